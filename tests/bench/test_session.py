"""What the commands share: who is there, where figures come from, and ceilings measured once."""

from __future__ import annotations

from typing import Any

import pytest

from fastft.bench.processes import Worker, WorkerError
from fastft.bench.results import ResultsFile
from fastft.bench.session import BenchError, Session, choose_providers
from tests.bench.samples import DEFAULTS, FakeWorker

LIBRARIES = {"torch": "torch", "typer": "typer", "ghost": "no_such_package_anywhere"}
LIMITS = {
    **DEFAULTS["open"],
    "limits": [
        {"name": "copy", "dtype": "", "samples_ms": [1.0] * 3, "bytes": 4e9, "flops": 0},
        {"name": "matmul", "dtype": "bfloat16", "samples_ms": [2.0] * 3, "bytes": 0, "flops": 1.6e12},
    ],
}


def session_with(answers: dict[str, dict[str, Any]] | None = None) -> tuple[Session, list[tuple[str, str]]]:
    log: list[tuple[str, str]] = []

    def start(provider: str) -> Worker:
        return FakeWorker(provider, log, {"limit": LIMITS, **(answers or {}).get(provider, {})})

    return Session(ResultsFile(None, overwrite=False), commit="abc1234", start=start), log


def test_providers_are_those_asked_for_in_the_tables_order() -> None:
    assert choose_providers(None, ["fastft", "torch"]) == ["fastft", "torch"]
    assert choose_providers(["torch", "fastft"], ["fastft", "torch", "liger"]) == ["fastft", "torch"]
    with pytest.raises(BenchError, match=r"no provider apex here; there are fastft, torch"):
        choose_providers(["apex"], ["fastft", "torch"])


def test_who_is_not_installed_is_not_started() -> None:
    session, log = session_with()
    workers, unavailable = session.open_workers(["torch", "ghost"], LIBRARIES)
    assert list(workers) == ["torch"]
    assert unavailable == {"ghost": ("not installed", "no package no_such_package_anywhere")}
    assert log == [("torch", "open")]
    assert session.facts["gpu"] == "Test GPU"


def test_who_cannot_be_used_here_is_reported_and_closed() -> None:
    error = {"status": "error", "note": "NotImplementedError: needs a GPU"}
    started: dict[str, FakeWorker] = {}

    def start(provider: str) -> Worker:
        started[provider] = FakeWorker(provider, [], {"open": error} if provider == "typer" else {})
        return started[provider]

    session = Session(ResultsFile(None, overwrite=False), start=start)
    workers, unavailable = session.open_workers(["torch", "typer"], LIBRARIES)
    assert {provider: worker.closed for provider, worker in started.items()} == {"torch": False, "typer": True}
    assert list(workers) == ["torch"]
    assert unavailable == {"typer": ("error", "cannot be used here: NotImplementedError: needs a GPU")}


def test_nobody_to_measure_is_an_error() -> None:
    session, _ = session_with({"torch": {"open": WorkerError("torch: the process ended")}})
    with pytest.raises(BenchError, match=r"torch: error.*the process ended.*ghost: not installed|ghost.*torch"):
        session.open_workers(["torch", "ghost"], LIBRARIES)


def test_ceilings_are_measured_once() -> None:
    session, log = session_with()
    session.learn()
    first, again = session.ceilings("bfloat16", 25), session.ceilings("bfloat16", 25)
    assert first == again
    assert first is not None
    assert first.gbps == pytest.approx(4000.0)
    assert [do for _, do in log] == ["open", "limit"]
    assert {row.kind for row in session.results.rows} == {"limit"}


def test_rows_say_where_and_of_what_code() -> None:
    session, _ = session_with()
    session.learn()
    row = session.blank_row()
    assert (row.commit, row.gpu, row.torch) == ("abc1234", "Test GPU", "2.11.0")
    assert row.transformers
    assert row.date


def test_the_dtype_is_the_devices_unless_asked() -> None:
    session, _ = session_with()
    session.learn()
    assert session.dtype(None) == "bfloat16"
    assert session.dtype("float32") == "float32"
