"""q2_k, q4_k and q5_k: super-blocks of 256 weights in blocks with a scale and a minimum each.

A super-block stores two float16 numbers, d and dmin. Block k has small unsigned integers sc and mn, and each weight a
level q of 2, 4 or 5 bits:

    x ≈ d·sc[k]·q − dmin·mn[k]

| type | blocks of | sc, mn | bits a weight, all told |
| --- | --- | --- | --- |
| q2_k | 16 | 4 bits | 2.625 |
| q4_k | 32 | 6 bits | 4.5 |
| q5_k | 32 | 6 bits | 5.5 |

Each block is fitted alone first (`search.fit_affine`); then d and dmin are chosen for the fitted scales and minima.
What rounding them did to the fit is made good as far as it goes: levels, (sc, mn) and (d, dmin) are fitted again in
turn, each with the others held. The order of bits is that of llama.cpp's ggml-common.h.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastft.saving.quantizers.packing import (
    as_float16,
    bit_planes,
    columns,
    half_bytes,
    nibbles,
    rows,
    six_bits,
    two_bits,
)
from fastft.saving.quantizers.search import fit_affine, levels, shared_scale

__all__ = ["better", "quantize_q2_k", "quantize_q4_k", "quantize_q5_k"]

_ROUNDS = 2


def quantize_q2_k(x: Tensor, weight: Tensor) -> Tensor:
    """uint8 [super-blocks, 84] of float32 [super-blocks, 256], with a weight of each squared error, > 0."""
    d, dmin, sc, mn, q = _quantize(x, weight, size=16, high=3, most=15)
    return torch.cat([sc | mn << 4, two_bits(q), half_bytes(d), half_bytes(dmin)], dim=1)


def quantize_q4_k(x: Tensor, weight: Tensor) -> Tensor:
    """uint8 [super-blocks, 144] of float32 [super-blocks, 256], with a weight of each squared error, > 0."""
    d, dmin, sc, mn, q = _quantize(x, weight, size=32, high=15, most=63)
    return torch.cat([half_bytes(d), half_bytes(dmin), six_bits(sc, mn), nibbles(q, 32)], dim=1)


def quantize_q5_k(x: Tensor, weight: Tensor) -> Tensor:
    """uint8 [super-blocks, 176] of float32 [super-blocks, 256], with a weight of each squared error, > 0."""
    d, dmin, sc, mn, q = _quantize(x, weight, size=32, high=31, most=63)
    head = torch.cat([half_bytes(d), half_bytes(dmin), six_bits(sc, mn)], dim=1)
    return torch.cat([head, bit_planes(q >> 4), nibbles(q & 15, 32)], dim=1)


def _quantize(x: Tensor, weight: Tensor, *, size: int, high: int, most: int) -> tuple[Tensor, ...]:
    """(d, dmin) float32 [super-blocks], (sc, mn) uint8 [super-blocks, blocks], q uint8 [super-blocks, 256]."""
    supers, blocks = x.shape[0], x.shape[1] // size
    x, weight = columns(x, size), columns(weight, size)  # [size, blocks · super-blocks], block by block
    total, weighted = weight.sum(0), weight * x

    def spread(shared: Tensor, each: Tensor) -> Tensor:
        return (shared * each).view(-1)  # [super-blocks] × [blocks, super-blocks] → [blocks · super-blocks]

    scale, minimum = (part.view(blocks, supers) for part in fit_affine(x, weight, high))
    q = levels(x, scale.view(-1), minimum.view(-1), 0, high)
    d = shared_scale(scale, (weight * q * q).sum(0).view(blocks, supers), 0, most)
    dmin = shared_scale(minimum, total.view(blocks, supers), 0, most)
    sc, mn = levels(scale, d, 0.0, 0, most), levels(minimum, dmin, 0.0, 0, most)
    best: tuple[Tensor, ...] | None = None
    for round_ in range(_ROUNDS + 1):
        q = levels(x, spread(d, sc), spread(dmin, mn), 0, high)
        error = x.sub(spread(d, sc) * q).add_(spread(dmin, mn)).square_().mul_(weight).sum(0).view(blocks, supers)
        found = (d, dmin, sc, mn, error.sum(0))
        best = found if best is None else better(found, best)
        if round_ == _ROUNDS:
            break
        weighted_q = weight * q
        sum_q, sum_qq = weighted_q.sum(0).view(blocks, supers), (weighted_q * q).sum(0).view(blocks, supers)
        sum_x, sum_qx = weighted.sum(0).view(blocks, supers), (weighted * q).sum(0).view(blocks, supers)
        sum_w = total.view(blocks, supers)
        sc = levels((sum_qx + dmin * mn * sum_q) / sum_qq.clamp_min(1e-30), d, 0.0, 0, most)
        mn = levels((d * sc * sum_q - sum_x) / sum_w, dmin, 0.0, 0, most)
        d, dmin = _refit(sc, mn, sum_q, sum_qq, sum_x, sum_qx, sum_w, d, dmin)
    assert best is not None
    d, dmin, sc, mn, _ = best
    q = levels(x, spread(d, sc), spread(dmin, mn), 0, high)
    return d, dmin, sc.to(torch.uint8).T, mn.to(torch.uint8).T, rows(q.to(torch.uint8), blocks)


def _refit(
    sc: Tensor, mn: Tensor, sum_q: Tensor, sum_qq: Tensor, sum_x: Tensor, sum_qx: Tensor, total: Tensor,
    d: Tensor, dmin: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The best (d, dmin) [super-blocks] for given integers: x ≈ d·(sc·q) − dmin·mn is linear in both."""
    aa, bb = (sc * sc * sum_qq).sum(0), (mn * mn * total).sum(0)
    ab, ax, bx = (sc * mn * sum_q).sum(0), (sc * sum_qx).sum(0), (mn * sum_x).sum(0)
    determinant = aa * bb - ab * ab
    usable = determinant > 1e-6 * aa * bb
    new_d, new_dmin = (ax * bb - ab * bx) / determinant, (ab * ax - aa * bx) / determinant
    usable &= (new_d > 0) & (new_dmin >= 0)
    return as_float16(torch.where(usable, new_d, d)), as_float16(torch.where(usable, new_dmin, dmin))


def better(found: tuple[Tensor, ...], best: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Super-block by super-block the one whose error, the last of each, is less."""
    less = found[-1] < best[-1]
    return tuple(torch.where(less, new, old) for new, old in zip(found, best, strict=True))
