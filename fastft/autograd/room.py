"""Buffers whose rows are longer than what a product reads of them.

oneDNN's 16-bit product for CPUs with AMX (torch 2.13) takes a row's inner dimension in blocks of 32 and, where its left
operand's rows lie further apart than they are long, reads the rest of the last block from what lies behind the row. It
multiplies that by zeros, which takes anything away but NaN and infinity: behind an uninitialized buffer's rows those
come and go, and with them NaN in a few rows of the result. So on a CPU what lies behind is zero from the start. cuBLAS
reads nothing there.
"""

from __future__ import annotations

import torch
from torch import Tensor


def room(rows: int, columns: int, more: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[rows, columns + more], of which the caller fills the first `columns`; on a CPU the rest is zero until filled."""
    buffer = torch.empty((rows, columns + more), dtype=dtype, device=device)
    if more and buffer.device.type == "cpu":
        buffer[:, columns:].zero_()
    return buffer
