"""Joined 4-bit weights and adapters: against the matrix spelled out, and the two products it is made for."""

from __future__ import annotations

import pytest
import torch

from fastft.kernels.join import Adapter, join, join_torch, padded_rank
from fastft.kernels.nf4 import QuantizedWeight, dequantize_torch
from tests.autograd.pieces import draw_quantized
from tests.kernels.reference import BF16_ULP, INTERPRETED, dtypes

GROUPS = {
    "query, key, value": ((24, 16, 16), (4, None, 3)),
    "one": ((8,), (2,)),
    "no adapters": ((8, 5), (None, None)),
    "ranks past one tile of columns": ((8, 40), (16, 9)),
    "more members than a launch takes": ((4, 3, 2, 5), (1, 2, 3, 4)),
}
groups = pytest.mark.parametrize("group", GROUPS)
widths = pytest.mark.parametrize("width", [32, 40, 6])  # blocks of 16: whole, ending inside a row, wider than a row


def draw(
    group: str, width: int, nested: bool = True, adapter_dtype: torch.dtype = torch.float32
) -> tuple[list[QuantizedWeight], list[Adapter | None]]:
    """Weights of random bytes and their adapters."""
    rows, ranks = GROUPS[group]
    weights = [draw_quantized(count, width, nested) for count in rows]
    adapters = [
        None
        if rank is None
        else Adapter(torch.randn(rank, width).to(adapter_dtype), torch.randn(count, rank).to(adapter_dtype), 1.7 + rank)
        for count, rank in zip(rows, ranks, strict=True)
    ]
    return weights, adapters


def spelled_out(
    weights: list[QuantizedWeight], adapters: list[Adapter | None], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """[W | sB] and A, one piece at a time."""
    rank = padded_rank(adapters)
    dense = torch.cat([dequantize_torch(w, dtype) for w in weights])
    right = torch.zeros(dense.shape[0], rank, dtype=dtype)
    below = torch.zeros(rank, dense.shape[1], dtype=dtype)
    row = column = 0
    for weight, adapter in zip(weights, adapters, strict=True):
        if adapter is not None:
            for i in range(weight.shape[0]):
                for j in range(adapter.lora_a.shape[0]):
                    right[row + i, column + j] = (adapter.lora_b[i, j].float() * adapter.scale).to(dtype)
            below[column : column + adapter.lora_a.shape[0]] = adapter.lora_a.to(dtype)
            column += adapter.lora_a.shape[0]
        row += weight.shape[0]
    return torch.cat((dense, right), 1), below


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@widths
@groups
@dtypes
def test_the_matrix_is_weights_scaled_b_and_a(group: str, width: int, nested: bool, dtype: torch.dtype) -> None:
    weights, adapters = draw(group, width, nested)
    matrix, rank = join(weights, adapters, dtype), padded_rank(adapters)
    top, below = spelled_out(weights, adapters, dtype)
    assert matrix.shape == (top.shape[0] + rank, width + rank)
    assert matrix.dtype == dtype
    for ours, theirs in ((matrix[: top.shape[0]], top), (matrix[top.shape[0] :, :width], below)):
        if INTERPRETED and dtype == torch.bfloat16:
            torch.testing.assert_close(ours, theirs, rtol=BF16_ULP, atol=0)
        else:
            assert torch.equal(ours, theirs)


@widths
@groups
@dtypes
def test_adapters_folded_into_the_weights(group: str, width: int, dtype: torch.dtype) -> None:
    """W + s·B·A, of operands in the matrix's dtype, summed in float32 and rounded once; sB and A beside it as ever."""
    weights, adapters = draw(group, width)
    matrix, joined = join(weights, adapters, dtype, fold=True), join(weights, adapters, dtype)
    rank, out = padded_rank(adapters), sum(w.shape[0] for w in weights)
    below, right = matrix[out:, :width], matrix[:out, width:]
    rtol = BF16_ULP if INTERPRETED and dtype == torch.bfloat16 else 0
    torch.testing.assert_close(right, joined[:out, width:], rtol=rtol, atol=0)
    torch.testing.assert_close(below, joined[out:, :width], rtol=rtol, atol=0)
    below, right = below.double(), right.double()
    dense = torch.cat([dequantize_torch(w, torch.float64) for w in weights])
    expected, summands = dense + right @ below, dense.abs() + right.abs() @ below.abs()
    ulp = {torch.bfloat16: BF16_ULP, torch.float16: 2**-10, torch.float32: 2**-23}[dtype]
    assert ((matrix[:out, :width].double() - expected).abs() <= ulp * expected.abs() + 2**-21 * summands).all()
    assert rank == 0 or not torch.equal(matrix[:out, :width], joined[:out, :width])


@pytest.mark.parametrize("rank", [1, 16, 17, 70])
def test_folding_any_rank(rank: int) -> None:
    """Of one tile, and of several; rows that do not fill the last tile."""
    weight = draw_quantized(70, 32, True)
    adapter = Adapter(torch.randn(rank, 32), torch.randn(70, rank), 0.7)
    matrix = join([weight], [adapter], torch.float32, fold=True)
    expected = dequantize_torch(weight, torch.float64) + 0.7 * adapter.lora_b.double() @ adapter.lora_a.double()
    torch.testing.assert_close(matrix[:70, :32].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("adapter_dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_adapters_of_another_dtype_are_cast_once(adapter_dtype: torch.dtype) -> None:
    weights, adapters = draw("query, key, value", 32, adapter_dtype=adapter_dtype)
    matrix = join(weights, adapters, torch.float32)
    top, below = spelled_out(weights, adapters, torch.float32)
    torch.testing.assert_close(matrix[: top.shape[0]], top, rtol=1e-6, atol=0)
    assert torch.equal(matrix[top.shape[0] :, :32], below)


def test_adapters_that_do_not_lie_contiguously() -> None:
    weights, adapters = draw("one", 32)
    (adapter,) = adapters
    assert adapter is not None
    strided = [Adapter(adapter.lora_a.t().contiguous().t(), adapter.lora_b.t().contiguous().t(), adapter.scale)]
    assert not strided[0].lora_a.is_contiguous()
    top, rank = weights[0].shape[0], padded_rank(adapters)
    ours, theirs = join(weights, strided, torch.float32), join(weights, adapters, torch.float32)
    assert torch.equal(ours[:top], theirs[:top])
    assert torch.equal(ours[top:, :32], theirs[top:, :32])
    assert rank == 8


def test_the_rank_is_padded_to_what_matrix_units_load() -> None:
    _, adapters = draw("query, key, value", 32)
    assert padded_rank(adapters) == 8
    assert padded_rank([None, None]) == 0
    assert padded_rank([Adapter(torch.empty(9, 4), torch.empty(4, 9), 1.0)]) == 16


def test_both_products_by_the_matrix_are_the_projections() -> None:
    """In float64, by the twin: [X | X Aᵀ] M[:out]ᵀ and [dY | dY sB] M[:, :in]."""
    weights, adapters = draw("query, key, value", 32)
    matrix, out, rank = join_torch(weights, adapters, torch.float64), 56, padded_rank(adapters)
    x, grad = torch.randn(5, 32, dtype=torch.float64), torch.randn(5, out, dtype=torch.float64)
    y = torch.cat((x, x @ matrix[out:, :32].t()), 1) @ matrix[:out].t()
    dx = torch.cat((grad, grad @ matrix[:out, 32:]), 1) @ matrix[:, :32]
    expected_y, expected_dx = [], torch.zeros_like(x)
    for weight, adapter, dy in zip(weights, adapters, grad.split([24, 16, 16], 1), strict=True):
        full = dequantize_torch(weight, torch.float64)
        if adapter is not None:
            full = full + adapter.scale * adapter.lora_b.double() @ adapter.lora_a.double()
        expected_y.append(x @ full.t())
        expected_dx += dy @ full
    torch.testing.assert_close(y, torch.cat(expected_y, 1))
    torch.testing.assert_close(dx, expected_dx)
    assert rank == 8
