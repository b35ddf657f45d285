"""Which layer keeps what: the cheapest assignment of levels whose peak fits the budget.

A layer's level says how much it holds from its forward to its backward, and what it costs to make the rest again. With
`saved_i` and `working_i` of layer i at its level, and `base` for what is there anyway (weights, gradients, optimizer),
a training step's peak is the largest of

    forward of layer i      base + saved_0 + … + saved_i + forward_working
    loss                    base + all saved + loss_working
    backward of layer i     base + saved_0 + … + saved_i + working_i       (layers after i are freed by then)

The backward of a late layer meets all that the layers before it hold, the backward of an early one next to nothing. A
layer that saves much is freed first if it comes last, so the better levels belong to the last layers: along depth a
plan reads offload…, recompute…, lean…, keep…, and is given by the three places a ≤ b ≤ c where one level ends and the
next begins. That is few enough (n³/6, some 350,000 for 126 layers) to look at all of them, in numpy and without
assuming how the levels' costs compare: the plan is the best of its kind, not an approximation. What makes looking cheap
is that every sum is a part that depends on a and b plus a part that depends on c: one addition a candidate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastft.memory.budget import format_bytes

__all__ = ["LEVELS", "LevelCost", "Plan", "make_plan", "predict_peak"]

# From the most memory to the least, and (so we hope) from the least time to the most.
LEVELS = ("keep", "lean", "recompute", "offload")
# The order along depth: what is freed late must be small.
_BY_DEPTH = LEVELS[::-1]

_Integers = npt.NDArray[np.int64]
_Seconds = npt.NDArray[np.float64]
_Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class LevelCost:
    """What one layer costs at one level.

    Attributes:
        saved: device bytes held from its forward to its backward.
        working: further device bytes while its backward runs.
        host: bytes in pinned host memory.
        seconds: time beyond level keep (recomputation, transfers); any unit, the same for all levels.
    """

    saved: int
    working: int
    host: int
    seconds: float


@dataclass(frozen=True)
class Plan:
    """A level for each layer, and what the step is predicted to use.

    Attributes:
        levels: one per layer, from the first to the last.
        peak: predicted peak of allocated device bytes, the base included.
        budget: the bytes it was made for.
        host: bytes in pinned host memory.
        seconds: time beyond keeping everything, in the unit of the costs.
        fits: whether device and host memory suffice; if not, this is the plan with the least peak.
        compact: rows of the MLP's small tiles that the costs it was made from are of; 0 for the usual tiles.
        away: what those costs have offloaded layers leave in host memory.
        late: whether that comes back when its layer is reached, not ahead of time.
        eager: whether it holds only without CUDA graphs.
    """

    levels: tuple[str, ...]
    peak: int
    budget: int
    host: int
    seconds: float
    fits: bool
    compact: int = 0
    away: str = "input"
    late: bool = False
    eager: bool = False

    def summary(self) -> str:
        """One line: how many layers at each level, the predicted peak, and host memory if any is used."""
        counts = ", ".join(f"{count} {level}" for level in _BY_DEPTH if (count := self.levels.count(level)))
        noun = "layer" if len(self.levels) == 1 else "layers"
        bound = "of" if self.peak <= self.budget else "exceeds the"
        tiles = " in small tiles" if self.compact else ""
        line = f"{len(self.levels)} {noun}: {counts}{tiles}; predicted peak {format_bytes(self.peak)} {bound} "
        line += f"{format_bytes(self.budget)} allowed"
        if self.host:
            line += f", {format_bytes(self.host)} in host memory"
            if not self.fits and self.peak <= self.budget:
                line += " (more than there is)"
        return line


def make_plan(
    *,
    layers: int,
    costs: Mapping[str, LevelCost],
    base: int,
    forward_working: int,
    loss_working: int,
    budget: int,
    fixed: Mapping[int, str] | None = None,
    allowed: Sequence[str] = LEVELS,
    host_budget: int | None = None,
) -> Plan:
    """The least time whose peak is within `budget` and whose pinned bytes are within `host_budget`.

    Of equally fast plans it is the one with the least peak. Where nothing fits, it is the plan with the least peak and
    `fits=False`; it still keeps to `host_budget` where some plan can, because overdrawn host memory ends the process.

    Args:
        layers: how many there are.
        costs: a layer's cost at each level; layers are alike. Levels that are neither allowed nor fixed may be missing.
        base: device bytes allocated throughout the step.
        forward_working: further bytes while any layer's forward runs.
        loss_working: further bytes while the loss runs, forward and backward.
        budget: the most device bytes allocated at once, `base` included.
        fixed: levels that are decided, by layer index; the other layers are planned around them.
        allowed: the levels for the others, in any order.
        host_budget: the most pinned bytes; None for any number.

    Raises:
        ValueError: a level unknown or without a cost, an index out of range, a negative cost, no layers, or layers
            left to plan with no level allowed.
    """
    fixed = dict(fixed or {})
    _check(layers, costs, fixed, allowed)
    top_working = max(forward_working, loss_working)
    counts = _best_counts(
        _grids(layers, costs, fixed, frozenset(allowed), base=base, top_working=top_working),
        free=layers - len(fixed),
        budget=budget,
        host_budget=None if host_budget is None else host_budget - sum(costs[level].host for level in fixed.values()),
    )
    levels = [level for level, count in zip(_BY_DEPTH, counts, strict=True) for _ in range(count)]
    for layer in sorted(fixed):
        levels.insert(layer, fixed[layer])
    peak = predict_peak(levels, costs, base=base, forward_working=forward_working, loss_working=loss_working)
    host = sum(costs[level].host for level in levels)
    return Plan(
        levels=tuple(levels),
        peak=peak,
        budget=budget,
        host=host,
        seconds=sum(levels.count(level) * costs[level].seconds for level in _BY_DEPTH if level in costs),
        fits=peak <= budget and (host_budget is None or host <= host_budget),
    )


def predict_peak(
    levels: Sequence[str], costs: Mapping[str, LevelCost], *, base: int, forward_working: int, loss_working: int
) -> int:
    """The peak of allocated bytes of a step with these levels: the formulas of this file's head, term by term."""
    held = peak = base
    for level in levels:
        held += costs[level].saved
        peak = max(peak, held + forward_working, held + costs[level].working)
    return max(peak, held + loss_working)


class _Grid(NamedTuple):
    """All plans that share a, at [b - a, c - a]; each array is [n - a + 1, n - a + 1]."""

    a: int
    possible: _Flags  # b ≤ c, and no layer at a level that is not allowed
    peak: _Integers
    host: _Integers
    seconds: _Seconds


def _grids(
    layers: int,
    costs: Mapping[str, LevelCost],
    fixed: Mapping[int, str],
    allowed: frozenset[str],
    *,
    base: int,
    top_working: int,
) -> Iterator[_Grid]:
    """Every way to give levels to the n free layers: [0, a) offload, [a, b) recompute, [b, c) lean, [c, n) keep.

    Args:
        top_working: the larger of the forward's and the loss's: both meet the most when everything is saved.
    """
    free = [layer for layer in range(layers) if layer not in fixed]
    n = len(free)
    each = [costs.get(level, LevelCost(0, 0, 0, 0.0)) for level in _BY_DEPTH]
    saved, working = [cost.saved for cost in each], [cost.working for cost in each]
    host, seconds = [cost.host for cost in each], [cost.seconds for cost in each]

    # What fixed layers hold at the backward of each free one, and after the last layer.
    fixed_saved = [costs[fixed[layer]].saved if layer in fixed else 0 for layer in range(layers)]
    fixed_before = np.array([sum(fixed_saved[:layer]) for layer in [*free, layers]], dtype=np.int64)
    # Of the fixed layers of a level the last meets the most: (free layers before it, other bytes at its backward).
    fixed_terms = [
        (sum(one < layer for one in free), sum(fixed_saved[: layer + 1]) + costs[level].working)
        for level, layer in {level: layer for layer, level in sorted(fixed.items())}.items()
    ]

    for a in range(n + 1) if "offload" in allowed else range(1):
        b = np.arange(a, n + 1, dtype=np.int64)[:, None]
        c = np.arange(a, n + 1, dtype=np.int64)[None, :]
        possible = c >= b
        for level, count in (("recompute", b - a), ("lean", c - b), ("keep", n - c)):
            if level not in allowed:
                possible = possible & (count == 0)

        # The last free layer of a level meets the most of its level: a term for each level that has one.
        ab, to_c = _sums(saved, n, a, b, c)
        top = fixed_before[n] + top_working
        if n > 0:
            top = np.where(c < n, np.maximum(top, fixed_before[n - 1] + working[3]), top)
        peak = ab + (to_c + top)
        lean = ab + (c * saved[2] + (fixed_before[c - 1] + working[2]))
        np.maximum(peak, lean, out=peak, where=c > b)
        recompute = a * saved[0] + (b - a) * saved[1] + (fixed_before[b - 1] + working[1])
        np.maximum(peak, recompute, out=peak, where=b > a)
        if a > 0:
            np.maximum(peak, a * saved[0] + (fixed_before[a - 1] + working[0]), out=peak)
        for before, other_bytes in fixed_terms:
            ab, to_c = _sums(saved, before, a, b, c)
            np.maximum(peak, ab + (to_c + other_bytes), out=peak)

        ab_host, c_host = _sums(host, n, a, b, c)
        ab_seconds, c_seconds = _sums(seconds, n, a, b, c)
        yield _Grid(a, possible, peak + base, ab_host + c_host, ab_seconds + c_seconds)


def _sums(values: Sequence[float], q: int, a: int, b: _Integers, c: _Integers) -> tuple[Any, Any]:
    """The sum of a level's value over the first q free layers: the part of a and b [., 1], and the part of c [1, .]."""
    offload, recompute, lean, keep = values
    ab = min(a, q) * (offload - recompute) + np.minimum(b, q) * (recompute - lean)
    return ab, np.minimum(c, q) * (lean - keep) + q * keep


def _best_counts(
    grids: Iterable[_Grid], *, free: int, budget: int, host_budget: int | None
) -> tuple[int, int, int, int]:
    """How many of the free layers the best plan has at each level, in the order of depth.

    What fits is ranked by time, then peak; else what host memory holds, and then the rest, by peak, then time.
    """
    best: tuple[int, float, float] | None = None
    counts = (0, 0, 0, free)
    for grid in grids:
        within_host = grid.possible if host_budget is None else grid.possible & (grid.host <= host_budget)
        classes = (
            (within_host & (grid.peak <= budget), grid.seconds, grid.peak),
            (within_host, grid.peak, grid.seconds),
            (grid.possible, grid.peak, grid.seconds),
        )
        for rank, (candidates, first, second) in enumerate(classes):
            if best is not None and best[0] < rank:
                break
            if not candidates.any():
                continue
            least = first[candidates].min()
            tied = np.flatnonzero(candidates & (first == least))
            winner = tied[second.flat[tied].argmin()]
            key = (rank, least.item(), second.flat[winner].item())
            if best is None or key < best:
                best = key
                to_b, to_c = (int(index) for index in np.unravel_index(winner, candidates.shape))
                counts = (grid.a, to_b, to_c - to_b, free - grid.a - to_c)
            break
    return counts


def _check(layers: int, costs: Mapping[str, LevelCost], fixed: Mapping[int, str], allowed: Sequence[str]) -> None:
    if layers < 1:
        raise ValueError(f"layers={layers}: there is nothing to plan.")
    for where, names in (("costs", costs), ("fixed", fixed.values()), ("allowed", allowed)):
        for level in names:
            if level not in LEVELS:
                raise ValueError(f"{where} names level {level!r}; the levels are {', '.join(LEVELS)}.")
            if level not in costs:
                raise ValueError(f"{where} names level {level!r}, but costs has none for it (only {', '.join(costs)}).")
    for layer in fixed:
        if not 0 <= layer < layers:
            raise ValueError(f"fixed gives layer {layer} a level, but the layers are 0 to {layers - 1}.")
    if not allowed and len(fixed) < layers:
        raise ValueError(f"allowed is empty, but {layers - len(fixed)} of {layers} layers have no fixed level.")
    for level, cost in costs.items():
        if min(cost.saved, cost.working, cost.host, cost.seconds) < 0:
            raise ValueError(f"costs[{level!r}] is {cost}: bytes and seconds cannot be negative.")
