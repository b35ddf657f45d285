"""Every kernel compiled for every GPU we name, without one: type errors, shared memory, access width, offsets.

Each kernel file is compiled by tests/kernels/compiler.py, from the launches in tests/kernels/compile_table.py.
"""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import fastft.kernels
from fastft.kernels.backend import HAS_TRITON
from tests.kernels.compile_table import TABLE
from tests.kernels.reference import INTERPRETED

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="needs Triton"),
    pytest.mark.skipif(INTERPRETED, reason="compiled in the other pass; nothing here depends on the interpreter"),
    pytest.mark.timeout(600),
]

KIBIBYTES = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # shared memory a block may take
files = pytest.mark.parametrize("file", sorted(TABLE))


@files
def test_compiles_for_every_gpu(file: str) -> None:
    """One test a file, so that its one compilation is shared by all that is asked of it."""
    from tests.kernels import compiler  # it needs Triton, without which nothing here runs

    results = list(compiler.compiled(file))
    for kernel in {result["kernel"] for result in results}:
        covered = {(result["dtype"], result["capability"]) for result in results if result["kernel"] == kernel}
        expected = {(dtype, capability) for dtype in ("fp16", "bf16", "fp32") for capability in KIBIBYTES}
        assert covered == expected - {("bf16", 75)}
    for result in results:
        where = f"{result['kernel']} ({result['launch']}, {result['dtype']}, sm_{result['capability']})"
        assert result["cubin"] > 0, where
        assert result["shared"] <= KIBIBYTES[result["capability"]] * 1024, where
        assert not result["atomics"], f"{where}: atomics make sums depend on the order of arrival"
        assert result["int64_offsets"], f"{where}: no pointer is advanced by a 64-bit offset (C17)"
        assert result["wide"] or not result["must_be_wide"], f"{where}: memory is not accessed 128 bits at a time"


def test_every_kernel_is_in_the_table() -> None:
    """A kernel file without an entry would go uncompiled in silence."""
    import triton

    having_kernels = set()
    for found in pkgutil.iter_modules(fastft.kernels.__path__):
        module = importlib.import_module(f"fastft.kernels.{found.name}")
        if any(isinstance(value, triton.JITFunction) for value in vars(module).values()):
            having_kernels.add(found.name)
    assert having_kernels == set(TABLE)
