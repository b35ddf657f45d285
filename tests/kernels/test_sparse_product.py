"""The sparse product: which columns are kept, what comes out of them, and that nothing else does."""

from __future__ import annotations

import pytest
import torch

from fastft.kernels.sparse_product import ROW_BLOCK, kept_columns, sparse_product, sparse_product_torch, tile_for
from tests.kernels.reference import (
    assert_as_good_as_stock,
    assert_same,
    dtypes,
    interpreted_only,
    relative_error,
    sparse_rows,
)

THRESHOLD = 2.0**-16


def make_gradient(
    rows: int, vocabulary: int, dtype: torch.dtype = torch.bfloat16, kept: float = 0.3, padding: int = 7
) -> torch.Tensor:
    """Entries below 2⁻¹⁷, but one random row's in `kept` of each block's columns; NaN in the rows' padding."""
    storage = torch.full((rows, vocabulary + padding), float("nan"), dtype=dtype)
    gradient = storage[:, :vocabulary]
    gradient.copy_((torch.rand(rows, vocabulary) * 2 - 1) * THRESHOLD / 2)
    for block in gradient.split(ROW_BLOCK):
        columns = torch.arange(vocabulary)[torch.rand(vocabulary) < kept]
        block[torch.randint(0, block.shape[0], columns.shape), columns] = (0.5 + torch.rand(columns.shape)).to(dtype)
    return gradient


def kept_part(gradient: torch.Tensor, threshold: float = THRESHOLD) -> torch.Tensor:
    """The whole gradient in float64 with zeros in the columns that are left out, judged entry by entry."""
    part = gradient.double().clone()
    for start in range(0, gradient.shape[0], ROW_BLOCK):
        block = part[start : start + ROW_BLOCK]
        largest = torch.tensor([max(map(abs, column)) for column in block.t().tolist()], dtype=torch.float64)
        block[:, largest <= threshold] = 0.0
    return part


def assert_is_the_product_of_what_is_kept(
    gradient: torch.Tensor,
    weight_dtype: torch.dtype | None = None,
    hidden: int = 40,
) -> None:
    weight = torch.randn(gradient.shape[1], hidden).to(weight_dtype or gradient.dtype)
    part = kept_part(gradient)
    out = torch.full((gradient.shape[0], hidden), float("nan"), dtype=gradient.dtype)
    used = weight.to(gradient.dtype)
    stock, reference = part.to(gradient.dtype) @ used, part @ used.double()
    assert sparse_product(gradient, weight, THRESHOLD, out=out) is out
    if gradient.dtype.itemsize == 2:
        assert_as_good_as_stock(out, stock, reference)
    else:  # stock's sums over zeros are in another order, and which is nearer is chance
        assert relative_error(out, reference) < 4 * torch.finfo(gradient.dtype).eps


@dtypes
@pytest.mark.parametrize(
    ("rows", "vocabulary"), [(256, 1024), (300, 97), (31, 131)], ids=["whole block", "ragged block", "part of a block"]
)
def test_the_kept_columns_product_is_as_good_as_stock(dtype: torch.dtype, rows: int, vocabulary: int) -> None:
    assert_is_the_product_of_what_is_kept(make_gradient(rows, vocabulary, dtype))


def test_twin_and_kernel_agree() -> None:
    gradient, weight = make_gradient(300, 200), torch.randn(200, 24).bfloat16()
    outs = [torch.empty(300, 24, dtype=torch.bfloat16) for _ in range(2)]
    sparse_product_torch(gradient, weight, THRESHOLD, out=outs[0])
    sparse_product(gradient, weight, THRESHOLD, out=outs[1])
    assert relative_error(outs[1], outs[0]) < 2.0**-7


def test_float64_takes_the_twin_and_keeps_its_input() -> None:
    gradient = make_gradient(300, 97, torch.float64)
    before = gradient.clone()
    assert_is_the_product_of_what_is_kept(gradient)
    assert torch.equal(gradient, before)


def test_a_kept_entry_is_strictly_above_the_threshold_whatever_its_sign() -> None:
    above = torch.tensor(THRESHOLD, dtype=torch.bfloat16) * 1.0078125  # the next bfloat16
    gradient = torch.zeros(300, 8, dtype=torch.bfloat16)
    gradient[3, 1], gradient[3, 2], gradient[3, 3] = THRESHOLD, above, -above
    gradient[299, 4], gradient[299, 5] = -THRESHOLD, float("nan")
    assert kept_columns(gradient[:256], THRESHOLD).tolist() == [2, 3]
    assert kept_columns(gradient[256:], THRESHOLD).tolist() == [5]
    out = torch.empty(300, 8, dtype=torch.bfloat16)
    sparse_product(gradient, torch.eye(8).bfloat16(), THRESHOLD, out=out)
    assert out[3].tolist() == [0.0, 0.0, above.item(), -above.item(), 0.0, 0.0, 0.0, 0.0]
    assert not out[:256].isnan().any()
    assert out[299].isnan().any()  # not lost: a NaN in the loss must reach the optimizer


def test_blocks_that_keep_all_or_nothing() -> None:
    gradient = torch.zeros(3 * ROW_BLOCK, 97, dtype=torch.float32)
    gradient[ROW_BLOCK : 2 * ROW_BLOCK] = torch.randn(ROW_BLOCK, 97)
    weight = torch.randn(97, 33)
    expected = gradient @ weight
    out = torch.full((3 * ROW_BLOCK, 33), float("nan"))
    sparse_product(gradient, weight, 0.0, out=out)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert torch.count_nonzero(out[:ROW_BLOCK]) == torch.count_nonzero(out[2 * ROW_BLOCK :]) == 0


def test_each_block_has_its_own_columns() -> None:
    """A column kept in one block is dropped in the next; the error stays below threshold · Σ|W| over the dropped."""
    gradient, weight = make_gradient(600, 97, torch.float32, kept=0.5), torch.randn(97, 16)
    whole, blocks = gradient.double() @ weight.double(), gradient.clone().split(ROW_BLOCK)
    kept = [kept_columns(block, THRESHOLD).tolist() for block in blocks]
    assert kept[0] != kept[1] != kept[2]
    out = torch.empty(600, 16)
    sparse_product(gradient, weight, THRESHOLD, out=out)
    for error, columns in zip((out.double() - whole).abs().split(ROW_BLOCK), kept, strict=True):
        dropped = [column for column in range(97) if column not in columns]
        bound = THRESHOLD * weight[dropped].abs().sum(0)
        assert (error <= bound + 1e-6).all()
        assert error.max() > bound.max() / 1000  # something was dropped


@pytest.mark.parametrize("padding", [0, 4, 27], ids=["dense", "odd stride", "stride of 8s"])
def test_what_lies_behind_a_row_never_comes_in(padding: int) -> None:
    """The operator's rows end before their stride does, in memory that nobody has written (NaN here)."""
    assert_is_the_product_of_what_is_kept(make_gradient(40, 101, torch.float32, kept=1.0, padding=padding))


def test_a_head_of_another_dtype_is_cast_as_it_is_read() -> None:
    assert_is_the_product_of_what_is_kept(make_gradient(40, 97), weight_dtype=torch.float32)


def test_a_weight_of_any_strides() -> None:
    gradient, weight = make_gradient(40, 97, torch.float32), torch.randn(16, 97).t()
    out, expected = torch.empty(40, 16), kept_part(gradient) @ weight.double()
    sparse_product(gradient, weight, THRESHOLD, out=out)
    assert relative_error(out, expected) < 1e-6


def test_two_runs_are_bit_equal_and_no_rows_are_no_work() -> None:
    gradient, weight = make_gradient(300, 97), torch.randn(97, 40).bfloat16()
    outs = [torch.empty(300, 40, dtype=torch.bfloat16) for _ in range(2)]
    for out in outs:
        sparse_product(gradient.clone(), weight, THRESHOLD, out=out)
    assert_same(*outs)
    sparse_product(gradient[:0], weight, THRESHOLD, out=outs[0][:0])


def test_rows_beyond_two_to_the_31_elements() -> None:
    """C17: the third row begins at 2**31."""
    gradient = sparse_rows(3, 40)
    assert_is_the_product_of_what_is_kept(gradient)


@interpreted_only
@pytest.mark.parametrize(("stride", "end"), [(33, 25), (40, 32)])
def test_at_most_seven_elements_behind_a_row_are_written(stride: int, end: int) -> None:
    """And none where the stride has no room for whole loads anyway."""
    storage = torch.full((5, stride), 7.0)
    gradient = storage[:, :25]
    gradient.copy_(torch.randn(5, 25))
    sparse_product(gradient, torch.randn(25, 16), 0.0, out=torch.empty(5, 16))
    assert (storage[:, end:] == 7.0).all()
    assert not (storage[:, 25:end] == 7.0).any()


def test_tiles_divide_a_block_of_rows() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for capability in (None, (7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
            assert ROW_BLOCK % tile_for(dtype, capability).rows == 0
