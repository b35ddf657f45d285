"""Which backend the kernel tests run on: each pass must test what it claims to."""

from __future__ import annotations

import fractions
import math
import os
from typing import Any

import pytest
import torch

from fastft.kernels import backend
from fastft.kernels.backend import (
    Settings,
    _specialization,
    cdiv,
    hash_ahead,
    interpreting,
    next_power_of_2,
    uses_triton,
)


def test_interpreted_pass_runs_the_triton_kernels() -> None:
    """Under TRITON_INTERPRET=1 every launcher takes its kernel; without it, on a CPU, its twin."""
    asked_for = os.environ.get("TRITON_INTERPRET", "0") == "1"
    assert interpreting() == asked_for
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert uses_triton(torch.empty(1, dtype=dtype)) == asked_for


def test_float64_always_takes_the_twin() -> None:
    assert not uses_triton(torch.empty(1, dtype=torch.float64))


def test_next_power_of_2() -> None:
    assert [next_power_of_2(n) for n in (0, 1, 2, 3, 4, 5, 1023, 1024, 1025)] == [1, 1, 2, 4, 4, 8, 1024, 1024, 2048]


def test_triton_hashes_itself_once_however_many_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second or more of a first step, whose kernels are looked for in Triton's cache by several threads."""
    cache = pytest.importorskip("triton.runtime.cache")
    hashed: list[str] = []
    monkeypatch.setattr(backend, "_hashing", None)
    monkeypatch.setattr(cache, "triton_key", lambda: hashed.append("done"))
    threads = [hash_ahead() for _ in range(3)]
    assert threads[0] is threads[1] is threads[2] is not None
    threads[0].join()
    assert hashed == ["done"]


def test_nothing_is_hashed_where_triton_has_no_such_function(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = pytest.importorskip("triton.runtime.cache")
    monkeypatch.setattr(backend, "_hashing", None)
    monkeypatch.delattr(cache, "triton_key")
    assert hash_ahead() is None


def test_launch_keys_are_as_fine_as_tritons() -> None:
    """Where our key of a remembered kernel is equal, Triton would have compiled the same kernel."""
    libtriton = pytest.importorskip("triton._C.libtriton")
    from triton.backends.compiler import BaseBackend

    storage = torch.zeros(64)
    edges = (0, 1, 2, 15, 16, 17, 2**31 - 16, 2**31 - 1, 2**31, 2**31 + 1, 2**32, 2**63 - 1)
    integers = [sign * value for value in edges for sign in (1, -1)]
    tensors = [storage, storage[1:], storage[4:], storage.bfloat16(), storage.int(), torch.nn.Parameter(storage)]
    tuples = [(1, 2), (2, 1), (None, 2), (16, None), (1, 2, 3), (2**31, 1), (True, 2), (2, True), (2, 1.0)]
    seen: dict[Any, Any] = {}
    for argument in [*integers, *tensors, *tuples, True, False, None, 1.0, 0.0]:
        theirs = libtriton.native_specialize_impl(BaseBackend, argument, False, True, True)
        assert seen.setdefault(tuple(_specialization((argument,))), theirs) == theirs, argument
    assert len(set(seen.values())) > 15


def test_arguments_cannot_pass_for_one_another() -> None:
    """A key is one sequence over all arguments: where one stops and the next begins must show."""
    storage, strides = torch.zeros(64), (64, 1)
    calls = [
        (storage, 0, None),
        (storage, None, 0),
        (storage, storage, None),
        (storage[1:], storage, None),
        (None, storage, storage),
        (storage, strides, 0),
        (storage, *strides, 0),
        (storage, (64, 2), 0),
        ((storage, None), 0, None),
        ((None, storage), 0, None),
    ]
    keys = [tuple(_specialization(call)) for call in calls]
    assert len(set(keys)) == len(calls)


def test_settings_are_told_apart_by_kernel_and_options() -> None:
    """Two threads may work out the same settings: they find one compiled kernel."""

    def one() -> None: ...

    def other() -> None: ...

    assert Settings(one, BLOCK=64) == Settings(one, BLOCK=64)
    assert (
        len({Settings(one, BLOCK=64), Settings(one, BLOCK=64), Settings(one, BLOCK=32), Settings(other, BLOCK=64)}) == 3
    )


@pytest.mark.parametrize(("numerator", "denominator"), [(0, 4), (1, 4), (4, 4), (5, 4), (2**33 + 1, 2)])
def test_cdiv_rounds_up(numerator: int, denominator: int) -> None:
    assert cdiv(numerator, denominator) == math.ceil(fractions.Fraction(numerator, denominator))
