"""4-bit weights (NF4, FP4) to 16 or 32 bits, as bitsandbytes stores them.

Byte j of the packed weight holds element 2j in its high nibble and 2j + 1 in its low one. A nibble names one of 16
values (`code`: NF4's quantiles of a normal, FP4's small floats; the kernel does not care which), and every `blocksize`
neighbours share one scale:

    w[i] = round(code[nibble i] · absmax[i // blocksize])

With double quantization ("nested") the scales are bytes themselves, in blocks of 256 with their own fp32 scale:

    absmax[b] = absmax_code[byte b] · absmax_scale[b // 256] + offset

Bytes: half a byte read and two written an element in bf16 (the scales add 1/64 to 1/16 of a byte), all in one launch:
the nested scales are decoded where they are used, never stored. A program takes whole blocks, [blocks, bytes of a
block], so that a scale is loaded once a block and not once an element; both tables stay in the L1 cache. The two
nibbles' results are interleaved in registers, so that the stores run along memory.

Rounding: products and the scale's sum in fp32 without fused multiply-add, as bitsandbytes rounds them, then one
rounding to the output's dtype. `offset` is read through its pointer: no host sync.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from fastft.kernels.backend import KERNEL_DTYPES, Settings, cdiv, launch, launch_on, tl, triton, uses_triton

__all__ = ["QuantizedWeight", "dequantize", "dequantize_torch", "quantized_weight"]

TILE_BYTES = 2048  # packed bytes a program: 16 a thread on 4 warps


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A 4-bit weight as bitsandbytes stores it: plain tensors, no reference to the module that holds them."""

    packed: torch.Tensor  # uint8, [n/2] or [n/2, 1]: byte j holds element 2j (high nibble) and 2j+1 (low nibble)
    absmax: torch.Tensor  # [ceil(n / blocksize)], float32, or uint8 if nested
    code: torch.Tensor  # float32 [16]: the value of each nibble
    blocksize: int
    shape: tuple[int, int]  # (out_features, in_features)
    dtype: torch.dtype  # what bitsandbytes dequantizes to
    absmax_code: torch.Tensor | None = None  # float32 [256]; None unless nested
    absmax_scale: torch.Tensor | None = None  # float32 [ceil(len(absmax) / absmax_blocksize)]
    absmax_blocksize: int = 256
    offset: torch.Tensor | None = None  # float32, 0-d

    def __post_init__(self) -> None:
        if self.blocksize < 2 or self.blocksize & (self.blocksize - 1):
            raise ValueError(
                f"QuantizedWeight: blocksize {self.blocksize} is not a power of two of at least 2, which every "
                "bitsandbytes 4-bit format uses. Was the quantization state read from another format?"
            )
        if self.packed.dtype != torch.uint8:
            raise ValueError(
                f"QuantizedWeight: packed is {self.packed.dtype}, not torch.uint8. A weight quantized with another "
                "`quant_storage` holds the same bytes: pass `packed.view(torch.uint8)`."
            )

    @property
    def nested(self) -> bool:
        """Whether the block scales are themselves 8-bit (bitsandbytes' double quantization)."""
        return self.absmax_code is not None


def quantized_weight(weight: torch.Tensor, state: Any) -> QuantizedWeight:
    """A bitsandbytes `Params4bit` and its `QuantState` as the tensors the kernel reads; nothing is copied.

    Args:
        weight: the packed weight, any storage dtype.
        state: `bitsandbytes.functional.QuantState`, read by attribute.
    """
    inner = state.state2 if state.nested else None
    return QuantizedWeight(
        packed=weight.detach().view(torch.uint8).reshape(-1),
        absmax=state.absmax,
        code=state.code,
        blocksize=int(state.blocksize),
        shape=(int(state.shape[0]), int(state.shape[1])),
        dtype=state.dtype,
        absmax_code=None if inner is None else inner.code,
        absmax_scale=None if inner is None else inner.absmax,
        absmax_blocksize=256 if inner is None else int(inner.blocksize),
        offset=None if inner is None else state.offset,
    )


def dequantize(
    weight: QuantizedWeight, dtype: torch.dtype | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The dense weight.

    Args:
        weight: the 4-bit weight.
        dtype: of the result; None is `weight.dtype`. Not looked at where `out` is given.
        out: [out_features, in_features] to write into.

    Returns:
        [out_features, in_features].
    """
    dtype = out.dtype if out is not None else weight.dtype if dtype is None else dtype
    rows, columns = weight.shape
    if not (uses_triton(weight.code) and dtype in KERNEL_DTYPES and rows * columns):
        return dequantize_torch(weight, dtype, out=out)
    if out is None:
        out = torch.empty((rows, columns), dtype=dtype, device=weight.packed.device)
    target = out if out.is_contiguous() else torch.empty((rows, columns), dtype=dtype, device=out.device)
    elements = rows * columns
    blocks = blocks_a_program(weight.blocksize)
    with launch_on(out):
        launch(
            _settings(weight.blocksize, weight.absmax_blocksize),
            (cdiv(elements, blocks * weight.blocksize),),
            target,
            weight.packed,
            weight.absmax,
            weight.code,
            weight.absmax_code,
            weight.absmax_scale,
            weight.offset,
            elements,
            (elements + 1) // 2,
        )
    return out if target is out else out.copy_(target)


def blocks_a_program(blocksize: int) -> int:
    """Quantization blocks that one program of a dequantization makes dense."""
    return max(1, TILE_BYTES // (blocksize // 2))


@functools.cache
def _settings(blocksize: int, absmax_blocksize: int) -> Settings:
    return Settings(
        _dequantize_kernel,
        ABSMAX_BLOCK=absmax_blocksize,
        BLOCKS=blocks_a_program(blocksize),
        HALF_BLOCK=blocksize // 2,
        num_warps=4,
        enable_fp_fusion=False,
    )


@triton.jit
def _dequantize_kernel(
    out,
    packed,
    absmax,
    code,
    absmax_code,
    absmax_scale,
    offset,
    elements,
    packed_bytes,
    ABSMAX_BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    """One program: BLOCKS quantization blocks of HALF_BLOCK bytes."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)  # int64: elements may pass 2**31
    block_mask = block * (2 * HALF_BLOCK) < elements
    scale = tl.load(absmax + block, mask=block_mask, other=0)
    if absmax_code is not None:
        outer = tl.load(absmax_scale + block // ABSMAX_BLOCK, mask=block_mask, other=0.0)
        scale = tl.load(absmax_code + scale.to(tl.int32)) * outer + tl.load(offset)
    byte = block[:, None] * HALF_BLOCK + tl.arange(0, HALF_BLOCK)[None, :]
    nibbles = tl.load(packed + byte, mask=byte < packed_bytes, other=0).to(tl.int32)
    high = tl.load(code + (nibbles >> 4)) * scale[:, None]
    low = tl.load(code + (nibbles & 15)) * scale[:, None]
    values = tl.interleave(high, low)  # [BLOCKS, 2 * HALF_BLOCK]
    element = block[:, None] * (2 * HALF_BLOCK) + tl.arange(0, 2 * HALF_BLOCK)[None, :]
    tl.store(out + element, values.to(out.dtype.element_ty), mask=element < elements)


def dequantize_torch(
    weight: QuantizedWeight, dtype: torch.dtype | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Plain-torch twin of `dequantize`: same arguments, same arithmetic, any device and dtype."""
    rows, columns = weight.shape
    elements = rows * columns
    # One gather per byte, not per nibble: entry b is the pair (code[b >> 4], code[b & 15]), seen as one 8-byte integer.
    pairs = torch.cartesian_prod(weight.code, weight.code).view(torch.int64).view(-1)  # [256]
    values = pairs.index_select(0, weight.packed.view(-1).int()).view(torch.float32)  # [n, or n + 1 if n is odd]
    absmax = _block_scales(weight)
    whole = elements // weight.blocksize
    body = values[: whole * weight.blocksize].view(whole, weight.blocksize)
    body *= absmax[:whole].unsqueeze(1)
    if whole < absmax.numel():
        values[whole * weight.blocksize : elements] *= absmax[whole]
    dense = values[:elements].view(rows, columns)
    return dense.to(weight.dtype if dtype is None else dtype) if out is None else out.copy_(dense)


def _block_scales(weight: QuantizedWeight) -> torch.Tensor:
    """float32 scale of each block, [ceil(n / blocksize)]."""
    if weight.absmax_code is None or weight.absmax_scale is None or weight.offset is None:
        return weight.absmax
    scales = weight.absmax_scale.repeat_interleave(weight.absmax_blocksize)[: weight.absmax.numel()]
    return weight.absmax_code[weight.absmax.int()] * scales + weight.offset
