"""`fastft bench step` and `fastft bench sft`: whole training runs, a fresh process for each provider and each run.

Runs follow one another and never share the device: a planner that reads free memory must find it free. To interleave
providers, ask for several rounds: every provider runs once a round, and the samples are pooled.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fastft.bench.processes import Worker, WorkerError
from fastft.bench.providers import Settings
from fastft.bench.registry import ModelShape
from fastft.bench.results import Row, find
from fastft.bench.roofline import Ceilings, step_cost, with_rates
from fastft.bench.timing import quantiles

__all__ = ["TrainingRun", "checkpoint_folder", "run_training"]


@dataclass
class TrainingRun:
    """One configuration for all providers.

    Attributes:
        shape: of the model in `folder`.
        settings: one for each provider, in the order of the table.
        unavailable: status and note of providers that were asked for and cannot be used.
        blank: a row with date, commit, GPU and versions.
        ceilings: of the machine; None: no share of the roofline.
        start: a fresh worker for a provider.
        rounds: how often each provider runs.
        known: rows of earlier runs.
        overwrite: measure also what `known` has.
        tell: says what happens.
    """

    shape: ModelShape
    settings: Sequence[Settings]
    unavailable: Mapping[str, tuple[str, str]]
    blank: Row
    ceilings: Ceilings | None
    start: Callable[[str], Worker]
    rounds: int = 1
    known: Sequence[Row] = ()
    overwrite: bool = False
    tell: Callable[[str], None] = lambda text: None


@dataclass
class _Pooled:
    """A provider's replies, over the rounds."""

    replies: list[dict[str, Any]] = field(default_factory=list)
    failure: dict[str, Any] | None = None


def run_training(run: TrainingRun) -> list[Row]:
    """A row for each provider."""
    rows: dict[str, Row] = {}
    wanted: dict[str, tuple[Settings, _Pooled]] = {}
    for settings in run.settings:
        blank = _blank_row(run, settings)
        known = None if run.overwrite else find(run.known, blank)
        if known is not None:
            rows[settings.provider] = known
        elif settings.provider in run.unavailable:
            status, note = run.unavailable[settings.provider]
            rows[settings.provider] = replace(blank, status=status, note=note)
        else:
            wanted[settings.provider] = (settings, _Pooled())
    for number in range(run.rounds):
        for provider, (settings, pooled) in wanted.items():
            if pooled.failure is None:
                size = f"{run.shape.name}, {settings.batch} × {settings.length}"
                run.tell(f"{settings.kind}, {size}: {provider}, run {number + 1} of {run.rounds}")
                _run_once(run, settings, pooled)
    for provider, (settings, pooled) in wanted.items():
        rows[provider] = _row(run, settings, pooled)
    return [rows[settings.provider] for settings in run.settings]


def _run_once(run: TrainingRun, settings: Settings, pooled: _Pooled) -> None:
    worker = run.start(settings.provider)
    try:
        reply = worker.ask({"do": "train", "settings": asdict(settings)})
    except WorkerError as error:
        reply = {"status": "error", "note": str(error)}
    finally:
        worker.close()
    if reply["status"] == "ok":
        pooled.replies.append(reply)
    else:
        pooled.failure = reply


def _blank_row(run: TrainingRun, settings: Settings) -> Row:
    kept = settings.checkpointing
    if settings.provider != "fastft":
        kept = "no checkpointing" if kept == "keep" else "checkpointing"
    elif settings.memory_budget:
        kept = f"{kept} {settings.memory_budget}"
    return replace(
        run.blank,
        kind=settings.kind,
        name=f"{settings.bits}-bit r{settings.rank}",
        mode=kept,
        provider=settings.provider,
        model=run.shape.name,
        tokens=settings.batch * settings.length,
        batch=settings.batch,
        length=settings.length,
        dtype=settings.dtype,
    )


def _row(run: TrainingRun, settings: Settings, pooled: _Pooled) -> Row:
    blank = _blank_row(run, settings)
    if pooled.failure is not None:
        return replace(blank, status=pooled.failure["status"], note=pooled.failure.get("note", ""))
    first = pooled.replies[0]
    samples = [time for reply in pooled.replies for time in reply["steps_ms"][settings.warmup :]]
    low, median, high = quantiles(samples)
    peak, base = first["peak_bytes"], first["base_bytes"]
    row = replace(
        blank,
        ms_20=low,
        ms_50=median,
        ms_80=high,
        extra_mib=None if peak is None else (peak - base) / 2**20,
        peak_gib=None if peak is None else max(reply["peak_bytes"] for reply in pooled.replies) / 2**30,
        samples=len(samples),
        timer="cpu" if first["device"] == "cpu" else "step",
        note="wall clock" if first["device"] == "cpu" else "",
        first_step_s=first["steps_ms"][0] / 1e3,
        import_s=first["import_s"],
        load_s=first["load_s"],
        losses=" ".join(f"{loss:.4f}" for loss in first["losses"]),
    )
    cost = step_cost(run.shape, settings.batch, settings.length, rank=settings.rank, bits=settings.bits)
    return with_rates(row, cost, run.ceilings)


@contextmanager
def checkpoint_folder(
    shape: ModelShape, folder: Path | None, *, dtype: str, start: Callable[[str], Worker]
) -> Iterator[Path]:
    """A random-weight checkpoint of `shape`: in `folder`, where it stays and is written only if there is none; or in a
    temporary one.

    Raises:
        WorkerError: it could not be written.
    """
    if folder is not None:
        if not (folder / "config.json").exists():
            _write_checkpoint(shape, folder, dtype, start)
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="fastft-bench-model-") as made:
        path = Path(made) / shape.name
        _write_checkpoint(shape, path, dtype, start)
        yield path


def _write_checkpoint(shape: ModelShape, folder: Path, dtype: str, start: Callable[[str], Worker]) -> None:
    worker = start("torch")
    try:
        worker.ask({"do": "checkpoint", "shape": asdict(shape), "folder": str(folder.absolute()), "dtype": dtype})
    finally:
        worker.close()
