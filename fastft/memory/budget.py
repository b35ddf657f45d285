"""How many bytes a training step may use: what the user asked for, what the device has.

A budget speaks about *allocated* bytes, the sum of the tensors alive at once, because that is what a plan predicts.
What torch asks the device for is more: blocks are cut and cached, and libraries have workspaces of their own. Where
nobody says a budget, a margin is left for that; where somebody does, they are taken at their word.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import psutil  # type: ignore[import-untyped]  # ships no types
import torch

__all__ = ["DeviceMemory", "allowed_bytes", "device_memory", "format_bytes", "parse_budget"]

_MEBIBYTE = 2**20
_SMALLEST_BUDGET = _MEBIBYTE  # less is never meant: "20" is a forgotten unit
_CUDA_MARGIN_SHARE = 0.06
_CUDA_MARGIN_BYTES = 512 * _MEBIBYTE  # cuBLAS and cuDNN workspaces do not shrink with the device
_CPU_SHARE = 0.5  # other programs live there too, and a machine that swaps is worse than a slower step

_BINARY_UNITS = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_DECIMAL_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS = _BINARY_UNITS | _DECIMAL_UNITS
_NUMBER_AND_UNIT = re.compile(r"(\d+\.?\d*|\.\d+)\s*([a-z]*|%)", re.IGNORECASE)

_FORMS = (
    "Give a size ('20GiB', '20 GB', '512MiB'), a share of the device's memory (0.8 or '80%'), bytes as a whole number "
    f"from {_SMALLEST_BUDGET} up, or None for what is free less a margin."
)


class DeviceMemory(NamedTuple):
    """A device's memory as this process finds it, in bytes.

    Attributes:
        total: what the device has.
        limit: the most that this process could have allocated at once, were its cache in one piece.
        allocated: what its tensors hold now (0 on the CPU, where torch does not count).
    """

    total: int
    limit: int
    allocated: int


def parse_budget(value: str | int | float | None) -> int | float | None:
    """A memory budget as the user writes it, as bytes (int), as a share of the device (float in (0, 1]) or None.

    Args:
        value: "20GiB" (2³⁰), "20 GB" (10⁹), "80%", bytes, a fraction, or None. A string may also hold a bare number,
            which means what the number means; case and spaces do not matter.

    Raises:
        ValueError: it is none of these, or too small to be meant.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"memory_budget={value!r} is neither a size nor a share. {_FORMS}")
    return _parse_text(value) if isinstance(value, str) else _check_number(value, value)


def device_memory(device: torch.device) -> DeviceMemory:
    """What `device` has, and how much of it this process can get.

    On CUDA other processes' memory counts as gone, and a cap set by `torch.cuda.set_per_process_memory_fraction` is
    respected. Asking about the CPU does not initialize CUDA.

    Raises:
        ValueError: the device is neither CUDA nor the CPU.
    """
    if device.type == "cpu":
        memory = psutil.virtual_memory()
        return DeviceMemory(total=memory.total, limit=memory.available, allocated=0)
    if device.type != "cuda":
        raise ValueError(f"{device}: how much memory it has is known for CUDA devices and the CPU only.")
    index = torch.cuda.current_device() if device.index is None else device.index
    free, total = torch.cuda.mem_get_info(index)
    # Reserved is what tensors hold and what torch keeps cached for the next ones.
    reachable = torch.cuda.memory_reserved(index) + free
    cap = int(total * torch.cuda.get_per_process_memory_fraction(index))
    return DeviceMemory(total=total, limit=min(reachable, cap), allocated=torch.cuda.memory_allocated(index))


def allowed_bytes(device: torch.device, budget: int | float | None) -> int:
    """The peak of allocated bytes that this process may reach on `device`, what it holds already included.

    Args:
        device: a CUDA device or the CPU.
        budget: as `parse_budget` returns it. None leaves a margin below what can be had (6 per cent and at least
            512 MiB on CUDA, half on the CPU); bytes and shares of the total are capped only by what can be had.

    Raises:
        ValueError: the device is neither CUDA nor the CPU.
    """
    memory = device_memory(device)
    if budget is None:
        if device.type == "cpu":
            return int(memory.limit * _CPU_SHARE)
        margin = max(int(memory.limit * _CUDA_MARGIN_SHARE), _CUDA_MARGIN_BYTES)
        return max(memory.limit - margin, 0)
    asked = budget if isinstance(budget, int) else int(memory.total * budget)
    return min(asked, memory.limit)


def format_bytes(n: int) -> str:
    """`n` bytes for people: "8.45 GiB", "512 MiB", "3 KiB", "12 B"."""
    for unit, size, decimals in (("GiB", 2**30, 2), ("MiB", 2**20, 0), ("KiB", 2**10, 0)):
        # Rounded first, so that one byte less than a GiB is not called 1024 MiB.
        if round(abs(n) / size, decimals) >= 1:
            return f"{n / size:.{decimals}f} {unit}"
    return f"{n} B"


def _parse_text(text: str) -> int | float:
    match = _NUMBER_AND_UNIT.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"memory_budget={text!r} is neither a size nor a share. {_FORMS}")
    digits, unit = match.group(1), match.group(2).lower()
    if not unit:
        return _check_number(int(digits) if digits.isdecimal() else float(digits), text)
    if unit == "%":
        share = float(digits) / 100
        if not 0 < share <= 1:
            raise ValueError(f"memory_budget={text!r} is not a share between 0 and 100 per cent. {_FORMS}")
        return share
    if unit not in _UNITS:
        raise ValueError(f"memory_budget={text!r}: {match.group(2)!r} is not a unit known here. {_FORMS}")
    size = int(float(digits) * _UNITS[unit])
    if size < _SMALLEST_BUDGET:
        raise ValueError(f"memory_budget={text!r} is less than 1 MiB, which holds no step. {_FORMS}")
    return size


def _check_number(number: int | float, given: str | int | float) -> int | float:
    """A number without a unit: a share up to 1.0, bytes from a MiB up, and a mistake in between."""
    if isinstance(number, float) and 0 < number <= 1:
        return number
    whole = isinstance(number, int) or number.is_integer()  # infinity and NaN are not
    if whole and number >= _SMALLEST_BUDGET:
        return int(number)
    meant = f" Did you mean '{number:g}GiB'?" if 0 < number < 1024 else ""
    raise ValueError(f"memory_budget={given!r} is neither a share up to 1.0 nor bytes from 1 MiB up.{meant} {_FORMS}")
