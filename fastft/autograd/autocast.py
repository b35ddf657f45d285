"""Autocast as a value: as it was when the forward ran, suspended around our arithmetic, restored around attention.

The pairs choose their compute dtype once and cast by hand, so ambient autocast must not cast a second time;
transformers' attention, on the other hand, was written to run under it. A backward may run in a thread or a context
with another autocast state than its forward had, so the state travels with the call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch


class AutocastState(NamedTuple):
    """Autocast of one device type: whether it was on, and the dtype it casts to."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def current(cls, device_type: str) -> AutocastState:
        """The state of this thread, now."""
        return cls(device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype matrix products run in for an input of `dtype`; like torch's own, autocast leaves float64 alone."""
        return self.dtype if self.enabled and dtype != torch.float64 else dtype

    def restored(self) -> Any:
        """Context with this state on again (a no-op where it was off, or still is on)."""
        if not self.enabled or AutocastState.current(self.device_type) == self:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, self.dtype)


def suspended(device_type: str) -> Any:
    """Context in which autocast does nothing for `device_type`; costs nothing where it is off already."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


@contextlib.contextmanager
def suspended_everywhere() -> Iterator[None]:
    """Context, or decorator, in which autocast does nothing, neither on the CPU nor on the accelerator."""
    accelerator = torch.accelerator.current_accelerator()
    with suspended("cpu"), suspended("cpu" if accelerator is None else accelerator.type):
        yield
