"""The loss's second product over the columns that count: out = G · W, columns of small entries left out.

    out_b = Σ_{v kept in b} G_b[:, v] · W[v, :]        v is kept in block b if any |G_b[i, v]| > threshold, or is NaN

G = P − Y [rows, vocabulary] is a chunk of logits turned into its own gradient (kernels/cross_entropy.py), W the head
[vocabulary, hidden], b a block of 256 rows. A trained model puts nearly all of a row's probability on a few tokens, and
rows of one text much of it on the same ones: of SmolLM2's 49,152 columns a block has 30 % in which any entry passes
2⁻¹⁶, and what the others add to G · W is twice its own rounding to bfloat16 and a third of the error that logits in
bfloat16 bring (docs/approximations.md).

Columns and not tiles: 64 neighbours in the vocabulary have nothing in common, so nearly every tile has one large entry.
A column's row of W is contiguous memory, and a gathered row feeds the matrix units as well as the next one does.

Four launches and a sum, all sizes staying on the device: (1) a flag for each block and column; their cumulative sum is
each kept column's position, its last element their number; (2) the kept columns' numbers, in order; (3) G's kept
columns moved to the front of their rows, in place, since nobody needs G any more; (4) the product, which reads rows of
W through the list and runs as far as the number says. Nothing is added up in an order that could vary: two runs are
bit-equal.

Bytes: G is read once by (1) and, in sectors, nearly once more by (3); its kept part is written once. Gathering G inside
the product instead would save that pass and repeat it for every tile of the hidden width: 16 passes at a width of 4,096
over sectors of which a sixth is wanted, and two-byte loads that the matrix units' pipeline cannot prefetch. W's kept
rows are read once a block from memory, the tiles that share them running side by side. Beside G there are nine bytes a
column and block of 256 rows, under 2 % of it. Rounding: products summed in float32, rounded once, as a plain product.

The bound of the error is threshold · Σ |W[v, :]| over the dropped v, for each row. That says little where a row's
probability is spread evenly over a large vocabulary (an untrained model): there all of it may be dropped.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastft.kernels.backend import (
    Settings,
    cdiv,
    interpreting,
    launch,
    launch_on,
    next_power_of_2,
    tl,
    triton,
    uses_triton,
)

__all__ = ["ROW_BLOCK", "THRESHOLD", "Tile", "kept_columns", "sparse_product", "sparse_product_torch", "tile_for"]

THRESHOLD = 2.0**-16  # of |P − Y|
ROW_BLOCK = 256  # rows that share a list of columns
_TWIN_COLUMNS = 8192  # of the head that a twin widens at a time


class Tile(NamedTuple):
    """What one program of the product computes, and how."""

    rows: int  # divides ROW_BLOCK
    width: int  # hidden columns
    depth: int  # kept columns a step
    warps: int
    stages: int


_FLOAT32 = Tile(32, 64, 32, 4, 2)
# Triton gives the list of columns, which W's addresses wait for, every other stage: five fetch W two steps ahead.
_PORTABLE = Tile(128, 128, 32, 8, 5)  # 33 to 49 KiB of shared memory: consumer cards have 99
_LARGE = Tile(256, 128, 64, 8, 5)  # the fastest of seven on an H200; 145 KiB


def tile_for(dtype: torch.dtype, capability: tuple[int, int] | None) -> Tile:
    """The product's tile.

    Args:
        dtype: of G.
        capability: of the GPU; None for one that any of them can run.
    """
    if dtype == torch.float32:
        return _FLOAT32
    return _LARGE if capability is not None and capability[0] in (9, 10) else _PORTABLE


def sparse_product(
    gradient: Tensor, weight: Tensor, threshold: float, *, out: Tensor, tile: Tile | None = None
) -> Tensor:
    """`out = gradient @ weight`, less the columns of `gradient` that are small in a whole block of rows.

    Args:
        gradient: [rows, vocabulary], 16- or 32-bit float, last dimension contiguous, any row stride. Overwritten, and
            so are up to seven elements behind a row where the stride leaves room for them: the storage must hold that
            room behind the last row too.
        weight: [vocabulary, hidden], any strides (contiguous rows are fast), any float dtype: cast to `gradient`'s as
            it is read.
        threshold: columns with no |entry| above it in a block of `ROW_BLOCK` rows are left out; at least 0.
        out: [rows, hidden] in `gradient`'s dtype, contiguous.
        tile: the product's tile; None for the device's own.

    Returns:
        `out`.
    """
    if not uses_triton(gradient):
        return sparse_product_torch(gradient, weight, threshold, out=out)
    row_count, hidden = out.shape
    if not out.numel():
        return out
    if tile is None:
        tile = tile_for(gradient.dtype, torch.cuda.get_device_capability(gradient.device) if gradient.is_cuda else None)
    stride, vocabulary = gradient.stride(0), gradient.shape[1]
    blocks = cdiv(row_count, ROW_BLOCK)
    padding = 8 if stride % 8 == 0 else 1
    with launch_on(gradient):
        columns, positions = _kept_lists(gradient, threshold, blocks)
        rows, block = (ROW_BLOCK, min(1024, next_power_of_2(vocabulary))) if interpreting() else (4, 512)
        launch(
            Settings(_compact_kernel, PADDING=padding, ROW_BLOCK=ROW_BLOCK, ROWS=rows, BLOCK=block, num_warps=4),
            (cdiv(row_count, rows),),
            gradient,
            stride,
            columns,
            positions,
            row_count,
            vocabulary,
        )
        launch(
            Settings(
                _product_kernel,
                PADDING=padding,
                WIDEN=interpreting(),
                ROW_BLOCK=ROW_BLOCK,
                ROWS=tile.rows,
                WIDTH=tile.width,
                DEPTH=tile.depth,
                num_warps=tile.warps,
                num_stages=tile.stages,
            ),
            (blocks * (ROW_BLOCK // tile.rows) * cdiv(hidden, tile.width),),
            gradient,
            stride,
            weight,
            *weight.stride(),
            columns,
            positions,
            out,
            row_count,
            vocabulary,
            hidden,
        )
    return out


def _kept_lists(gradient: Tensor, threshold: float, blocks: int) -> tuple[Tensor, Tensor]:
    """The kept columns of each block, ascending, and the flags' cumulative sum: both [blocks, vocabulary] int32.

    A list's length is the last of its block's sums; behind its end it is not written.
    """
    row_count, vocabulary = gradient.shape
    rows, block = (ROW_BLOCK, min(1024, next_power_of_2(vocabulary))) if interpreting() else (16, 256)
    flags = torch.empty((blocks, vocabulary), dtype=torch.uint8, device=gradient.device)
    grid = (cdiv(vocabulary, block), blocks)
    launch(
        Settings(_flag_columns_kernel, ROW_BLOCK=ROW_BLOCK, ROWS=rows, BLOCK=block, num_warps=4),
        grid,
        gradient,
        gradient.stride(0),
        flags,
        row_count,
        vocabulary,
        float(threshold),
    )
    positions = torch.cumsum(flags, 1, dtype=torch.int32)
    columns = torch.empty_like(positions)
    launch(Settings(_list_columns_kernel, BLOCK=block, num_warps=4), grid, flags, positions, columns, vocabulary)
    return columns, positions


# Row counts change from batch to batch: they must not compile a new kernel.
@triton.jit(do_not_specialize=["row_count"])
def _flag_columns_kernel(
    gradient,
    row_stride,
    flags,
    row_count,
    vocabulary,
    threshold,
    ROW_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: BLOCK columns of one block of rows."""
    block = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column_mask = column < vocabulary
    kept = tl.zeros([ROWS, BLOCK], tl.int32)
    for start in range(0, ROW_BLOCK, ROWS):
        row = block * ROW_BLOCK + start + tl.arange(0, ROWS)
        mask = (row < row_count)[:, None] & column_mask[None, :]
        value = tl.load(gradient + row[:, None] * row_stride + column[None, :], mask=mask, other=0.0)
        kept |= tl.where(tl.abs(value.to(tl.float32)) <= threshold, 0, 1)  # so that a NaN is kept
    tl.store(flags + block * vocabulary + column, tl.max(kept, axis=0).to(tl.uint8), mask=column_mask)


@triton.jit
def _list_columns_kernel(flags, positions, columns, vocabulary, BLOCK: tl.constexpr):
    """One program: BLOCK columns of one block of rows, the kept ones written at their places."""
    start = tl.program_id(1).to(tl.int64) * vocabulary
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column_mask = column < vocabulary
    kept = tl.load(flags + start + column, mask=column_mask, other=0) != 0
    position = tl.load(positions + start + column, mask=column_mask, other=1)
    tl.store(columns + start + position - 1, column, mask=kept)


@triton.jit(do_not_specialize=["row_count"])
def _compact_kernel(
    gradient,
    row_stride,
    columns,
    positions,
    row_count,
    vocabulary,
    PADDING: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: ROWS rows, their kept columns moved to the front, zeros behind them up to a multiple of PADDING.

    In place, from left to right: the k-th kept column lies at k or to the right of it, so what a step writes is what an
    earlier step, or this one, has read.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = (row < row_count)[:, None]
    target = gradient + row.to(tl.int64)[:, None] * row_stride
    start_of_list = (tl.program_id(0) * ROWS // ROW_BLOCK).to(tl.int64) * vocabulary
    count = tl.load(positions + start_of_list + vocabulary - 1)
    padded = tl.cdiv(count, PADDING) * PADDING
    for start in range(0, padded, BLOCK):
        index = start + tl.arange(0, BLOCK)
        column = tl.load(columns + start_of_list + index, mask=index < count, other=0)
        value = tl.load(target + column[None, :], mask=row_mask & (index < count)[None, :], other=0.0)
        tl.debug_barrier()  # one thread's target is another's source
        tl.store(target + index[None, :], value, mask=row_mask & (index < padded)[None, :])


@triton.jit(do_not_specialize=["row_count"])
def _product_kernel(
    gradient,  # compacted
    row_stride,
    weight,
    weight_row_stride,
    weight_column_stride,
    columns,
    positions,
    out,
    row_count,
    vocabulary,
    hidden,
    PADDING: tl.constexpr,
    WIDEN: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One program: ROWS × WIDTH of the product. Programs that read the same rows of W follow each other."""
    ROW_TILES: tl.constexpr = ROW_BLOCK // ROWS
    program = tl.program_id(0)
    programs_per_block = ROW_TILES * tl.cdiv(hidden, WIDTH)
    block = program // programs_per_block
    tile = program % programs_per_block
    first_row = block * ROW_BLOCK + (tile % ROW_TILES) * ROWS
    row = (first_row + tl.arange(0, ROWS)).to(tl.int64)
    row_mask = (row < row_count)[:, None]
    width = (tile // ROW_TILES) * WIDTH + tl.arange(0, WIDTH)
    width_mask = (width < hidden)[None, :]
    start_of_list = block.to(tl.int64) * vocabulary
    count = tl.load(positions + start_of_list + vocabulary - 1)
    count = tl.where(first_row < row_count, count, 0)  # the last block may lack whole tiles
    padded = tl.cdiv(count, PADDING) * PADDING  # a limit that keeps the loads of G wide
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, count, DEPTH):
        index = start + tl.arange(0, DEPTH)
        inside = index < count
        column = tl.load(columns + start_of_list + index, mask=inside, other=0).to(tl.int64)
        g = tl.load(
            gradient + row[:, None] * row_stride + index[None, :], mask=row_mask & (index < padded)[None, :], other=0.0
        )
        w_pointers = weight + column[:, None] * weight_row_stride + width[None, :] * weight_column_stride
        w = tl.load(w_pointers, mask=inside[:, None] & width_mask, other=0.0).to(g.dtype)
        if WIDEN:  # the interpreter multiplies no bfloat16
            g, w = g.to(tl.float32), w.to(tl.float32)
        total = tl.dot(g, w, total, input_precision="ieee")
    target = out + row[:, None] * hidden + width[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=row_mask & width_mask)


def kept_columns(block: Tensor, threshold: float) -> Tensor:
    """The columns of a block of rows [n, vocabulary] that are kept, ascending, [kept] int64."""
    wide = torch.promote_types(block.dtype, torch.float32)
    return (~(block.to(wide).abs() <= threshold)).any(0).nonzero().squeeze(1)  # a NaN is kept


def sparse_product_torch(gradient: Tensor, weight: Tensor, threshold: float, *, out: Tensor) -> Tensor:
    """Plain-torch twin of `sparse_product`: same arguments, same columns, any device and dtype; keeps `gradient`."""
    wide = torch.promote_types(gradient.dtype, torch.float32)
    for start in range(0, gradient.shape[0], ROW_BLOCK):
        block = gradient[start : start + ROW_BLOCK]  # [n, vocabulary]
        total = torch.zeros((block.shape[0], weight.shape[1]), dtype=wide, device=block.device)
        for columns in kept_columns(block, threshold).split(_TWIN_COLUMNS):
            rows = weight.index_select(0, columns).to(block.dtype)  # [≤ 8,192, hidden]
            total.addmm_(block.index_select(1, columns).to(wide), rows.to(wide))
        out[start : start + ROW_BLOCK] = total
    return out
