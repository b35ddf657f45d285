"""Which scale, and which minimum, a block of weights is rounded with.

A block x (16 or 32 weights of a row) is stored as small integers q on a grid: x ≈ s·q − m with q = 0 … Q (affine), or
x ≈ s·q with q = −Q … Q − 1 (symmetric). The grid through the extremes wastes its steps on them; a slightly finer or
coarser one is often better. So a few grids are tried: each gives integers, the integers give the best s and m by
weighted least squares in closed form, and the block keeps what has the least error Σ w (x − s·q + m)². From the best,
rounding and fitting are alternated, which can only get better.

The same problem comes up once more inside of a super-block, where the blocks' own scales are rounded to a few bits
(`shared_scale`); a scale's weight there is how much the error grows with a change of it, Σ w q².

All blocks of a chunk are searched at once. They lie in columns, [block size, blocks], so that a sum over a block adds
whole rows; torch adds along short contiguous dimensions several times slower.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastft.saving.quantizers.packing import as_float16

__all__ = ["fit_affine", "fit_symmetric", "levels", "shared_scale"]

_TINY = 1e-30
# How much finer or coarser than through the extremes a grid is tried, in steps of it.
_AFFINE_STEPS = tuple(-0.9 + 0.15 * index for index in range(13))
_SYMMETRIC_STEPS = tuple(-0.9 + 0.15 * index for index in range(13))
_SHARED_STEPS = tuple(-0.8 + 0.2 * index for index in range(9))
_REFINEMENTS = 2


def levels(x: Tensor, scale: Tensor, minimum: Tensor | float, low: int, high: int) -> Tensor:
    """The integers on the grid of `scale` and `minimum` that are nearest to `x`; 0 where the scale is 0.

    Args:
        x: float32 [size, blocks].
        scale: [blocks], of either sign.
        minimum: [blocks] or a number, subtracted from the grid (x ≈ scale·q − minimum).
        low: least integer.
        high: largest integer.

    Returns:
        float32 [size, blocks].
    """
    inverse = torch.where(scale != 0, 1 / scale, 0.0).nan_to_num_(posinf=0.0, neginf=0.0)
    return ((x + minimum) * inverse).round_().clamp_(low, high)


def fit_affine(x: Tensor, weight: Tensor, high: int) -> tuple[Tensor, Tensor]:
    """Scales and minima of affine blocks, both ≥ 0.

    Args:
        x: float32 [size, blocks].
        weight: of each element's squared error, > 0, [size, blocks].
        high: largest integer; the least is 0.

    Returns:
        (scale, minimum), float32 [blocks].
    """
    floor = x.amin(0).clamp_(max=0.0)
    y = x - floor  # ≥ 0, so that a far offset costs no digits below
    span = y.amax(0)
    total, weighted = weight.sum(0), weight * y
    sum_y, sum_yy = weighted.sum(0), (weighted * y).sum(0)
    scale, offset = span / high, torch.zeros_like(span)
    error = torch.full_like(span, torch.inf)

    def consider(q: Tensor) -> None:
        """Keep the fit to the integers `q` where it is the best so far; `y ≈ scale·q + offset`, offset ≤ −floor."""
        nonlocal scale, offset, error
        weighted_q = weight * q
        sum_q, sum_qq, sum_qy = weighted_q.sum(0), weighted_q.mul_(q).sum(0), q.mul_(weighted).sum(0)
        determinant = total * sum_qq - sum_q * sum_q
        usable = determinant > 1e-6 * total * sum_qq
        fitted = (sum_qq * sum_y - sum_q * sum_qy) / determinant
        # A minimum must not be negative: at that limit the best scale is another one.
        fitted = torch.minimum(torch.where(usable, fitted, 0.0), -floor)
        slope = (sum_qy - fitted * sum_q) / sum_qq.clamp_min(_TINY)
        residual = (
            sum_yy - 2 * (slope * sum_qy + fitted * sum_y)
            + slope * slope * sum_qq + 2 * slope * fitted * sum_q + fitted * fitted * total
        )  # fmt: skip
        better = residual < error
        scale, offset, error = (
            torch.where(better, slope, scale), torch.where(better, fitted, offset), torch.where(better, residual, error)
        )  # fmt: skip

    inverse = torch.where(span > _TINY, 1 / span.clamp_min(_TINY), 0.0)
    for step in _AFFINE_STEPS:
        consider((y * ((high + step) * inverse)).round_().clamp_(max=high))
    for _ in range(_REFINEMENTS):
        consider(levels(y, scale, -offset, 0, high))
    flat = span <= _TINY
    return torch.where(flat, 0.0, scale.clamp_min_(0.0)), torch.where(flat, -floor, -(floor + offset)).clamp_min_(0.0)


def fit_symmetric(x: Tensor, weight: Tensor, high: int) -> Tensor:
    """Signed scales of symmetric blocks, whose integers are −high … high − 1.

    Args:
        x: float32 [size, blocks].
        weight: of each element's squared error, > 0, [size, blocks].
        high: size of the negative end of the grid.

    Returns:
        float32 [blocks]; 0 for blocks of zeros.
    """
    extreme = x.gather(0, x.abs().argmax(0, keepdim=True))[0]
    weighted = weight * x
    scale, gain = torch.zeros_like(extreme), torch.zeros_like(extreme)

    def consider(q: Tensor) -> None:
        """Keep the fit to the integers `q` where it is the best so far: it takes Σwqx²/Σwq² off the error."""
        nonlocal scale, gain
        sum_qx = (q * weighted).sum(0)
        sum_qq = q.mul_(q).mul_(weight).sum(0).clamp_min_(_TINY)
        slope = sum_qx / sum_qq
        better = slope * sum_qx > gain
        gain, scale = torch.where(better, slope * sum_qx, gain), torch.where(better, slope, scale)

    inverse = torch.where(extreme.abs() > _TINY, 1 / extreme, 0.0).nan_to_num_(posinf=0.0, neginf=0.0)
    for step in _SYMMETRIC_STEPS:  # the extreme lies at the negative end, which is the longer one
        consider((x * (-(high + step) * inverse)).round_().clamp_(-high, high - 1))
    for _ in range(_REFINEMENTS):
        consider(levels(x, scale, 0.0, -high, high - 1))
    return scale


def shared_scale(values: Tensor, weight: Tensor, low: int, high: int) -> Tensor:
    """The one scale d per super-block with which `values` ≈ d·integers, the integers from `low` to `high`.

    Args:
        values: float32 [blocks in a super-block, super-blocks]; not negative where `low` is 0.
        weight: of each value's squared error, ≥ 0, the same shape.
        low: least integer, 0 or negative.
        high: largest integer.

    Returns:
        float32 [super-blocks], representable in float16 (which is how it is stored).

    Raises:
        ValueError: a scale that float16 cannot hold.
    """
    extreme = values.gather(0, values.abs().argmax(0, keepdim=True))[0]
    end = float(low if low < 0 else high)
    inverse = torch.where(extreme.abs() > _TINY, 1 / extreme, 0.0).nan_to_num_(posinf=0.0, neginf=0.0)
    weight = weight + weight.amax(0).clamp_min(_TINY) * 1e-6
    best, gain = torch.zeros_like(extreme), torch.zeros_like(extreme)
    for step in _SHARED_STEPS:
        q = (values * ((end + (step if end > 0 else -step)) * inverse)).round_().clamp_(low, high)
        sum_qv, sum_qq = (weight * q * values).sum(0), (weight * q * q).sum(0).clamp_min_(_TINY)
        slope = sum_qv / sum_qq
        better = slope * sum_qv > gain
        gain, best = torch.where(better, slope * sum_qv, gain), torch.where(better, slope, best)
    # Where float16 would make it 0, its least number does: the integers are fewer then, but not none.
    least = torch.where(extreme.abs() > 2**-25, 2**-24, 0.0)
    return as_float16(torch.where(best.abs() < least, best.sign() * least, best))
