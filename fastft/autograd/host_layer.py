"""What an offloaded decoder layer has in host memory between its forward and its backward, and how it gets there.

x leaves when the layer begins. As far as `LayerCall.away` says, attention's output and statistics follow when attention
has run, or all of the attention half that level *lean* would keep when that has: each copy runs beside what the layer
computes next. Coming back, x is there first, because everything is made from it.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fastft.autograd import attention_half
from fastft.autograd.attention_half import Attended, SavedIn
from fastft.autograd.emptied_graph import EmptiedGraph
from fastft.autograd.layer_call import N_ATTENTION, Attend, AttentionSaved, LayerCall
from fastft.autograd.stretches import Views, stretches

__all__ = ["FromHost", "HostLayer"]


class FromHost(NamedTuple):
    """An offloaded layer's x, and what spares its backward work."""

    x: Tensor
    saved: AttentionSaved | None = None  # None: the attention half runs again
    attended: Attended | None = None
    attend: Attend | None = None  # what attention would give; None: attention runs again


class HostLayer:
    """What an offloaded layer has in host memory."""

    __slots__ = ("_call", "_graph", "_parcel", "_statistics", "_views")

    def __init__(self, call: LayerCall, x: Tensor) -> None:
        assert call.host is not None
        self._parcel, self._call = call.host.put(x), call
        self._graph: EmptiedGraph | None = None
        self._statistics: list[Tensor] = []  # on their way to `stow`
        self._views: Views | None = None

    def attend(self, into: SavedIn) -> Attended:
        """The forward's attention; its output leaves at once, beside the rest of the layer, unless `stow` takes it."""
        attended, self._graph = attention_half.attend_once(into, self._call.attention, self._call.autocast)
        if self._graph is not None:
            output, *statistics = self._graph.take()
            if self._call.away == "half":
                self._statistics = statistics
            else:
                self._parcel.add(output, *statistics, ahead=not self._call.late)
        return attended

    def stow(self, saved: AttentionSaved) -> None:
        """The attention half leaves, beside the MLP."""
        whole, self._views = stretches([*saved.flatten(), *self._statistics])
        self._statistics = []
        self._parcel.add(*whole, ahead=not self._call.late)

    def get(self, retain: bool) -> FromHost:
        """All of it; `retain`: there may be another backward."""
        x, graph = self._parcel.get(), self._graph
        if self._views is not None:
            tensors = self._views.over(self._parcel.added())
            saved = AttentionSaved.restore(tensors[:N_ATTENTION])
            if graph is None:
                return FromHost(x, saved)
            kept = [saved.attended, *tensors[N_ATTENTION:]]
            return FromHost(x, saved, attention_half.refilled(saved.into, graph, kept, retain))  # type: ignore[arg-type]
        if graph is None:
            return FromHost(x)
        return FromHost(x, attend=lambda into: attention_half.refilled(into, graph, self._parcel.added(), retain))
