"""What stands for CUDA graphs on the CPU: a tape that runs what it was given, where a graph would launch it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastft.memory import graphs


class Recorded:
    """What stands for a CUDA graph."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        run()  # as a capture does, over whatever is in the buffers

    def replay(self) -> None:
        self._run()


class Tape:
    """Keeps count of captures over all tapes; `fails_at` makes one of them fail."""

    records = 0
    fails_at: int | None = None

    def __init__(self, device: torch.device) -> None:
        del device

    def record(self, run: Callable[[], None]) -> tuple[Recorded, None]:
        if Tape.records == Tape.fails_at:
            raise RuntimeError("no capture today")
        Tape.records += 1
        return Recorded(run), None


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs for CPU layers, from no captures on."""

    def refusal(self: Any, call: Any, x: Tensor) -> str | None:
        if self._failed:
            return self.reason
        if call.attention_key is None:
            return "attention has a mask"
        self._weights = 1
        return "level offload" if call.level == "offload" else None

    Tape.records, Tape.fails_at = 0, None
    monkeypatch.setattr(graphs, "Tape", Tape)
    monkeypatch.setattr(graphs.ModelGraphs, "_refusal", refusal)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: 0)
