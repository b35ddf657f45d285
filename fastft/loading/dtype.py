"""Which dtype a model computes in.

`dtype=None` reads the hardware: bfloat16 needs compute capability 8.0 (Ampere); a T4 (7.5) or V100 (7.0) *reports*
bfloat16 as supported through emulation and then fails inside a kernel, so the capability decides and not
`torch.cuda.is_bf16_supported()`. A CPU gets float32. A dtype that the user wrote is never exchanged for another: it is
taken, or refused with a reason.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["BF16_CAPABILITY", "choose_dtype", "parse_dtype"]

BF16_CAPABILITY = (8, 0)

_NAMES = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
    "float32": torch.float32,
    "fp32": torch.float32,
    "float": torch.float32,
    "float64": torch.float64,
    "fp64": torch.float64,
    "double": torch.float64,
}


def parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """The torch dtype that `dtype` names; None stays None (the hardware decides).

    Raises:
        ValueError: a string that names no floating dtype, or a dtype that is not a floating one.
        TypeError: neither a string, a `torch.dtype` nor None.
    """
    if dtype is None:
        return None
    accepted = ", ".join(repr(name) for name in _NAMES)
    advice = f"Accepted: {accepted} (each also with a 'torch.' prefix), a torch.dtype, or None to choose by device."
    if isinstance(dtype, str):
        known = _NAMES.get(dtype.strip().lower().removeprefix("torch."))
        if known is None:
            raise ValueError(f"dtype={dtype!r} names no dtype that a model can be loaded in. {advice}")
        return known
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a string, a torch.dtype or None, not {type(dtype).__name__}. {advice}")
    if dtype not in _NAMES.values():
        raise ValueError(
            f"dtype={dtype} is not a dtype that a model can be loaded in (4-bit weights are asked for by "
            f"load_in_4bit=True; dtype is what they compute in). {advice}"
        )
    return dtype


def choose_dtype(dtype: str | torch.dtype | None, devices: Iterable[torch.device]) -> torch.dtype:
    """The dtype a model on `devices` is loaded in: the explicit one, else by the weakest CUDA device among them.

    Raises:
        ValueError: bfloat16 was asked for on a CUDA device below capability 8.0; or as `parse_dtype`.
        TypeError: as `parse_dtype`.
    """
    explicit = parse_dtype(dtype)
    cuda_devices = [device for device in devices if device.type == "cuda"]
    if not cuda_devices:
        return torch.float32 if explicit is None else explicit
    weakest = min(cuda_devices, key=torch.cuda.get_device_capability)
    capability = torch.cuda.get_device_capability(weakest)
    has_bf16 = capability >= BF16_CAPABILITY
    if explicit is None:
        return torch.bfloat16 if has_bf16 else torch.float16
    if explicit is torch.bfloat16 and not has_bf16:
        major, minor = capability
        raise ValueError(
            f"dtype=bfloat16 was asked for, but {weakest} has compute capability {major}.{minor} and bfloat16 needs "
            f"8.0 (Ampere or newer). Pass dtype='float16', or dtype=None to let the capability choose; with a "
            "Trainer also set bf16=False, fp16=True."
        )
    return explicit
