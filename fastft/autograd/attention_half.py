"""The attention half of a decoder layer: a pair for what comes before attention, and attention itself.

Attention-in:   X̂ = RMSNorm(x);  Q, K, V = projections of X̂;  [Qwen3: Q, K = RMSNorm over head_dim];  Q, K = RoPE(Q, K)
Attention:      O = softmax(Q Kᵀ / √d + mask) V — transformers' own interface, a callable here
Attention-out:  the output projection of O, a group of one; its residual add is in the second norm's kernel

Q, K and V are slices of one buffer [tokens, Σ out], as their joined product wrote it, and RoPE turns Q and K there, in
one launch: no layout is copied. Its backward is the transpose rotation, which reads dQ and dK as attention's backward
left them and writes them beside dV, as the next product wants them. Attention-in keeps 1/rms, Q, K, V and X̂ Aᵀ; never
X̂, which costs one read and one write to make again.

Attention runs under `enable_grad` on detached Q, K, V, so its backward is whatever its forward dispatched to (cuDNN,
flash, eager …). That small graph lives in `Attended` until the first backward has used it; a second backward
(retain_graph=True) builds it again from Q, K, V. Where Q, K and V are made again but attention is not run again, the
graph is an emptied one (emptied_graph.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fastft.autograd.autocast import AutocastState
from fastft.autograd.emptied_graph import EmptiedGraph, Refilled
from fastft.autograd.products import Products
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

    def cut(self, side_by_side: Tensor, batch: int, sequence: int) -> tuple[Tensor, Tensor, Tensor]:
        """Q, K and V `[batch, sequence, heads, dim]`, views of `[tokens, Σ heads · dim (+ room)]`."""
        counts = (self.query, self.key_value, self.key_value)
        starts = (0, self.query * self.dim, (self.query + self.key_value) * self.dim)
        rows = side_by_side.view(batch, sequence, -1)
        query, key, value = (
            rows[..., start : start + count * self.dim].view(batch, sequence, count, self.dim)
            for start, count in zip(starts, counts, strict=True)
        )
        return query, key, value


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
    # output with history, and the leaves query, key, value; or a graph that has been given these again
    graph: tuple[Tensor, Tensor, Tensor, Tensor] | Refilled | None
    retain: bool = False  # the first backward leaves the graph's tensors where they are


def normed_rows(x: Tensor, norm: Norm, made: Products) -> tuple[Tensor, Tensor]:
    """RMSNorm(x) [tokens, hidden + room] as the input of `made`, in its compute dtype, and 1/rms [tokens].

    Args:
        x: `[tokens, hidden]`.
        norm: the norm.
        made: the products that read it.
    """
    room = made.input_room(x.shape[0])
    _, inverse_rms, _ = rms_norm(x, norm.weight, norm.epsilon, mode=norm.mode, out=room[:, : x.shape[1]])
    return room, inverse_rms


def forward_in(
    x: Tensor,
    norm: Norm,
    qkv: Products,
    head_norms: tuple[Norm, Norm] | None,
    heads: Heads,
    cos: Tensor,
    sin: Tensor,
) -> tuple[SavedIn, Tensor]:
    """Norm, Q/K/V and rotation.

    Args:
        x: the residual stream `[batch, sequence, hidden]`.
        norm: the input norm.
        qkv: products of the three projections.
        head_norms: norms of Q and K over head_dim (Qwen3), or None.
        heads: head counts and width.
        cos: `[1 or batch, sequence, rotary_dim]`.
        sin: as `cos`.

    Returns:
        What the backward needs, and X̂ `[tokens, hidden + room]` in the compute dtype.
    """
    batch, sequence, hidden = x.shape
    normed, inverse_rms = normed_rows(x.view(-1, hidden), norm, qkv)
    side_by_side, low_rank = qkv.forward(normed)
    query, key, value = heads.cut(side_by_side, batch, sequence)
    raw: tuple[Tensor | None, ...] = (None, None, None, None)
    if head_norms is not None:
        raw_query, raw_key, dtype = query, key, query.dtype
        query, query_inverse_rms, _ = rms_norm(
            query, head_norms[0].weight, head_norms[0].epsilon, mode=head_norms[0].mode
        )
        key, key_inverse_rms, _ = rms_norm(key, head_norms[1].weight, head_norms[1].epsilon, mode=head_norms[1].mode)
        query, key = query.to(dtype), key.to(dtype)
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


def attend_once(saved: SavedIn, attention: Attention, state: AutocastState) -> tuple[Attended, EmptiedGraph | None]:
    """Attention whose backward will need Q, K, V and what `EmptiedGraph.take` gives, but no second run.

    Returns:
        The output, without a graph, and the graph; None where attention saves too much else (eager attention's scores),
        or somebody forbids saved-tensor hooks.
    """
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():
        return attend(saved, attention, state, with_graph=False), None
    heads = tuple(t.transpose(1, 2) for t in (saved.query, saved.key, saved.value))
    with state.restored():
        output, graph = EmptiedGraph.record(attention, *heads)
    return Attended(output, None), graph


def refilled(saved: SavedIn, graph: EmptiedGraph, kept: Sequence[Tensor], retain: bool) -> Attended:
    """`attend_once`'s output and graph, given Q, K and V that were made again, and what was kept.

    Args:
        saved: of a second `forward_in`.
        graph: of the forward.
        kept: what its `take` gave, in order, from wherever it was.
        retain: whether there may be another backward.
    """
    heads = (t.transpose(1, 2) for t in (saved.query, saved.key, saved.value))
    return Attended(kept[0], graph.refill(*heads, kept), retain)


def attend_backward(grad: Tensor, attended: Attended) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV `[batch, sequence, heads, head_dim]`, of any strides, from dO `[tokens, heads · head_dim]`."""
    graph = attended.graph
    attended.graph = None
    assert graph is not None
    if isinstance(graph, Refilled):
        grads = graph.backward(grad, attended.retain)
    else:
        output, *leaves = graph
        grads = torch.autograd.grad(
            output, leaves, grad.to(output.dtype).view(output.shape), retain_graph=attended.retain
        )
    return tuple(g.transpose(1, 2) for g in grads)  # type: ignore[return-value]


def backward_in(
    grads: tuple[Tensor, Tensor, Tensor],
    x: Tensor,
    norm: Norm,
    qkv: Products,
    head_norms: tuple[Norm, Norm] | None,
    heads: Heads,
    cos: Tensor,
    sin: Tensor,
    saved: SavedIn,
    normed: Tensor | None,
    residual_grad: Tensor,
    needs_leaves: Sequence[bool],
    needs_norms: tuple[bool, bool, bool],
    needs_x: bool = True,
    out: Tensor | None = None,
) -> tuple[Tensor | None, list[Tensor | None], tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """Backward of attention-in.

    Args:
        grads: dQ, dK, dV `[batch, sequence, heads, head_dim]`; read, never written.
        x: the forward's input.
        norm: the forward's norm.
        qkv: products of the forward's projections.
        head_norms: the forward's head norms.
        heads: head counts and width.
        cos: as in the forward.
        sin: as in the forward.
        saved: the forward's `SavedIn`.
        normed: X̂ in the compute dtype from a forward that has just run, or None: it is made again.
        residual_grad: `[tokens, hidden]`, what flows past the half along the residual stream.
        needs_leaves: three times `LEAVES` flags.
        needs_norms: whether the input norm's, the query norm's and the key norm's weight train.
        needs_x: whether dx is wanted.
        out: receives dx.

    Returns:
        dx `[tokens, hidden]` with the residual's gradient added, the leaves' gradients, the three norms' gradients.
    """
    batch, sequence, hidden = x.shape
    room = qkv.grad_room(batch * sequence)
    grad_query, grad_key, grad_value = heads.cut(room, batch, sequence)
    grad_value.copy_(grads[2])
    dtype = room.dtype
    rope(grads[0].to(dtype), grads[1].to(dtype), cos, sin, inverse=True, out=(grad_query, grad_key))
    grad_query_norm = grad_key_norm = None
    if head_norms is not None:
        grad_query_norm = _head_norm_backward(
            grad_query, saved.query_raw, head_norms[0], saved.query_inverse_rms, needs_norms[1]
        )
        grad_key_norm = _head_norm_backward(
            grad_key, saved.key_raw, head_norms[1], saved.key_inverse_rms, needs_norms[2]
        )
    rows = x.view(-1, hidden)
    grad_normed, grad_low_rank = qkv.input_grad(room, needs_x or needs_norms[0])
    if any(needs_leaves):
        if normed is None:
            normed, _ = normed_rows(rows, norm, qkv)
        leaf_grads = qkv.leaf_grads(room, grad_low_rank, normed[:, :hidden], saved.low_rank, needs_leaves)
    else:
        leaf_grads = [None] * len(needs_leaves)
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
        out=out,
    )
    return grad_x if needs_x else None, leaf_grads, (grad_norm, grad_query_norm, grad_key_norm)


def _head_norm_backward(
    grad: Tensor, raw: Tensor | None, norm: Norm, inverse_rms: Tensor | None, needs_weight: bool
) -> Tensor | None:
    """Turn `grad` `[batch, sequence, heads, head_dim]` in place into the gradient before a head norm; the weight's."""
    assert raw is not None
    assert inverse_rms is not None
    before, grad_weight = rms_norm_backward(
        grad, raw, norm.weight, inverse_rms, mode=norm.mode, needs_weight_grad=needs_weight
    )
    grad.copy_(before)
    return grad_weight
