"""One linear map with a low-rank adapter, as it stands at a call: plain data for products.py and lora_linear.py.

Y = X Wᵀ + b + s (X Aᵀ) Bᵀ      X [tokens, in], W [out, in], A [rank, in], B [out, rank]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastft.kernels.dropout import dropout
from fastft.kernels.nf4 import QuantizedWeight, dequantize

LEAVES = 4  # tensors a projection can train: weight, bias, lora_a, lora_b


@dataclass(frozen=True, slots=True)
class Dropout:
    """Dropout of an adapter's input, as drawn for this call: the same rows are masked the same way whenever asked.

    Args:
        p: share of the entries that are zero, in (0, 1).
        seed: `[1]` int64 on the device.
        stream: keeps apart projections that share a seed.
    """

    p: float
    seed: Tensor
    stream: int

    def of(self, x: Tensor, first_row: int = 0) -> Tensor:
        """`x` `[tokens, in]` dropped, or a gradient of it; `first_row`: the number of its first token in the batch."""
        return dropout(x, self.p, self.seed, stream=self.stream, first_row=first_row)


@dataclass(slots=True)
class Projection:
    """One linear map as it stands at this call.

    Args:
        weight: `[out, in]`, dense of any float dtype, or 4-bit.
        bias: `[out]` or None.
        lora_a: `[rank, in]` or None (no adapter).
        lora_b: `[out, rank]` or None.
        scale: what PEFT calls `scaling` (alpha / r, or alpha / sqrt(r) with rsLoRA).
        fold: let W + s·B·A be rounded once and used as one weight, where W is 4-bit (kernels/fold.py).
        dropout: of the adapter's input, or None.
    """

    weight: Tensor | QuantizedWeight
    bias: Tensor | None = None
    lora_a: Tensor | None = None
    lora_b: Tensor | None = None
    scale: float = 1.0
    fold: bool = False
    dropout: Dropout | None = None

    @property
    def out_features(self) -> int:
        """Rows of the base weight."""
        return int(self.weight.shape[0])

    @property
    def rank(self) -> int:
        """Rank of the adapter, 0 without one."""
        return 0 if self.lora_a is None else int(self.lora_a.shape[0])

    def leaves(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """The tensors a gradient can flow to: what a Function takes as arguments. A frozen base weight is not one."""
        weight = self.weight if isinstance(self.weight, Tensor) and self.weight.requires_grad else None
        bias = self.bias if self.bias is not None and self.bias.requires_grad else None
        return weight, bias, self.lora_a, self.lora_b

    def with_leaves(self, leaves: Sequence[Tensor | None]) -> Projection:
        """The same projection over `leaves` as autograd hands them back."""
        weight, bias, lora_a, lora_b = leaves
        return replace(
            self,
            weight=self.weight if weight is None else weight,
            bias=self.bias if bias is None else bias,
            lora_a=lora_a,
            lora_b=lora_b,
        )

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The base weight `[out, in]` in `dtype`: dequantized, or cast where it must be."""
        if isinstance(self.weight, Tensor):
            return self.weight if self.weight.dtype == dtype else self.weight.to(dtype)
        return dequantize(self.weight, dtype)


def flatten_leaves(group: Sequence[Projection]) -> list[Tensor | None]:
    """The leaves of a group, `LEAVES` per projection."""
    return [leaf for projection in group for leaf in projection.leaves()]


def restore_leaves(group: Sequence[Projection], leaves: Sequence[Tensor | None]) -> list[Projection]:
    """The group over leaves as autograd hands them back."""
    return [p.with_leaves(leaves[LEAVES * i : LEAVES * (i + 1)]) for i, p in enumerate(group)]
