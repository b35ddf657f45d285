"""Projections with adapters whose input is dropped out, each by a mask of its own (PEFT's `lora_dropout`).

    Y_i  = X W_iᵀ + b_i + s_i (D_i(X) A_iᵀ) B_iᵀ
    dX   = Σ_i dY_i W_i + D_i(U_i A_i)                   U_i = s_i dY_i B_i
    dA_i = U_iᵀ D_i(X)        dB_i = s_i dY_iᵀ (D_i(X) A_iᵀ)

D_i masks and divides by 1 − p; it is its own adjoint, so the same kernel serves both passes (kernels/dropout.py). The
base's products, s·B and all that is saved are those of products.py: only what goes through A differs. Nothing more is
kept: masks are functions of a seed and of a token's row, and D_i(X) is made again for dA.

Bytes beyond products.py's: for each projection X read and D_i(X) written and read twice (X Aᵀ, dA), and U_i A_i
[tokens, in] written, masked and added to dX. It cannot be one product with the base's, whose X is whole.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fastft.autograd.products import JoinedProducts, Products, SeparateProducts
from fastft.autograd.projection import Projection
from fastft.kernels.nf4 import QuantizedWeight

__all__ = ["products"]


def products(group: Sequence[Projection], dtype: torch.dtype) -> Products:
    """As products.products, where one of `group` drops out its adapter's input; nothing is folded then."""
    joined = all(isinstance(projection.weight, QuantizedWeight) for projection in group)
    return _DroppedJoined(group, dtype) if joined else _DroppedSeparate(group, dtype)


class _Dropped:
    """What goes through A, projection by projection; below the stacked A_i there may be rows of padding."""

    rides_back = False
    _group: Sequence[Projection]
    _lora_a: Any
    _first = 0

    def from_row(self, first: int) -> Any:
        """The same products for rows of a batch that begin at row `first`."""
        if first == self._first:
            return self
        other = copy.copy(self)
        other._first = first
        return other

    def _adapters(self) -> Iterator[tuple[Projection, int, int]]:
        """Projections with an adapter, and which of the stacked rows are its own."""
        start = 0
        for projection in self._group:
            if projection.rank:
                yield projection, start, start + projection.rank
                start += projection.rank

    def _dropped(self, x: Tensor, projection: Projection) -> Tensor:
        return x if projection.dropout is None else projection.dropout.of(x, self._first)

    def low_rank(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """D(X) Aᵀ [tokens, rank]."""
        made = x.new_empty((x.shape[0], self._lora_a.shape[0])) if out is None else out
        end = 0
        for projection, start, end in self._adapters():
            torch.mm(self._dropped(x, projection), self._lora_a[start:end].t(), out=made[:, start:end])
        made[:, end:].zero_()
        return made

    def add_low_rank(self, grad_x: Tensor, grad_low_rank: Tensor) -> Tensor:
        """dX with every D_i(U_i A_i) added, in place."""
        for projection, start, end in self._adapters():
            share = torch.mm(grad_low_rank[:, start:end], self._lora_a[start:end])
            grad_x.add_(self._dropped(share, projection))
        return grad_x

    def grad_a(self, grad_low_rank: Tensor, x: Tensor) -> Tensor:
        """dA [rank, in]."""
        return torch.cat(
            [torch.mm(grad_low_rank[:, start:end].t(), self._dropped(x, p)) for p, start, end in self._adapters()]
        )


class _DroppedJoined(_Dropped, JoinedProducts):
    """Over 4-bit weights."""


class _DroppedSeparate(_Dropped, SeparateProducts):
    """Over dense weights."""
