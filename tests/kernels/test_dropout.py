"""Dropout by seed and place: Philox's own numbers, the same mask whoever asks, and what a mask must be."""

from __future__ import annotations

import pytest
import torch

from fastft.kernels.dropout import _philox, dropout, dropout_torch
from tests.kernels.reference import assert_same, dtypes, interpreted_only, sparse_rows

SEED = torch.tensor([0x1234_5678_9ABC_DEF0])


def mask(rows: int, width: int, p: float, seed: torch.Tensor = SEED, **place: int) -> torch.Tensor:
    """Where entries are kept."""
    return dropout(torch.ones(rows, width), p, seed, **place) != 0


def test_philox_is_the_published_one() -> None:
    """Known answers of Random123 (kat_vectors, philox4x32 10), key and counter zero."""
    zero = torch.zeros(1, 1, dtype=torch.int64)
    assert [int(word) for word in _philox(zero[0], zero, zero, 0)] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@dtypes
@pytest.mark.parametrize("shape", [(1, 1), (3, 5, 173), (70, 64), (2, 1100)], ids=str)
@pytest.mark.parametrize("p", [0.0, 0.05, 0.5])
def test_the_twin_has_the_same_mask_and_numbers(dtype: torch.dtype, shape: tuple[int, ...], p: float) -> None:
    x = torch.randn(shape).to(dtype)
    ours, twin = (f(x, p, SEED, stream=3, first_row=1000) for f in (dropout, dropout_torch))
    assert torch.equal(ours == 0, twin == 0)
    torch.testing.assert_close(ours, twin, rtol=torch.finfo(dtype).eps * 2, atol=0)


@pytest.mark.parametrize("p", [0.05, 0.3, 0.9])
def test_a_share_of_p_is_dropped_and_the_rest_scaled(p: float) -> None:
    x = torch.ones(256, 256)
    y = dropout(x, p, SEED)
    dropped = (y == 0).float().mean().item()
    assert dropped == pytest.approx(p, abs=4 * (p * (1 - p) / x.numel()) ** 0.5)
    assert_same(y[y != 0], torch.full_like(y[y != 0], 1 / (1 - p)))


def test_entries_are_dropped_independently() -> None:
    """Neighbours along both axes, and rows as a whole: correlations of a fair coin, five deviations wide."""
    kept = mask(512, 256, 0.5).float() * 2 - 1
    for product in (kept[:, 1:] * kept[:, :-1], kept[1:] * kept[:-1], kept[:, 4:] * kept[:, :-4]):
        assert abs(product.mean().item()) < 5 / product.numel() ** 0.5
    assert kept.mean(1).abs().max() < 5 / 256**0.5


def test_seeds_streams_and_rows_have_masks_of_their_own() -> None:
    base = mask(64, 64, 0.5)
    for other in (mask(64, 64, 0.5, SEED + 1), mask(64, 64, 0.5, stream=1), mask(64, 64, 0.5, first_row=64)):
        assert 0.4 < (other == base).float().mean() < 0.6
    assert torch.equal(mask(64, 64, 0.5), base)


def test_a_part_of_the_rows_is_masked_as_in_the_whole() -> None:
    whole = mask(70, 173, 0.3)
    assert torch.equal(mask(31, 173, 0.3, first_row=20), whole[20:51])


@dtypes
def test_in_place_and_strided_inputs(dtype: torch.dtype) -> None:
    wide = torch.randn(9, 200).to(dtype)
    expected = dropout(wide[:, :173].contiguous(), 0.3, SEED)
    assert_same(dropout(wide[:, :173], 0.3, SEED), expected)
    room = torch.full((9, 200), 7.0).to(dtype)
    dropout(wide[:, :173], 0.3, SEED, out=room[:, :173])
    assert_same(room[:, :173], expected)
    assert (room[:, 173:] == 7).all()
    part = wide[:, :173]
    assert dropout(part, 0.3, SEED, out=part) is part
    assert_same(part, expected)


def test_the_gradient_goes_through_the_same_mask() -> None:
    x = torch.randn(6, 20, dtype=torch.float64)
    assert torch.equal(dropout(torch.ones_like(x), 0.4, SEED) * x, dropout(x, 0.4, SEED))


@interpreted_only
def test_rows_beyond_2_to_the_31_elements() -> None:
    """C17: offsets are 64 bits wide."""
    x = sparse_rows(3, 8)
    out = dropout(x, 0.5, SEED, first_row=5)
    assert_same(out, dropout(x.contiguous(), 0.5, SEED, first_row=5))
