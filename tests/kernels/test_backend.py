"""Which backend the kernel tests run on: each pass must test what it claims to."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from fastft.kernels.backend import _specialization, hash_ahead, interpreting, next_power_of_2, uses_triton


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


def test_triton_s_hash_of_itself_is_there_when_the_thread_is_done() -> None:
    """Half a second or more of a first step, which looks for its first kernel in Triton's cache."""
    cache = pytest.importorskip("triton.runtime.cache")
    thread = hash_ahead()
    assert thread is not None
    thread.join()
    known = cache.triton_key.cache_info()
    assert known.currsize == 1
    cache.triton_key()
    assert cache.triton_key.cache_info().hits == known.hits + 1


def test_nothing_is_hashed_where_triton_has_no_such_function(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = pytest.importorskip("triton.runtime.cache")
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
    tuples = [(1, 2), (2, 1), (None, 2), (16, None), (1, 2, 3), (2**31, 1), (True, 2)]
    seen: dict[Any, Any] = {}
    for argument in [*integers, *tensors, *tuples, True, False, None, 1.0, 0.0]:
        theirs = libtriton.native_specialize_impl(BaseBackend, argument, False, True, True)
        assert seen.setdefault(_specialization(argument), theirs) == theirs, argument
    assert len(set(seen.values())) > 15
