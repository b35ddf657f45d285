"""Linear projections with low-rank adapters, alone or in a group that shares its input.

    Y_i = X W_iᵀ + b_i + s_i (X A_iᵀ) B_iᵀ          X [tokens, in], W_i [out_i, in], A_i [rank_i, in], B_i [out_i, rank_i]

The backward, with U_i = s_i dY_i B_i  [tokens, rank_i]:

    dX   = Σ_i dY_i W_i + U A        (A, U: the A_i stacked and the U_i side by side, so one product serves the group)
    dA   = Uᵀ X                      (one product for the group, then cut)
    dB_i = s_i dY_iᵀ (X A_iᵀ)
    dW_i = dY_iᵀ X,  db_i = Σ_tokens dY_i      where the base trains

What it saves is X Aᵀ [tokens, Σ rank], a few per cent of Y; X is the caller's (rebuilt by the caller from x and 1/rms when
it is a norm's output). A 4-bit W is dequantized once for the forward and once for the backward and never kept, unless
the caller asks for it (a recomputation and its backward are neighbours in time: `keep_weights`).

Bytes: beside the base product each adapter reads X once for the whole group (not once per projection) and reads and
writes Y_i once, inside the product that adds to it. Rounding: Y is rounded once after the base product and once after
the adapter is added in fp32 inside the GEMM (stock rounds the adapter's own output as well). The scale is GEMM's alpha:
no rounding, no kernel. Adapters kept in another dtype are cast to the compute dtype; their gradients are cast back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastft.autograd.autocast import AutocastState, suspended
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


class Saved(NamedTuple):
    """What a group keeps for its backward besides its input."""

    low_rank: Tensor | None  # X Aᵀ [tokens, Σ rank]
    stacked_a: Tensor | None  # [Σ rank, in], compute dtype


def stack_adapters(group: Sequence[Projection], dtype: torch.dtype) -> Tensor | None:
    """The group's A matrices, one under the other `[Σ rank, in]`, in `dtype`; None without adapters."""
    matrices = [p.lora_a.to(dtype) for p in group if p.lora_a is not None]
    if not matrices:
        return None
    return matrices[0] if len(matrices) == 1 else torch.cat(matrices)


def forward(
    x: Tensor, group: Sequence[Projection], keep_weights: list[Tensor] | None = None
) -> tuple[list[Tensor], Saved]:
    """Y_i for every projection of the group.

    Args:
        x: `[tokens, in]` in the compute dtype.
        group: projections that share `x`.
        keep_weights: a list to which the dense base weights are appended, for a backward that follows at once.

    Returns:
        Y_i `[tokens, out_i]` in the compute dtype, freshly allocated, and what the backward needs.
    """
    dtype = x.dtype
    stacked_a = stack_adapters(group, dtype)
    low_rank = None if stacked_a is None else torch.mm(x, stacked_a.t())  # [tokens, Σ rank]
    outputs, column = [], 0
    for projection in group:
        weight = projection.dense(dtype)
        if keep_weights is not None:
            keep_weights.append(weight)
        if projection.bias is None:
            output = torch.mm(x, weight.t())
        else:
            output = torch.addmm(projection.bias.to(dtype), x, weight.t())
        if low_rank is not None and projection.lora_b is not None:
            end = column + projection.rank
            output.addmm_(low_rank[:, column:end], projection.lora_b.to(dtype).t(), alpha=projection.scale)
            column = end
        outputs.append(output)
    return outputs, Saved(low_rank, stacked_a)


def backward(
    grads: Sequence[Tensor],
    x: Tensor,
    group: Sequence[Projection],
    saved: Saved,
    needs_leaves: Sequence[bool],
    needs_x: bool = True,
    weights: Sequence[Tensor] | None = None,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Gradients of the shared input and of every leaf.

    Args:
        grads: dY_i `[tokens, out_i]` in the compute dtype; read, never written.
        x: `[tokens, in]`, the forward's input.
        group: the forward's projections.
        saved: the forward's `Saved`; a `low_rank` of None with adapters present is made again from `x`.
        needs_leaves: `LEAVES` flags per projection: which gradients are wanted.
        needs_x: whether dX is wanted.
        weights: dense base weights kept by a forward that has just run.

    Returns:
        dX `[tokens, in]` or None, freshly allocated, and `LEAVES` gradients per projection in the leaves' dtypes.
    """
    dtype = x.dtype
    stacked_a = saved.stacked_a if saved.stacked_a is not None else stack_adapters(group, dtype)
    leaf_grads: list[Tensor | None] = [None] * (LEAVES * len(group))
    grad_low_rank = None
    if stacked_a is not None:
        low_rank = saved.low_rank if saved.low_rank is not None else torch.mm(x, stacked_a.t())
        grad_low_rank = torch.empty((x.shape[0], stacked_a.shape[0]), dtype=dtype, device=x.device)
    grad_x: Tensor | None = None
    column = 0
    for index, (projection, grad) in enumerate(zip(group, grads, strict=True)):
        needs_weight, needs_bias, needs_a, needs_b = needs_leaves[LEAVES * index : LEAVES * (index + 1)]
        if projection.lora_b is not None and grad_low_rank is not None:
            end = column + projection.rank
            if needs_b:
                product = torch.empty_like(projection.lora_b, dtype=dtype, memory_format=torch.contiguous_format)
                product.addmm_(grad.t(), low_rank[:, column:end], beta=0, alpha=projection.scale)
                leaf_grads[LEAVES * index + 3] = product.to(projection.lora_b.dtype)
            grad_low_rank[:, column:end].addmm_(grad, projection.lora_b.to(dtype), beta=0, alpha=projection.scale)
            column = end
        if needs_weight:
            leaf_grads[LEAVES * index] = torch.mm(grad.t(), x).to(projection.weight.dtype)
        if needs_bias and projection.bias is not None:
            leaf_grads[LEAVES * index + 1] = grad.sum(0, dtype=_sum_dtype(dtype)).to(projection.bias.dtype)
        if needs_x:
            weight = projection.dense(dtype) if weights is None else weights[index]
            grad_x = torch.mm(grad, weight) if grad_x is None else grad_x.addmm_(grad, weight)
    if grad_low_rank is not None and stacked_a is not None:
        if grad_x is not None:
            grad_x.addmm_(grad_low_rank, stacked_a)
        _cut_grad_a(torch.mm(grad_low_rank.t(), x), group, needs_leaves, leaf_grads)
    return grad_x, leaf_grads


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
            leaf_grads[LEAVES * index + 2] = grad_a[row:end].to(projection.lora_a.dtype)
        row = end


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
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
        rows = x.reshape(-1, x.shape[-1])
        with suspended(x.device.type):
            outputs, saved = forward(rows.to(state.compute_dtype(x.dtype)), group)
        ctx.group, ctx.compute_dtype, ctx.shape = group, state.compute_dtype(x.dtype), x.shape
        ctx.save_for_backward(rows, *saved, *leaves)
        ctx.set_materialize_grads(False)
        return tuple(y.view(*x.shape[:-1], y.shape[-1]) for y in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        rows, low_rank, stacked_a, *leaves = ctx.saved_tensors
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
            grad_x, leaf_grads = backward(filled, x, group, Saved(low_rank, stacked_a), needs_leaves, needs_x)
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
    if lora_a is not None and lora_b is not None:
        rank = lora_a.shape[0]
        if tuple(lora_a.shape) != (rank, in_features) or tuple(lora_b.shape) != (out_features, rank):
            raise ValueError(
                f"lora_linear: lora_a {tuple(lora_a.shape)} and lora_b {tuple(lora_b.shape)} do not fit a weight of "
                f"{(out_features, in_features)}; expected [rank, {in_features}] and [{out_features}, rank]."
            )
    return apply_group(x, [Projection(weight, bias, lora_a, lora_b, scale)])[0]
