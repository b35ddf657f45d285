"""What stands for CUDA graphs on the CPU: a tape that runs what it was given, where a graph would launch it.

As with real graphs a replay writes the tensors that the capture returned; to be sure that nobody reads what a later
replay may have written over, it spoils those of all other graphs.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from fastft.memory import graphs, token_graphs


class Recorded:
    """What stands for a CUDA graph."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self._run = run
        self.result = run()  # as a capture does, over whatever is in the buffers

    def tensors(self) -> list[Tensor]:
        """What the capture's results lie in."""
        return [tensor for tensor in self.result or () if tensor is not None]

    def replay(self) -> None:
        made = [tensor for tensor in self._run() or () if tensor is not None]
        for fixed, new in zip(self.tensors(), made, strict=True):
            fixed.copy_(new)
        for other in Tape.recorded:
            graph = other()
            if graph is not None and graph is not self:
                for tensor in graph.tensors():
                    tensor.fill_(torch.nan)


class Tape:
    """Keeps what was recorded over all tapes; `fails_at` makes a recording fail."""

    recorded: ClassVar[list[weakref.ref[Recorded]]] = []
    made = 0
    fails_at: int | None = None

    def __init__(self, device: torch.device) -> None:
        self.device = device
        Tape.made += 1

    def record(self, run: Callable[[], Any]) -> tuple[Recorded, Any]:
        if len(Tape.recorded) == Tape.fails_at:
            raise RuntimeError("no capture today")
        graph = Recorded(run)
        Tape.recorded.append(weakref.ref(graph))
        return graph, graph.result


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs for CPU layers, from no captures on."""

    def bar(self: Any, call: Any, x: Tensor) -> str | None:
        if call.attention_key is None:
            return "attention has a mask"
        return "level offload" if call.level == "offload" else None

    def token_refusal(self: Any, call: Any, x: Tensor) -> str | None:
        return self._failed or ("more than one token of a row" if x.shape[1] != 1 else None)

    monkeypatch.setattr(Tape, "recorded", [])
    monkeypatch.setattr(Tape, "made", 0)
    monkeypatch.setattr(Tape, "fails_at", None)
    for module in (graphs, token_graphs):
        monkeypatch.setattr(module, "Tape", Tape)
    monkeypatch.setattr(graphs.ModelGraphs, "_bar", bar)
    monkeypatch.setattr(graphs, "pays", lambda *_: True)
    monkeypatch.setattr(token_graphs.TokenGraphs, "_refusal", token_refusal)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: 0)
