"""Seeing a tensor of any rank as rows [rows, width] one stride apart, which is how the row kernels address memory."""

from __future__ import annotations

import torch

__all__ = ["input_rows", "output_rows", "store_rows"]


def input_rows(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` [..., width] as [rows, width] with a contiguous last dimension: a view where its strides allow one."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def output_rows(out: torch.Tensor) -> torch.Tensor:
    """`out` [..., width] as [rows, width] to write into, or a fresh buffer where its strides allow no such view.

    Hand what comes back to `store_rows`, which carries a fresh buffer over into `out`.
    """
    width = out.shape[-1]
    if out.stride(-1) == 1:
        try:
            return out.view(-1, width)
        except RuntimeError:  # dimensions that cannot be merged, such as a transposed batch: written through a copy
            pass
    return torch.empty((out.numel() // width, width), dtype=out.dtype, device=out.device)


def store_rows(rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`out`, holding what a kernel wrote into `rows = output_rows(out)`."""
    return out if rows.data_ptr() == out.data_ptr() else out.copy_(rows.view(out.shape))
