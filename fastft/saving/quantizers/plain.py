"""q4_0, q5_0, q4_1 and q5_1: blocks of 32 weights with float16 scales of their own, for rows of any 32.

x ≈ d·(q − 8) or d·(q − 16) in the _0 types, x ≈ d·q + m in the _1 types. llama.cpp puts the grid through a block's
extremes, as the `gguf` library does; here it is searched for (`search.py`), which an importance matrix needs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastft.saving.quantizers.packing import as_float16, half_bytes, nibbles
from fastft.saving.quantizers.search import fit_affine, fit_symmetric, levels

__all__ = ["quantize_q4_0", "quantize_q4_1", "quantize_q5_0", "quantize_q5_1"]


def quantize_q4_0(x: Tensor, weight: Tensor) -> Tensor:
    """uint8 [blocks, 18] of float32 [blocks, 32], with a weight of each squared error, > 0."""
    d, q = _symmetric(x, weight, 8)
    return torch.cat([half_bytes(d), nibbles(q, 16)], dim=1)


def quantize_q5_0(x: Tensor, weight: Tensor) -> Tensor:
    """uint8 [blocks, 22] of float32 [blocks, 32], with a weight of each squared error, > 0."""
    d, q = _symmetric(x, weight, 16)
    return torch.cat([half_bytes(d), _fifth_bits(q), nibbles(q & 15, 16)], dim=1)


def quantize_q4_1(x: Tensor, weight: Tensor) -> Tensor:
    """uint8 [blocks, 20] of float32 [blocks, 32], with a weight of each squared error, > 0."""
    d, m, q = _affine(x, weight, 15)
    return torch.cat([half_bytes(d), half_bytes(m), nibbles(q, 16)], dim=1)


def quantize_q5_1(x: Tensor, weight: Tensor) -> Tensor:
    """uint8 [blocks, 24] of float32 [blocks, 32], with a weight of each squared error, > 0."""
    d, m, q = _affine(x, weight, 31)
    return torch.cat([half_bytes(d), half_bytes(m), _fifth_bits(q), nibbles(q & 15, 16)], dim=1)


def _symmetric(x: Tensor, weight: Tensor, high: int) -> tuple[Tensor, Tensor]:
    x, weight = x.T.contiguous(), weight.T.contiguous()
    d = as_float16(fit_symmetric(x, weight, high))
    return d, (levels(x, d, 0.0, -high, high - 1) + high).to(torch.uint8).T.contiguous()


def _affine(x: Tensor, weight: Tensor, high: int) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = x.T.contiguous(), weight.T.contiguous()
    d, minimum = (as_float16(part) for part in fit_affine(x, weight, high))
    return d, -minimum, levels(x, d, minimum, 0, high).to(torch.uint8).T.contiguous()


def _fifth_bits(q: Tensor) -> Tensor:
    """[blocks, 32] → [blocks, 4]: bit i of the little-endian 32-bit number is that of weight i."""
    return ((q >> 4).view(-1, 4, 8) << torch.arange(8, dtype=torch.uint8)).sum(2, dtype=torch.uint8)
