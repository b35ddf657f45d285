"""Attention's own backward without a second forward: its autograd graph, emptied of the tensors it saved.

A layer that recomputes makes Q, K and V again from x. Run under autograd, attention saves these three, its output
O [tokens, heads · head_dim] and a statistic of every row and head (the log of the sum of exponentials). O and the
statistics are no more than x is; with them kept, attention itself, the one part of a layer whose work grows with the
square of the row's length (2 · tokens · sequence · heads · head_dim operations, causal), need not run again:

    forward    Q K V ─ attention ─ O            the graph holds: which of Q, K, V was saved where; which of `kept`
    backward   x → Q K V again, O and statistics from where they were kept → refill → dQ, dK, dV

Nothing is known of the attention function: saved-tensor hooks see what it saves. Q, K and V are known by their
addresses and become a number; O, which most save as a view of what they return, and other large tensors are handed to
the caller; small ones (random states, boundaries) stay. One that saves much more (eager attention: the scores) gets no
graph, and holds nothing: the layer runs it again. Nothing is rounded or computed here; dQ, dK and dV are those of the
function's own backward.

What must not be held: the graph begins at a node without tensors (leaves would hold Q, K and V as long as it lives),
and its end is an edge, not the output. The hooks know the slots that are refilled, not the object that knows the edges:
through C++ that would be a cycle, which Python's garbage collection does not see.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

__all__ = ["EmptiedGraph", "Refilled"]

_SMALL = 1 << 16  # bytes that may stay on the device, in all
_STATISTICS = 1.25  # O and its statistics, over O and four bytes a row and head: room for rounded-up lengths


class EmptiedGraph:
    """The graph of one attention call, without the tensors it saved."""

    __slots__ = ("_dtype", "_end", "_entrance", "_kept", "_shape", "_slots")

    def __init__(self, entrance: tuple[GradientEdge, ...], output: Tensor, slots: _Slots, kept: list[Tensor]) -> None:
        self._entrance, self._end = entrance, get_gradient_edge(output)
        self._shape, self._dtype = output.shape, output.dtype
        self._slots, self._kept = slots, kept

    @classmethod
    def record(
        cls, attention: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, EmptiedGraph | None]:
        """Run attention once.

        Args:
            attention: `(query, key, value) -> [batch, sequence, heads, head_dim]`.
            query: `[batch, heads, sequence, head_dim]`.
            key: as `query`, of as many heads or fewer.
            value: as `key`.

        Returns:
            Its output `[tokens, heads · head_dim]` in `query`'s dtype, without history, and the graph behind it, or
            None where it saves more than its output and a statistic of each row and head.
        """
        rows = query.numel() // query.shape[-1]
        recorder = _Recorder((query, key, value), int((query.nbytes + 4 * rows) * _STATISTICS) + _SMALL)
        slots = _Slots()
        with torch.enable_grad():
            entered = _Entrance.apply(torch.empty(0, device=query.device, requires_grad=True), query, key, value)
            entrance = tuple(get_gradient_edge(tensor) for tensor in entered)
            with saved_tensors_hooks(recorder.pack, slots.unpack):
                output = attention(*entered)
        flat = output.detach().reshape(-1, output.shape[-2] * output.shape[-1]).to(query.dtype).contiguous()
        kept = None if output.grad_fn is None else recorder.arrange(flat, slots)
        return flat, None if kept is None else cls(entrance, output, slots, kept)

    def take(self) -> list[Tensor]:
        """What the backward wants back besides Q, K and V, contiguous; first the output `[tokens, heads · head_dim]`.

        This object then holds none of it.
        """
        kept, self._kept = self._kept, []
        return kept

    def refill(self, query: Tensor, key: Tensor, value: Tensor, kept: Sequence[Tensor]) -> Refilled:
        """The graph with the tensors given back, as they were (strides too), for one backward."""
        return Refilled(self, (query, key, value), kept)


class Refilled(NamedTuple):
    """A graph, and what it is given for one backward; the graph itself holds it no longer than that runs."""

    graph: EmptiedGraph
    given: tuple[Tensor, Tensor, Tensor]
    kept: Sequence[Tensor]

    def backward(self, grad: Tensor, retain: bool) -> tuple[Tensor, ...]:
        """dQ, dK, dV `[batch, heads, sequence, head_dim]` from dO `[tokens, heads · head_dim]`.

        Args:
            grad: dO.
            retain: whether there may be another backward, after another `refill`.
        """
        graph, slots = self.graph, self.graph._slots
        grads = (grad.to(graph._dtype).view(graph._shape),)
        # Several backwards may go through a graph that is retained: in threads, or one inside the other (autograd's
        # device thread takes up what it finds while an inner backward waits).
        with slots.lock:
            before = slots.given, slots.kept
            slots.given, slots.kept = self.given, self.kept
            try:
                return torch.autograd.grad((graph._end,), graph._entrance, grads, retain_graph=retain)
            finally:
                slots.given, slots.kept = before


class _View(NamedTuple):
    """A saved tensor: of those that are given back, which, and how it was laid over it."""

    place: int
    shape: torch.Size
    stride: tuple[int, ...]

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[self.place].as_strided(self.shape, self.stride)


class _Given(_View):
    """A view of Q, K or V."""


class _Other(NamedTuple):
    """One of what attention saved besides."""

    place: int


class _Slots:
    """What a backward finds in place of what was saved."""

    __slots__ = ("given", "kept", "lock", "views")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.given: Sequence[Tensor] = ()
        self.kept: Sequence[Tensor] = ()
        self.views: list[_View] = []  # over `kept`

    def unpack(self, packed: Any) -> Any:
        if isinstance(packed, _Given):
            return packed.of(self.given)
        return self.views[packed.place].of(self.kept) if isinstance(packed, _Other) else packed


class _Recorder:
    """Sees what attention saves."""

    def __init__(self, given: tuple[Tensor, ...], most: int) -> None:
        self._given, self._most = given, most
        self._small = 0  # bytes that stay
        self._others: list[Tensor] | None = []  # None: more than `most` bytes

    def pack(self, tensor: Tensor) -> Any:
        if tensor.layout != torch.strided:
            self._others = None  # it has no address
            return None
        for place, known in enumerate(self._given):
            if _same_elements(tensor, known):
                return _Given(place, tensor.shape, tensor.stride())
        held = tensor.untyped_storage().nbytes()  # a view holds it all
        if self._small + held <= _SMALL:
            self._small += held
            return tensor.detach()  # one that attention made knows its node, which holds what is returned here
        if self._others is None:
            return None
        self._others.append(tensor)
        if sum(other.nbytes for other in self._others) > self._most:
            self._others = None  # and with that nothing of it is held
            return None
        return _Other(len(self._others) - 1)

    def arrange(self, flat: Tensor, slots: _Slots) -> list[Tensor] | None:
        """The output and whatever else is to be kept; None where that is too much, has gaps or is elsewhere."""
        kept, others = [flat], self._others
        self._given, self._others = (), None
        if others is None or not all(_dense(tensor) and tensor.device == flat.device for tensor in others):
            return None
        for tensor in others:
            place = 0 if _same_elements(tensor, flat) else len(kept)
            if place:
                kept.append(tensor.as_strided((tensor.numel(),), (1,)))
            slots.views.append(_View(place, tensor.shape, tensor.stride()))
        return kept if sum(tensor.nbytes for tensor in kept) <= self._most else None


def _same_elements(one: Tensor, other: Tensor) -> bool:
    """Whether both are the same elements, in whatever shape."""
    return one.data_ptr() == other.data_ptr() and one.numel() == other.numel() and one.dtype == other.dtype


def _dense(tensor: Tensor) -> bool:
    """Whether its elements fill a stretch of memory, in any order."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return reach + 1 == tensor.numel()


class _Entrance(torch.autograd.Function):
    """Q, K and V, as made by a node that remembers none of them. Their gradients are taken before it would run."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        return (None,) * (1 + len(grads))
