"""Seeing a tensor of any rank as rows [rows, width], which is how the row kernels address memory.

They want an address and how far apart the rows are. So a tensor that lies as rows do is handed on as it is, with its
stride: a view of another shape costs the host as much as all the rest of a launch's arguments.
"""

from __future__ import annotations

import torch

__all__ = ["input_rows", "output_rows", "store_rows"]


def input_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """What holds the rows of `tensor` [..., width], and how many elements apart they begin.

    `tensor` itself or a view where its strides allow one, else a contiguous copy.
    """
    if tensor.is_contiguous():
        return tensor, tensor.shape[-1]
    if tensor.dim() == 2 and tensor.stride(1) == 1:
        return tensor, tensor.stride(0)
    rows = tensor.reshape(-1, tensor.shape[-1])
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    return rows, rows.stride(0)


def output_rows(out: torch.Tensor) -> tuple[torch.Tensor, int]:
    """As `input_rows`, to write into: a fresh buffer where `out`'s strides allow no view.

    Hand the tensor that comes back to `store_rows`, which carries a fresh buffer over into `out`.
    """
    width = out.shape[-1]
    if out.is_contiguous():
        return out, width
    if out.stride(-1) == 1:
        if out.dim() == 2:
            return out, out.stride(0)
        try:
            rows = out.view(-1, width)
        except RuntimeError:  # dimensions that cannot be merged, such as a transposed batch: written through a copy
            pass
        else:
            return rows, rows.stride(0)
    return torch.empty((out.numel() // width, width), dtype=out.dtype, device=out.device), width


def store_rows(rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`out`, holding what a kernel wrote into the tensor that `output_rows(out)` gave."""
    return out if rows is out or rows.data_ptr() == out.data_ptr() else out.copy_(rows.view(out.shape))
