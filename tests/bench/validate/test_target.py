"""The process Nsight Compute looks at, on a CPU: what it runs inside the profiled range."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from fastft.bench.operations import find_operation
from fastft.bench.operations.base import Problem
from fastft.bench.registry import find_model
from fastft.bench.validate.target import run_once

PROBLEM = Problem(find_model("tiny"), 32, torch.float32, "cpu")


@contextlib.contextmanager
def profiled(seen: list[str]) -> Iterator[None]:
    """Keeps the names of the torch operators that ran inside."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield
    seen += [event.name for event in profile.events()]


@pytest.mark.parametrize("name", ["rms_norm", "rope", "swiglu", "dequantize", "cross_entropy"])
def test_ours_and_torchs_compute_the_same_and_nothing_else(name: str) -> None:
    seen: list[str] = []
    ours = run_once(name, "fastft", PROBLEM, profiled(seen))
    reference = run_once(name, "torch", PROBLEM, contextlib.nullcontext())
    assert len(ours) == len(reference)
    for fast, stock in zip(ours, reference, strict=True):
        assert stock.abs().sum() > 0
        torch.testing.assert_close(fast, stock, rtol=1e-4, atol=1e-5)
    assert seen, "it ran outside the profiled range"
    assert not {"aten::randn", "aten::normal_"} & set(seen), "inputs are drawn before the range"


@pytest.mark.parametrize(("name", "results"), [("dropout", 2), ("sparse_product", 1)])
def test_what_does_not_compute_the_same_is_profiled_too(name: str, results: int) -> None:
    """Other masks; all columns. And the first call has used up its inputs, not the second's."""
    for provider in ("fastft", "torch"):
        ours = run_once(name, provider, PROBLEM, contextlib.nullcontext())
        assert len(ours) == results
        assert all(torch.count_nonzero(each) > 0.5 * each.numel() for each in ours)


def test_the_backward_is_profiled_where_there_is_one() -> None:
    results = run_once("swiglu", "torch", PROBLEM, contextlib.nullcontext())
    assert len(results) == 3
    assert not find_operation("dequantize").has_backward
