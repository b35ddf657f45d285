"""How levels, scales and float16 numbers lie in the bytes of GGUF's block types.

The order of bits is that of llama.cpp's ggml-common.h; the test of it is the `gguf` library's `dequantize`. Blocks are
rows here, uint8 [blocks or super-blocks, …], and columns while they are searched (`columns`, `rows`).
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["as_float16", "bit_planes", "columns", "half_bytes", "nibbles", "rows", "six_bits", "two_bits"]


def columns(x: Tensor, size: int) -> Tensor:
    """[super-blocks, n] → [size, blocks · super-blocks], all super-blocks' first blocks first."""
    return x.view(x.shape[0], -1, size).permute(2, 1, 0).reshape(size, -1)


def rows(x: Tensor, blocks: int) -> Tensor:
    """`columns` undone, for super-blocks of `blocks` blocks."""
    size = x.shape[0]
    return x.view(size, blocks, -1).permute(2, 1, 0).reshape(-1, blocks * size)


def as_float16(scale: Tensor) -> Tensor:
    """`scale` rounded to float16, kept as float32.

    Raises:
        ValueError: too large for float16, or not finite.
    """
    largest = float(scale.abs().max()) if scale.numel() else 0.0
    if not largest <= 65504:
        raise ValueError(
            f"a block's scale is {largest:.3g}, and GGUF's block types hold scales up to 65504 (float16): its weights "
            "are too large. Save as f32 or bf16, or look at the training run."
        )
    return scale.half().float()


def half_bytes(x: Tensor) -> Tensor:
    """float [blocks] → [blocks, 2]."""
    return x.half().contiguous().view(torch.uint8).view(-1, 2)


def two_bits(q: Tensor) -> Tensor:
    """[super-blocks, 256] → [super-blocks, 64]: byte i of a half holds its weights i, i + 32, i + 64 and i + 96."""
    q = q.view(-1, 2, 4, 32)
    return (q[:, :, 0] | q[:, :, 1] << 2 | q[:, :, 2] << 4 | q[:, :, 3] << 6).reshape(-1, 64)


def nibbles(q: Tensor, size: int) -> Tensor:
    """[blocks, n] → [blocks, n / 2]: byte i of each `size` bytes holds weights i (low) and i + size (high)."""
    width = q.shape[1]
    q = q.view(q.shape[0], -1, 2, size)
    return (q[:, :, 0] | q[:, :, 1] << 4).reshape(-1, width // 2)


def bit_planes(bits: Tensor) -> Tensor:
    """Zeros and ones [super-blocks, 256] → [super-blocks, 32]: bit k of byte i is that of weight 32·k + i."""
    planes = bits.view(-1, 8, 32) << torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    return planes.sum(1, dtype=torch.uint8)


def six_bits(sc: Tensor, mn: Tensor) -> Tensor:
    """Two times [super-blocks, 8] → [super-blocks, 12]: blocks 0 to 3 whole, 4 to 7 in nibbles and spare top bits."""
    first, second = sc[:, :4] | (sc[:, 4:] >> 4) << 6, mn[:, :4] | (mn[:, 4:] >> 4) << 6
    return torch.cat([first, second, sc[:, 4:] & 15 | (mn[:, 4:] & 15) << 4], dim=1)
