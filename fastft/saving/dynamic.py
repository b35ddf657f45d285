"""The dynamic mixture: each tensor's type by measured error, within a size.

Every matrix is rounded to every type it could have, and what the rounding costs is measured. With importance
(`importance.py`) the cost is an estimate of the loss itself. Without it, it is the share of the matrix that becomes
noise, ‖Δ‖²/‖W‖², times what a share of noise costs in a matrix of its kind. Those factors were measured on one model
(SmolLM2-135M, by importance, in the mean over its layers) and are a rule of thumb for another: calibrate.

Then bits are bought where they save most. For each matrix only the types on the lower convex hull of (bytes, cost) are
worth considering; all matrices start at their smallest, and the step that saves the most cost per byte comes first, as
long as it fits. (That is the Lagrangian solution, up to the last step that does not fit.)
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fastft.saving.gguf_tensors import GgufTensors
from fastft.saving.importance import Importance
from fastft.saving.mixtures import tensor_bytes
from fastft.saving.quantizers import quantize
from fastft.saving.workers import in_order

__all__ = ["budget_bytes", "choose_types", "cost", "spend"]

_SUPER_BLOCKS = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q8_0")
_BLOCKS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0")
_SAMPLE = 2**19  # weights of a matrix that its costs are measured on
_SENSITIVITIES = {
    "output": 70.0,
    "token_embd": 3.0,
    "ffn_down": 1.5,
    "ffn_up": 1.0,
    "ffn_gate": 0.65,
    "attn_v": 1.0,
    "attn_k": 0.45,
    "attn_q": 0.35,
    "attn_output": 0.45,
}
_UNITS = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


@dataclass(frozen=True)
class Option:
    """A type that a tensor could have.

    Attributes:
        kind: its name.
        size: bytes of the tensor in it.
        cost: of its rounding errors, comparable between tensors.
    """

    kind: str
    size: int
    cost: float


def kinds_for(shape: tuple[int, ...]) -> tuple[str, ...]:
    """Types that a tensor of this shape can have, the smallest first."""
    if len(shape) < 2:
        return ("f32",)
    if shape[-1] % 256 == 0:
        return _SUPER_BLOCKS
    return _BLOCKS if shape[-1] % 32 == 0 else ("f16",)


def budget_bytes(size: int | str, shapes: Mapping[str, tuple[int, ...]], around: int) -> int:
    """Bytes that the tensors may take.

    Args:
        size: of the file in bytes, as a number or with a unit ("80MiB", "1.5GB"), or bits per weight ("4.5bpw").
        shapes: of all tensors.
        around: bytes of the file that are not tensors.

    Raises:
        ValueError: it cannot be read, or is less than the smallest types take.
    """
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([a-z]*)\s*", str(size).lower())
    number = float(found[1]) if found is not None and found[1].count(".") <= 1 and found[1] != "." else None
    unit = found[2] if found is not None else ""
    if number is None or (unit != "bpw" and unit not in _UNITS):
        raise ValueError(f"size={size!r} is no size: '4.5bpw' (bits per weight), '80MiB', '1.5GB' or bytes.")
    weights = sum(tensor_bytes("f32", shape) // 4 for shape in shapes.values())
    budget = int(number * weights / 8) if unit == "bpw" else int(number * _UNITS[unit]) - around
    least = sum(tensor_bytes(kinds_for(shape)[0], shape) for shape in shapes.values())
    if budget < least:
        raise ValueError(
            f"size={size!r} cannot be had: in their smallest types the tensors take {least / 2**20:.1f} MiB "
            f"({8 * least / weights:.2f}bpw), and the file around them {around / 2**20:.1f} MiB."
        )
    return budget


def choose_types(tensors: GgufTensors, budget: int, importance: Importance | None) -> dict[str, str]:
    """GGUF tensor name → type, all of them within `budget` bytes, in the order of `tensors`."""

    def options(name: str) -> list[Option]:
        shape = tensors.shapes[name]
        kinds = kinds_for(shape)
        costs = dict.fromkeys(kinds, 0.0)
        if len(kinds) > 1:
            terms = None if importance is None else importance.terms.get(name)
            columns = None if importance is None else importance.columns(name)
            matrix, kept = _sample(tensors.tensor(name))
            factor = 1.0 if terms is not None else _sensitivity(name, "output.weight" in tensors.shapes)
            costs = {kind: factor * cost(matrix, kept, kind, terms, columns) for kind in kinds}
        return [Option(kind, tensor_bytes(kind, shape), costs[kind]) for kind in kinds]

    return spend(dict(zip(tensors.shapes, in_order(options, tensors.shapes), strict=True)), budget)


def _sensitivity(name: str, has_output: bool) -> float:
    """What noise in a matrix of this kind costs, relative to others."""
    part = name.split(".")[-2]
    return _SENSITIVITIES["output" if part == "token_embd" and not has_output else part]


def _sample(matrix: Tensor) -> tuple[Tensor, slice]:
    """Evenly spaced rows of a matrix, float32, and which."""
    step = min(max(1, matrix.numel() // _SAMPLE), len(matrix))
    kept = slice(step // 2, None, step)
    return matrix[kept].float(), kept


def cost(
    matrix: Tensor, kept: slice, kind: str, terms: list[tuple[Tensor, Tensor]] | None, columns: Tensor | None
) -> float:
    """What storing a matrix as `kind` costs.

    Args:
        matrix: float32 [some rows, in].
        kept: which of all rows those are.
        kind: the type.
        terms: of `Importance`, for all rows; None: the share of noise.
        columns: weight of the columns' errors while rounding, [in].
    """
    import gguf

    stored = gguf.GGMLQuantizationType[kind.upper()]
    dense = torch.from_numpy(gguf.dequantize(quantize(matrix, kind, columns), stored)).reshape(matrix.shape)
    squares = dense.sub_(matrix).square_()
    if terms is None:
        return float(squares.sum() / matrix.square().sum().clamp_min(1e-30))
    total = 0.0
    for rows, weights in terms:
        some = rows[kept]
        total += float(some @ (squares @ weights)) * float(rows.sum() / some.sum().clamp_min(1e-30))
    return total


def spend(options: Mapping[str, list[Option]], budget: int) -> dict[str, str]:
    """The types that cost least together, of one `Option` list per tensor, in at most `budget` bytes (greedily)."""
    chosen, steps = {}, []
    for name, choices in options.items():
        hull = lower_hull(choices)
        chosen[name] = hull[0]
        for before, after in itertools.pairwise(hull):
            steps.append(((before.cost - after.cost) / (after.size - before.size), name, before, after))
    left = budget - sum(option.size for option in chosen.values())
    for _, name, before, after in sorted(steps, key=lambda step: -step[0]):
        if chosen[name] is before and after.size - before.size <= left:
            chosen[name] = after
            left -= after.size - before.size
    return {name: option.kind for name, option in chosen.items()}


def lower_hull(choices: list[Option]) -> list[Option]:
    """The options that are best at some price of a byte, the smallest first: costs fall, ever more slowly."""
    hull: list[Option] = []
    for option in sorted(choices, key=lambda option: (option.size, option.cost)):
        if hull and option.cost >= hull[-1].cost:
            continue
        while len(hull) > 1 and _slope(hull[-2], option) >= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(option)
    return hull


def _slope(before: Option, after: Option) -> float:
    return (before.cost - after.cost) / (after.size - before.size)
