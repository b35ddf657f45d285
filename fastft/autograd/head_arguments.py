"""What the head and its loss refuse before anything is computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastft.kernels.cross_entropy import OPTIONAL_OUTPUTS

__all__ = ["check", "check_reduction"]


def check_reduction(hidden: Tensor, labels: Tensor, reduction: str, num_items_in_batch: Any) -> None:
    """Refuse an unknown reduction, a divisor without a mean, and labels of another shape.

    Raises:
        ValueError: naming the argument.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"linear_cross_entropy: reduction must be 'mean', 'sum' or 'none', not {reduction!r}")
    if num_items_in_batch is not None and reduction != "mean":
        raise ValueError(
            "linear_cross_entropy: num_items_in_batch belongs to reduction='mean'; with reduction="
            f"{reduction!r}, divide the result yourself"
        )
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"linear_cross_entropy: labels {tuple(labels.shape)} must have hidden's shape {tuple(hidden.shape)} "
            "less its last dimension"
        )


def check(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    softcap: float | None,
    temperature: float,
    label_smoothing: float,
    outputs: tuple[str, ...],
    skip_below: float | None,
) -> None:
    """Refuse arguments that do not fit each other, before anything is computed.

    Raises:
        ValueError: naming the argument.
    """
    if hidden.dim() != 2 or labels.shape != hidden.shape[:1]:
        shapes = f"{tuple(hidden.shape)} and {tuple(labels.shape)}"
        raise ValueError(f"linear_cross_entropy: hidden must be [rows, hidden] and labels [rows]: got {shapes}")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[1]:
        shapes = f"{tuple(weight.shape)} for hidden {tuple(hidden.shape)}"
        raise ValueError(f"linear_cross_entropy: weight must be [vocabulary, {hidden.shape[1]}]: got {shapes}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"linear_cross_entropy: bias must be [{weight.shape[0]}], one per row of weight: got {tuple(bias.shape)}"
        )
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"linear_cross_entropy: labels must be integers, not {labels.dtype}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"linear_cross_entropy: softcap must be positive, or None for no cap: got {softcap}")
    if not temperature > 0:
        raise ValueError(f"linear_cross_entropy: temperature must be positive: got {temperature}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"linear_cross_entropy: label_smoothing must lie in [0, 1]: got {label_smoothing}")
    if skip_below is not None and not skip_below >= 0:
        raise ValueError(f"linear_cross_entropy: skip_below must be at least 0, or None to skip none: got {skip_below}")
    unknown = set(outputs) - {"log_probs", *OPTIONAL_OUTPUTS}
    if unknown:
        raise ValueError(
            f"linear_cross_entropy: unknown outputs {sorted(unknown)}; known: log_probs, {', '.join(OPTIONAL_OUTPUTS)}"
        )
