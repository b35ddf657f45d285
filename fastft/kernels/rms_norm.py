"""RMSNorm with an optional fused residual add, and its backward.

    s = x + residual                                 rounded to x's dtype (s = x without a residual)
    r = 1 / sqrt(mean(s²) + eps)                     one number a row, kept for the backward
    n = s · r
    llama:  y = w · round(n)                         in the promoted dtype of x and w (bf16 x, fp32 w: y is fp32)
    fp32:   y = round(w · n)                         OLMo 2, Helium
    gemma:  y = round((1 + w) · n)

With g the gradient of y and e the weight that multiplied n (w, or 1 + w):

    ds = r · (e·g - n · mean(e·g · n)) + residual_grad
    dw = Σ over rows of g · n                        (of g · round(n) in llama mode: that is what w multiplied)

`residual_grad` is what already flows down the residual stream past this norm. Adding it here saves the stream one read
and one write a layer.

Bytes: the work is nothing, the memory all. With b bytes an element the forward reads and writes 2b an element (4b with
a residual), the backward 3b (4b with `residual_grad`), which is the least there is: a row stays in registers between
its statistics and its output. The normalized rows are never kept: x and r make them again.

Rounding: everything is computed in fp32 from the loaded values; the two inner roundings of llama mode (n before w, and
its mirror image e·g in the backward) are made where Hugging Face makes them, so that equal inputs give equal roundings.
`dw` is summed unrounded in fp32: each program sums its own rows, then one torch sum adds the programs up, in a fixed
order. No atomics, so two runs on one device agree bit for bit.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch

from fastft.kernels.backend import Settings, cdiv, launch, launch_on, next_power_of_2, tl, triton, uses_triton
from fastft.kernels.rows import input_rows, output_rows, store_rows

NormMode = Literal["llama", "fp32", "gemma"]

__all__ = ["NormMode", "rms_norm", "rms_norm_backward", "rms_norm_backward_torch", "rms_norm_torch"]

TILE = 4096  # elements a program holds at once: 8 warps with 16 elements a thread
WIDEST_ROW = 32768  # beyond this a row no longer fits one program's registers; such rows take the twin


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    mode: NormMode = "llama",
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    summed_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalize each row of `x` (or of `x + residual`) by its root mean square and multiply by `weight`.

    Args:
        x: [..., hidden].
        weight: [hidden], any float dtype.
        eps: added to the mean square.
        mode: where the weight enters and what is rounded; see the essay above.
        residual: like `x`, added to it first.
        out: receives y; may be `x` or `residual` itself (`x` without a residual: then `summed` is overwritten too).
        summed_out: receives `x + residual`; may be `x` or `residual` itself, but not `out`.

    Returns:
        y [..., hidden], in the promoted dtype of x and weight in llama mode, else in x's;
        inverse_rms [rows], float32 (float64 for float64 x);
        summed [..., hidden], in x's dtype: what was normalized, kept for the backward (`x` itself without a residual).
    """
    if not _runs_as_kernel(x, weight):
        return rms_norm_torch(x, weight, eps, mode=mode, residual=residual, out=out, summed_out=summed_out)
    if out is None:
        dtype = torch.promote_types(x.dtype, weight.dtype) if mode == "llama" else x.dtype
        out = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    summed, summed_rows, residual_rows, summed_stride, residual_stride = x, None, None, 0, 0
    if residual is not None:
        summed = torch.empty_like(x, memory_format=torch.contiguous_format) if summed_out is None else summed_out
        summed_rows, summed_stride = output_rows(summed)
        residual_rows, residual_stride = input_rows(residual)
    x_rows, x_stride = input_rows(x)
    y_rows, y_stride = output_rows(out)
    hidden = x.shape[-1]
    rows = x.numel() // hidden
    inverse_rms = torch.empty(rows, dtype=torch.float32, device=x.device)
    with launch_on(x):
        launch(
            _settings(hidden, mode)[0],
            (cdiv(rows, _shape_table(hidden)[0]),),
            y_rows,
            summed_rows,
            inverse_rms,
            x_rows,
            residual_rows,
            weight.contiguous(),
            (y_stride, summed_stride, x_stride, residual_stride),
            rows,
            hidden,
            eps,
        )
    if summed_rows is not None:
        store_rows(summed_rows, summed)
    return store_rows(y_rows, out), inverse_rms, summed


def rms_norm_backward(
    grad_output: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    inverse_rms: torch.Tensor,
    *,
    mode: NormMode = "llama",
    residual_grad: torch.Tensor | None = None,
    needs_weight_grad: bool = False,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradient of `rms_norm` with respect to what was normalized and, if asked, to the weight.

    Args:
        grad_output: [..., hidden], the gradient of y.
        x: [..., hidden], what was normalized (`summed` of the forward).
        weight: [hidden].
        inverse_rms: [rows], from the forward.
        mode: as in the forward.
        residual_grad: [..., hidden], the residual stream's own gradient, added before the one store.
        needs_weight_grad: whether the weight trains.
        out: receives grad_x; may be any of the inputs of its shape and dtype.

    Returns:
        grad_x [..., hidden] in x's dtype (where a residual was added it is the gradient of both addends);
        grad_weight [hidden] in the weight's dtype, or None.
    """
    if not _runs_as_kernel(x, weight, grad_output):
        return rms_norm_backward_torch(
            grad_output,
            x,
            weight,
            inverse_rms,
            mode=mode,
            residual_grad=residual_grad,
            needs_weight_grad=needs_weight_grad,
            out=out,
        )
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    grad_rows, grad_stride = input_rows(grad_output)
    x_rows, x_stride = input_rows(x)
    grad_x_rows, grad_x_stride = output_rows(out)
    residual_rows, residual_stride = (None, 0) if residual_grad is None else input_rows(residual_grad)
    hidden = x.shape[-1]
    rows = x.numel() // hidden
    programs, blocks_per_program, partial = cdiv(rows, _shape_table(hidden)[0]), 1, None
    if needs_weight_grad:  # few programs with many rows each, so that their partial sums stay small beside x
        blocks_per_program = cdiv(programs, min(programs, _summing_programs(x.device)))
        programs = cdiv(programs, blocks_per_program)
        partial = torch.empty((programs, hidden), dtype=torch.float32, device=x.device)
    with launch_on(x):
        launch(
            _settings(hidden, mode)[1],
            (programs,),
            grad_x_rows,
            partial,
            grad_rows,
            x_rows,
            residual_rows,
            weight.contiguous(),
            inverse_rms,
            (grad_x_stride, grad_stride, x_stride, residual_stride),
            rows,
            hidden,
            blocks_per_program,
        )
    return store_rows(grad_x_rows, out), None if partial is None else partial.sum(0).to(weight.dtype)


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    y,
    summed,
    inverse_rms,
    x,
    residual,
    weight,
    row_strides,  # of y, summed, x, residual
    rows,
    hidden,
    eps,
    MODE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: ROWS whole rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_offset = row[:, None]  # int64: rows x hidden passes 2**31
    column = tl.arange(0, BLOCK)
    column_offset = column[None, :]
    mask = (row < rows)[:, None] & (column < hidden)[None, :]
    values = tl.load(x + row_offset * row_strides[2] + column_offset, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        added = tl.load(residual + row_offset * row_strides[3] + column_offset, mask=mask, other=0.0).to(tl.float32)
        rounded = (values + added).to(summed.dtype.element_ty)
        tl.store(summed + row_offset * row_strides[1] + column_offset, rounded, mask=mask)
        values = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, axis=1) / hidden + eps)  # [ROWS]
    tl.store(inverse_rms + row, inverse, mask=row < rows)
    normalized = values * inverse[:, None]
    scale = tl.load(weight + column, mask=column < hidden, other=0.0).to(tl.float32)
    if MODE == "llama":
        normalized = normalized.to(x.dtype.element_ty).to(tl.float32)
    if MODE == "gemma":
        scale += 1.0
    result = normalized * scale[None, :]
    tl.store(y + row_offset * row_strides[0] + column_offset, result.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "blocks_per_program"])
def _rms_norm_backward_kernel(
    grad_x,
    partial,
    grad_output,
    x,
    residual_grad,
    weight,
    inverse_rms,
    row_strides,  # of grad_x, grad_output, x, residual_grad
    rows,
    hidden,
    blocks_per_program,
    MODE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: blocks_per_program times ROWS neighbouring rows, and the sum of their weight gradients."""
    column = tl.arange(0, BLOCK)
    column_offset = column[None, :]
    scale = tl.load(weight + column, mask=column < hidden, other=0.0).to(tl.float32)
    if MODE == "gemma":
        scale += 1.0
    weight_grad = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    first_row = tl.program_id(0).to(tl.int64) * blocks_per_program * ROWS
    for block in range(blocks_per_program):
        row = first_row + block * ROWS + tl.arange(0, ROWS)
        row_offset = row[:, None]
        mask = (row < rows)[:, None] & (column < hidden)[None, :]
        inverse = tl.load(inverse_rms + row, mask=row < rows, other=0.0)[:, None]
        values = tl.load(x + row_offset * row_strides[2] + column_offset, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_output + row_offset * row_strides[1] + column_offset, mask=mask, other=0.0).to(tl.float32)
        normalized = values * inverse
        weighted = grad * scale[None, :]
        if MODE == "llama":
            weighted = weighted.to(x.dtype.element_ty).to(tl.float32)
        projection = tl.sum(weighted * normalized, axis=1)[:, None] / hidden
        result = (weighted - normalized * projection) * inverse
        if residual_grad is not None:
            past = tl.load(residual_grad + row_offset * row_strides[3] + column_offset, mask=mask, other=0.0)
            result += past.to(tl.float32)
        tl.store(grad_x + row_offset * row_strides[0] + column_offset, result.to(grad_x.dtype.element_ty), mask=mask)
        if partial is not None:
            if MODE == "llama":
                normalized = normalized.to(x.dtype.element_ty).to(tl.float32)
            weight_grad += grad * normalized
    if partial is not None:
        partial_row = partial + tl.program_id(0).to(tl.int64) * hidden
        tl.store(partial_row + column, tl.sum(weight_grad, axis=0), mask=column < hidden)


def rms_norm_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    mode: NormMode = "llama",
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    summed_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Plain-torch twin of `rms_norm`: same arguments and arithmetic, any device; float64 in float64 throughout."""
    if residual is None:
        summed = x
    else:
        summed = torch.add(x, residual) if summed_out is None else summed_out.copy_(x + residual)
    wide = summed.to(_statistics_dtype(x.dtype))
    inverse_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)  # [..., 1]
    normalized = wide * inverse_rms
    if mode == "llama":
        y = weight * normalized.to(x.dtype)
    else:
        y = (normalized * _effective_weight(weight, mode, wide.dtype)).to(x.dtype)
    if out is not None:
        y = out.copy_(y)
    return y, inverse_rms.reshape(-1), summed


def rms_norm_backward_torch(
    grad_output: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    inverse_rms: torch.Tensor,
    *,
    mode: NormMode = "llama",
    residual_grad: torch.Tensor | None = None,
    needs_weight_grad: bool = False,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Plain-torch twin of `rms_norm_backward`."""
    wide_dtype = _statistics_dtype(x.dtype)
    scale = inverse_rms.to(wide_dtype).view(*x.shape[:-1], 1)  # [..., 1]
    normalized = x.to(wide_dtype) * scale
    grad_wide = grad_output.to(wide_dtype)
    weighted = grad_wide * _effective_weight(weight, mode, wide_dtype)
    if mode == "llama":
        weighted = weighted.to(x.dtype).to(wide_dtype)  # the gradient of the cast to x.dtype
    projection = (weighted * normalized).mean(-1, keepdim=True)
    grad_x = (weighted - normalized * projection) * scale
    if residual_grad is not None:
        grad_x = grad_x + residual_grad.to(wide_dtype)
    grad_weight = None
    if needs_weight_grad:
        multiplied = normalized.to(x.dtype).to(wide_dtype) if mode == "llama" else normalized
        grad_weight = (grad_wide * multiplied).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
    return (grad_x.to(x.dtype) if out is None else out.copy_(grad_x)), grad_weight


def _statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _effective_weight(weight: torch.Tensor, mode: NormMode, dtype: torch.dtype) -> torch.Tensor:
    return weight.to(dtype) + 1.0 if mode == "gemma" else weight.to(dtype)


def _runs_as_kernel(x: torch.Tensor, *others: torch.Tensor) -> bool:
    return (
        uses_triton(x)
        and all(uses_triton(other) for other in others)
        and 0 < x.shape[-1] <= WIDEST_ROW
        and x.numel() > 0  # no rows: an empty grid cannot be launched
    )


@functools.cache
def _settings(hidden: int, mode: NormMode) -> tuple[Settings, Settings]:
    """Of the forward's and the backward's kernel; the number of rows only sets the grid."""
    rows, block, warps = _shape_table(hidden)
    options = {"MODE": mode, "ROWS": rows, "BLOCK": block, "num_warps": warps, "enable_fp_fusion": False}
    return Settings(_rms_norm_kernel, **options), Settings(_rms_norm_backward_kernel, **options)


@functools.cache
def _shape_table(hidden: int) -> tuple[int, int, int]:
    """(rows a program, block, warps) for a row of `hidden`; the number of rows has no say in it."""
    block = next_power_of_2(hidden)
    return max(1, TILE // block), block, min(32, max(8, block // 512))


@functools.cache
def _summing_programs(device: torch.device) -> int:
    """How many programs share the weight gradient's sum: two a multiprocessor; a few in the interpreter."""
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
