"""Linear projections with low-rank adapters, alone or in a group that shares its input.

    Y_i = X W_iᵀ + b_i + s_i (X A_iᵀ) B_iᵀ      X [tokens, in], W_i [out_i, in], A_i [rank_i, in], B_i [out_i, rank_i]

The backward, with U_i = s_i dY_i B_i  [tokens, rank_i]:

    dX   = Σ_i dY_i W_i + U A        (A, U: the A_i stacked and the U_i side by side, so one product serves the group)
    dA   = Uᵀ X                      (one product for the group, then cut)
    dB_i = s_i dY_iᵀ (X A_iᵀ)
    dW_i = dY_iᵀ X,  db_i = Σ_tokens dY_i      where the base trains

What it saves is X Aᵀ [tokens, Σ rank], a few per cent of Y; X is the caller's (rebuilt by the caller from x and 1/rms
when it is a norm's output). The adapters themselves are brought into the compute dtype and stacked once for a forward
and once for a backward (`operands`): one copy kernel for all groups of a layer, where casting each would be fourteen.
A 4-bit W is dequantized once for the forward and once for the backward and never kept, unless the caller asks for it
(a recomputation and its backward are neighbours in time: `keep_weights`).

Bytes: beside the base product each adapter reads X once for the whole group (not once per projection) and reads and
writes Y_i once, inside the product that adds to it. Rounding: Y is rounded once after the base product and once after
the adapter is added in fp32 inside the GEMM (stock rounds the adapter's own output as well). The scale is GEMM's
alpha: no rounding, no kernel. Adapters kept in another dtype are cast to the compute dtype; their gradients are cast
back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastft.autograd.autocast import AutocastState, suspended
from fastft.autograd.first_order import first_order
from fastft.kernels.nf4 import QuantizedWeight, dequantize

LEAVES = 4  # tensors a projection can train: weight, bias, lora_a, lora_b


@dataclass(slots=True)
class Projection:
    """One linear map as it stands at this call.

    Args:
        weight: `[out, in]`, dense of any float dtype, or 4-bit.
        bias: `[out]` or None.
        lora_a: `[rank, in]` or None (no adapter).
        lora_b: `[out, rank]` or None.
        scale: what PEFT calls `scaling` (alpha / r, or alpha / sqrt(r) with rsLoRA).
    """

    weight: Tensor | QuantizedWeight
    bias: Tensor | None = None
    lora_a: Tensor | None = None
    lora_b: Tensor | None = None
    scale: float = 1.0

    @property
    def out_features(self) -> int:
        """Rows of the base weight."""
        return int(self.weight.shape[0])

    @property
    def rank(self) -> int:
        """Rank of the adapter, 0 without one."""
        return 0 if self.lora_a is None else int(self.lora_a.shape[0])

    def leaves(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """The tensors a gradient can flow to: what a Function takes as arguments. A frozen base weight is not one."""
        weight = self.weight if isinstance(self.weight, Tensor) and self.weight.requires_grad else None
        bias = self.bias if self.bias is not None and self.bias.requires_grad else None
        return weight, bias, self.lora_a, self.lora_b

    def with_leaves(self, leaves: Sequence[Tensor | None]) -> Projection:
        """The same projection over `leaves` as autograd hands them back."""
        weight, bias, lora_a, lora_b = leaves
        return replace(
            self,
            weight=self.weight if weight is None else weight,
            bias=self.bias if bias is None else bias,
            lora_a=lora_a,
            lora_b=lora_b,
        )

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The base weight `[out, in]` in `dtype`: dequantized, or cast where it must be."""
        if isinstance(self.weight, Tensor):
            return self.weight if self.weight.dtype == dtype else self.weight.to(dtype)
        return dequantize(self.weight, dtype)


class Operands(NamedTuple):
    """A group's adapters as the products read them: in the compute dtype, the A matrices one under the other."""

    stacked_a: Tensor | None  # [Σ rank, in]; None without adapters
    lora_b: tuple[Tensor | None, ...]  # [out_i, rank_i]


def operands(groups: Sequence[Sequence[Projection]], dtype: torch.dtype) -> list[Operands]:
    """The operands of several groups, made with one allocation and one copy kernel.

    What already has the dtype, and needs no stacking, is used where it lies.
    """
    sources: list[Tensor] = []
    places: list[tuple[int, int]] = []  # (index of the first source, number of sources) of each group's A
    for group in groups:
        matrices = [p.lora_a for p in group if p.lora_a is not None]
        if len(matrices) > 1 or any(a.dtype != dtype for a in matrices):
            places.append((len(sources), len(matrices)))
            sources += matrices
        else:
            places.append((-1, len(matrices)))
    a_count = len(sources)
    sources += [p.lora_b for group in groups for p in group if p.lora_b is not None and p.lora_b.dtype != dtype]
    copies: list[Tensor] = []
    if sources:
        flat = torch.empty(sum(t.numel() for t in sources), dtype=dtype, device=sources[0].device)
        pieces = flat.split([t.numel() for t in sources])
        copies = [piece.view(t.shape) for piece, t in zip(pieces, sources, strict=True)]
        torch._foreach_copy_(copies, [t.detach() for t in sources])
    b_copies = iter(copies[a_count:])
    found = []
    for group, (first, count) in zip(groups, places, strict=True):
        stacked = None
        if first >= 0:
            width = copies[first].shape[1]
            start = copies[first].storage_offset()
            rank = sum(c.shape[0] for c in copies[first : first + count])
            stacked = flat[start : start + rank * width].view(rank, width)
        elif count:
            stacked = next(p.lora_a for p in group if p.lora_a is not None)
        lora_b = tuple(p.lora_b if p.lora_b is None or p.lora_b.dtype == dtype else next(b_copies) for p in group)
        found.append(Operands(stacked, lora_b))
    return found


def forward(
    x: Tensor, group: Sequence[Projection], adapters: Operands, keep_weights: list[Tensor] | None = None
) -> tuple[list[Tensor], Tensor | None]:
    """Y_i for every projection of the group.

    Args:
        x: `[tokens, in]` in the compute dtype.
        group: projections that share `x`.
        adapters: the group's operands.
        keep_weights: a list to which the dense base weights are appended, for a backward that follows at once.

    Returns:
        Y_i `[tokens, out_i]` in the compute dtype, freshly allocated; X Aᵀ `[tokens, Σ rank]` (None without adapters).
    """
    dtype = x.dtype
    low_rank = None if adapters.stacked_a is None else torch.mm(x, adapters.stacked_a.t())
    outputs, column = [], 0
    for projection, lora_b in zip(group, adapters.lora_b, strict=True):
        weight = projection.dense(dtype)
        if keep_weights is not None:
            keep_weights.append(weight)
        if projection.bias is None:
            output = torch.mm(x, weight.t())
        else:
            output = torch.addmm(projection.bias.to(dtype), x, weight.t())
        if low_rank is not None and lora_b is not None:
            end = column + lora_b.shape[1]
            output.addmm_(low_rank[:, column:end], lora_b.t(), alpha=projection.scale)
            column = end
        outputs.append(output)
    return outputs, low_rank


def backward(
    grads: Sequence[Tensor],
    x: Tensor,
    group: Sequence[Projection],
    adapters: Operands,
    low_rank: Tensor | None,
    needs_leaves: Sequence[bool],
    needs_x: bool = True,
    weights: Sequence[Tensor] | None = None,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Gradients of the shared input and of every leaf, in the compute dtype (`to_leaf_dtypes` casts the leaves').

    Args:
        grads: dY_i `[tokens, out_i]` in the compute dtype; read, never written.
        x: `[tokens, in]`, the forward's input.
        group: the forward's projections.
        adapters: the group's operands.
        low_rank: X Aᵀ from the forward.
        needs_leaves: `LEAVES` flags per projection: which gradients are wanted.
        needs_x: whether dX is wanted.
        weights: dense base weights kept by a forward that has just run.

    Returns:
        dX `[tokens, in]` or None, freshly allocated, and `LEAVES` gradients per projection.
    """
    dtype, stacked_a = x.dtype, adapters.stacked_a
    leaf_grads: list[Tensor | None] = [None] * (LEAVES * len(group))
    grad_low_rank = None if low_rank is None else torch.empty_like(low_rank)
    grad_x: Tensor | None = None
    column = 0
    for index, (projection, lora_b, grad) in enumerate(zip(group, adapters.lora_b, grads, strict=True)):
        needs_weight, needs_bias, _, needs_b = needs_leaves[LEAVES * index : LEAVES * (index + 1)]
        if lora_b is not None and low_rank is not None and grad_low_rank is not None:
            end = column + lora_b.shape[1]
            if needs_b:
                leaf_grads[LEAVES * index + 3] = grad_of_b(grad, low_rank[:, column:end], projection.scale)
            grad_low_rank[:, column:end].addmm_(grad, lora_b, beta=0, alpha=projection.scale)
            column = end
        if needs_weight:
            leaf_grads[LEAVES * index] = torch.mm(grad.t(), x)
        if needs_bias:
            leaf_grads[LEAVES * index + 1] = grad.sum(0, dtype=sum_dtype(dtype))
        if needs_x:
            weight = projection.dense(dtype) if weights is None else weights[index]
            grad_x = torch.mm(grad, weight) if grad_x is None else grad_x.addmm_(grad, weight)
    if grad_low_rank is not None and stacked_a is not None:
        if grad_x is not None:
            grad_x.addmm_(grad_low_rank, stacked_a)
        if any(needs_leaves[2::LEAVES]):
            _cut_grad_a(torch.mm(grad_low_rank.t(), x), group, needs_leaves, leaf_grads)
    return grad_x, leaf_grads


def grad_of_b(grad: Tensor, low_rank: Tensor, scale: float) -> Tensor:
    """dB = s dYᵀ (X Aᵀ), `[out, rank]`, from dY `[tokens, out]` and X Aᵀ `[tokens, rank]`."""
    product = torch.empty((grad.shape[1], low_rank.shape[1]), dtype=grad.dtype, device=grad.device)
    return product.addmm_(grad.t(), low_rank, beta=0, alpha=scale)


def _cut_grad_a(
    grad_a: Tensor, group: Sequence[Projection], needs_leaves: Sequence[bool], leaf_grads: list[Tensor | None]
) -> None:
    """Hand each projection its rows of dA `[Σ rank, in]`."""
    row = 0
    for index, projection in enumerate(group):
        if projection.lora_a is None:
            continue
        end = row + projection.rank
        if needs_leaves[LEAVES * index + 2]:
            leaf_grads[LEAVES * index + 2] = grad_a[row:end]
        row = end


def to_leaf_dtypes(grads: Sequence[Tensor | None], leaves: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients in their leaves' dtypes; those that differ are cast by one kernel."""
    result = list(grads)
    places = [i for i, (g, t) in enumerate(zip(grads, leaves, strict=True)) if g is not None and g.dtype != t.dtype]  # type: ignore[union-attr]
    if places:
        targets = [torch.empty_like(leaves[i], memory_format=torch.contiguous_format) for i in places]  # type: ignore[arg-type]
        torch._foreach_copy_(targets, [grads[i] for i in places])
        for i, target in zip(places, targets, strict=True):
            result[i] = target
    return result


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype a sum over tokens is accumulated in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def flatten_leaves(group: Sequence[Projection]) -> list[Tensor | None]:
    """The leaves of a group, `LEAVES` per projection."""
    return [leaf for projection in group for leaf in projection.leaves()]


def restore_leaves(group: Sequence[Projection], leaves: Sequence[Tensor | None]) -> list[Projection]:
    """The group over leaves as autograd hands them back."""
    return [p.with_leaves(leaves[LEAVES * i : LEAVES * (i + 1)]) for i, p in enumerate(group)]


class _ProjectionGroup(torch.autograd.Function):
    """Autograd shell of the pair above; every leaf is an argument, so DDP, FSDP2 and graph capture see it."""

    @staticmethod
    def forward(
        ctx: Any, group: Sequence[Projection], state: AutocastState, x: Tensor, *leaves: Tensor | None
    ) -> tuple[Tensor, ...]:
        rows, dtype = x.reshape(-1, x.shape[-1]), state.compute_dtype(x.dtype)
        with suspended(x.device.type):
            outputs, low_rank = forward(rows.to(dtype), group, operands([group], dtype)[0])
        ctx.group, ctx.compute_dtype, ctx.shape = group, dtype, x.shape
        ctx.save_for_backward(rows, low_rank, *leaves)
        ctx.set_materialize_grads(False)
        return tuple(y.view(*x.shape[:-1], y.shape[-1]) for y in outputs)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        rows, low_rank, *leaves = ctx.saved_tensors
        group = restore_leaves(ctx.group, leaves)
        x = rows.to(ctx.compute_dtype)
        with suspended(rows.device.type):
            filled = [
                x.new_zeros(x.shape[0], p.out_features)
                if g is None
                else g.reshape(-1, p.out_features).to(ctx.compute_dtype)
                for g, p in zip(grads, group, strict=True)
            ]
            needs_x, needs_leaves = ctx.needs_input_grad[2], ctx.needs_input_grad[3:]
            (adapters,) = operands([group], ctx.compute_dtype)
            grad_x, leaf_grads = backward(filled, x, group, adapters, low_rank, needs_leaves, needs_x)
            leaf_grads = to_leaf_dtypes(leaf_grads, leaves)
        if grad_x is not None:
            grad_x = grad_x.to(rows.dtype).view(ctx.shape)
        return None, None, grad_x, *leaf_grads


def apply_group(x: Tensor, group: Sequence[Projection]) -> tuple[Tensor, ...]:
    """Differentiable Y_i for a group of projections sharing `x`.

    Args:
        x: `[..., in]`. Under autocast the products run in its dtype, else in `x`'s.
        group: the projections; leaves that require gradients get them.

    Returns:
        One `[..., out_i]` per projection, in the compute dtype.
    """
    return _ProjectionGroup.apply(group, AutocastState.current(x.device.type), x, *flatten_leaves(group))  # type: ignore[no-any-return]


def lora_linear(
    x: Tensor,
    weight: Tensor | QuantizedWeight,
    lora_a: Tensor | None = None,
    lora_b: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """`x Wᵀ + bias + scale (x Aᵀ) Bᵀ` with a hand-derived backward, over a dense or a 4-bit weight.

    Args:
        x: `[..., in]`, float16, bfloat16, float32 or float64.
        weight: `[out, in]`, dense, or `fastft.kernels.nf4.QuantizedWeight`.
        lora_a: `[rank, in]`, any float dtype, or None.
        lora_b: `[out, rank]`, any float dtype, or None.
        bias: `[out]` or None.
        scale: factor of the low-rank term, PEFT's `scaling`.

    Returns:
        `[..., out]` in the compute dtype (autocast's if it is on, else `x`'s).

    Raises:
        ValueError: if only one of `lora_a` and `lora_b` is given, or the shapes do not fit.
    """
    if (lora_a is None) != (lora_b is None):
        raise ValueError("lora_linear: lora_a and lora_b come together; got only one of them. Pass both, or neither.")
    out_features, in_features = weight.shape
    if x.shape[-1] != in_features:
        raise ValueError(f"lora_linear: x has {x.shape[-1]} features, the weight takes {in_features}.")
    if bias is not None and tuple(bias.shape) != (out_features,):
        raise ValueError(
            f"lora_linear: bias has shape {tuple(bias.shape)}, a weight of {out_features} rows needs that many."
        )
    if lora_a is not None and lora_b is not None:
        rank = lora_a.shape[0]
        if tuple(lora_a.shape) != (rank, in_features) or tuple(lora_b.shape) != (out_features, rank):
            raise ValueError(
                f"lora_linear: lora_a {tuple(lora_a.shape)} and lora_b {tuple(lora_b.shape)} do not fit a weight of "
                f"{(out_features, in_features)}; expected [rank, {in_features}] and [{out_features}, rank]."
            )
    return apply_group(x, [Projection(weight, bias, lora_a, lora_b, scale)])[0]
