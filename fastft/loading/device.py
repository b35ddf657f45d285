"""Where a model is put, and a plain word when that place does not exist.

The default is the device of this process: under torchrun the GPU of the local rank (a 4-bit model that all ranks load
on GPU 0 is the usual way to run out of memory there), else the current CUDA device, else the CPU. A `device_map` that
the user gave is passed on as it is; it is only read, to check that its devices exist and to choose the dtype.
"""

from __future__ import annotations

import os
from typing import Any

import torch

__all__ = ["mapped_devices", "resolve_device_map", "torch_is_cpu_build"]

# Strings that accelerate resolves over every visible device.
_SPREADING = frozenset({"auto", "balanced", "balanced_low_0", "sequential"})


def torch_is_cpu_build() -> bool:
    """Whether the installed torch was built without any GPU support (neither CUDA nor ROCm)."""
    return torch.version.cuda is None and torch.version.hip is None


def resolve_device_map(device_map: Any = None) -> Any:
    """`device_map` as given, or `{"": device of this process}` for None.

    Raises:
        RuntimeError: it names a CUDA device where this process can see none, or not that many.
    """
    if device_map is None:
        return {"": _own_device()}
    for device in mapped_devices(device_map):
        _check_exists(device, device_map)
    return device_map


def mapped_devices(device_map: Any) -> list[torch.device]:
    """The distinct devices that weights go to under `device_map` ("disk" and "meta" hold no arithmetic: left out).

    Raises:
        ValueError: an entry is not a device.
    """
    if isinstance(device_map, str) and device_map in _SPREADING:
        if torch.cuda.is_available():
            return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        return [torch.device("cpu")]
    entries = list(device_map.values()) if isinstance(device_map, dict) else [device_map]
    devices = {_as_device(entry, device_map): None for entry in entries if str(entry) not in ("disk", "meta")}
    return list(devices)


def _as_device(entry: Any, device_map: Any) -> torch.device:
    if isinstance(entry, int):  # accelerate's reading of a bare index; torch.device(0) raises on a CPU build
        backend = "cuda" if torch.cuda.is_available() else _other_accelerator() or "cuda"
        return torch.device(backend, entry)
    try:
        return torch.device(entry)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"device_map={device_map!r}: {entry!r} is not a device. Give a device ('cuda:0', 'cpu', 0), a dict from "
            f"module names to devices ({{'': 0}}), one of {', '.join(sorted(_SPREADING))}, or None for this process's."
        ) from error


def _other_accelerator() -> str | None:
    accelerator = torch.accelerator.current_accelerator()
    return None if accelerator is None else accelerator.type


def _own_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # One GPU a process can be arranged either way: LOCAL_RANK counts within the visible ones, or each process sees one.
    local_rank = os.environ.get("LOCAL_RANK", "")
    if local_rank.isdecimal() and int(local_rank) < torch.cuda.device_count():
        return torch.device("cuda", int(local_rank))
    return torch.device("cuda", torch.cuda.current_device())


def _check_exists(device: torch.device, device_map: Any) -> None:
    if device.type != "cuda":
        return
    asked = f"device_map={device_map!r} asks for {device}, but "
    if torch.cuda.is_available():
        visible = torch.cuda.device_count()
        if device.index is not None and device.index >= visible:
            raise RuntimeError(f"{asked}only {visible} GPU(s) are visible: indices 0 to {visible - 1}.")
        return
    if torch_is_cpu_build():
        raise RuntimeError(
            f"{asked}torch {torch.__version__} is a CPU build: it cannot use a GPU whether there is one or not. "
            "Install a CUDA build (https://pytorch.org/get-started/locally gives the command), or leave device_map out "
            "to load on the CPU."
        )
    visibility = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = "is not set" if visibility is None else f"is {visibility!r}"
    raise RuntimeError(
        f"{asked}torch {torch.__version__} (CUDA {torch.version.cuda or torch.version.hip}) sees no GPU. Look whether "
        f"nvidia-smi shows one; CUDA_VISIBLE_DEVICES {seen}. Or leave device_map out to load on the CPU."
    )
