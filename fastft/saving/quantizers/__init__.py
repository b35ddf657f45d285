"""Quantizers of GGUF's block types, in torch, some rows at a time on every core.

The K-quants (q2_k … q6_k) are ours. With importance weights the older types (q4_0 … q5_1) are ours too. Without them
those, and f32 … q8_0 always, are the `gguf` library's, bit by bit what llama.cpp writes.

Each squared difference has a weight: the importance of its column where that was measured (`importance.py`). Where not,
what is large in its block counts more, by llama.cpp's rule of thumb 1 + |x| / σ. That costs a little of the plain error
and gains perplexity: SmolLM2 with all projections in q4_k, 10.1 without the rule and 9.8 with it; in q3_k 17.8 and 16.9
(llama.cpp's own quantizer: 9.8 and 17.9). With importance the rule only harms: q4_0, 9.5 without it and 9.6 with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy
import torch
from torch import Tensor

from fastft.saving.quantizers.affine import quantize_q2_k, quantize_q4_k, quantize_q5_k
from fastft.saving.quantizers.plain import quantize_q4_0, quantize_q4_1, quantize_q5_0, quantize_q5_1
from fastft.saving.quantizers.symmetric import quantize_q3_k, quantize_q6_k
from fastft.saving.workers import in_order

__all__ = ["quantize", "quantized_pieces"]

_Quantizer = Callable[[Tensor, Tensor], Tensor]
_K_QUANTS: dict[str, _Quantizer] = {
    "q2_k": quantize_q2_k,
    "q3_k": quantize_q3_k,
    "q4_k": quantize_q4_k,
    "q5_k": quantize_q5_k,
    "q6_k": quantize_q6_k,
}
_PLAIN: dict[str, _Quantizer] = {
    "q4_0": quantize_q4_0,
    "q4_1": quantize_q4_1,
    "q5_0": quantize_q5_0,
    "q5_1": quantize_q5_1,
}
_PIECE = 2**17  # weights that a thread works on at a time


def quantize(tensor: Tensor, kind: str, importance: Tensor | None = None) -> numpy.ndarray:
    """`tensor` in a GGUF type.

    Args:
        tensor: floating point, [..., columns], on the CPU.
        kind: "f32", "f16", "bf16", "q8_0", "q4_0", …, "q2_k", …; the columns are a multiple of its block size.
        importance: of the columns' squared errors, ≥ 0, [columns]; all zero counts as none. f32 to q8_0 need none.

    Returns:
        numpy [..., bytes of a row] uint8; float32 or float16 [..., columns] for "f32" and "f16".

    Raises:
        ValueError: inf or NaN, weights too large for float16 scales, or `importance` that does not fit.
    """
    data: numpy.ndarray = numpy.concatenate(list(quantized_pieces(tensor, kind, importance)))
    return data.reshape(*tensor.shape[:-1], -1)


def quantized_pieces(tensor: Tensor, kind: str, importance: Tensor | None = None) -> Iterator[numpy.ndarray]:
    """`quantize`, some rows after others: memory holds a few pieces and not the result. Arguments are checked at once.

    Returns:
        Of numpy [rows, …] as `quantize` gives them, together all rows.
    """
    import gguf

    stored = gguf.GGMLQuantizationType[kind.upper()]
    columns = tensor.shape[-1]
    if importance is not None:
        importance = _checked(importance, columns)
    size = gguf.GGML_QUANT_SIZES[stored][0]
    if columns % size:
        raise ValueError(f"{kind} needs rows that are a multiple of {size}; these have {columns} columns.")
    matrix = tensor.detach().reshape(-1, columns)
    pieces = matrix.split(max(1, _PIECE // max(1, columns)))
    return in_order(lambda piece: _quantized(piece, kind, importance), pieces)


def _quantized(piece: Tensor, kind: str, importance: Tensor | None) -> numpy.ndarray:
    """Some rows, [rows, columns]; `importance` with mean 1."""
    import gguf

    stored = gguf.GGMLQuantizationType[kind.upper()]
    function = _K_QUANTS.get(kind) or (_PLAIN.get(kind) if importance is not None else None)
    if function is None:
        data: numpy.ndarray = gguf.quantize(piece.float().contiguous().numpy(), stored)
        return data
    part = piece.float()
    if not bool(torch.isfinite(part).all()):
        raise ValueError(f"a tensor holds inf or NaN and cannot be written as {kind}: look at the training run.")
    blocks = part.reshape(-1, gguf.GGML_QUANT_SIZES[stored][0])
    weight = _magnitudes(blocks) if importance is None else importance.expand_as(part).reshape(blocks.shape)
    return function(blocks, weight).view(len(part), -1).numpy()


def _magnitudes(blocks: Tensor) -> Tensor:
    """1 + |x| / σ: what is large in its (super-)block counts more. 1 in blocks of zeros."""
    deviation = blocks.square().mean(1, keepdim=True).sqrt_().clamp_min_(1e-30)
    return (blocks.abs() / deviation).add_(1)


def _checked(importance: Tensor, columns: int) -> Tensor | None:
    """Importance with mean 1, and no column without any; None if all are zero.

    Raises:
        ValueError: the wrong shape, or a number that is negative or not finite.
    """
    if tuple(importance.shape) != (columns,):
        raise ValueError(f"importance is {tuple(importance.shape)}, and the tensor has {columns} columns.")
    if not bool((importance >= 0).all()) or not bool(torch.isfinite(importance).all()):
        raise ValueError("importance must be finite and not negative.")
    mean = importance.double().mean()
    return (importance.double() / mean).float().clamp_min(1e-4) if mean > 0 else None
