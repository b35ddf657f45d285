"""4-bit weights that share an input, dequantized together with their adapters into one matrix.

A group of projections Y_i = X W_iᵀ + s_i (X A_iᵀ) B_iᵀ over one X [tokens, in] becomes two products over M:

            in      rank                          forward    Y  = [X | X Aᵀ] · M[:out]ᵀ        X Aᵀ = X · M[out:, :in]ᵀ
    out   [  W   |   sB   ]                       backward   dX = [dY | dY sB] · M[:, :in]     dY sB = dY · M[:out, in:]
    rank  [  A   |    –   ]

W, A: the W_i and A_i one under the other; sB: the s_i B_i along the diagonal, zero elsewhere; the corner is never read.
A product that carries the adapter as a few more columns of its inner dimension adds it inside the accumulator: the
adapter's own pass over Y [tokens, out], a read and a write of the widest tensors of a layer, is gone, and so is the
rounding of Y between the two. Three projections are one product instead of six.

Bytes: as dequantization (kernels/nf4.py: half a byte read and two written an element), plus the adapters, in one
launch for the whole group. `rank` is padded to a multiple of 8 with zeros, so that every row begins on 16 bytes, which
is what matrix units load. Rounding: W as bitsandbytes; s·B in float32, then once to the matrix's dtype; A once.

With `fold` W + s·B·A stands where W stood (kernels/fold.py); sB and A are there as before, for dA and dB.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fastft.kernels.backend import (
    KERNEL_DTYPES,
    Settings,
    cdiv,
    launch,
    launch_on,
    next_power_of_2,
    tl,
    triton,
    uses_triton,
)
from fastft.kernels.fold import TILE_ROWS, fold_torch, folded_tile
from fastft.kernels.nf4 import QuantizedWeight, blocks_a_program, dequantize_torch

__all__ = ["MOST_MEMBERS", "Adapter", "join", "join_torch", "padded_rank", "round_rank"]

MOST_MEMBERS = 3  # of a group, in one launch: query, key and value
RANK_MULTIPLE = 8  # 16-bit elements in the 16 bytes that matrix units load
ADAPTER_TILE = 4096  # elements a program copies of A or B


class Adapter(NamedTuple):
    """One projection's adapter."""

    lora_a: torch.Tensor  # [rank, in], any float dtype
    lora_b: torch.Tensor  # [out, rank]
    scale: float


def padded_rank(adapters: Sequence[Adapter | None]) -> int:
    """Columns that a group's adapters take in the joined matrix, 0 without adapters."""
    return round_rank(sum(adapter.lora_a.shape[0] for adapter in adapters if adapter is not None))


def round_rank(rank: int) -> int:
    """`rank` rounded up to what a row of the joined matrix takes."""
    return -(-rank // RANK_MULTIPLE) * RANK_MULTIPLE


def join(
    weights: Sequence[QuantizedWeight], adapters: Sequence[Adapter | None], dtype: torch.dtype, fold: bool = False
) -> torch.Tensor:
    """The matrix M of the module's formulas.

    Args:
        weights: one to three 4-bit weights with the same number of columns.
        adapters: one for each weight, or None.
        dtype: of the matrix.
        fold: add s·B·A to W.

    Returns:
        [Σ out + r, in + r] in `dtype`, r being `padded_rank(adapters)`. The last r × r elements are not written.
    """
    width, blocksize = weights[0].shape[1], weights[0].blocksize
    rows = tuple(weight.shape[0] for weight in weights)
    ranks = tuple(0 if adapter is None else adapter.lora_a.shape[0] for adapter in adapters)
    rank = round_rank(sum(ranks))
    matrix = torch.empty((sum(rows) + rank, width + rank), dtype=dtype, device=weights[0].packed.device)
    if not (uses_triton(weights[0].code) and dtype in KERNEL_DTYPES and len(weights) <= MOST_MEMBERS and width):
        return join_torch(weights, adapters, dtype, fold, out=matrix)
    if any(weight.blocksize != blocksize for weight in weights) or (fold and width % blocksize):
        return join_torch(weights, adapters, dtype, fold, out=matrix)
    absmax_blocks = tuple(weight.absmax_blocksize for weight in weights)
    settings, programs = _settings(width, rows, ranks, blocksize, absmax_blocks, fold)
    absent = MOST_MEMBERS - len(weights)
    with launch_on(matrix):
        launch(
            settings,
            (programs,),
            matrix,
            *(_pointers(weight) for weight in weights),
            *(_NO_POINTERS,) * absent,
            tuple(None if adapter is None else adapter.lora_a.contiguous() for adapter in adapters) + (None,) * absent,
            tuple(None if adapter is None else adapter.lora_b.contiguous() for adapter in adapters) + (None,) * absent,
            tuple(1.0 if adapter is None else float(adapter.scale) for adapter in adapters) + (1.0,) * absent,
        )
    return matrix


@functools.cache
def _settings(
    width: int,
    rows: tuple[int, ...],
    ranks: tuple[int, ...],
    blocksize: int,
    absmax_blocks: tuple[int, ...],
    fold: bool,
) -> tuple[Settings, int]:
    """Of a group's shapes, and how many programs: those of each weight, then those of sB, then those of A."""
    rank, absent = round_rank(sum(ranks)), (0,) * (MOST_MEMBERS - len(rows))
    blocks = blocks_a_program(blocksize)
    if fold:
        tiles = [cdiv(each, TILE_ROWS) * (width // blocksize) for each in rows]
    else:
        tiles = [cdiv(each * width, blocks * blocksize) for each in rows]
    rank_block = next_power_of_2(rank) if rank else 1
    b_rows = max(1, ADAPTER_TILE // rank_block)
    a_columns = min(256, next_power_of_2(width))
    a_rows = ADAPTER_TILE // a_columns
    b_tiles = cdiv(sum(rows), b_rows) if rank else 0
    a_tiles = cdiv(rank, a_rows) * cdiv(width, a_columns)
    settings = Settings(
        _join_kernel,
        WIDTH=width,
        ROWS=rows + absent,
        RANKS=ranks + absent,
        TILES=(*tiles, *absent, b_tiles),
        ABSMAX_BLOCKS=absmax_blocks + (1,) * len(absent),
        RANK=rank,
        BLOCKS=blocks,
        HALF_BLOCK=blocksize // 2,
        WHOLE=width % blocksize == 0,
        B_TILE=(b_rows, rank_block),
        A_TILE=(a_rows, a_columns),
        FOLD_RANK=min(64, max(16, rank_block)) if fold else 0,
        FOLD_ROWS=TILE_ROWS,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return settings, sum(tiles) + b_tiles + a_tiles


def _pointers(weight: QuantizedWeight) -> tuple[torch.Tensor | None, ...]:
    """What dequantization reads."""
    return weight.packed, weight.absmax, weight.code, weight.absmax_code, weight.absmax_scale, weight.offset


_NO_POINTERS = (None,) * 6


@triton.jit
def _join_kernel(
    matrix,
    first,  # packed, absmax, code, absmax_code, absmax_scale, offset
    second,
    third,
    lora_a,
    lora_b,
    scales,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    TILES: tl.constexpr,  # programs for each weight, then for B
    ABSMAX_BLOCKS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCKS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    B_TILE: tl.constexpr,
    A_TILE: tl.constexpr,
    FOLD_RANK: tl.constexpr,  # 0: W alone
    FOLD_ROWS: tl.constexpr,
):
    """One program: a tile of one weight, or of sB, or of A."""
    program = tl.program_id(0)
    STRIDE: tl.constexpr = WIDTH + RANK
    if program < TILES[0]:
        if FOLD_RANK > 0:
            folded_tile(
                matrix, first, lora_a[0], lora_b[0], scales[0], program,
                STRIDE, WIDTH, ROWS[0], RANKS[0], FOLD_RANK, ABSMAX_BLOCKS[0], HALF_BLOCK, FOLD_ROWS,
            )  # fmt: skip
        else:
            _dequantize_tile(
                matrix, first, program, STRIDE, WIDTH, ROWS[0], ABSMAX_BLOCKS[0], BLOCKS, HALF_BLOCK, WHOLE
            )
    elif program < TILES[0] + TILES[1]:
        if second[0] is not None:
            tile = program - TILES[0]
            target = matrix + STRIDE * ROWS[0]
            if FOLD_RANK > 0:
                folded_tile(
                    target, second, lora_a[1], lora_b[1], scales[1], tile,
                    STRIDE, WIDTH, ROWS[1], RANKS[1], FOLD_RANK, ABSMAX_BLOCKS[1], HALF_BLOCK, FOLD_ROWS,
                )  # fmt: skip
            else:
                _dequantize_tile(
                    target, second, tile, STRIDE, WIDTH, ROWS[1], ABSMAX_BLOCKS[1], BLOCKS, HALF_BLOCK, WHOLE
                )
    elif program < TILES[0] + TILES[1] + TILES[2]:
        if third[0] is not None:
            tile = program - TILES[0] - TILES[1]
            target = matrix + STRIDE * (ROWS[0] + ROWS[1])
            if FOLD_RANK > 0:
                folded_tile(
                    target, third, lora_a[2], lora_b[2], scales[2], tile,
                    STRIDE, WIDTH, ROWS[2], RANKS[2], FOLD_RANK, ABSMAX_BLOCKS[2], HALF_BLOCK, FOLD_ROWS,
                )  # fmt: skip
            else:
                _dequantize_tile(
                    target, third, tile, STRIDE, WIDTH, ROWS[2], ABSMAX_BLOCKS[2], BLOCKS, HALF_BLOCK, WHOLE
                )
    elif RANK > 0:
        tile = program - TILES[0] - TILES[1] - TILES[2]
        if tile < TILES[3]:
            _scaled_b_tile(matrix + WIDTH, lora_b, scales, tile, STRIDE, ROWS, RANKS, RANK, B_TILE[0], B_TILE[1])
        else:
            target = matrix + STRIDE * (ROWS[0] + ROWS[1] + ROWS[2])
            _a_tile(target, lora_a, tile - TILES[3], STRIDE, WIDTH, RANKS, RANK, A_TILE[0], A_TILE[1])


@triton.jit
def _scaled_b_tile(
    out,
    lora_b,
    scales,
    tile,
    STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    RANK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """TILE_ROWS rows of sB: one member's block, zeros around it."""
    row = (tile * TILE_ROWS + tl.arange(0, TILE_ROWS))[:, None]
    column = tl.arange(0, TILE_COLUMNS)[None, :]
    value = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    if lora_b[0] is not None:
        value += _b_block(lora_b[0], row, column, ROWS[0], RANKS[0]) * scales[0]
    if lora_b[1] is not None:
        value += _b_block(lora_b[1], row - ROWS[0], column - RANKS[0], ROWS[1], RANKS[1]) * scales[1]
    if lora_b[2] is not None:
        row_2, column_2 = row - ROWS[0] - ROWS[1], column - RANKS[0] - RANKS[1]
        value += _b_block(lora_b[2], row_2, column_2, ROWS[2], RANKS[2]) * scales[2]
    mask = (row < ROWS[0] + ROWS[1] + ROWS[2]) & (column < RANK)
    tl.store(out + row.to(tl.int64) * STRIDE + column, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _a_tile(
    out,
    lora_a,
    tile,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    RANKS: tl.constexpr,
    RANK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """A tile of the stacked A; the rows that pad the rank are zero."""
    tiles_per_row: tl.constexpr = (WIDTH + TILE_COLUMNS - 1) // TILE_COLUMNS
    row = ((tile // tiles_per_row) * TILE_ROWS + tl.arange(0, TILE_ROWS))[:, None]
    column = ((tile % tiles_per_row) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS))[None, :]
    value = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    if lora_a[0] is not None:
        value += _a_block(lora_a[0], row, column, WIDTH, RANKS[0])
    if lora_a[1] is not None:
        value += _a_block(lora_a[1], row - RANKS[0], column, WIDTH, RANKS[1])
    if lora_a[2] is not None:
        value += _a_block(lora_a[2], row - RANKS[0] - RANKS[1], column, WIDTH, RANKS[2])
    mask = (row < RANK) & (column < WIDTH)
    tl.store(out + row.to(tl.int64) * STRIDE + column, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _b_block(lora_b, row, column, ROWS: tl.constexpr, RANK: tl.constexpr):
    """B [ROWS, RANK] at (row, column), in float32; 0 outside."""
    inside = (row >= 0) & (row < ROWS) & (column >= 0) & (column < RANK)
    return tl.load(lora_b + row * RANK + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _a_block(lora_a, row, column, WIDTH: tl.constexpr, RANK: tl.constexpr):
    """A [RANK, WIDTH] at (row, column), in float32; 0 outside."""
    inside = (row >= 0) & (row < RANK) & (column < WIDTH)
    return tl.load(lora_a + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _dequantize_tile(
    out,
    weight,  # packed, absmax, code, absmax_code, absmax_scale, offset
    tile,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    ABSMAX_BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """BLOCKS quantization blocks of HALF_BLOCK bytes, into rows that are STRIDE apart (kernels/nf4.py)."""
    packed, absmax, code, absmax_code, absmax_scale, offset = weight
    ELEMENTS: tl.constexpr = ROWS * WIDTH
    block = tile.to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    block_mask = block * (2 * HALF_BLOCK) < ELEMENTS
    scale = tl.load(absmax + block, mask=block_mask, other=0)
    if absmax_code is not None:
        outer = tl.load(absmax_scale + block // ABSMAX_BLOCK, mask=block_mask, other=0.0)
        scale = tl.load(absmax_code + scale.to(tl.int32)) * outer + tl.load(offset)
    byte = block[:, None] * HALF_BLOCK + tl.arange(0, HALF_BLOCK)[None, :]
    nibbles = tl.load(packed + byte, mask=byte < (ELEMENTS + 1) // 2, other=0).to(tl.int32)
    high = tl.load(code + (nibbles >> 4)) * scale[:, None]
    low = tl.load(code + (nibbles & 15)) * scale[:, None]
    values = tl.interleave(high, low).to(out.dtype.element_ty)  # [BLOCKS, 2 * HALF_BLOCK]
    element = tl.arange(0, 2 * HALF_BLOCK)[None, :]
    if WHOLE:  # a block lies in one row
        blocks_per_row = WIDTH // (2 * HALF_BLOCK)
        block_start = (block // blocks_per_row) * STRIDE + (block % blocks_per_row) * (2 * HALF_BLOCK)
        tl.store(out + block_start[:, None] + element, values, mask=block_mask[:, None])
    else:
        element = block[:, None] * (2 * HALF_BLOCK) + element
        tl.store(out + (element // WIDTH) * STRIDE + element % WIDTH, values, mask=element < ELEMENTS)


def join_torch(
    weights: Sequence[QuantizedWeight],
    adapters: Sequence[Adapter | None],
    dtype: torch.dtype,
    fold: bool = False,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Plain-torch twin of `join`: same arguments, same arithmetic, any device and dtype.

    Args:
        weights: as in `join`, any number of them.
        adapters: as in `join`.
        dtype: as in `join`.
        fold: as in `join`.
        out: the matrix to write into.
    """
    rank, width = padded_rank(adapters), weights[0].shape[1]
    out_features = sum(weight.shape[0] for weight in weights)
    if out is None:
        out = torch.empty((out_features + rank, width + rank), dtype=dtype, device=weights[0].packed.device)
    out[:out_features, width:].zero_()
    out[out_features:, :width].zero_()
    row, column = 0, 0
    for weight, adapter in zip(weights, adapters, strict=True):
        end = row + weight.shape[0]
        if fold and adapter is not None:
            fold_torch(weight, *adapter, out=out[row:end, :width])
        else:
            dequantize_torch(weight, out=out[row:end, :width])
        if adapter is not None:
            stop = column + adapter.lora_a.shape[0]
            wide = torch.promote_types(torch.promote_types(adapter.lora_b.dtype, dtype), torch.float32)
            out[row:end, width + column : width + stop] = adapter.lora_b.detach().to(wide) * adapter.scale
            out[out_features + column : out_features + stop, :width] = adapter.lora_a.detach()
            column = stop
        row = end
    return out
