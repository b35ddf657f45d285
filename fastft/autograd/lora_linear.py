"""Projections as autograd nodes of their own, where no larger node (decoder layer, MLP) holds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastft.autograd.autocast import AutocastState, suspended
from fastft.autograd.first_order import first_order
from fastft.autograd.products import Products, products, to_leaf_dtypes
from fastft.autograd.projection import Projection, flatten_leaves, restore_leaves
from fastft.kernels.nf4 import QuantizedWeight


class _ProjectionGroup(torch.autograd.Function):
    """Autograd shell of the pair above; every leaf is an argument, so DDP, FSDP2 and graph capture see it."""

    @staticmethod
    def forward(
        ctx: Any, group: Sequence[Projection], state: AutocastState, x: Tensor, *leaves: Tensor | None
    ) -> tuple[Tensor, ...]:
        rows, dtype = x.reshape(-1, x.shape[-1]), state.compute_dtype(x.dtype)
        with suspended(x.device.type):
            y, low_rank = products(group, dtype).forward(rows.to(dtype))
        ctx.group, ctx.compute_dtype, ctx.shape = group, dtype, x.shape
        ctx.save_for_backward(rows, low_rank, *leaves)
        ctx.set_materialize_grads(False)
        parts = y.split([p.out_features for p in group], 1)
        return tuple(part.contiguous().view(*x.shape[:-1], part.shape[-1]) for part in parts)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        rows, low_rank, *leaves = ctx.saved_tensors
        group = restore_leaves(ctx.group, leaves)
        x = rows.to(ctx.compute_dtype)
        with suspended(rows.device.type):
            needs_x, needs_leaves = ctx.needs_input_grad[2], ctx.needs_input_grad[3:]
            made = products(group, ctx.compute_dtype)
            grad = _side_by_side(grads, group, made, x.shape[0])
            grad_x, grad_low_rank = made.input_grad(grad, needs_x)
            leaf_grads = to_leaf_dtypes(made.leaf_grads(grad, grad_low_rank, x, low_rank, needs_leaves), leaves)
        if grad_x is not None:
            grad_x = grad_x.to(rows.dtype).view(ctx.shape)
        return None, None, grad_x, *leaf_grads


def _side_by_side(grads: Sequence[Tensor | None], group: Sequence[Projection], made: Products, tokens: int) -> Tensor:
    """dY of the whole group, from one gradient (or None) per projection."""
    if len(group) == 1 and grads[0] is not None:
        return grads[0].reshape(tokens, group[0].out_features).to(made.grad_room(0).dtype)
    room, column = made.grad_room(tokens), 0
    for grad, projection in zip(grads, group, strict=True):
        part = room[:, column : column + projection.out_features]
        if grad is None:
            part.zero_()
        else:
            part.copy_(grad.reshape(part.shape))
        column += projection.out_features
    return room


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
