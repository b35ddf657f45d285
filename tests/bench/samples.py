"""Rows, sizes and stand-in workers for the benchmark's tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastft.bench.processes import WorkerError
from fastft.bench.results import Row

PLACE = {"date": "2026-01-02T03:04:05+00:00", "commit": "abc1234", "gpu": "Test GPU", "torch": "2.11.0"}


def kernel_row(**changes: Any) -> Row:
    """A measured row of RMSNorm; any column can be set."""
    values: dict[str, Any] = {
        **PLACE,
        "kind": "kernels",
        "name": "rms_norm",
        "mode": "forward",
        "provider": "fastft",
        "model": "tiny",
        "tokens": 64,
        "dtype": "bfloat16",
        "ms_20": 0.9,
        "ms_50": 1.0,
        "ms_80": 1.2,
        "timer": "graph",
        "samples": 20,
    }
    return Row(**(values | changes))


Answer = Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass
class FakeWorker:
    """Answers by table: `answers[do]` is a reply, a function of the request, or an exception to raise.

    Attributes:
        name: who it is, in `log`.
        log: (name, do) of all requests to all workers that share it.
    """

    name: str
    log: list[tuple[str, str]]
    answers: dict[str, Any] = field(default_factory=dict)
    closed: bool = False

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self.log.append((self.name, request["do"]))
        answer = self.answers.get(request["do"], DEFAULTS.get(request["do"]))
        if isinstance(answer, WorkerError):
            raise answer
        return answer(request) if callable(answer) else dict(answer)

    def close(self) -> None:
        self.closed = True


DEFAULTS: dict[str, Any] = {
    "open": {"status": "ok", "device": "cuda", "gpu": "Test GPU", "torch": "2.11.0", "free_bytes": 10**10},
    "release": {"status": "ok", "free_bytes": 10**10},
    "prepare": {"status": "ok", "timer": "graph", "note": "", "extra_bytes": 2**20, "footprint_bytes": 10**6},
    "sample": lambda request: {
        "status": "ok",
        "device_ms": [1.0] * request["count"],
        "host_ms": [0.25] * request["count"],
    },
}
