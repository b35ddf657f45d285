"""The error contract every gradient is held to, on CPU and on GPU (DESIGN.md, "Numbers").

    ‖g − g64‖ / ‖g64‖  ≤  max(1.5 × the same error of the stock code, 2 ulp)        median over the seeds

A reference of zeros proves nothing and fails; so does NaN anywhere.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

FACTOR = 1.5


class Run(NamedTuple):
    """Tensors by name from one seed: ours, the stock code's in the same dtype, and the high-precision reference."""

    fast: Mapping[str, Tensor]
    stock: Mapping[str, Tensor]
    reference: Mapping[str, Tensor]


def relative_error(value: Tensor, reference: Tensor) -> float:
    """‖value − reference‖ / ‖reference‖ in float64."""
    assert value.shape == reference.shape, f"{tuple(value.shape)} against {tuple(reference.shape)}"
    wide = reference.detach().double()
    norm = wide.norm()
    assert norm > 0, "a reference of zeros proves nothing"
    return ((value.detach().to(wide) - wide).norm() / norm).item()


def assert_contract(runs: Sequence[Run], compute_dtype: torch.dtype, floor: float | None = None) -> None:
    """Fail, naming every tensor whose median error is above what the contract allows.

    Args:
        runs: one per seed.
        compute_dtype: dtype of the products; an ulp is its epsilon, or the tensor's own where that is coarser.
        floor: instead of 2 ulp: an error that is allowed whatever stock's.
    """
    names = runs[0].reference.keys()
    assert names, "nothing to compare"
    broken = []
    for name in names:
        ulp = max(torch.finfo(compute_dtype).eps, torch.finfo(runs[0].fast[name].dtype).eps)
        fast = statistics.median(relative_error(run.fast[name], run.reference[name]) for run in runs)
        stock = statistics.median(relative_error(run.stock[name], run.reference[name]) for run in runs)
        allowed = max(FACTOR * stock, 2 * ulp if floor is None else floor)
        if not fast <= allowed:
            broken.append(f"{name}: error {fast:.3e}, stock {stock:.3e}, allowed {allowed:.3e}")
    assert not broken, f"{len(broken)} of {len(names)} tensors break the contract:\n" + "\n".join(broken)
