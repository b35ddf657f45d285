"""`fastft::lora_linear_4bit`: x Wᵀ + b + s (x Aᵀ) Bᵀ over a packed 4-bit W, forward and hand-derived backward.

A dispatcher schema knows tensors and numbers, so a `QuantizedWeight` travels as its fields; `lora_linear` takes it
apart. A dense W needs no operator: its products are plain matrix products, which a compiler handles better when it can
see them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastft.autograd.autocast import AutocastState, suspended
from fastft.autograd.products import products, to_leaf_dtypes
from fastft.autograd.projection import Projection
from fastft.kernels import nf4
from fastft.kernels.join import Adapter, padded_rank
from fastft.kernels.nf4 import QuantizedWeight

__all__ = [
    "dequantize",
    "lora_linear",
    "lora_linear_4bit",
    "lora_linear_4bit_backward_op",
    "lora_linear_4bit_flat",
    "lora_linear_4bit_op",
]


def flat_weight(weight: QuantizedWeight) -> tuple[list[Tensor], list[int], torch.dtype]:
    """A 4-bit weight as an operator takes it: tensors (packed, absmax, code, then the nested scales' three), numbers
    (out_features, in_features, blocksize, absmax_blocksize) and the dtype it was quantized from."""
    tensors = [weight.packed, weight.absmax, weight.code]
    if weight.absmax_code is not None and weight.absmax_scale is not None and weight.offset is not None:
        tensors += [weight.absmax_code, weight.absmax_scale, weight.offset]
    return tensors, [*weight.shape, weight.blocksize, weight.absmax_blocksize], weight.dtype


def _weight(tensors: list[Tensor], numbers: list[int], dtype: torch.dtype) -> QuantizedWeight:
    packed, absmax, code, *nested = tensors
    absmax_code, absmax_scale, offset = nested or (None, None, None)
    return QuantizedWeight(
        packed=packed,
        absmax=absmax,
        code=code,
        blocksize=numbers[2],
        shape=(numbers[0], numbers[1]),
        dtype=dtype,
        absmax_code=absmax_code,
        absmax_scale=absmax_scale,
        absmax_blocksize=numbers[3],
        offset=offset,
    )


@torch.library.custom_op("fastft::dequantize", mutates_args=())
def dequantize_op(tensors: list[Tensor], numbers: list[int], weight_dtype: torch.dtype, dtype: torch.dtype) -> Tensor:
    """The dense weight [out_features, in_features] in `dtype`; see kernels/nf4.py."""
    return nf4.dequantize(_weight(tensors, numbers, weight_dtype), dtype)


@dequantize_op.register_fake
def _(tensors: list[Tensor], numbers: list[int], weight_dtype: torch.dtype, dtype: torch.dtype) -> Tensor:
    return tensors[0].new_empty(numbers[:2], dtype=dtype)


@torch.library.custom_op("fastft::lora_linear_4bit", mutates_args=())
def lora_linear_4bit_op(
    x: Tensor,
    lora_a: Tensor | None,
    lora_b: Tensor | None,
    bias: Tensor | None,
    weight: list[Tensor],
    numbers: list[int],
    weight_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """y [..., out] in the compute dtype and x Aᵀ [tokens, padded rank] for the backward ([0] without an adapter).

    Args:
        x: [..., in].
        lora_a: [rank, in] or None.
        lora_b: [out, rank] or None.
        bias: [out] or None.
        weight, numbers, weight_dtype: as `flat_weight` gives them.
        compute_dtype: of the products.
        scale: factor of the low-rank term.
    """
    projection = Projection(_weight(weight, numbers, weight_dtype), bias, lora_a, lora_b, scale)
    rows = x.reshape(-1, x.shape[-1]).to(compute_dtype)
    with suspended(x.device.type):
        y, low_rank = products([projection], compute_dtype).forward(rows)
    return y.view(*x.shape[:-1], numbers[0]), x.new_empty(0) if low_rank is None else low_rank.contiguous()


@lora_linear_4bit_op.register_fake
def _(
    x: Tensor,
    lora_a: Tensor | None,
    lora_b: Tensor | None,
    bias: Tensor | None,
    weight: list[Tensor],
    numbers: list[int],
    weight_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    scale: float,
) -> tuple[Tensor, Tensor]:
    y = x.new_empty((*x.shape[:-1], numbers[0]), dtype=compute_dtype)
    if lora_a is None or lora_b is None:
        return y, x.new_empty(0)
    tokens = x.numel() // x.shape[-1]
    return y, x.new_empty((tokens, padded_rank([Adapter(lora_a, lora_b, scale)])), dtype=compute_dtype)


@torch.library.custom_op("fastft::lora_linear_4bit_backward", mutates_args=())
def lora_linear_4bit_backward_op(
    grad: Tensor,
    x: Tensor,
    low_rank: Tensor,
    lora_a: Tensor | None,
    lora_b: Tensor | None,
    bias: Tensor | None,
    weight: list[Tensor],
    numbers: list[int],
    weight_dtype: torch.dtype,
    scale: float,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, lora_a, lora_b and bias, in their dtypes; [0] where `needs` (in this order) says no."""
    compute_dtype = grad.dtype
    projection = Projection(_weight(weight, numbers, weight_dtype), bias, lora_a, lora_b, scale)
    rows = x.reshape(-1, x.shape[-1]).to(compute_dtype)
    outer = grad.reshape(-1, numbers[0])
    with suspended(x.device.type):
        made = products([projection], compute_dtype)
        grad_x, grad_low_rank = made.input_grad(outer, needs[0])
        wanted = [False, needs[3], needs[1], needs[2]]
        kept = None if lora_a is None else low_rank
        leaves = made.leaf_grads(outer, grad_low_rank, rows, kept, wanted)
        _, grad_bias, grad_a, grad_b = to_leaf_dtypes(leaves, [None, bias, lora_a, lora_b])
    first = x.new_empty(0) if grad_x is None else grad_x.to(x.dtype).view(x.shape)
    second, third, fourth = (x.new_empty(0) if g is None else g for g in (grad_a, grad_b, grad_bias))
    return first, second, third, fourth


@lora_linear_4bit_backward_op.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    low_rank: Tensor,
    lora_a: Tensor | None,
    lora_b: Tensor | None,
    bias: Tensor | None,
    weight: list[Tensor],
    numbers: list[int],
    weight_dtype: torch.dtype,
    scale: float,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    first, second, third, fourth = (
        x.new_empty(0) if t is None or not needed else t.new_empty(t.shape)
        for t, needed in zip((x, lora_a, lora_b, bias), needs, strict=True)
    )
    return first, second, third, fourth


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, lora_a, lora_b, bias, weight, ctx.numbers, ctx.weight_dtype, _, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, output[1], lora_a, lora_b, bias, *weight)


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    x, low_rank, lora_a, lora_b, bias, *weight = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:4])
    grads = lora_linear_4bit_backward_op(
        grad, x, low_rank, lora_a, lora_b, bias, weight, ctx.numbers, ctx.weight_dtype, ctx.scale, needs
    )
    first, second, third, fourth = (g if needed else None for g, needed in zip(grads, needs, strict=True))
    return first, second, third, fourth, [None] * len(weight), None, None, None, None


lora_linear_4bit_op.register_autograd(_backward, setup_context=_setup_context)


def lora_linear_4bit(
    x: Tensor,
    weight: QuantizedWeight,
    lora_a: Tensor | None = None,
    lora_b: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """`lora_linear` over a 4-bit weight."""
    compute_dtype = AutocastState.current(x.device.type).compute_dtype(x.dtype)
    return lora_linear_4bit_op(x, lora_a, lora_b, bias, *flat_weight(weight), compute_dtype, scale)[0]


def lora_linear_4bit_flat(
    x: Tensor,
    packed: Tensor,
    absmax: Tensor,
    code: Tensor,
    absmax_code: Tensor | None,
    absmax_scale: Tensor | None,
    offset: Tensor | None,
    lora_a: Tensor | None,
    lora_b: Tensor | None,
    bias: Tensor | None,
    out_features: int,
    blocksize: int,
    scale: float,
) -> Tensor:
    """`lora_linear_4bit` with the weight's fields one by one, as a module holds them in buffers.

    Args:
        x: [..., in].
        packed, absmax, code, absmax_code, absmax_scale, offset, blocksize: as in `QuantizedWeight`; the nested scales
            (blocks of 256) are three tensors or three times None.
        lora_a, lora_b, bias, scale: as in `lora_linear`.
        out_features: rows of the weight.

    Returns:
        [..., out_features] in the compute dtype.
    """
    weight = [packed, absmax, code]
    if absmax_code is not None and absmax_scale is not None and offset is not None:
        weight += [absmax_code, absmax_scale, offset]
    dtype = AutocastState.current(x.device.type).compute_dtype(x.dtype)
    numbers = [out_features, x.shape[-1], blocksize, 256]
    return lora_linear_4bit_op(x, lora_a, lora_b, bias, weight, numbers, dtype, dtype, scale)[0]


def lora_linear(
    x: Tensor,
    weight: Tensor | QuantizedWeight,
    lora_a: Tensor | None = None,
    lora_b: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """`fastft.functional.lora_linear` for a compiler: an operator over a 4-bit weight, plain products over a dense one.

    Args:
        x: [..., in].
        weight: [out, in], dense or 4-bit.
        lora_a: [rank, in] or None.
        lora_b: [out, rank] or None.
        bias: [out] or None.
        scale: factor of the low-rank term.

    Returns:
        [..., out] in the compute dtype.
    """
    if isinstance(weight, QuantizedWeight):
        return lora_linear_4bit(x, weight, lora_a, lora_b, bias=bias, scale=scale)
    dtype = AutocastState.current(x.device.type).compute_dtype(x.dtype)
    x = x.to(dtype)
    y = torch.nn.functional.linear(x, weight.to(dtype), None if bias is None else bias.to(dtype))
    if lora_a is None or lora_b is None:
        return y
    low_rank = torch.nn.functional.linear(x, lora_a.to(dtype))
    return y + torch.nn.functional.linear(low_rank, lora_b.to(dtype)) * scale


def dequantize(weight: QuantizedWeight, dtype: torch.dtype | None = None) -> Tensor:
    """`fastft.functional.dequantize` as an operator call."""
    tensors, numbers, weight_dtype = flat_weight(weight)
    return dequantize_op(tensors, numbers, weight_dtype, weight_dtype if dtype is None else dtype)
