"""`fastft bench kernels`: every provider of an operation at one size, interleaved, and what became of each.

The workers stay alive over the whole run, one process a provider. At each point they all get ready; then the parent
asks them in turn, round by round, in an order that rotates: a clock that changes or a neighbour that wakes up hits all
of them. What does not fit beside the others is measured alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fastft.bench.operations import find_operation
from fastft.bench.operations.base import Operation
from fastft.bench.probe import MemoryProbe
from fastft.bench.processes import Worker, WorkerError
from fastft.bench.registry import ModelShape
from fastft.bench.results import Row, find
from fastft.bench.roofline import Ceilings, with_rates
from fastft.bench.timing import quantiles

__all__ = ["KernelRun", "Point", "measure_point", "run_kernels"]

OUT_OF_MEMORY = "out of memory"
_ROUNDS = 5


@dataclass(frozen=True)
class Point:
    """What is measured together: one operation, model, token count, dtype and mode."""

    operation: str
    shape: ModelShape
    tokens: int
    dtype: str
    mode: str


@dataclass
class Outcome:
    """What one provider did at one point."""

    status: str = "ok"
    note: str = ""
    timer: str = ""
    device_ms: list[float] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)
    extra_bytes: int | None = None
    footprint_bytes: int = 0


@dataclass
class KernelRun:
    """A run's choices and its means.

    Attributes:
        operations: names.
        shapes: models whose shapes are measured.
        tokens: token counts, in rising order.
        dtype: of activations, torch's name.
        samples: timed rounds a provider, at least 20.
        workers: by provider, opened.
        unavailable: status and note of providers that were asked for and cannot be used.
        blank: a row with date, commit, GPU and versions.
        ceilings: of the machine; None: no share of the roofline.
        known: rows of earlier runs.
        overwrite: measure also what `known` has.
        restart: a new, opened worker for a provider whose process has ended.
        tell: says what happens.
    """

    operations: Sequence[str]
    shapes: Sequence[ModelShape]
    tokens: Sequence[int]
    dtype: str
    samples: int
    workers: dict[str, Worker]
    unavailable: Mapping[str, tuple[str, str]]
    blank: Row
    ceilings: Ceilings | None
    known: Sequence[Row] = ()
    overwrite: bool = False
    restart: Callable[[str], Worker] | None = None
    tell: Callable[[str], None] = lambda text: None


def run_kernels(run: KernelRun) -> Iterator[list[Row]]:
    """All points of a run; yields the rows of one operation at one size at a time (old ones of `known` included)."""
    for name in run.operations:
        operation = find_operation(name)
        for shape in run.shapes:
            probe = MemoryProbe()
            sizes = run.tokens if operation.sized_by_tokens else run.tokens[:1]
            for tokens in sizes:
                rows: list[Row] = []
                for mode in operation.modes():
                    point = Point(name, shape, tokens, run.dtype, mode)
                    rows += _rows_of_point(run, operation, point, probe)
                yield rows


def _rows_of_point(run: KernelRun, operation: Operation, point: Point, probe: MemoryProbe) -> list[Row]:
    rows: dict[str, Row] = {}
    wanted: list[str] = []
    free = _free_bytes(run)
    for provider in operation.provider_names():
        blank = _blank_row(run, operation, point, provider)
        known = None if run.overwrite else find(run.known, blank)
        if known is not None:
            rows[provider] = known
        elif provider in run.unavailable:
            status, note = run.unavailable[provider]
            rows[provider] = replace(blank, status=status, note=note)
        elif provider in run.workers:
            too_large = probe.reason_to_skip(provider, point.mode, point.tokens, free)
            if too_large:
                rows[provider] = replace(blank, status="skipped", note=too_large)
            else:
                wanted.append(provider)
    run.tell(
        f"{point.operation} {point.mode}, {point.shape.name}, {point.tokens} tokens: {', '.join(wanted) or 'known'}"
    )
    outcomes = measure_point(run.workers, wanted, point, run.samples, run.restart)
    for provider, outcome in outcomes.items():
        probe.saw(provider, point.mode, point.tokens, outcome.footprint_bytes)
        if outcome.status == OUT_OF_MEMORY:
            probe.failed(provider, point.mode, point.tokens)
        rows[provider] = _row(run, operation, point, provider, outcome)
    return [rows[provider] for provider in operation.provider_names() if provider in rows]


def measure_point(
    workers: dict[str, Worker],
    providers: Sequence[str],
    point: Point,
    samples: int,
    restart: Callable[[str], Worker] | None = None,
) -> dict[str, Outcome]:
    """Let all `providers` get ready, then time them in turn; those that found no room beside the others, alone.

    Args:
        workers: by provider. One that ended is replaced by `restart`, or removed.
        providers: whom to measure.
        point: what.
        samples: rounds a provider.
        restart: see `KernelRun`.
    """
    outcomes = {provider: Outcome() for provider in providers}
    together = _Asking(workers, outcomes, point, restart)
    together.measure(providers, samples)
    crowded = [provider for provider in providers if outcomes[provider].status == OUT_OF_MEMORY]
    if len(providers) > 1:
        for provider in crowded:
            outcomes[provider] = Outcome()
            together.measure([provider], samples)
            if outcomes[provider].status == "ok":
                outcomes[provider].note = "measured alone: no room beside the others. " + outcomes[provider].note
    return outcomes


@dataclass
class _Asking:
    """Asks workers about one point and keeps what they answer in `outcomes`."""

    workers: dict[str, Worker]
    outcomes: dict[str, Outcome]
    point: Point
    restart: Callable[[str], Worker] | None

    def measure(self, providers: Sequence[str], samples: int) -> None:
        ready = [provider for provider in providers if self._prepare(provider)]
        rounds = min(_ROUNDS, samples)
        for turn in range(rounds):
            count = samples // rounds + (turn < samples % rounds)
            shift = turn % max(1, len(ready))
            for provider in ready[shift:] + ready[:shift]:
                if self.outcomes[provider].status == "ok":
                    self._sample(provider, count)
        for provider in providers:
            self._ask(provider, {"do": "release"})

    def _prepare(self, provider: str) -> bool:
        point = self.point
        request = {
            "do": "prepare",
            "operation": point.operation,
            "mode": point.mode,
            "shape": asdict(point.shape),
            "tokens": point.tokens,
            "dtype": point.dtype,
        }
        reply = self._ask(provider, request)
        outcome = self.outcomes[provider]
        outcome.timer = reply.get("timer", "")
        outcome.extra_bytes, outcome.footprint_bytes = reply.get("extra_bytes"), reply.get("footprint_bytes", 0)
        return reply["status"] == "ok"

    def _sample(self, provider: str, count: int) -> None:
        reply = self._ask(provider, {"do": "sample", "count": count})
        self.outcomes[provider].device_ms += reply.get("device_ms", [])
        self.outcomes[provider].host_ms += reply.get("host_ms", [])

    def _ask(self, provider: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """The reply; a status that is not ok, and the note, are written down. A process that ended is replaced."""
        outcome = self.outcomes[provider]
        if provider not in self.workers:
            return {"status": outcome.status}
        try:
            reply = self.workers[provider].ask(request)
        except WorkerError as error:
            reply = {"status": "error", "note": f"{error}{self._replace(provider)}"}
        if reply["status"] != "ok":
            outcome.status = reply["status"]
        outcome.note = reply.get("note", outcome.note)
        return reply

    def _replace(self, provider: str) -> str:
        """A fresh worker in place of one that ended. Returns why there is none, where it will not start again."""
        self.workers.pop(provider).close()
        if self.restart is None:
            return ""
        try:
            self.workers[provider] = self.restart(provider)
        except WorkerError as error:
            return f" It did not start again: {error}"
        return ""


def _free_bytes(run: KernelRun) -> int | None:
    """What any worker says is free on the device now; None where that is no GPU, or nobody says."""
    for worker in run.workers.values():
        try:
            reply = worker.ask({"do": "release"})
        except WorkerError:
            continue  # it will be found ended, and replaced, when it is asked to measure
        if reply["status"] == "ok":
            return int(reply["free_bytes"])
    return None


def _blank_row(run: KernelRun, operation: Operation, point: Point, provider: str) -> Row:
    return replace(
        run.blank,
        kind="kernels",
        name=operation.name,
        mode=point.mode,
        provider=provider,
        model=point.shape.name,
        tokens=point.tokens if operation.sized_by_tokens else None,
        dtype=point.dtype,
    )


def _row(run: KernelRun, operation: Operation, point: Point, provider: str, outcome: Outcome) -> Row:
    row = replace(
        _blank_row(run, operation, point, provider), status=outcome.status, note=outcome.note, timer=outcome.timer
    )
    if outcome.status != "ok":
        return row
    low, median, high = quantiles(outcome.device_ms)
    itemsize = {"float32": 4}.get(point.dtype, 2)
    row = replace(
        row,
        ms_20=low,
        ms_50=median,
        ms_80=high,
        host_ms=quantiles(outcome.host_ms)[1] if outcome.host_ms else None,
        extra_mib=None if outcome.extra_bytes is None else outcome.extra_bytes / 2**20,
        samples=len(outcome.device_ms),
    )
    return with_rates(row, operation.cost(point.shape, point.tokens, itemsize, point.mode), run.ceilings)
