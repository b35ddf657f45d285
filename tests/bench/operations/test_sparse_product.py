"""The sparse product's inputs, its cost, and a check that tells it from the whole product."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fastft.bench.checking import TOLERANCE, check_provider
from fastft.bench.operations import find_operation
from fastft.bench.operations.base import Inputs, Problem
from fastft.bench.operations.sparse_product import KEPT, ROW_BLOCK, THRESHOLD
from fastft.bench.registry import find_model
from fastft.kernels import sparse_product as kernel
from fastft.kernels.sparse_product import kept_columns, sparse_product_torch

ROWS = 1100  # five blocks, the last ragged; two pieces of the reference
TINY = find_model("tiny")
SPARSE = find_operation("sparse_product")
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def inputs_of(dtype: torch.dtype = torch.float32, rows: int = ROWS) -> Inputs:
    return SPARSE.draw(Problem(TINY, rows, dtype, "cpu"), torch.Generator().manual_seed(0))


def blocks_of(inputs: Inputs) -> list[Tensor]:
    return [kept_columns(block, THRESHOLD) for block in inputs.arguments["gradient"].split(ROW_BLOCK)]


def test_the_numbers_are_the_kernels_own() -> None:
    assert (THRESHOLD, ROW_BLOCK) == (kernel.THRESHOLD, kernel.ROW_BLOCK)


@dtypes
def test_every_block_keeps_its_share_and_columns_of_its_own(dtype: torch.dtype) -> None:
    kept = blocks_of(inputs_of(dtype))
    assert [len(columns) for columns in kept] == [round(KEPT * TINY.vocabulary)] * 5
    assert len({tuple(columns.tolist()) for columns in kept}) == 5


@dtypes
@pytest.mark.parametrize("provider", ["fastft", "torch"])
def test_each_is_right_by_its_own_measure_and_wrong_by_the_others(provider: str, dtype: torch.dtype) -> None:
    inputs, function = inputs_of(dtype), SPARSE.load(provider, "forward")
    other = "torch" if provider == "fastft" else "fastft"
    assert check_provider(SPARSE, provider, function, inputs, 0.0)[1] < TOLERANCE[dtype]
    assert check_provider(SPARSE, other, function, inputs, 0.0)[1] > TOLERANCE[dtype]


@pytest.mark.parametrize("wrong", ["threshold", "columns of the first block"])
def test_wrong_columns_are_seen(wrong: str) -> None:
    inputs = inputs_of(torch.bfloat16)

    def function(gradient: Tensor, weight: Tensor) -> Tensor:
        out = gradient.new_empty(len(gradient), weight.shape[1])
        if wrong == "threshold":
            return sparse_product_torch(gradient, weight, 64 * THRESHOLD, out=out)
        first = kept_columns(gradient[:ROW_BLOCK], THRESHOLD)
        return gradient[:, first] @ weight[first]

    assert check_provider(SPARSE, "fastft", function, inputs, 0.0)[1] > TOLERANCE[torch.bfloat16]


def test_no_peer_is_left_to_be_compared_with_the_sparse_product() -> None:
    assert set(SPARSE.provider_names()) - {"fastft"} == set(SPARSE.checks)


@pytest.mark.parametrize("rows", [80, ROWS])
def test_the_cost_is_that_of_what_is_kept(rows: int) -> None:
    inputs = inputs_of(rows=rows)
    gradient, weight = inputs.arguments.values()
    kept = blocks_of(inputs)
    with FlopCounterMode(display=False) as counter:
        blocks = zip(gradient.split(ROW_BLOCK), kept, strict=True)
        out = torch.cat([block[:, columns] @ weight[columns] for block, columns in blocks])
    cost = SPARSE.cost(TINY, rows, 4, "forward")
    assert cost is not None
    assert cost.flops == counter.get_total_flops()
    head_rows = weight[torch.cat(kept).unique()]
    assert cost.bytes == pytest.approx(gradient.nbytes + head_rows.nbytes + out.nbytes, rel=0.01)
