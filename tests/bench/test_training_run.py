"""Training runs as the parent sees them: rounds, pooled samples, failures, checkpoints."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from fastft.bench.processes import Worker, WorkerError
from fastft.bench.providers import Settings
from fastft.bench.registry import find_model
from fastft.bench.results import Row
from fastft.bench.roofline import Ceilings
from fastft.bench.training_run import TrainingRun, checkpoint_folder, run_training
from tests.bench.samples import PLACE, FakeWorker

TINY = find_model("tiny")
REPLY = {
    "status": "ok",
    "device": "cuda",
    "steps_ms": [900.0, 50.0, 10.0, 12.0],
    "losses": [6.25, 6.5],
    "import_s": 1.5,
    "load_s": 2.0,
    "base_bytes": 2**30,
    "peak_bytes": 3 * 2**30,
}


def settings(provider: str, **changes: Any) -> Settings:
    values: dict[str, Any] = {
        "kind": "step",
        "batch": 2,
        "steps": 2,
        "warmup": 2,
        "bits": 4,
        "rank": 16,
        "checkpointing": "auto",
        "memory_budget": "",
        "dtype": "bfloat16",
        "provider": provider,
        "folder": "/models/tiny",
        "length": 64,
    }
    return Settings(**(values | changes))


def run_with(replies: dict[str, list[Any]], **changes: Any) -> tuple[list[Row], list[str]]:
    """Rows, and who was started in which order. `replies`: for each provider those of its runs."""
    started: list[str] = []

    def start(provider: str) -> Worker:
        started.append(provider)
        return FakeWorker(provider, [], {"train": replies[provider].pop(0)})

    values: dict[str, Any] = {
        "shape": TINY,
        "settings": [settings(provider) for provider in replies],
        "unavailable": {},
        "blank": Row(**PLACE),
        "ceilings": Ceilings(gbps=4000.0, tflops=800.0),
        "start": start,
    }
    return run_training(TrainingRun(**(values | changes))), started


def test_a_row_of_a_run() -> None:
    rows, _ = run_with({"fastft": [REPLY]})
    (row,) = rows
    assert (row.kind, row.name, row.mode, row.provider, row.model) == ("step", "4-bit r16", "auto", "fastft", "tiny")
    assert (row.tokens, row.batch, row.length) == (128, 2, 64)
    assert row.ms_50 == 11.0  # the two steps after warm-up
    assert row.peak_gib == 3.0
    assert row.extra_mib == 2048.0
    assert (row.first_step_s, row.import_s, row.load_s, row.losses) == (0.9, 1.5, 2.0, "6.2500 6.5000")
    assert row.roofline_share is not None


def test_rounds_alternate_and_their_samples_are_pooled() -> None:
    slower = {**REPLY, "steps_ms": [800.0, 50.0, 30.0, 32.0], "peak_bytes": 4 * 2**30}
    rows, started = run_with({"fastft": [REPLY, slower], "hf": [REPLY, REPLY]}, rounds=2)
    assert started == ["fastft", "hf", "fastft", "hf"]
    assert rows[0].samples == 4
    assert rows[0].ms_50 == 21.0
    assert rows[0].peak_gib == 4.0
    assert rows[0].first_step_s == 0.9


def test_a_failure_ends_that_provider_alone() -> None:
    memory = {"status": "out of memory", "note": "tried to allocate 2 GiB"}
    rows, started = run_with(
        {"hf": [memory], "liger": [WorkerError("liger: KeyError")], "fastft": [REPLY] * 2}, rounds=2
    )
    assert started == ["hf", "liger", "fastft", "fastft"]
    assert [(row.status, row.note) for row in rows] == [
        ("out of memory", "tried to allocate 2 GiB"),
        ("error", "liger: KeyError"),
        ("ok", ""),
    ]


def test_what_is_kept_is_part_of_the_key() -> None:
    budget = settings("fastft", memory_budget="8GiB")
    recompute = settings("fastft", checkpointing="recompute")
    modes = [run_with({"fastft": [REPLY]}, settings=[each])[0][0].mode for each in (budget, recompute)]
    assert modes == ["auto 8GiB", "recompute"]
    for checkpointing, mode in (("auto", "checkpointing"), ("keep", "no checkpointing")):
        rows, _ = run_with({"hf": [REPLY]}, settings=[settings("hf", checkpointing=checkpointing)])
        assert rows[0].mode == mode


def test_known_rows_and_missing_providers_start_nothing() -> None:
    known, _ = run_with({"fastft": [REPLY]})
    rows, started = run_with(
        {"fastft": [], "liger": []}, known=known, unavailable={"liger": ("not installed", "no package liger_kernel")}
    )
    assert started == []
    assert rows[0] == known[0]
    assert rows[1].status == "not installed"
    _, started = run_with({"fastft": [REPLY]}, known=known, overwrite=True)
    assert started == ["fastft"]


def test_a_checkpoint_is_written_once_where_a_folder_is_given(tmp_path: pathlib.Path) -> None:
    written: list[str] = []

    def start(provider: str) -> Worker:
        def write(request: Any) -> dict[str, Any]:
            written.append(request["folder"])
            folder = pathlib.Path(request["folder"])
            folder.mkdir(parents=True)
            (folder / "config.json").write_text("{}")
            return {"status": "ok"}

        return FakeWorker(provider, [], {"checkpoint": write})

    for _ in range(2):
        with checkpoint_folder(TINY, tmp_path / "kept", dtype="float32", start=start) as folder:
            assert folder == tmp_path / "kept"
    assert written == [str(tmp_path / "kept")]
    with checkpoint_folder(TINY, None, dtype="float32", start=start) as folder:
        assert (folder / "config.json").exists()
    assert not folder.exists()


def test_a_checkpoint_that_cannot_be_written_is_an_error() -> None:
    def start(provider: str) -> Worker:
        return FakeWorker(provider, [], {"checkpoint": WorkerError("no space left")})

    with (
        pytest.raises(WorkerError, match="no space"),
        checkpoint_folder(TINY, None, dtype="float32", start=start),
    ):
        pass
