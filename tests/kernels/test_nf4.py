"""4-bit dequantization against bitsandbytes and, where its CPU kernel is wrong, the format spelled out."""

from __future__ import annotations

import bitsandbytes.functional as bnb
import pytest
import torch

from fastft.kernels.nf4 import QuantizedWeight, dequantize
from tests.kernels.reference import BF16_ULP, INTERPRETED, dtypes

quant_types = pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
nested = pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])


def quantize(
    rows: int,
    columns: int,
    *,
    quant_type: str = "nf4",
    nested: bool = False,
    blocksize: int = 64,
    dtype: torch.dtype = torch.float32,
) -> tuple[QuantizedWeight, torch.Tensor, bnb.QuantState]:
    """A random matrix in 4 bits by bitsandbytes: ours, its packed bytes, its state. Blocks differ in scale."""
    dense = torch.randn(rows, columns) * torch.logspace(-2, 1, rows).unsqueeze(1)
    packed, state = bnb.quantize_4bit(
        dense.to(dtype), blocksize=blocksize, quant_type=quant_type, compress_statistics=nested
    )
    weight = QuantizedWeight(
        packed=packed,
        absmax=state.absmax,
        code=state.code,
        blocksize=state.blocksize,
        shape=(rows, columns),
        dtype=state.dtype,
        absmax_code=state.state2.code if nested else None,
        absmax_scale=state.state2.absmax if nested else None,
        absmax_blocksize=state.state2.blocksize if nested else 0,
        offset=state.offset if nested else None,
    )
    return weight, packed, state


def spelled_out(weight: QuantizedWeight) -> torch.Tensor:
    """The format, one element at a time, in fp32."""
    code, packed = weight.code.tolist(), weight.packed.flatten().tolist()
    scales = weight.absmax
    if weight.nested:
        outer = torch.tensor([i // weight.absmax_blocksize for i in range(len(weight.absmax))])
        scales = weight.absmax_code[weight.absmax.long()] * weight.absmax_scale[outer] + weight.offset
    rows, columns = weight.shape
    values = []
    for i in range(rows * columns):
        byte = packed[i // 2]
        values.append(code[byte >> 4 if i % 2 == 0 else byte & 15])
    blocks = torch.tensor([i // weight.blocksize for i in range(rows * columns)])
    return (torch.tensor(values) * scales[blocks]).view(rows, columns)


def assert_dequantized(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit-equal; in the interpreter, one ulp for bf16."""
    assert actual.dtype == expected.dtype
    assert expected.norm() > 0
    if INTERPRETED and actual.dtype == torch.bfloat16:
        torch.testing.assert_close(actual, expected, rtol=BF16_ULP, atol=0)
    else:
        assert torch.equal(actual, expected)


@quant_types
@nested
@dtypes
@pytest.mark.parametrize("shape", [(64, 64), (5, 128), (33, 192), (7, 100)], ids=str)
def test_equals_bitsandbytes(quant_type: str, nested: bool, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Where bitsandbytes' CPU kernel is right: in_features a multiple of 64, or not one of 16."""
    weight, packed, state = quantize(*shape, quant_type=quant_type, nested=nested, dtype=dtype)
    assert_dequantized(dequantize(weight), bnb.dequantize_4bit(packed, state))


@nested
@dtypes
@pytest.mark.parametrize("shape", [(6, 16), (11, 48), (8, 96), (9, 7), (97, 13), (1, 1)], ids=str)
def test_equals_the_format_spelled_out(nested: bool, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Where bitsandbytes' CPU kernel is wrong (in_features 16, 48, 96), and for odd numbers of elements."""
    weight, _, _ = quantize(*shape, nested=nested)
    assert_dequantized(dequantize(weight, dtype), spelled_out(weight).to(dtype))


@nested
@pytest.mark.parametrize("blocksize", [32, 64, 128, 256, 512, 1024, 2048, 4096])
def test_every_block_size(nested: bool, blocksize: int) -> None:
    """The last block is never whole; three programs and more at most sizes."""
    weight, _, _ = quantize(99, 91, nested=nested, blocksize=blocksize)
    assert_dequantized(dequantize(weight), spelled_out(weight))


def test_more_scales_than_one_nested_block() -> None:
    """256 scales share one outer scale; here are 338, so a wrong outer index shows."""
    weight, _, _ = quantize(208, 104, nested=True)
    assert weight.absmax_scale is not None
    assert weight.absmax_scale.numel() == 2
    assert_dequantized(dequantize(weight), spelled_out(weight))


@dtypes
def test_out_is_written(dtype: torch.dtype) -> None:
    weight, _, _ = quantize(9, 26, nested=True)
    expected = dequantize(weight, dtype)
    out = torch.empty(9, 26, dtype=dtype)
    assert dequantize(weight, out=out) is out
    assert torch.equal(out, expected)
    strided = torch.zeros(9, 40, dtype=dtype)
    assert torch.equal(dequantize(weight, out=strided[:, :26]), expected)
    assert not strided[:, 26:].any()


def test_dtype_defaults_to_the_weights_own() -> None:
    weight, _, _ = quantize(4, 64, dtype=torch.float16)
    assert dequantize(weight).dtype == torch.float16
    assert dequantize(weight, torch.float64).dtype == torch.float64


def test_flat_and_column_packed_bytes_are_one() -> None:
    weight, packed, state = quantize(8, 64)
    flat = QuantizedWeight(packed.flatten(), state.absmax, state.code, 64, (8, 64), torch.float32)
    assert torch.equal(dequantize(flat), dequantize(weight))


def test_weights_of_another_format_are_refused() -> None:
    weight, packed, state = quantize(8, 64)
    with pytest.raises(ValueError, match="blocksize 48 is not a power of two"):
        QuantizedWeight(packed, state.absmax, state.code, 48, (8, 64), torch.float32)
    with pytest.raises(ValueError, match=r"packed\.view\(torch\.uint8\)"):
        QuantizedWeight(weight.packed.view(torch.int8), state.absmax, state.code, 64, (8, 64), torch.float32)
