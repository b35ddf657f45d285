"""q3_k and q6_k: super-blocks of 256 weights in 16 blocks with a signed scale each and no minimum.

    x ≈ d·sc[k]·q

| type | q | sc | bits a weight, all told |
| --- | --- | --- | --- |
| q3_k | −4 … 3 | −32 … 31 | 3.4375 |
| q6_k | −32 … 31 | −128 … 127 | 6.5625 |

The grid has one step more on its negative side, and the scale's sign says which side of the block that is. As in
`affine.py` blocks are fitted alone, then d for their scales, and then levels, sc and d in turn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastft.saving.quantizers.affine import better
from fastft.saving.quantizers.packing import as_float16, bit_planes, columns, half_bytes, nibbles, rows, two_bits
from fastft.saving.quantizers.search import fit_symmetric, levels, shared_scale

__all__ = ["quantize_q3_k", "quantize_q6_k"]

_ROUNDS = 2


def quantize_q3_k(x: Tensor, weight: Tensor) -> Tensor:
    """uint8 [super-blocks, 110] of float32 [super-blocks, 256], with a weight of each squared error, > 0."""
    d, sc, q = _quantize(x, weight, high=4, most=32)
    low, high = (sc & 15).view(-1, 2, 8), (sc >> 4).view(-1, 4, 4)
    low = low[:, 0] | low[:, 1] << 4
    high = high[:, 0] | high[:, 1] << 2 | high[:, 2] << 4 | high[:, 3] << 6
    return torch.cat([bit_planes(q >> 2), two_bits(q & 3), low, high, half_bytes(d)], dim=1)


def quantize_q6_k(x: Tensor, weight: Tensor) -> Tensor:
    """uint8 [super-blocks, 210] of float32 [super-blocks, 256], with a weight of each squared error, > 0."""
    d, sc, q = _quantize(x, weight, high=32, most=128)
    return torch.cat([nibbles(q & 15, 64), two_bits(q >> 4), sc ^ 128, half_bytes(d)], dim=1)  # sc is signed there


def _quantize(x: Tensor, weight: Tensor, *, high: int, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """d float32 [super-blocks], sc + most uint8 [super-blocks, 16], q + high uint8 [super-blocks, 256]."""
    supers = x.shape[0]
    x, weight = columns(x, 16), columns(weight, 16)  # [16, 16 · super-blocks]
    weighted = weight * x
    scale = fit_symmetric(x, weight, high)
    q = levels(x, scale, 0.0, -high, high - 1)
    d = shared_scale(scale.view(16, supers), (weight * q * q).sum(0).view(16, supers), -most, most - 1)
    sc = levels(scale.view(16, supers), d, 0.0, -most, most - 1)
    best: tuple[Tensor, ...] | None = None
    for round_ in range(_ROUNDS + 1):
        q = levels(x, (d * sc).view(-1), 0.0, -high, high - 1)
        error = x.sub((d * sc).view(-1) * q).square_().mul_(weight).sum(0).view(16, supers).sum(0)
        found = (d, sc, error)
        best = found if best is None else better(found, best)
        if round_ == _ROUNDS:
            break
        sum_qq, sum_qx = (weight * q * q).sum(0).view(16, supers), (weighted * q).sum(0).view(16, supers)
        sc = levels(sum_qx / sum_qq.clamp_min(1e-30), d, 0.0, -most, most - 1)
        d = as_float16((sc * sum_qx).sum(0) / (sc * sc * sum_qq).sum(0).clamp_min(1e-30))
    assert best is not None
    d, sc, _ = best
    q = levels(x, (d * sc).view(-1), 0.0, -high, high - 1)
    return d, (sc + most).to(torch.uint8).T, rows((q + high).to(torch.uint8), 16)
