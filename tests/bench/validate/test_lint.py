"""Step 1: ruff mends what it can; what is left stops the run."""

from __future__ import annotations

import pytest

from fastft.bench.validate.context import ExitCode, StepError
from tests.bench.validate.bed import Bed


def test_what_ruff_mends_is_named_and_goes_on(bed: Bed) -> None:
    bed.programs.complaints = ["F401 unused import"]
    assert bed.validate() is ExitCode.PASSED
    assert "ruff mended fastft/kernels/double.py" in bed.printed
    assert len(bed.programs.ran("ruff check --fix")) == 1
    assert len(bed.programs.ran("ruff format --check")) == 2
    for line in bed.programs.ran("ruff"):
        assert line.endswith("fastft/kernels/double.py tests/kernels/test_double.py")


def test_a_ruff_that_cannot_run_stops_without_touching_a_file(bed: Bed) -> None:
    bed.programs.statuses = {"ruff check": (2, "invalid pyproject.toml")}
    with pytest.raises(StepError, match=r"could not run:\ninvalid pyproject\.toml"):
        bed.validate()
    assert not bed.programs.ran("ruff check --fix")


def test_a_missing_ruff_says_what_to_install(bed: Bed) -> None:
    bed.programs.statuses = {"ruff": (1, "/usr/bin/python3: No module named ruff")}
    with pytest.raises(StepError, match=r"ruff is not installed .*pip install"):
        bed.validate()


def test_what_ruff_cannot_mend_stops_before_the_tests(bed: Bed) -> None:
    bed.programs.complaints = ["F821 undefined name", "F821 undefined name `x`"]
    with pytest.raises(StepError, match="F821 undefined name `x`"):
        bed.validate()
    assert not bed.programs.ran("pytest")
