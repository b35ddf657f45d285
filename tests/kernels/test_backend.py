"""Which backend the kernel tests run on: each pass must test what it claims to."""

from __future__ import annotations

import os

import torch

from fastft.kernels.backend import interpreting, next_power_of_2, uses_triton


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
