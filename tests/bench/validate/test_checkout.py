"""Which kernels a checkout holds."""

from __future__ import annotations

import pathlib
import re

import pytest

from fastft.bench.operations import OPERATIONS
from fastft.bench.validate.checkout import find_kernel, find_root, known_kernels
from fastft.bench.validate.context import StepError
from tests.bench.validate.bed import REPOSITORY, Bed


def test_kernels_are_the_files_that_hold_one(bed: Bed) -> None:
    assert known_kernels(bed.root) == ["double"]
    assert {"rms_norm", "rope", "swiglu", "nf4", "cross_entropy"} <= set(known_kernels(REPOSITORY))
    assert "backend" not in known_kernels(REPOSITORY)


def test_every_kernel_of_the_repository_can_be_validated() -> None:
    """Its tests are there, on a CUDA machine too, and `fastft bench kernels` knows what to measure."""
    assert find_kernel(REPOSITORY, "nf4").bench_name == "dequantize"
    for name in known_kernels(REPOSITORY):
        kernel = find_kernel(REPOSITORY, name)
        tests = re.findall(r"^def (test_\w+)", (REPOSITORY / kernel.gpu_file).read_text(), re.MULTILINE)
        words = [word for word in kernel.gpu_tests.split(" or ") if not word.startswith("not ")]
        assert all(any(word in test for test in tests) for word in words), f"no test of {kernel.gpu_file} for {name}"
        assert kernel.bench_name in OPERATIONS, f"{name} is not measured"


def test_a_kernel_that_no_operation_runs_says_so(bed: Bed) -> None:
    bed.programs.bench_status = 1
    with pytest.raises(StepError, match="double has no operation in fastft/bench/operations"):
        bed.validate()


def test_a_kernel_without_tests_is_refused(bed: Bed) -> None:
    (bed.root / "tests/kernels/test_double.py").unlink()
    with pytest.raises(StepError, match=r"write tests/kernels/test_double\.py first"):
        find_kernel(bed.root, "double")


def test_an_installed_package_says_to_clone(tmp_path: pathlib.Path) -> None:
    with pytest.raises(StepError, match="Clone the repository"):
        find_root(tmp_path / "site-packages" / "fastft")
    assert find_root() == REPOSITORY
