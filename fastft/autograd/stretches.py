"""Tensors as the stretches of memory they lie in, each once, and as views of these again.

What a layer saves are views: Q, K and V of one product's output, attention's output under two shapes. To move them
elsewhere and back, move the memory, not the views.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Views", "stretches"]


class _View(NamedTuple):
    """A tensor: in which stretch, and how."""

    stretch: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Views:
    """How tensors lie in stretches of memory; no memory itself."""

    views: tuple[_View | None, ...]

    def over(self, moved: Sequence[Tensor]) -> list[Tensor | None]:
        """The tensors again, as views of `moved`: copies of the stretches `[elements]`, in their order."""
        return [None if v is None else moved[v.stretch].as_strided(v.shape, v.stride, v.offset) for v in self.views]


def stretches(tensors: Sequence[Tensor | None]) -> tuple[list[Tensor], Views]:
    """Every storage that `tensors` lie in, once and whole, and how they lie there.

    Args:
        tensors: of any shape; those that share a storage share a dtype.

    Returns:
        The storages as tensors `[elements]`, and the views.
    """
    found: dict[int, int] = {}
    whole: list[Tensor] = []
    views: list[_View | None] = []
    for tensor in tensors:
        if tensor is None:
            views.append(None)
            continue
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in found:
            found[storage.data_ptr()] = len(whole)
            whole.append(tensor.as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0))
        place = found[storage.data_ptr()]
        views.append(_View(place, tensor.shape, tensor.stride(), tensor.storage_offset()))
    return whole, Views(tuple(views))
