"""Pieces in their order, on torch's number of threads, which is the same afterwards."""

from __future__ import annotations

import itertools
import threading
import time

import numpy
import pytest
import torch

from fastft.saving.quantizers import quantize
from fastft.saving.workers import in_order


@pytest.fixture
def two_threads() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_results_come_in_order_from_several_threads_with_one_each(two_threads: None) -> None:
    def work(number: int) -> tuple[int, int, int]:
        time.sleep(0.01 * (number % 3 == 0))
        return number, torch.get_num_threads(), threading.get_ident()

    numbers, threads, identities = zip(*in_order(work, range(20)), strict=True)
    assert numbers == tuple(range(20))
    assert set(threads) == {1}
    assert len(set(identities)) == 2
    assert torch.get_num_threads() == 2


def test_few_results_wait(two_threads: None) -> None:
    """A taker that is slow stops the workers: what waits is memory."""
    started = []
    results = in_order(lambda number: started.append(number), itertools.count())
    next(results)
    time.sleep(0.05)
    assert len(started) <= 6
    results.close()
    assert torch.get_num_threads() == 2


def test_an_error_comes_through_and_the_number_of_threads_is_as_before(two_threads: None) -> None:
    def work(number: int) -> int:
        if number == 3:
            raise ValueError("three")
        return number

    with pytest.raises(ValueError, match="three"):
        list(in_order(work, range(10)))
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("kind", ["q4_k", "q6_k"])
def test_the_number_of_threads_makes_no_difference(kind: str, two_threads: None) -> None:
    """torch adds the last columns of a block in another order: pieces of other sizes would have other bits."""
    x = torch.randn(20, 14336, generator=torch.Generator().manual_seed(0))
    two = quantize(x, kind)
    torch.set_num_threads(1)
    numpy.testing.assert_array_equal(quantize(x, kind), two)
