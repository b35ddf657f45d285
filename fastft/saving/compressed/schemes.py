"""The formats, by the names llm-compressor and vLLM give them, and what rounding to each of them costs.

| scheme | weights | activations | runs on (vLLM) |
| --- | --- | --- | --- |
| FP8_DYNAMIC | e4m3, a scale per row | e4m3, a scale per token, found while serving | Ada, Hopper and later |
| FP8 | e4m3, one scale | e4m3, one scale, from calibration | Ada, Hopper and later |
| W8A8 (INT8) | int8, a scale per row | int8, a scale per token, found while serving | Turing and later |
| W4A16 | int4, a scale per group of 128 | as they are | Turing and later |
| NVFP4 | e2m1, an e4m3 scale per 16 and one for all | the same, the one for all from calibration | Blackwell |
| NVFP4A16 | as NVFP4 | as they are | |
| MXFP4 | e2m1, a power of two per 32 | the same, found while serving | Blackwell |
| MXFP4A16 | as MXFP4 | as they are | |

`rounding_error` rounds a weight by the format's definition, in a few lines of our own. What llm-compressor wrote is
held against it: a tensor may be as far off as the format makes it, whatever outliers it has, and no further.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["Scheme", "resolve_scheme", "rounded", "rounding_error"]

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Scheme:
    """A format.

    Attributes:
        preset: llm-compressor's name.
        grid: values a stored weight may take, before its scale.
        bits: of a stored weight.
        group: weights of a row that share a scale; "row" or "tensor".
        power_of_two: whether scales are powers of two.
        activation_error: relative error (root mean square) of rounding an activation, roughly; 0: not rounded.
        needs_calibration: whether activations have scales that only data can tell.
    """

    preset: str
    grid: Literal["e4m3", "int", "e2m1"]
    bits: int
    group: int | Literal["row", "tensor"]
    power_of_two: bool = False
    activation_error: float = 0.0
    needs_calibration: bool = False

    @property
    def only_bfloat16(self) -> bool:
        """Whether compressed-tensors makes the weights dense in bfloat16, whatever the rest of the model is in."""
        return self.grid == "e2m1"

    @property
    def rounds_by_data(self) -> bool:
        """Whether the usual recipe with calibration data is GPTQ."""
        return self.grid == "int"


_SCHEMES = {
    scheme.preset: scheme
    for scheme in (
        Scheme("FP8_DYNAMIC", "e4m3", 8, "row", activation_error=0.026),
        Scheme("FP8", "e4m3", 8, "tensor", activation_error=0.026, needs_calibration=True),
        Scheme("W8A8", "int", 8, "row", activation_error=0.02),
        Scheme("W4A16", "int", 4, 128),
        Scheme("NVFP4", "e2m1", 4, 16, activation_error=0.1, needs_calibration=True),
        Scheme("NVFP4A16", "e2m1", 4, 16),
        Scheme("MXFP4", "e2m1", 4, 32, power_of_two=True, activation_error=0.12),
        Scheme("MXFP4A16", "e2m1", 4, 32, power_of_two=True),
    )
}
_ALIASES = {"INT8": "W8A8", "INT4": "W4A16"}


def resolve_scheme(name: str) -> Scheme:
    """The format that `name` means, upper or lower case.

    Raises:
        ValueError: not one that is written here; those that are, are named.
    """
    preset = str(name).upper().replace("-", "_")
    scheme = _SCHEMES.get(_ALIASES.get(preset, preset))
    if scheme is None:
        known = ", ".join(repr(preset.lower()) for preset in (*_SCHEMES, *_ALIASES))
        raise ValueError(f"scheme={name!r} is not known here; {known} are.")
    return scheme


def rounding_error(weight: Tensor, scheme: Scheme, group_size: int | None = None) -> float:
    """Relative error (root mean square) of `weight` [out, in] rounded to nearest in `scheme`."""
    difference = rounded(weight, scheme, group_size).sub_(weight)
    squares = difference.square().sum(dtype=torch.float64) / weight.float().square().sum(dtype=torch.float64)
    return float(squares.nan_to_num().sqrt())


def rounded(weight: Tensor, scheme: Scheme, group_size: int | None = None) -> Tensor:
    """`weight` [out, in] rounded to nearest in `scheme` and made dense again, float32.

    Args:
        group_size: instead of the scheme's.
    """
    group = group_size or scheme.group
    per_scale = weight.numel() if group == "tensor" else weight.shape[1] if group == "row" else int(group)
    groups = weight.float().reshape(-1, per_scale)
    largest = groups.abs().amax(1, keepdim=True).clamp_min(1e-30)
    if scheme.grid == "int":
        steps = 2**scheme.bits
        scale = 2 * largest / (steps - 1)
        values = (groups / scale).round_().clamp_(-steps // 2, steps // 2 - 1)
    elif scheme.grid == "e4m3":
        scale = largest / torch.finfo(torch.float8_e4m3fn).max
        values = (groups / scale).to(torch.float8_e4m3fn).float()
    else:
        # The largest power of two whose 4 is not above the group's largest value: 6 · scale may be below it, and clips.
        scale = torch.exp2(torch.floor(torch.log2(largest)) - 2) if scheme.power_of_two else largest / _E2M1[-1]
        values = _to_e2m1(groups / scale)
    return values.mul_(scale).reshape(weight.shape)


def _to_e2m1(x: Tensor) -> Tensor:
    values = torch.tensor(_E2M1, device=x.device)
    return values[torch.bucketize(x.abs(), (values[1:] + values[:-1]) / 2)] * x.sign()
