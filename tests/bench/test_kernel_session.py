"""What a worker answers: figures, "wrong" without figures, and errors of the library it measures."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from fastft.bench import operations
from fastft.bench.kernel_session import KernelSession
from fastft.bench.operations import find_operation
from fastft.bench.registry import find_model

PREPARE = {
    "do": "prepare",
    "operation": "rms_norm",
    "mode": "full",
    "shape": asdict(find_model("tiny")),
    "tokens": 48,
    "dtype": "float32",
}


@pytest.fixture
def session() -> KernelSession:
    session = KernelSession("torch")
    assert session.handle({"do": "open"})["status"] == "ok"
    return session


def replace_provider(monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    """Let "torch" be another function in RMSNorm."""
    operation = replace(find_operation("rms_norm"), providers={"torch": lambda: function})
    monkeypatch.setattr(operations, "find_operation", lambda name: operation)


def test_a_right_operation_is_timed(session: KernelSession) -> None:
    reply = session.handle(PREPARE)
    assert reply["status"] == "ok"
    assert reply["timer"] in ("cpu", "graph")
    assert reply["error"] < 1e-5
    sample = session.handle({"do": "sample", "count": 4})
    assert len(sample["device_ms"]) == 4
    assert min(sample["device_ms"]) > 0
    json.dumps([reply, sample])  # it must travel


def test_a_wrong_operation_is_not_timed(session: KernelSession, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_provider(monkeypatch, lambda x, weight: x * weight)
    reply = session.handle(PREPARE)
    assert reply["status"] == "wrong"
    assert "relative error" in reply["note"]
    assert session.handle({"do": "sample", "count": 1})["status"] == "error"


def test_nan_travels_as_json(session: KernelSession, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_provider(monkeypatch, lambda x, weight: x * float("nan"))
    reply = session.handle(PREPARE)
    assert reply["status"] == "wrong"
    assert "NaN" not in json.dumps(reply)


def test_what_a_library_raises_is_a_reply(session: KernelSession, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(x: Any, weight: Any) -> Any:
        raise KeyError("sm_999\nwith a long tail")

    replace_provider(monkeypatch, broken)
    reply = session.handle(PREPARE)
    assert (reply["status"], "KeyError" in reply["note"]) == ("error", True)
    assert "\n" not in reply["note"]


def test_out_of_memory_has_a_status_of_its_own(session: KernelSession, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def hungry(x: Any, weight: Any) -> Any:
        raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")

    replace_provider(monkeypatch, hungry)
    assert session.handle(PREPARE)["status"] == "out of memory"


def test_after_release_there_is_nothing_to_sample(session: KernelSession) -> None:
    session.handle(PREPARE)
    assert session.handle({"do": "release"})["free_bytes"] > 0
    assert "prepare" in session.handle({"do": "sample", "count": 1})["note"]


def test_a_library_that_is_not_there() -> None:
    session = KernelSession("cce")
    reply = session.handle({"do": "open"})
    if reply["status"] != "ok":  # not installed on this machine
        assert "cut_cross_entropy" in reply["note"]
