"""What a 16-bit product of oneDNN may read behind a row is zero, never what was in memory before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fastft.autograd import head_products
from fastft.autograd.linear_cross_entropy import linear_cross_entropy
from fastft.autograd.products import products
from tests.autograd.pieces import draw_projection


@pytest.fixture
def memory_full_of_nan() -> Iterator[None]:
    """torch.empty fills with NaN, as it does under deterministic algorithms."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def behind(rows: Tensor, columns: int) -> Tensor:
    """What lies in memory behind the first `columns` of each row."""
    stride = rows.stride(0)
    return rows.as_strided((rows.shape[0], stride), (stride, 1))[:, columns:]


@pytest.mark.usefixtures("memory_full_of_nan")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_behind_the_logits_is_zero(dtype: torch.dtype) -> None:
    (_, _, logits), *_ = head_products.chunks(5, 97, dtype, torch.device("cpu"))
    assert logits.isnan().all(), "the fixture fills nothing"
    assert behind(logits, 97).shape == (logits.shape[0], 31)
    assert not behind(logits, 97).any()


@pytest.mark.usefixtures("memory_full_of_nan")
def test_the_rooms_of_a_joined_product_begin_with_zeros_for_the_adapters() -> None:
    made = products([draw_projection(97, 64, rank=4, quantized="nested")], torch.bfloat16)
    for buffer, columns in ((made.input_room(5), 64), (made.grad_room(5), 97)):
        assert made.columns > 0
        assert buffer.shape == (5, columns + made.columns)
        assert buffer[:, :columns].isnan().all()
        assert not buffer[:, columns:].any()


@pytest.mark.usefixtures("memory_full_of_nan")
@pytest.mark.parametrize("vocabulary", [97, 128, 994])
def test_gradients_are_finite_whatever_the_vocabulary(vocabulary: int) -> None:
    """On a CPU with AMX, rows of the hidden states' gradient were NaN."""
    hidden = torch.randn(300, 64, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, 64, dtype=torch.bfloat16)
    linear_cross_entropy(hidden, weight, torch.randint(vocabulary, (300,))).backward()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()
