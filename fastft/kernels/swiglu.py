"""SwiGLU, silu(gate) · up, and its backward.

    s = sigmoid(gate)
    a = gate · s                          silu
    product = a · up
    d_up   = grad · a
    d_gate = (grad · up) · s · (1 + gate · (1 - s))

Bytes: with b bytes an element the forward moves 3b (two reads, one write). The backward reads grad, gate and up once
and writes d_gate, d_up and, for the gradient of the down projection's adapter, `product` once more: 6b, and the product
need not be kept from the forward. `out=(grad, gate, up)` writes all three over what was read.

Rounding is Hugging Face's: silu is computed in fp32 and rounded before `up` multiplies it, and so is grad · up before
it meets silu's derivative.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from fastft.kernels.backend import Settings, cdiv, launch, launch_on, next_power_of_2, tl, triton, uses_triton
from fastft.kernels.rows import input_rows, output_rows, store_rows

__all__ = ["swiglu", "swiglu_backward", "swiglu_backward_torch", "swiglu_torch"]

TILE = 4096  # elements a program, on 8 warps
WIDEST_BLOCK = 1024  # columns a program: divides most models' intermediate sizes, or leaves little over


def swiglu(gate: torch.Tensor, up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) · up.

    Args:
        gate: [..., intermediate]; may be half of a wider tensor.
        up: like gate.
        out: receives the product; may be `gate` or `up` itself.

    Returns:
        [..., intermediate] in gate's dtype.
    """
    if not (uses_triton(gate) and uses_triton(up) and gate.numel()):
        return swiglu_torch(gate, up, out=out)
    if out is None:
        out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    out_rows, out_stride = output_rows(out)
    gate_rows, gate_stride = input_rows(gate)
    up_rows, up_stride = input_rows(up)
    width = gate.shape[-1]
    rows = gate.numel() // width
    strides = (out_stride, gate_stride, up_stride)
    with launch_on(gate):
        launch(_settings(width)[0], _grid(rows, width), out_rows, gate_rows, up_rows, strides, rows, width)
    return store_rows(out_rows, out)


def swiglu_backward(
    grad: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    *,
    out: tuple[torch.Tensor | None, torch.Tensor, torch.Tensor] | None = None,
    needs_product: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Gradients of `swiglu`, and the product made again.

    Args:
        grad: [..., intermediate], the gradient of the product.
        gate: like grad.
        up: like grad.
        out: (product, grad_gate, grad_up) to write into; `out=(grad, gate, up)` is in place on all three.
        needs_product: whether the product is wanted; if not, None is returned in its place and its write saved.

    Returns:
        product, grad_gate, grad_up.
    """
    if not (uses_triton(grad) and uses_triton(gate) and uses_triton(up) and grad.numel()):
        return swiglu_backward_torch(grad, gate, up, out=out, needs_product=needs_product)
    product, grad_gate, grad_up = (None, None, None) if out is None else out
    if needs_product and product is None:
        product = torch.empty_like(gate, memory_format=torch.contiguous_format)
    if grad_gate is None or grad_up is None:
        grad_gate = torch.empty_like(gate, memory_format=torch.contiguous_format)
        grad_up = torch.empty_like(up, memory_format=torch.contiguous_format)
    product_rows, product_stride = output_rows(product) if needs_product and product is not None else (None, 0)
    grad_gate_rows, grad_gate_stride = output_rows(grad_gate)
    grad_up_rows, grad_up_stride = output_rows(grad_up)
    grad_rows, grad_stride = input_rows(grad)
    gate_rows, gate_stride = input_rows(gate)
    up_rows, up_stride = input_rows(up)
    width = gate.shape[-1]
    rows = gate.numel() // width
    with launch_on(gate):
        launch(
            _settings(width)[1],
            _grid(rows, width),
            product_rows,
            grad_gate_rows,
            grad_up_rows,
            grad_rows,
            gate_rows,
            up_rows,
            (product_stride, grad_gate_stride, grad_up_stride, grad_stride, gate_stride, up_stride),
            rows,
            width,
        )
    return (
        None if product_rows is None or product is None else store_rows(product_rows, product),
        store_rows(grad_gate_rows, grad_gate),
        store_rows(grad_up_rows, grad_up),
    )


@triton.jit(do_not_specialize=["rows"])
def _swiglu_kernel(
    product,
    gate,
    up,
    row_strides,  # of product, gate, up
    rows,
    width,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: ROWS rows of BLOCK columns."""
    row, column, mask = _tile(rows, width, ROWS, BLOCK)
    gate_value = tl.load(gate + row * row_strides[1] + column, mask=mask, other=0.0).to(tl.float32)
    up_value = tl.load(up + row * row_strides[2] + column, mask=mask, other=0.0).to(tl.float32)
    activated = gate_value / (1.0 + tl.exp(-gate_value))
    activated = activated.to(gate.dtype.element_ty).to(tl.float32)
    result = activated * up_value
    tl.store(product + row * row_strides[0] + column, result.to(product.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _swiglu_backward_kernel(
    product,
    grad_gate,
    grad_up,
    grad,
    gate,
    up,
    row_strides,  # in the order of the six tensors
    rows,
    width,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: ROWS rows of BLOCK columns, everything read before anything is written."""
    row, column, mask = _tile(rows, width, ROWS, BLOCK)
    grad_value = tl.load(grad + row * row_strides[3] + column, mask=mask, other=0.0).to(tl.float32)
    gate_value = tl.load(gate + row * row_strides[4] + column, mask=mask, other=0.0).to(tl.float32)
    up_value = tl.load(up + row * row_strides[5] + column, mask=mask, other=0.0).to(tl.float32)
    denominator = 1.0 + tl.exp(-gate_value)
    activated = (gate_value / denominator).to(gate.dtype.element_ty).to(tl.float32)  # the forward's own bits
    sigmoid = 1.0 / denominator
    grad_activated = (grad_value * up_value).to(gate.dtype.element_ty).to(tl.float32)
    gate_result = grad_activated * sigmoid * (1.0 + gate_value * (1.0 - sigmoid))
    up_result = grad_value * activated
    tl.store(grad_gate + row * row_strides[1] + column, gate_result.to(grad_gate.dtype.element_ty), mask=mask)
    tl.store(grad_up + row * row_strides[2] + column, up_result.to(grad_up.dtype.element_ty), mask=mask)
    if product is not None:
        result = activated * up_value
        tl.store(product + row * row_strides[0] + column, result.to(product.dtype.element_ty), mask=mask)


@triton.jit
def _tile(rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Row indices [ROWS, 1] (int64: rows x width passes 2**31), columns [1, BLOCK] and mask of this program's tile."""
    blocks_per_row = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks_per_row).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % blocks_per_row) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    return row[:, None], column[None, :], mask


@functools.cache
def _settings(width: int) -> tuple[Settings, Settings]:
    """Of the forward's and the backward's kernel; the number of rows only sets the grid."""
    block = _block(width)
    options = {"ROWS": TILE // block, "BLOCK": block, "num_warps": 8, "enable_fp_fusion": False}
    return Settings(_swiglu_kernel, **options), Settings(_swiglu_backward_kernel, **options)


def _grid(rows: int, width: int) -> tuple[int]:
    block = _block(width)
    return (cdiv(rows, TILE // block) * cdiv(width, block),)


def _block(width: int) -> int:
    return min(WIDEST_BLOCK, next_power_of_2(width))


def swiglu_torch(gate: torch.Tensor, up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Plain-torch twin of `swiglu`: same arguments, same arithmetic, any device and dtype."""
    return torch.mul(F.silu(gate), up, out=out)


def swiglu_backward_torch(
    grad: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    *,
    out: tuple[torch.Tensor | None, torch.Tensor, torch.Tensor] | None = None,
    needs_product: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Plain-torch twin of `swiglu_backward`."""
    activated = F.silu(gate)
    grad_up = grad * activated
    grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
    product = activated.mul_(up) if needs_product else None
    if out is None:
        return product, grad_gate, grad_up
    if product is not None and out[0] is not None:
        product = out[0].copy_(product)
    return product, out[1].copy_(grad_gate), out[2].copy_(grad_up)
