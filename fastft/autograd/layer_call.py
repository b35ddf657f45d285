"""A decoder layer as it stands at one call, and what it saves of its attention half: plain data for all who run it.

`LayerCall` is read off the modules once a forward (patching/decoder_layer.py) and frozen from then on: frozen weights,
masks and the attention callable ride in it. What can receive a gradient is named by `leaves`, in one order for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor

from fastft.autograd import mlp_half
from fastft.autograd.attention_half import Attended, Attention, Heads, Norm, SavedIn
from fastft.autograd.autocast import AutocastState
from fastft.autograd.projection import Projection, flatten_leaves, restore_leaves

Level = Literal["keep", "lean", "recompute", "offload"]
Away = Literal["input", "attention", "half"]  # in host memory: x; and O, statistics; and all that *lean* keeps
Attend = Callable[[SavedIn], Attended]
NORMS = 4  # input, post-attention, query, key


class HostStore(Protocol):
    """Where level *offload* leaves x (memory/offload.py)."""

    def put(self, tensor: Tensor) -> Any:
        """Start copying `tensor` to host memory; the returned parcel's `get()` brings it back.

        Its `add(*tensors, ahead=…)` takes more, which `added()` brings back.
        """


@dataclass(slots=True)
class LayerCall:
    """A decoder layer as it stands at this call: everything but x, cos and sin."""

    input_norm: Norm
    post_norm: Norm
    head_norms: tuple[Norm, Norm] | None
    qkv: tuple[Projection, Projection, Projection]
    output: Projection
    gate_up: tuple[Projection, Projection]
    down: Projection
    heads: Heads
    attention: Attention
    autocast: AutocastState
    level: Level = "keep"
    compact: int = 0  # rows of the MLP's small tiles; 0 for the usual ones
    host: HostStore | None = None  # for level offload; without one it is recompute
    away: Away = "input"  # what level offload leaves there
    late: bool = False  # what is there beside x comes back when its layer is reached, not ahead of time
    attention_key: tuple[Any, ...] | None = None  # what `attention` depends on besides Q, K, V; None: more than that
    observer: Callable[[], None] | None = None  # called when a backward ends

    @property
    def projections(self) -> list[Projection]:
        """The seven, in the order of their leaves."""
        return [*self.qkv, self.output, *self.gate_up, self.down]

    @property
    def norms(self) -> list[Norm | None]:
        """The four norms, in the order of their leaves."""
        return [self.input_norm, self.post_norm, *(self.head_norms or (None, None))]

    def leaves(self) -> list[Tensor | None]:
        """Tensors a gradient can flow to: four norm weights, then four per projection."""
        norms = [n.weight if n is not None and n.weight.requires_grad else None for n in self.norms]
        return norms + flatten_leaves(self.projections)

    @property
    def seed(self) -> Tensor | None:
        """The seed `[1]` of the dropouts of adapters' inputs, one for the layer; None where there are none."""
        return next((p.dropout.seed for p in self.projections if p.dropout is not None), None)

    def with_leaves(self, leaves: list[Tensor | None]) -> LayerCall:
        """The same call over leaves as autograd hands them back."""
        norms = [
            n if n is None or w is None else replace(n, weight=w)
            for n, w in zip(self.norms, leaves[:NORMS], strict=True)
        ]
        q, k, v, o, gate, up, down = restore_leaves(self.projections, leaves[NORMS:])
        head_norms = None if self.head_norms is None else (norms[2], norms[3])
        return replace(
            self,
            input_norm=norms[0],
            post_norm=norms[1],
            head_norms=head_norms,
            qkv=(q, k, v),
            output=o,
            gate_up=(gate, up),
            down=down,
        )


class AttentionSaved(NamedTuple):
    """What levels *keep* and *lean* save besides x."""

    into: SavedIn
    attended: Tensor  # [tokens, heads · head_dim]
    out_low_rank: Tensor | None  # O Aᵀ of the output projection
    h: Tensor  # [tokens, hidden]
    inverse_rms: Tensor  # [tokens]

    def flatten(self) -> list[Tensor | None]:
        """A flat list for `save_for_backward`."""
        return [*self.into, *self[1:]]

    @classmethod
    def restore(cls, flat: Sequence[Tensor | None]) -> AttentionSaved:
        """The inverse of `flatten`."""
        inner = len(SavedIn._fields)
        return cls(SavedIn(*flat[:inner]), *flat[inner:])  # type: ignore[arg-type]


N_ATTENTION = len(SavedIn._fields) + len(AttentionSaved._fields) - 1
N_SAVED = {"keep": N_ATTENTION + len(mlp_half.Saved._fields), "lean": N_ATTENTION, "recompute": 0, "offload": 0}
