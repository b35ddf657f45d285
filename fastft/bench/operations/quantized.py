"""NF4 weights with double quantization, as bitsandbytes makes them, and each side's view of the same bytes."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

__all__ = ["QuantizedInput", "dequantize_eager", "fastft_weight", "quantize", "quantized_bytes"]

_BLOCK, _OUTER_BLOCK = 64, 256


@dataclass(frozen=True, eq=False)  # hashed by identity: views of it are cached
class QuantizedInput:
    """bitsandbytes' packed weight [n / 2, 1] and its `QuantState`; stands for [out, in]."""

    packed: Tensor
    state: Any

    @property
    def nbytes(self) -> int:
        """Of the packed weight; its scales are a few per cent more."""
        return self.packed.nbytes


def quantize(dense: Tensor) -> QuantizedInput:
    """NF4 in blocks of 64, the scales quantized too.

    Raises:
        ImportError: bitsandbytes is not installed.
    """
    packed, state = import_module("bitsandbytes.functional").quantize_4bit(
        dense, blocksize=_BLOCK, quant_type="nf4", compress_statistics=True
    )
    return QuantizedInput(packed, state)


def fastft_weight(weight: QuantizedInput) -> Any:
    """The same tensors as a `fastft.functional.QuantizedWeight`."""
    state = weight.state
    return import_module("fastft.functional").QuantizedWeight(
        packed=weight.packed.view(torch.uint8).reshape(-1),
        absmax=state.absmax,
        code=state.code,
        blocksize=state.blocksize,
        shape=tuple(state.shape),
        dtype=state.dtype,
        absmax_code=state.state2.code,
        absmax_scale=state.state2.absmax,
        absmax_blocksize=state.state2.blocksize,
        offset=state.offset,
    )


def dequantize_eager(weight: QuantizedInput) -> Tensor:
    """The dense weight in its own dtype, in plain torch: a table look-up, two levels of scales, one rounding."""
    state, packed = weight.state, weight.packed.view(-1)
    outer = state.state2
    scales = outer.code[state.absmax.int()].view(-1)
    scales = scales * outer.absmax.repeat_interleave(outer.blocksize)[: scales.numel()] + state.offset
    nibbles = torch.stack((packed >> 4, packed & 15), -1).view(-1)
    values = state.code[nibbles.int()].view(-1, state.blocksize) * scales[:, None]
    return values.view(*state.shape).to(state.dtype)


def quantized_bytes(elements: int) -> float:
    """Bytes of an NF4 weight with double quantization: half a byte an element, and the two levels of scales."""
    return elements * (0.5 + 1 / _BLOCK + 4 / (_BLOCK * _OUTER_BLOCK))
