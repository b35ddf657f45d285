"""What the kernel tests share: the error contract, and which backend this process tests.

A test process is either interpreted (TRITON_INTERPRET=1: the Triton kernels run, on the CPU) or not (their plain-torch
twins run). The same tests serve both passes.
"""

from __future__ import annotations

import pytest
import torch

from fastft.kernels.backend import interpreting

INTERPRETED = interpreting()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
interpreted_only = pytest.mark.skipif(not INTERPRETED, reason="needs the Triton interpreter: TRITON_INTERPRET=1")
twins_only = pytest.mark.skipif(INTERPRETED, reason="bit equality is the twins'; interpreted kernels truncate bf16")

BF16_ULP = 2.0**-7  # the interpreter truncates where the GPU rounds


def relative_error(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """‖actual - reference‖ / ‖reference‖ in float64."""
    actual, reference = actual.detach(), reference.detach()
    norm = reference.double().norm()
    assert norm > 0, "a zero reference compares nothing"
    return ((actual.double() - reference.double()).norm() / norm).item()


def assert_as_good_as_stock(actual: torch.Tensor, stock: torch.Tensor, reference: torch.Tensor) -> None:
    """The 'Numbers' contract: the error against float64 is at most 1.5 times stock's in the same dtype."""
    assert actual.dtype == stock.dtype
    assert actual.shape == stock.shape
    # Where stock happens to be off by next to nothing, a fraction of one rounding is granted.
    bound = max(1.5 * relative_error(stock, reference), torch.finfo(stock.dtype).eps / 8)
    if INTERPRETED and torch.bfloat16 in (actual.dtype, stock.dtype):
        bound = max(bound, 2 * BF16_ULP)  # two roundings in a row, one ulp each
    error = relative_error(actual, reference)
    assert error <= bound, f"relative error {error:.3e}, allowed {bound:.3e}"


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Two roads to one result through the same backend: bit-equal."""
    assert actual.dtype == expected.dtype
    assert torch.equal(actual, expected)


def assert_same_values(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """As `assert_same` for kernels; near for twins: torch takes another loop (sum order, exp) where strides differ."""
    if INTERPRETED:
        assert_same(actual, expected)
    else:
        eps = torch.finfo(expected.dtype).eps
        torch.testing.assert_close(actual, expected, rtol=4 * eps, atol=4 * eps)


def sparse_rows(rows: int, width: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """[rows, width] whose rows lie 2**30 elements apart, so that the third begins at 2**31: C17's offsets on a CPU.

    The storage is virtual memory; only the pages of the rows themselves are ever touched.
    """
    stride = 2**30
    storage = torch.empty((rows - 1) * stride + width, dtype=dtype)
    return storage.as_strided((rows, width), (stride, 1)).copy_(torch.randn(rows, width))
