"""The whole command, and one run with the real ruff and pytest."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace

from typer.testing import CliRunner

from fastft.bench.validate import context
from fastft.bench.validate.context import ExitCode, run_in
from fastft.cli import app
from tests.bench.validate.bed import KERNEL, REPOSITORY, Bed


def test_a_good_kernel_goes_through_every_step_in_order(bed: Bed) -> None:
    assert bed.validate() is ExitCode.PASSED
    steps = [line.split()[0] + " " + line.split()[1] for line in bed.programs.asked]
    assert steps == [
        "ruff check",
        "ruff format",
        "pytest tests/kernels/test_double.py",
        "pytest tests/kernels/test_double.py",
        "fastft.cli bench",
        "fastft.cli bench",
    ]
    report = (bed.root / ".fastft/validate/double/report.md").read_text()
    assert "| full | 64 | 1 | 2 | 2.00 × | 50 | 100 | 50% |" in report
    assert "Speed and memory improved." in report
    assert "![](plots/speed.png)" in report
    assert "2.00 ×" in bed.printed
    assert "Speed and memory improved." in bed.printed


def test_git_does_not_see_what_is_written() -> None:
    assert "/.fastft/" in (REPOSITORY / ".gitignore").read_text().splitlines()
    assert context.FOLDER.parts[0] == ".fastft"


def test_an_unknown_name_lists_the_known_ones() -> None:
    result = CliRunner().invoke(app, ["validate", "swigloo"], env={"COLUMNS": "300"})
    assert result.exit_code == ExitCode.USAGE == 2
    assert "swigloo" in result.output
    assert "cross_entropy" in result.output


def test_help_documents_the_exit_codes() -> None:
    text = " ".join(CliRunner().invoke(app, ["validate", "--help"], env={"COLUMNS": "300"}).output.split())
    for code in ExitCode:
        assert f"{code.value} " in text[text.index("Exit status") :]


def test_the_real_lint_and_the_real_tests(bed: Bed) -> None:
    """Only the benchmark is played: ruff mends a file, pytest runs it, twice red and once green."""
    real = run_in(bed.root)

    def run(
        arguments: Sequence[str], *, environment: Mapping[str, str | None] | None = None
    ) -> subprocess.CompletedProcess[str]:
        play = bed.programs if "fastft.cli" in arguments else real
        return play(arguments, environment=environment)

    bed.context = replace(bed.context, run=run, has_triton=False)
    source = bed.root / "fastft/kernels/double.py"
    source.write_text("import os\n" + KERNEL.replace("value * FACTOR", "value*FACTOR - 1"))
    assert bed.validate() is ExitCode.FAILED
    assert source.read_text() == KERNEL.replace("value * FACTOR", "value * FACTOR - 1"), "ruff mended both"
    assert "tests/kernels/test_double.py::test_doubles (twins)" in bed.printed
    assert "AssertionError: doubling is off" in bed.printed
    assert "assert 5 == 6" in bed.printed

    # Of another length: bytecode is taken for its file's by size and second of writing, and all this may be one second.
    source.write_text(KERNEL.replace("def double", "def doubling"))
    assert bed.validate() is ExitCode.FAILED
    assert "ImportError: cannot import name 'double'" in bed.printed

    source.write_text(KERNEL)
    assert bed.validate() is ExitCode.PASSED
    assert "Tests passed: 1 in twins." in bed.printed
