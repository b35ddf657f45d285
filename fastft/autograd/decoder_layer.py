"""A whole decoder layer as one autograd node, composed of the pairs of the attention half and the MLP half.

    h = x + O(attention(RMSNorm(x)))          y = h + MLP(RMSNorm(h))          x, h, y [batch, sequence, hidden]

One node instead of some thirty: an eager autograd node costs the host 0.03–0.2 ms, and what is saved between the
forward and the backward is decided here rather than by thirty modules. Four levels:

keep        saves x, 1/rms, Q, K, V, O, h, G, U and the small X Aᵀ; the backward makes the two norms and SwiGLU again.
lean        the same less G and U, the two widest: the backward makes them again, tile by tile.
recompute   saves x alone; the backward runs the attention half again, then goes on as *lean* does. The down projection
            is not run again: nobody needs its output. The dense weights of the recomputation serve the backward.
offload     as recompute, with x in host memory (`LayerCall.host`). As far as the link carries more (`LayerCall.away`),
            *attention*'s output and statistics are there too, and attention itself is not run again
            (emptied_graph.py); or all of the attention *half* that *lean* keeps, and nothing of it is.

The residual gradient travels inside the norm's backward kernel (dh = d RMSNorm + dy in one store), and the residual
add of attention's output inside the second norm's forward kernel. Rounding follows transformers: each projection's
output, each residual sum and each norm is rounded once to its own dtype.

Every tensor that can receive a gradient is an argument of the Function and goes through `save_for_backward`, so an
optimizer step between forward and backward raises as it does in stock PyTorch; frozen weights, masks and the
attention callable ride in `LayerCall`, read once, in the forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastft.autograd import attention_half, mlp_half
from fastft.autograd.attention_half import Attended
from fastft.autograd.autocast import suspended
from fastft.autograd.first_order import first_order
from fastft.autograd.host_layer import HostLayer
from fastft.autograd.layer_call import N_ATTENTION, N_SAVED, NORMS, Attend, AttentionSaved, LayerCall
from fastft.autograd.products import Products, products, to_leaf_dtypes
from fastft.autograd.projection import LEAVES
from fastft.kernels.rms_norm import rms_norm, rms_norm_backward


@dataclass(slots=True)
class Recomputed:
    """What a recomputation hands to the backward right after it, beyond `AttentionSaved`."""

    qkv: Products
    output: Products
    gate_up: Products
    normed: Tensor  # RMSNorm(x) [tokens, hidden + room]
    normed_h: Tensor  # RMSNorm(h) [tokens, hidden + room]


class AttentionOut(NamedTuple):
    """What comes of attention's output before the MLP."""

    output: Products
    gate_up: Products
    low_rank: Tensor | None  # O Aᵀ of the output projection
    h: Tensor  # [tokens, hidden]
    normed_h: Tensor  # RMSNorm(h) [tokens, hidden + room]
    inverse_rms: Tensor  # [tokens]


def attention_out(rows: Tensor, attended: Tensor, call: LayerCall, dtype: torch.dtype) -> AttentionOut:
    """Output projection, residual sum and second norm.

    Args:
        rows: x, `[tokens, hidden]`.
        attended: attention's output, `[tokens, heads · head_dim]`.
        call: the layer.
        dtype: compute dtype of the products.
    """
    output = products([call.output], dtype)
    projected, low_rank = output.forward(attended)
    gate_up = products(call.gate_up, dtype)
    norm, normed_h = call.post_norm, gate_up.input_room(rows.shape[0])
    projected = projected.to(rows.dtype)
    _, inverse_rms, h = rms_norm(
        projected,
        norm.weight,
        norm.epsilon,
        mode=norm.mode,
        residual=rows,
        out=normed_h[:, : rows.shape[1]],
        summed_out=projected,  # each row is read before it is written
    )
    return AttentionOut(output, gate_up, low_rank, h, normed_h, inverse_rms)


def mlp_out(
    h: Tensor,
    normed_h: Tensor,
    gate_up: Products,
    call: LayerCall,
    dtype: torch.dtype,
    keep: bool,
    out: Tensor | None = None,
) -> tuple[Tensor, mlp_half.Saved | None]:
    """h + MLP(RMSNorm(h)) `[tokens, hidden]`, and with `keep` what level *keep* saves of the MLP.

    Args:
        h: the residual stream before the MLP `[tokens, hidden]`.
        normed_h: RMSNorm(h) `[tokens, hidden + room]`.
        gate_up: products of the gate and the up projection.
        call: the layer.
        dtype: compute dtype of the products.
        keep: whether gate and up are wanted.
        out: receives the sum.
    """
    down = products([call.down], dtype)
    y, mlp = mlp_half.forward(normed_h, gate_up, down, h.shape[1], call.gate_up[0].out_features, keep, call.compact)
    if out is not None:
        return torch.add(h, y, out=out.view(h.shape)), mlp
    return (y.add_(h) if y.dtype == h.dtype else h + y), mlp


def forward_attention(
    x: Tensor, cos: Tensor, sin: Tensor, call: LayerCall, dtype: torch.dtype, attend: Attend
) -> tuple[AttentionSaved, Attended, Recomputed]:
    """The layer up to the second norm.

    Args:
        x: `[batch, sequence, hidden]`, contiguous.
        cos: `[1 or batch, sequence, rotary_dim]`.
        sin: as `cos`.
        call: the layer.
        dtype: compute dtype of the products.
        attend: attention over what comes before it.
    """
    qkv = products(call.qkv, dtype)
    into, normed = attention_half.forward_in(x, call.input_norm, qkv, call.head_norms, call.heads, cos, sin)
    attended = attend(into)
    after = attention_out(x.view(-1, x.shape[-1]), attended.output, call, dtype)
    saved = AttentionSaved(into, attended.output, after.low_rank, after.h, after.inverse_rms)
    return saved, attended, Recomputed(qkv, after.output, after.gate_up, normed, after.normed_h)


def forward(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    call: LayerCall,
    with_graph: bool,
    keep_mlp: bool,
    out: Tensor | None = None,
    attend: Attend | None = None,
    stow: Callable[[AttentionSaved], None] | None = None,
) -> tuple[Tensor, AttentionSaved | None, mlp_half.Saved | None, Attended | None]:
    """The layer's output; with `with_graph` also what levels *keep* and *lean* save, and attention's graph.

    Args:
        x: `[batch, sequence, hidden]`, contiguous.
        cos: `[1 or batch, sequence, rotary_dim]`.
        sin: as `cos`.
        call: the layer.
        with_graph: record attention's own graph for the backward.
        keep_mlp: whether gate and up are wanted.
        out: receives the output.
        attend: runs attention where it is not just run.
        stow: receives what levels *keep* and *lean* save of the attention half, which is not returned then.
    """
    dtype = call.autocast.compute_dtype(x.dtype)
    attended: Attended | None
    attend = attend or _attention(call, with_graph)
    saved, attended, made = forward_attention(x, cos, sin, call, dtype, attend)
    h, normed_h, gate_up = saved.h, made.normed_h, made.gate_up
    del made
    kept: AttentionSaved | None = None
    if with_graph or stow is not None:  # views of rooms: as they are, they would keep the rooms alive
        low_rank = saved.into.low_rank
        kept = saved._replace(into=saved.into._replace(low_rank=None if low_rank is None else low_rank.contiguous()))
    del saved
    if stow is not None and kept is not None:
        stow(kept)
        kept = None
    if kept is None:
        attended = None  # Q, K, V and O are let go before the widest tensors come
    y, mlp = mlp_out(h, normed_h, gate_up, call, dtype, keep_mlp, out)
    return y.view(x.shape), kept, mlp, attended


def backward(
    grad: Tensor,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    call: LayerCall,
    saved: AttentionSaved | None,
    mlp: mlp_half.Saved | None,
    attended: Attended | None,
    needs_x: bool,
    needs_leaves: list[bool],
    out: Tensor | None = None,
    attend: Attend | None = None,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """dx `[batch, sequence, hidden]` and the gradient of every leaf, in the order of `LayerCall.leaves`.

    Args:
        grad: dy `[batch, sequence, hidden]`; read, never written.
        x: the forward's input.
        cos: as in the forward.
        sin: as in the forward.
        call: the forward's call.
        saved: what levels *keep* and *lean* saved, or None: attention is run again.
        mlp: what level *keep* saved, or None: gate and up are made again.
        attended: attention's graph, or None: it is built again.
        needs_x: whether dx is wanted.
        needs_leaves: one flag per leaf.
        out: receives dx, if it is wanted.
        attend: where attention need not run again: gives its output and graph.
    """
    dtype, rows = call.autocast.compute_dtype(x.dtype), x.view(-1, x.shape[-1])
    grad = grad.reshape(rows.shape)
    needs_norms, needs_projections = needs_leaves[:NORMS], needs_leaves[NORMS:]
    made: Recomputed | None = None
    if saved is None:
        saved, attended, made = forward_attention(x, cos, sin, call, dtype, attend or _attention(call, with_graph=True))
        qkv, output, gate_up, normed_h = made.qkv, made.output, made.gate_up, made.normed_h
    else:
        if attended is None or attended.graph is None:
            attended = attention_half.attend(saved.into, call.attention, call.autocast, with_graph=True)
        gate_up = products(call.gate_up, dtype)
        normed_h, _ = attention_half.normed_rows(saved.h, call.post_norm, gate_up)
    normed = None
    if made is not None:
        normed = made.normed
        del made
    into, attention_output, out_low_rank, h, inverse_rms = saved
    del saved
    grad_normed, mlp_grads = mlp_half.backward(
        grad.to(dtype),
        normed_h,
        gate_up,
        products([call.down], dtype),
        call.gate_up[0].out_features,
        mlp,
        needs_projections[4 * LEAVES :],
        compact=call.compact,
    )
    del mlp, normed_h, gate_up
    assert grad_normed is not None
    assert attended is not None
    if normed is None:
        output = products([call.output], dtype)
    room = output.grad_room(rows.shape[0])  # dh goes where the output projection's products want it
    norm, target = call.post_norm, room[:, : rows.shape[1]]
    grad_h, grad_post = rms_norm_backward(
        grad_normed,
        h,
        norm.weight,
        inverse_rms,
        mode=norm.mode,
        residual_grad=grad,
        needs_weight_grad=needs_norms[1],
        out=target if x.dtype == dtype else None,
    )
    if x.dtype != dtype:
        target.copy_(grad_h)
    del grad_normed, h, target
    grad_attended, grad_low_rank = output.input_grad(room)
    out_grads = output.leaf_grads(
        room, grad_low_rank, attention_output, out_low_rank, needs_projections[3 * LEAVES : 4 * LEAVES]
    )
    del output, room
    grads = attention_half.attend_backward(grad_attended, attended)  # type: ignore[arg-type]
    del grad_attended, attention_output
    if normed is None:
        qkv = products(call.qkv, dtype)
    grad_x, qkv_grads, norm_grads = attention_half.backward_in(
        grads,
        x,
        call.input_norm,
        qkv,
        call.head_norms,
        call.heads,
        cos,
        sin,
        into,
        normed,
        grad_h,
        needs_projections[: 3 * LEAVES],
        (needs_norms[0], needs_norms[2], needs_norms[3]),
        needs_x,
        None if out is None else out.view(rows.shape),
    )
    leaf_grads = [norm_grads[0], grad_post, norm_grads[1], norm_grads[2], *qkv_grads, *out_grads, *mlp_grads]
    return None if grad_x is None else grad_x.view(x.shape), leaf_grads


def _attention(call: LayerCall, with_graph: bool) -> Attend:
    return lambda into: attention_half.attend(into, call.attention, call.autocast, with_graph)


class _DecoderLayer(torch.autograd.Function):
    """Autograd shell. In a Function's forward `needs_input_grad` is always True and grad mode off: callers decide."""

    @staticmethod
    def forward(ctx: Any, call: LayerCall, x: Tensor, cos: Tensor, sin: Tensor, *leaves: Tensor | None) -> Tensor:
        # Ambient autocast stays on: every product's operands are in its dtype already, and attention is to see it.
        level = call.level
        keeps_attention = level in ("keep", "lean")
        away = HostLayer(call, x) if level == "offload" and call.host is not None else None  # beside the forward
        attend = away.attend if away is not None and call.away != "input" else None
        stow = away.stow if away is not None and call.away == "half" else None
        y, saved, mlp, attended = forward(
            x, cos, sin, call, keeps_attention, keep_mlp=level == "keep", attend=attend, stow=stow
        )
        ctx.call, ctx.attended, ctx.away = call, attended, away
        kept_x = x if away is None else None
        kept = [] if saved is None else [*saved.flatten(), *(mlp or ())]
        ctx.save_for_backward(kept_x, cos, sin, *leaves, *kept)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, cos, sin, *rest = ctx.saved_tensors
        call, attended = ctx.call, ctx.attended
        ctx.attended = None  # a node outlives its backward for as long as the loss does
        n_saved = N_SAVED[call.level]
        leaves, kept = rest[: len(rest) - n_saved], rest[len(rest) - n_saved :]
        del rest
        saved = AttentionSaved.restore(kept[:N_ATTENTION]) if kept else None
        mlp = mlp_half.Saved(*kept[N_ATTENTION:]) if call.level == "keep" else None  # type: ignore[arg-type]
        del kept
        attend: Attend | None = None
        if ctx.away is not None:
            retain = torch._C._autograd._get_current_graph_task_keep_graph()
            x, saved, attended, attend = ctx.away.get(retain)
            if not retain:
                ctx.away = None  # the host memory is the next step's, though somebody holds on to the loss
        needs_x, needs_leaves = ctx.needs_input_grad[1], list(ctx.needs_input_grad[4:])
        with suspended(x.device.type):
            call = call.with_leaves(leaves)
            grad_x, leaf_grads = backward(
                grad, x, cos, sin, call, saved, mlp, attended, needs_x, needs_leaves, attend=attend
            )
            leaf_grads = to_leaf_dtypes(leaf_grads, leaves)
        if call.observer is not None:
            call.observer()
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
        return forward(x, cos, sin, call, with_graph=False, keep_mlp=False)[0]
