"""The attention half of a decoder layer: a pair for what comes before attention, and attention itself.

Attention-in:   X̂ = RMSNorm(x);  Q, K, V = projections of X̂;  [Qwen3: Q, K = RMSNorm over head_dim];  Q, K = RoPE(Q, K)
Attention:      O = softmax(Q Kᵀ / √d + mask) V — transformers' own interface, a callable here
Attention-out:  the output projection of O, a group of one; its residual add is in the second norm's kernel

RoPE turns Q and K where the projections wrote them, [batch, sequence, heads, head_dim], in one launch: no layout is
copied. Its backward is the transpose rotation of dQ and dK, in place on buffers that attention's backward has just
made. Attention-in keeps 1/rms, Q, K, V and X̂ Aᵀ; never X̂, which costs one read and one write to make again.

Attention runs under `enable_grad` on detached Q, K, V, so its backward is whatever its forward dispatched to (cuDNN,
flash, eager …). That small graph lives in `Attended` until the first backward has used it; a second backward
(retain_graph=True) builds it again from Q, K, V.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fastft.autograd import projection
from fastft.autograd.autocast import AutocastState
from fastft.autograd.projection import Operands, Projection
from fastft.kernels.rms_norm import NormMode, rms_norm, rms_norm_backward
from fastft.kernels.rope import rope

# (query, key, value), each [batch, heads, sequence, head_dim] -> [batch, sequence, heads, head_dim]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(slots=True)
class Norm:
    """An RMSNorm as it stands at this call: weight `[width]`, epsilon, rounding mode (kernels/rms_norm.py)."""

    weight: Tensor
    epsilon: float
    mode: NormMode = "llama"


@dataclass(slots=True)
class Heads:
    """Head counts and width: how a projection's output is viewed."""

    query: int
    key_value: int
    dim: int


class SavedIn(NamedTuple):
    """What attention-in keeps besides its input."""

    inverse_rms: Tensor  # [tokens]
    query: Tensor  # [batch, sequence, heads, head_dim], rotated
    key: Tensor
    value: Tensor
    low_rank: Tensor | None  # X̂ Aᵀ
    query_raw: Tensor | None  # before the head norm, where there is one
    key_raw: Tensor | None
    query_inverse_rms: Tensor | None
    key_inverse_rms: Tensor | None


@dataclass(slots=True)
class Attended:
    """Attention's output and the small graph behind it."""

    output: Tensor  # [tokens, heads · head_dim]
    graph: tuple[Tensor, Tensor, Tensor, Tensor] | None  # output with history, and the leaves query, key, value


def forward_in(
    x: Tensor,
    norm: Norm,
    qkv: Sequence[Projection],
    adapters: Operands,
    head_norms: tuple[Norm, Norm] | None,
    heads: Heads,
    cos: Tensor,
    sin: Tensor,
    compute_dtype: torch.dtype,
    keep_weights: list[Tensor] | None = None,
) -> tuple[SavedIn, Tensor]:
    """Norm, Q/K/V and rotation.

    Args:
        x: the residual stream `[batch, sequence, hidden]`.
        norm: the input norm.
        qkv: the three projections.
        adapters: their operands.
        head_norms: norms of Q and K over head_dim (Qwen3), or None.
        heads: head counts and width.
        cos: `[1 or batch, sequence, rotary_dim]`.
        sin: as `cos`.
        compute_dtype: dtype of the matrix products.
        keep_weights: see `projection.forward`.

    Returns:
        What the backward needs, and X̂ `[tokens, hidden]` in the compute dtype.
    """
    batch, sequence, hidden = x.shape
    normed, inverse_rms, _ = rms_norm(x.view(-1, hidden), norm.weight, norm.epsilon, mode=norm.mode)
    normed = normed.to(compute_dtype)
    (query, key, value), low_rank = projection.forward(normed, qkv, adapters, keep_weights)
    query = query.view(batch, sequence, heads.query, heads.dim)
    key = key.view(batch, sequence, heads.key_value, heads.dim)
    value = value.view(batch, sequence, heads.key_value, heads.dim)
    raw: tuple[Tensor | None, ...] = (None, None, None, None)
    if head_norms is not None:
        raw_query, raw_key = query, key
        query, query_inverse_rms, _ = rms_norm(
            query, head_norms[0].weight, head_norms[0].epsilon, mode=head_norms[0].mode
        )
        key, key_inverse_rms, _ = rms_norm(key, head_norms[1].weight, head_norms[1].epsilon, mode=head_norms[1].mode)
        query, key = query.to(compute_dtype), key.to(compute_dtype)
        raw = (raw_query, raw_key, query_inverse_rms, key_inverse_rms)
    rope(query, key, cos, sin, out=(query, key))
    return SavedIn(inverse_rms, query, key, value, low_rank, *raw), normed


def attend(saved: SavedIn, attention: Attention, state: AutocastState, with_graph: bool) -> Attended:
    """Attention over the rotated heads; with `with_graph` its own graph is recorded for `attend_backward`."""
    query, key, value = (t.transpose(1, 2) for t in (saved.query, saved.key, saved.value))
    if not with_graph:
        with state.restored():
            output = attention(query, key, value)
        return Attended(output.reshape(-1, output.shape[-2] * output.shape[-1]).to(query.dtype), None)
    leaves = tuple(t.detach().requires_grad_() for t in (query, key, value))
    with torch.enable_grad(), state.restored():
        output = attention(*leaves)
    flat = output.detach().reshape(-1, output.shape[-2] * output.shape[-1]).to(query.dtype)
    return Attended(flat, (output, *leaves))  # type: ignore[arg-type]


def attend_backward(grad: Tensor, attended: Attended) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV `[batch, sequence, heads, head_dim]`, contiguous, from dO `[tokens, heads · head_dim]`."""
    assert attended.graph is not None
    output, *leaves = attended.graph
    attended.graph = None
    grads = torch.autograd.grad(output, leaves, grad.to(output.dtype).view(output.shape))
    return tuple(g.transpose(1, 2).contiguous() for g in grads)  # type: ignore[return-value]


def backward_in(
    grads: tuple[Tensor, Tensor, Tensor],
    x: Tensor,
    norm: Norm,
    qkv: Sequence[Projection],
    adapters: Operands,
    head_norms: tuple[Norm, Norm] | None,
    cos: Tensor,
    sin: Tensor,
    saved: SavedIn,
    normed: Tensor | None,
    residual_grad: Tensor,
    needs_leaves: Sequence[bool],
    needs_norms: tuple[bool, bool, bool],
    needs_x: bool = True,
    weights: Sequence[Tensor] | None = None,
) -> tuple[Tensor | None, list[Tensor | None], tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """Backward of attention-in.

    Args:
        grads: dQ, dK, dV `[batch, sequence, heads, head_dim]`, this call's own: dQ and dK are rotated in place.
        x: the forward's input.
        norm: the forward's norm.
        qkv: the forward's projections.
        adapters: their operands.
        head_norms: the forward's head norms.
        cos: as in the forward.
        sin: as in the forward.
        saved: the forward's `SavedIn`.
        normed: X̂ in the compute dtype from a forward that has just run, or None: it is made again.
        residual_grad: `[tokens, hidden]`, what flows past the half along the residual stream.
        needs_leaves: three times `LEAVES` flags.
        needs_norms: whether the input norm's, the query norm's and the key norm's weight train.
        needs_x: whether dx is wanted.
        weights: dense Q, K, V weights kept by a forward that has just run.

    Returns:
        dx `[tokens, hidden]` with the residual's gradient added, the leaves' gradients, the three norms' gradients.
    """
    hidden = x.shape[-1]
    dtype = saved.value.dtype
    grad_query, grad_key, grad_value = (g.to(dtype) for g in grads)
    rope(grad_query, grad_key, cos, sin, inverse=True, out=(grad_query, grad_key))
    grad_query_norm = grad_key_norm = None
    if head_norms is not None:
        grad_query, grad_query_norm = _head_norm_backward(
            grad_query, saved.query_raw, head_norms[0], saved.query_inverse_rms, needs_norms[1]
        )
        grad_key, grad_key_norm = _head_norm_backward(
            grad_key, saved.key_raw, head_norms[1], saved.key_inverse_rms, needs_norms[2]
        )
    rows = x.view(-1, hidden)
    if normed is None:
        normed = rms_norm(rows, norm.weight, norm.epsilon, mode=norm.mode)[0].to(dtype)
    flat = [g.reshape(rows.shape[0], -1) for g in (grad_query, grad_key, grad_value)]
    needs_normed = needs_x or needs_norms[0]
    grad_normed, leaf_grads = projection.backward(
        flat, normed, qkv, adapters, saved.low_rank, needs_leaves, needs_normed, weights
    )
    if grad_normed is None:
        return None, leaf_grads, (None, grad_query_norm, grad_key_norm)
    grad_x, grad_norm = rms_norm_backward(
        grad_normed,
        rows,
        norm.weight,
        saved.inverse_rms,
        mode=norm.mode,
        residual_grad=residual_grad,
        needs_weight_grad=needs_norms[0],
    )
    return grad_x if needs_x else None, leaf_grads, (grad_norm, grad_query_norm, grad_key_norm)


def _head_norm_backward(
    grad: Tensor, raw: Tensor | None, norm: Norm, inverse_rms: Tensor | None, needs_weight: bool
) -> tuple[Tensor, Tensor | None]:
    assert raw is not None
    assert inverse_rms is not None
    return rms_norm_backward(grad, raw, norm.weight, inverse_rms, mode=norm.mode, needs_weight_grad=needs_weight)
