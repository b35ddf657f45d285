"""A whole decoder layer as one autograd node, composed of the pairs of the attention half and the MLP half.

    h = x + O(attention(RMSNorm(x)))          y = h + MLP(RMSNorm(h))          x, h, y [batch, sequence, hidden]

One node instead of some thirty: an eager autograd node costs the host 0.03–0.2 ms, and what is saved between the
forward and the backward is decided here rather than by thirty modules. Two levels:

keep        saves x, 1/rms, Q, K, V, O, h, G, U and the small X Aᵀ; the backward makes the two norms and SwiGLU again.
recompute   saves x alone; the backward runs the layer again except for the down projection, whose output nobody needs,
            and hands the dense weights it has just dequantized to the products of the backward that follow.

The residual gradient travels inside the norm's backward kernel (dh = d RMSNorm + dy in one store), and the residual
add of attention's output inside the second norm's forward kernel. Rounding follows transformers: each projection's
output, each residual sum and each norm is rounded once to its own dtype.

Every tensor that can receive a gradient is an argument of the Function and goes through `save_for_backward`, so an
optimizer step between forward and backward raises as it does in stock PyTorch; frozen weights, masks and the
attention callable ride in `LayerCall`, read once, in the forward.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fastft.autograd import attention_half, mlp_half, projection
from fastft.autograd.attention_half import Attended, Attention, Heads, Norm, SavedIn
from fastft.autograd.autocast import AutocastState, suspended
from fastft.autograd.first_order import first_order
from fastft.autograd.projection import (
    LEAVES,
    Operands,
    Projection,
    flatten_leaves,
    operands,
    restore_leaves,
    to_leaf_dtypes,
)
from fastft.kernels.rms_norm import rms_norm, rms_norm_backward

Level = Literal["keep", "recompute"]
NORMS = 4  # input, post-attention, query, key


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

    @property
    def projections(self) -> list[Projection]:
        """The seven, in the order of their leaves."""
        return [*self.qkv, self.output, *self.gate_up, self.down]

    @property
    def norms(self) -> list[Norm | None]:
        """The four norms, in the order of their leaves."""
        return [self.input_norm, self.post_norm, *(self.head_norms or (None, None))]

    def operands(self, dtype: torch.dtype) -> list[Operands]:
        """Adapters in the compute dtype: of Q/K/V, of the output projection, of gate and up, of down."""
        return operands([self.qkv, [self.output], self.gate_up, [self.down]], dtype)

    def leaves(self) -> list[Tensor | None]:
        """Tensors a gradient can flow to: four norm weights, then four per projection."""
        norms = [n.weight if n is not None and n.weight.requires_grad else None for n in self.norms]
        return norms + flatten_leaves(self.projections)

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


class Saved(NamedTuple):
    """Everything level *keep* saves besides x (level *recompute* saves nothing of it)."""

    into: SavedIn
    attended: Tensor  # [tokens, heads · head_dim]
    out_low_rank: Tensor | None  # O Aᵀ of the output projection
    h: Tensor  # [tokens, hidden]
    inverse_rms: Tensor
    mlp: mlp_half.Saved

    def flatten(self) -> list[Tensor | None]:
        """A flat list for `save_for_backward`."""
        return [*self.into, self.attended, self.out_low_rank, self.h, self.inverse_rms, *self.mlp]

    @classmethod
    def restore(cls, flat: list[Tensor | None]) -> Saved:
        """The inverse of `flatten`."""
        n_in = len(SavedIn._fields)
        attended, out_low_rank, h, inverse_rms, *mlp = flat[n_in:]
        return cls(SavedIn(*flat[:n_in]), attended, out_low_rank, h, inverse_rms, mlp_half.Saved(*mlp))  # type: ignore[arg-type]


N_SAVED = len(SavedIn._fields) + len(Saved._fields) - 2 + len(mlp_half.Saved._fields)


@dataclass(slots=True)
class Kept:
    """What a recomputation hands to the backward right after it, beyond `Saved`: cheap to hold for that long."""

    qkv: list[Tensor] = field(default_factory=list)  # dense base weights
    output: list[Tensor] = field(default_factory=list)
    gate_up: list[Tensor] = field(default_factory=list)
    normed: Tensor | None = None  # RMSNorm(x) [tokens, hidden]
    normed_h: Tensor | None = None  # RMSNorm(h) [tokens, hidden]


def forward(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    call: LayerCall,
    adapters: list[Operands],
    with_graph: bool,
    kept: Kept | None = None,
) -> tuple[Tensor | None, Saved, Attended]:
    """The layer's output, what level *keep* saves, and attention's graph (with `with_graph`).

    Args:
        x: `[batch, sequence, hidden]`, contiguous.
        cos: `[1 or batch, sequence, rotary_dim]`.
        sin: as `cos`.
        call: the layer.
        adapters: `call.operands`.
        with_graph: record attention's own graph for the backward.
        kept: given by a recomputation: gets what the backward can use at once, and the down projection is left out
            (output None).
    """
    again = kept or Kept()
    keep = kept is not None
    dtype = call.autocast.compute_dtype(x.dtype)
    into, normed = attention_half.forward_in(
        x,
        call.input_norm,
        call.qkv,
        adapters[0],
        call.head_norms,
        call.heads,
        cos,
        sin,
        dtype,
        again.qkv if keep else None,
    )
    again.normed = normed if keep else None
    del normed
    attended = attention_half.attend(into, call.attention, call.autocast, with_graph)
    (projected,), out_low_rank = projection.forward(
        attended.output, [call.output], adapters[1], again.output if keep else None
    )
    norm = call.post_norm
    normed, inverse_rms, h = rms_norm(
        projected.to(x.dtype), norm.weight, norm.epsilon, mode=norm.mode, residual=x.view(-1, x.shape[-1])
    )
    del projected
    normed = normed.to(dtype)
    again.normed_h = normed if keep else None
    y, mlp = mlp_half.forward(
        normed, call.gate_up, call.down, adapters[2:], again.gate_up if keep else None, skip_down=keep
    )
    if y is not None:
        y = (y.add_(h) if y.dtype == h.dtype else h + y).view(x.shape)
    return y, Saved(into, attended.output, out_low_rank, h, inverse_rms, mlp), attended


def backward(
    grad: Tensor,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    call: LayerCall,
    adapters: list[Operands],
    saved: Saved | None,
    attended: Attended | None,
    needs_x: bool,
    needs_leaves: list[bool],
) -> tuple[Tensor | None, list[Tensor | None]]:
    """dx `[batch, sequence, hidden]` and the gradient of every leaf, in the order of `LayerCall.leaves`.

    Args:
        grad: dy `[batch, sequence, hidden]`; read, never written.
        x: the forward's input.
        cos: as in the forward.
        sin: as in the forward.
        call: the forward's call.
        adapters: `call.operands`.
        saved: what level *keep* saved, or None: everything is made again.
        attended: attention's graph, or None: it is built again.
        needs_x: whether dx is wanted.
        needs_leaves: one flag per leaf.
    """
    dtype = call.autocast.compute_dtype(x.dtype)
    grad = grad.reshape(-1, x.shape[-1])
    needs_norms, needs_projections = needs_leaves[:NORMS], needs_leaves[NORMS:]
    kept: Kept | None = None
    if saved is None:
        kept = Kept()
        _, saved, attended = forward(x, cos, sin, call, adapters, with_graph=True, kept=kept)
    elif attended is None or attended.graph is None:
        attended = attention_half.attend(saved.into, call.attention, call.autocast, with_graph=True)
    into, attention_output, out_low_rank, h, inverse_rms, mlp = saved
    del saved
    norm = call.post_norm
    if kept is None:
        normed_h = rms_norm(h, norm.weight, norm.epsilon, mode=norm.mode)[0].to(dtype)
    else:
        normed_h, kept.normed_h = kept.normed_h, None
    grad_normed, mlp_grads = mlp_half.backward(
        grad.to(dtype),
        normed_h,  # type: ignore[arg-type]
        call.gate_up,
        call.down,
        adapters[2:],
        mlp,
        needs_projections[4 * LEAVES :],
        weights=None if kept is None else kept.gate_up,
        owns_saved=kept is not None,
    )
    del mlp, normed_h
    if kept is not None:
        kept.gate_up.clear()
    assert grad_normed is not None
    assert attended is not None
    grad_h, grad_post = rms_norm_backward(
        grad_normed, h, norm.weight, inverse_rms, mode=norm.mode, residual_grad=grad, needs_weight_grad=needs_norms[1]
    )
    del grad_normed, h
    grad_attended, out_grads = projection.backward(
        [grad_h.to(dtype)],
        attention_output,
        [call.output],
        adapters[1],
        out_low_rank,
        needs_projections[3 * LEAVES : 4 * LEAVES],
        weights=None if kept is None else kept.output,
    )
    grads = attention_half.attend_backward(grad_attended, attended)  # type: ignore[arg-type]
    del grad_attended, attention_output
    grad_x, qkv_grads, norm_grads = attention_half.backward_in(
        grads,
        x,
        call.input_norm,
        call.qkv,
        adapters[0],
        call.head_norms,
        cos,
        sin,
        into,
        None if kept is None else kept.normed,
        grad_h,
        needs_projections[: 3 * LEAVES],
        (needs_norms[0], needs_norms[2], needs_norms[3]),
        needs_x,
        None if kept is None else kept.qkv,
    )
    leaf_grads = [norm_grads[0], grad_post, norm_grads[1], norm_grads[2], *qkv_grads, *out_grads, *mlp_grads]
    return None if grad_x is None else grad_x.view(x.shape), leaf_grads


class _DecoderLayer(torch.autograd.Function):
    """Autograd shell. In a Function's forward `needs_input_grad` is always True and grad mode off: callers decide."""

    @staticmethod
    def forward(ctx: Any, call: LayerCall, x: Tensor, cos: Tensor, sin: Tensor, *leaves: Tensor | None) -> Tensor:
        keep = call.level == "keep"
        # Ambient autocast stays on: every product's operands are in its dtype already, and attention is to see it.
        adapters = call.operands(call.autocast.compute_dtype(x.dtype))
        y, saved, attended = forward(x, cos, sin, call, adapters, with_graph=keep)
        # Adapters in the compute dtype are a copy of one megabyte a layer (8B, r=16): kept, they are cast once a step.
        ctx.call, ctx.adapters, ctx.attended = call, adapters, attended if keep else None
        ctx.save_for_backward(x, cos, sin, *leaves, *(saved.flatten() if keep else ()))
        return y  # type: ignore[return-value]

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, cos, sin, *rest = ctx.saved_tensors
        saved = Saved.restore(rest[-N_SAVED:]) if ctx.call.level == "keep" else None
        leaves = rest[:-N_SAVED] if saved is not None else rest
        adapters, attended = ctx.adapters, ctx.attended
        ctx.adapters = ctx.attended = None  # a node outlives its backward for as long as the loss does
        needs_x, needs_leaves = ctx.needs_input_grad[1], list(ctx.needs_input_grad[4:])
        with suspended(x.device.type):
            call = ctx.call.with_leaves(leaves)
            del rest
            if adapters is None:  # a second backward through a retained graph
                adapters = call.operands(call.autocast.compute_dtype(x.dtype))
            grad_x, leaf_grads = backward(grad, x, cos, sin, call, adapters, saved, attended, needs_x, needs_leaves)
            leaf_grads = to_leaf_dtypes(leaf_grads, leaves)
        return None, grad_x, None, None, *leaf_grads


def apply_layer(x: Tensor, cos: Tensor, sin: Tensor, call: LayerCall) -> Tensor:
    """The decoder layer, differentiable in x and in every leaf of `call`.

    Args:
        x: the residual stream `[batch, sequence, hidden]`.
        cos: rotary cosines `[1 or batch, sequence, rotary_dim]`.
        sin: rotary sines, as `cos`.
        call: the layer as it stands.

    Returns:
        `[batch, sequence, hidden]` in `x`'s dtype.
    """
    x = x.contiguous()
    if torch.is_grad_enabled():
        leaves = call.leaves()
        if x.requires_grad or any(leaf is not None and leaf.requires_grad for leaf in leaves):
            return _DecoderLayer.apply(call, x, cos, sin, *leaves)  # type: ignore[no-any-return]
    with torch.no_grad():
        y, _, _ = forward(x, cos, sin, call, call.operands(call.autocast.compute_dtype(x.dtype)), with_graph=False)
    assert y is not None
    return y
