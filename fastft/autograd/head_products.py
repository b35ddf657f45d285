"""The head's products, a chunk of rows at a time: logits, and back through them to rows and to the head itself.

A chunk is a byte budget of logits, not a share of tokens × vocabulary; one buffer serves all of them. A weight of
another dtype than the products' is cast in slices: a copy of a whole head would be more than the chunk. Sums over
slices or chunks are kept in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fastft.autograd.room import room

__all__ = [
    "add_head_grads",
    "add_product",
    "chunk_bytes",
    "chunk_rows",
    "chunks",
    "project",
    "project_back",
    "put_rows",
    "take_rows",
]

# Bytes of a chunk of logits: 2,048 rows of a 128,256-token vocabulary in 16 bits; on Hopper fewer rows are slower, more
# are no faster.
_CUDA_CHUNK_BYTES = 512 * 2**20
_CPU_CHUNK_BYTES = 64 * 2**20
_FEW_ROWS = 4096  # up to here in chunks of half the size (hidden 2,048 on an H200: 7.5 ms for 7.2, and half the memory)
_CAST_SLICE_BYTES = 64 * 2**20  # of a weight that has to be cast
_UPCAST_COLUMNS = 8192  # vocabulary columns per product where 16-bit operands are widened by hand


def chunk_rows(count: int, vocabulary: int, itemsize: int, device: torch.device) -> int:
    """Rows of logits that exist at once."""
    on_cpu = device.type == "cpu"
    budget, most = (_CPU_CHUNK_BYTES, 1024) if on_cpu else (_CUDA_CHUNK_BYTES, 4096)
    if not on_cpu and count <= _FEW_ROWS:
        budget //= 2
    rows = min(most, max(256, budget // (vocabulary * itemsize) // 128 * 128))
    rows = -(-count // -(-count // rows))  # even chunks: no last one of a few rows that reads the whole weight
    return min(count, -(-rows // 128) * 128)


def chunk_bytes(count: int, vocabulary: int, itemsize: int, device: torch.device) -> int:
    """Bytes of the logits that exist at once, for `count` supervised rows."""
    return chunk_rows(count, vocabulary, itemsize, device) * vocabulary * itemsize if count and vocabulary else 0


def chunks(count: int, vocabulary: int, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[int, int, Tensor]]:
    """(start, end, logits buffer [end − start, vocabulary]) over `count` rows; one buffer serves all chunks."""
    if count == 0:
        return
    rows = chunk_rows(count, vocabulary, dtype.itemsize, device)
    # Row starts on 128-byte boundaries whatever the vocabulary: matrix units and vector loads want aligned rows
    stride = -(-vocabulary // 64) * 64
    buffer = room(rows, vocabulary, stride - vocabulary, dtype, device)[:, :vocabulary]
    for start in range(0, count, rows):
        end = min(start + rows, count)
        yield start, end, buffer[: end - start]


def _weight_slices(weight: Tensor, dtype: torch.dtype) -> Iterator[tuple[int, int, Tensor]]:
    """(first row, end row, rows in `dtype`): the weight itself, or slices of it cast one at a time."""
    vocabulary, hidden = weight.shape
    if weight.dtype == dtype:
        yield 0, vocabulary, weight
        return
    step = max(1, _CAST_SLICE_BYTES // (hidden * dtype.itemsize))
    for start in range(0, vocabulary, step):
        end = min(start + step, vocabulary)
        yield start, end, weight[start:end].to(dtype)


def project(rows: Tensor, weight: Tensor, bias: Tensor | None, logits: Tensor) -> None:
    """logits = rows @ weightᵀ + bias."""
    for start, end, part in _weight_slices(weight, rows.dtype):
        if bias is None:
            torch.mm(rows, part.t(), out=logits[:, start:end])
        else:
            torch.addmm(bias[start:end].to(rows.dtype), rows, part.t(), out=logits[:, start:end])


def project_back(gradient: Tensor, weight: Tensor, out: Tensor) -> None:
    """out = gradient @ weight, accumulated in float32 and rounded once, whether or not the weight comes in slices."""
    if weight.dtype == gradient.dtype:
        torch.mm(gradient, weight, out=out)
        return
    wide = torch.float32 if gradient.dtype.itemsize < 4 else gradient.dtype
    total = torch.zeros(out.shape, dtype=wide, device=out.device)
    for start, end, part in _weight_slices(weight, gradient.dtype):
        add_product(total, gradient[:, start:end], part)
    out.copy_(total)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b without rounding the product to the operands' dtype first."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def add_head_grads(grad_weight: Tensor | None, grad_bias: Tensor | None, gradient: Tensor, rows: Tensor) -> None:
    if grad_weight is not None:
        vocabulary = gradient.shape[1]
        widened = gradient.dtype != grad_weight.dtype and not gradient.is_cuda
        step = _UPCAST_COLUMNS if widened else vocabulary
        for start in range(0, vocabulary, step):
            columns = slice(start, start + step)
            add_product(grad_weight[columns], gradient[:, columns].t(), rows)
    if grad_bias is not None:
        grad_bias.add_(gradient.sum(0, dtype=grad_bias.dtype))


def take_rows(tensor: Tensor, index: Tensor | None, start: int, end: int) -> Tensor:
    """Rows start..end of those that count."""
    return tensor[start:end] if index is None else tensor.index_select(0, index[start:end])


def put_rows(tensor: Tensor, index: Tensor | None, start: int, end: int, rows: Tensor) -> None:
    if index is None:
        tensor[start:end].copy_(rows)
    else:
        tensor.index_copy_(0, index[start:end], rows.to(tensor.dtype))
