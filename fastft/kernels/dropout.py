"""Dropout whose mask is a function of a seed and a place, so that it is never kept.

    y[r, c] = x[r, c] / (1 − p)   where u(seed, stream, first_row + r, c) ≥ p,   else 0

u is Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), the generator of torch's own
CUDA dropout and of `tl.rand`: a bijection of a counter under a key. The key is the seed; the counter is (c // 4, row,
stream, 0), and its four words are those of four neighbouring columns. The backward of dropout is dropout of the
gradient, by the same seed. Rows have numbers of their own, so a tile of a batch is masked as the whole batch is, and a
recomputation as the first time. `stream` keeps apart what shares a seed: a layer's seven projections.

Bytes: x read and y written once, 2b an element with b bytes. Ten rounds are some 60 integer operations for four
elements, which stays below what the memory takes. Stock's dropout writes a mask beside y, and keeps both.

Rounding: x / (1 − p) in fp32, rounded once, as torch rounds it. p is a multiple of 2⁻³¹.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fastft.kernels.backend import Settings, cdiv, launch, launch_on, next_power_of_2, tl, triton, uses_triton
from fastft.kernels.rows import input_rows, output_rows, store_rows

__all__ = ["dropout", "dropout_torch"]

_WIDEST_BLOCK = 1024  # columns a program
_TILE = 4096  # elements a program, on 8 warps


def dropout(
    x: Tensor, p: float, seed: Tensor, *, stream: int = 0, first_row: int = 0, out: Tensor | None = None
) -> Tensor:
    """`x` with a share of `p` of its entries zero and the others divided by 1 − p.

    Args:
        x: [..., width], any float dtype.
        p: at least 0, below 1.
        seed: [1] int64 on `x`'s device; read on the device.
        stream: at least 0, below 2³¹: another one is another mask.
        first_row: the number of `x`'s first row; rows are numbered below 2³¹.
        out: receives the result; may be `x` itself.

    Returns:
        [..., width] in `x`'s dtype.
    """
    if not (uses_triton(x) and x.numel()):
        return dropout_torch(x, p, seed, stream=stream, first_row=first_row, out=out)
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    out_rows, out_stride = output_rows(out)
    x_rows, x_stride = input_rows(x)
    width = x.shape[-1]
    rows = x.numel() // width
    block = _block(width)
    with launch_on(x):
        launch(
            _settings(block),
            (cdiv(rows, _TILE // block) * cdiv(width, block),),
            out_rows,
            x_rows,
            seed,
            (out_stride, x_stride),
            rows,
            width,
            stream,
            first_row,
            _threshold(p),
            1.0 / (1.0 - p),
        )
    return store_rows(out_rows, out)


def _block(width: int) -> int:
    return max(4, min(_WIDEST_BLOCK, next_power_of_2(width)))


@functools.cache
def _settings(block: int) -> Settings:
    return Settings(_dropout_kernel, ROWS=_TILE // block, BLOCK=block, num_warps=8)


def _threshold(p: float) -> int:
    """Below which of 2³¹ numbers an entry is dropped."""
    return min(round(p * 2**31), 2**31 - 1)


@triton.jit(do_not_specialize=["rows", "stream", "first_row", "threshold"])
def _dropout_kernel(
    out,
    x,
    seed,
    row_strides,  # of out, x
    rows,
    width,
    stream,
    first_row,
    threshold,
    scale,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: ROWS rows of BLOCK columns, four columns to a counter."""
    blocks_per_row = tl.cdiv(width, BLOCK)
    first = (tl.program_id(0) // blocks_per_row) * ROWS
    start = (tl.program_id(0) % blocks_per_row) * BLOCK
    row = first + tl.arange(0, ROWS)
    group = start // 4 + tl.arange(0, BLOCK // 4)
    zero = tl.zeros((ROWS, BLOCK // 4), dtype=tl.int32)
    a, b, c, d = tl.philox(tl.load(seed), group[None, :] + zero, (first_row + row)[:, None] + zero, stream + zero, zero)
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (ROWS, BLOCK))
    kept = (words >> 1).to(tl.int32) >= threshold
    column = start + tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    row = row.to(tl.int64)[:, None]
    value = tl.load(x + row * row_strides[1] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    result = tl.where(kept, value * scale, 0.0)
    tl.store(out + row * row_strides[0] + column[None, :], result.to(out.dtype.element_ty), mask=mask)


def dropout_torch(
    x: Tensor, p: float, seed: Tensor, *, stream: int = 0, first_row: int = 0, out: Tensor | None = None
) -> Tensor:
    """Plain-torch twin of `dropout`: same arguments, same mask, any device and dtype."""
    width = x.shape[-1]
    rows = x.numel() // width if width else 0
    group = torch.arange(-(-width // 4), device=x.device)[None, :]
    row = torch.arange(first_row, first_row + rows, device=x.device)[:, None]
    words = torch.stack(torch.broadcast_tensors(*_philox(seed.to(x.device), group, row, stream)), -1)
    kept = (words.view(rows, -1)[:, :width] >> 1) >= _threshold(p)
    scaled = x.to(torch.promote_types(x.dtype, torch.float32)) * (1.0 / (1.0 - p))
    result = scaled.masked_fill(~kept.view(x.shape), 0.0).to(x.dtype)
    return result if out is None else out.copy_(result)


_WORD = 0xFFFFFFFF


def _philox(seed: Tensor, group: Tensor, row: Tensor, stream: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 of (group, row, stream, 0), as int64 in [0, 2³²). Products wrap at 2⁶⁴, which keeps their bits."""
    c0, c1 = group & _WORD, row & _WORD
    c2, c3 = torch.full_like(group, stream), torch.zeros_like(group)
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(10):
        even, odd = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((odd >> 32) & _WORD) ^ c1 ^ k0, odd & _WORD
        c2, c3 = ((even >> 32) & _WORD) ^ c3 ^ k1, even & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3
