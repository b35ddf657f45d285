"""A tile of W + s·B·A, rounded once: what kernels/join.py writes in the place of W where adapters are folded in.

With the adapter inside the dense copy that every use makes of a 4-bit weight anyway, Y = X (W + s·B·A)ᵀ is one product
of the base's own shape: no X Aᵀ before the forward's product and no further columns inside of either. The backward's
dX = dY (W + s·B·A) likewise; dA and dB need X Aᵀ and dY·B as ever.

What it costs is precision. Joined, the adapter's share meets the base's in the product's fp32 accumulator. Folded, it
meets W before the rounding to the matrix's dtype, and what is smaller than half a unit in the last place of W (2⁻⁹ of
it in bfloat16) is lost there, the same way in every step until it has grown. An error of the size of W's own rounding,
but not a constant one: so folding is asked for, never a default (`approximations=["fold_adapters"]` of `fastft.patch`).

Bytes: half read and two written an element, as plain dequantization; A and B come from the L2 cache, [64, rank] and
[rank, 64] for 4,096 elements. Rounding: s·B in float32, then once to the matrix's dtype; A once; their product and W in
float32, their sum once to the matrix's dtype.
"""

from __future__ import annotations

import torch

from fastft.kernels.backend import tl, triton
from fastft.kernels.nf4 import QuantizedWeight, dequantize_torch

__all__ = ["TILE_ROWS", "fold_torch", "folded_tile"]

TILE_ROWS = 64


@triton.jit
def folded_tile(
    out,
    weight,  # packed, absmax, code, absmax_code, absmax_scale, offset
    lora_a,
    lora_b,
    scale,
    tile,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    ABSMAX_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """TILE rows of one quantization block each, block below block, into rows that are STRIDE apart."""
    packed, absmax, code, absmax_code, absmax_scale, offset = weight
    BLOCKS_PER_ROW: tl.constexpr = WIDTH // (2 * HALF_BLOCK)
    row = (tile // BLOCKS_PER_ROW) * TILE + tl.arange(0, TILE)
    first_column = (tile % BLOCKS_PER_ROW) * (2 * HALF_BLOCK)
    block = row.to(tl.int64) * BLOCKS_PER_ROW + tile % BLOCKS_PER_ROW
    inside = row < ROWS
    block_scale = tl.load(absmax + block, mask=inside, other=0)
    if absmax_code is not None:
        outer = tl.load(absmax_scale + block // ABSMAX_BLOCK, mask=inside, other=0.0)
        block_scale = tl.load(absmax_code + block_scale.to(tl.int32)) * outer + tl.load(offset)
    byte = block[:, None] * HALF_BLOCK + tl.arange(0, HALF_BLOCK)[None, :]
    nibbles = tl.load(packed + byte, mask=inside[:, None], other=0).to(tl.int32)
    high = tl.load(code + (nibbles >> 4)) * block_scale[:, None]
    low = tl.load(code + (nibbles & 15)) * block_scale[:, None]
    value = tl.interleave(high, low)  # [TILE, 2 * HALF_BLOCK]
    column = first_column + tl.arange(0, 2 * HALF_BLOCK)
    if lora_a is not None:
        dtype = out.dtype.element_ty
        product = tl.zeros([TILE, 2 * HALF_BLOCK], tl.float32)
        for start in range(0, RANK, RANK_BLOCK):
            rank = start + tl.arange(0, RANK_BLOCK)
            b_mask = inside[:, None] & (rank < RANK)[None, :]
            b = tl.load(lora_b + row[:, None] * RANK + rank[None, :], mask=b_mask, other=0.0).to(tl.float32) * scale
            a = tl.load(lora_a + rank[:, None] * WIDTH + column[None, :], mask=(rank < RANK)[:, None], other=0.0)
            # 16-bit values are whole in tf32, so nothing is rounded; and the interpreter multiplies no bfloat16
            b, a = b.to(dtype).to(tl.float32), a.to(dtype).to(tl.float32)
            product = tl.dot(b, a, product, input_precision="ieee" if dtype == tl.float32 else "tf32")
        value += product
    target = out + row.to(tl.int64)[:, None] * STRIDE + column[None, :]
    tl.store(target, value.to(out.dtype.element_ty), mask=inside[:, None])


def fold_torch(
    weight: QuantizedWeight, lora_a: torch.Tensor, lora_b: torch.Tensor, scale: float, *, out: torch.Tensor
) -> torch.Tensor:
    """Plain-torch twin: W + s·B·A into `out`, by the same roundings.

    Args:
        weight: `[out_features, in_features]`.
        lora_a: `[rank, in_features]`.
        lora_b: `[out_features, rank]`.
        scale: s.
        out: `[out_features, in_features]`.
    """
    wide = torch.promote_types(torch.promote_types(lora_b.dtype, out.dtype), torch.float32)
    scaled_b = (lora_b.detach().to(wide) * scale).to(out.dtype)
    dense = dequantize_torch(weight, wide)
    return out.copy_(dense.addmm_(scaled_b.to(wide), lora_a.detach().to(out.dtype).to(wide)))
