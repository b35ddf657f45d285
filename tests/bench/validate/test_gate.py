"""Step 2: attempts, repeated verdicts, the lock and its way out; which passes run and what their results mean."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from dataclasses import replace

import pytest

from fastft.bench.validate.context import ExitCode, StepError
from fastft.bench.validate.gate import read_results
from tests.bench.validate.bed import KERNEL, Bed, junit


def test_the_same_code_repeats_its_verdict_without_a_run(bed: Bed) -> None:
    bed.fail()
    assert bed.validate() is ExitCode.FAILED
    bed.mend()
    assert bed.validate() is ExitCode.FAILED
    assert not bed.programs.ran("pytest")
    assert "that verdict stands" in bed.printed
    assert "assert 5 == 6" in bed.printed
    assert "1 of 3 versions failed" in bed.printed


def test_a_green_verdict_is_repeated_too_and_the_benchmark_runs(bed: Bed) -> None:
    bed.validate()
    assert bed.validate() is ExitCode.PASSED
    assert not bed.programs.ran("pytest")
    assert bed.programs.ran("fastft.cli bench kernels")


@pytest.mark.parametrize("path", ["fastft/kernels/double.py", "fastft/kernels/helper.py"])
def test_changed_code_is_a_new_attempt(bed: Bed, path: str) -> None:
    """What the kernel imports from fastft/kernels is part of it."""
    bed.fail()
    bed.validate()
    bed.change("other", path)
    assert bed.validate() is ExitCode.FAILED
    assert bed.programs.ran("pytest")
    assert "2 of 3 versions failed" in bed.printed


@pytest.mark.parametrize("path", ["tests/kernels/test_double.py", "tests/kernels/numbers.py"])
def test_changed_tests_run_again_but_are_no_new_attempt(bed: Bed, path: str) -> None:
    bed.fail()
    bed.validate()
    bed.change("other", path)
    assert bed.validate() is ExitCode.FAILED
    assert bed.programs.ran("pytest")
    assert "1 of 3 versions failed" in bed.printed


def test_the_third_failed_version_locks_with_tests_messages_and_diff(bed: Bed) -> None:
    bed.validate()
    bed.fail("assert 5 == 6 [off by one]&#10;  second line")
    for number in range(3):
        assert "fastft/kernels/double.py (last green" not in bed.printed
        bed.change(f"version {number}")
        code = bed.validate()
    assert code is ExitCode.LOCKED == 3
    assert "tests/kernels/test_double.py::test_doubles (twins)" in bed.printed
    assert "tests/kernels/test_double.py::test_doubles (interpreter)" in bed.printed
    assert "assert 5 == 6 [off by one]\n  second line\n" in bed.printed
    assert "--- fastft/kernels/double.py (last green" in bed.printed
    assert "\n+# version 2\n" in bed.printed
    assert "version 0" not in bed.printed
    assert "--reset" in bed.printed
    assert not bed.programs.ran("fastft.cli bench")


def test_a_long_message_is_not_the_one_that_pytest_cut(tmp_path: pathlib.Path) -> None:
    """pytest 9.2 cuts what it puts into the attribute after 500 characters; a row of numbers is longer."""
    test, results = tmp_path / "test_long.py", tmp_path / "results.xml"
    test.write_text("def test_long():\n    raise ValueError('\\n'.join(f'number {i}' for i in range(99)))\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={results}"]
    subprocess.run([*command, "-o", "junit_family=xunit1", str(test)], cwd=tmp_path, check=False, capture_output=True)
    passed, failures = read_results(results, "twins")
    assert (passed, len(failures)) == (0, 1)
    assert all(f"number {i}" in failures[0].message for i in range(99))


def test_while_locked_new_code_is_refused_too(bed: Bed) -> None:
    bed.lock()
    bed.mend()
    bed.change("right at last")
    assert bed.validate() is ExitCode.LOCKED
    assert not bed.programs.ran("ruff"), "a locked kernel's files are left alone"
    assert not bed.programs.ran("pytest")
    assert not bed.programs.ran("fastft.cli")
    assert "assert 5 == 6" in bed.printed
    assert "+# right at last" in bed.printed


def test_a_reset_is_kept_though_the_run_stops(bed: Bed) -> None:
    bed.lock()
    bed.programs.statuses = {"ruff": (2, "invalid pyproject.toml")}
    with pytest.raises(StepError):
        bed.validate(reset=True)
    bed.programs.statuses = {}
    assert bed.validate() is ExitCode.FAILED


def test_reset_unlocks_and_tests_the_same_code_again(bed: Bed) -> None:
    bed.lock()
    bed.mend()
    assert bed.validate(reset=True) is ExitCode.PASSED
    assert bed.programs.ran("pytest")
    assert bed.programs.ran("fastft.cli bench")
    bed.fail()
    bed.change("wrong again")
    assert bed.validate() is ExitCode.FAILED
    assert "1 of 3 versions failed" in bed.printed


def test_a_green_run_clears_the_counter(bed: Bed) -> None:
    bed.fail()
    for number in range(2):
        bed.change(f"version {number}")
        bed.validate()
    bed.mend()
    bed.change("right")
    assert bed.validate() is ExitCode.PASSED
    bed.fail()
    for number in range(2, 4):
        bed.change(f"version {number}")
        assert bed.validate() is ExitCode.FAILED


def test_going_back_to_green_code_is_no_run_and_clears_nothing(bed: Bed) -> None:
    bed.change("right")
    bed.validate()
    bed.fail()
    for number in range(2):
        bed.change(f"version {number}")
        bed.validate()
    bed.change("right")
    assert bed.validate() is ExitCode.PASSED
    bed.change("version 2")
    assert bed.validate() is ExitCode.LOCKED


def test_without_a_green_run_the_diff_is_against_git(bed: Bed) -> None:
    bed.programs.head = KERNEL.replace("value * FACTOR", "value + value")
    bed.lock()
    assert "git HEAD" in bed.printed
    assert "-    return value + value" in bed.printed


def test_passes_cover_twins_interpreter_compiler_and_gpu(bed: Bed) -> None:
    for path in ("tests/kernels/test_compile.py", "tests/gpu/test_kernels.py"):
        (bed.root / path).parent.mkdir(exist_ok=True)
        (bed.root / path).touch()
    bed.validate()
    runs = [
        (line.split(" -q")[0], environment["TRITON_INTERPRET"])
        for line, environment in zip(bed.programs.asked, bed.programs.environments, strict=True)
        if line.startswith("pytest")
    ]
    assert runs == [
        ("pytest tests/kernels/test_double.py", None),
        ("pytest tests/kernels/test_double.py", "1"),
        ("pytest tests/kernels/test_compile.py::test_compiles_for_every_gpu[double]", None),
        ("pytest tests/gpu/test_kernels.py -k double", None),
    ]


def test_other_versions_check_again(bed: Bed) -> None:
    bed.validate()
    bed.context = replace(bed.context, versions="torch 3")
    bed.validate()
    assert bed.programs.ran("pytest")


def test_skipped_tests_do_not_count_as_passed(bed: Bed) -> None:
    skipped = '<testcase classname="a" file="a.py" name="b"><skipped message="why">why</skipped></testcase>'
    bed.programs.tests = (0, junit(2, {}).replace("</testsuite>", f"{skipped}</testsuite>", 1))
    bed.validate()
    assert "Tests passed: 2 in twins, 2 in interpreter." in bed.printed


def test_a_machine_that_can_check_more_checks_again(bed: Bed) -> None:
    with_triton = bed.context
    bed.context = replace(with_triton, has_triton=False)
    bed.validate()
    assert "only the plain-torch twins were tested" in bed.printed
    bed.context = with_triton
    bed.validate()
    assert len(bed.programs.ran("pytest")) == 2


@pytest.mark.parametrize(
    ("status", "results", "complaint"),
    [
        (5, junit(0, {}), "selects no test"),
        (4, None, "could not run"),
        (3, junit(0, {}), "could not run"),
        (0, junit(0, {}), "was skipped"),
        (1, junit(1, {}), "names no failing test"),
    ],
)
def test_tests_that_did_not_run_are_no_attempt(bed: Bed, status: int, results: str | None, complaint: str) -> None:
    bed.programs.tests = (status, results)
    with pytest.raises(StepError, match=complaint):
        bed.validate()
    assert not bed.context.state_file.exists()


def test_a_test_file_that_does_not_import_is_a_failed_attempt(bed: Bed) -> None:
    bed.programs.tests = (2, junit(0, {}, {"tests/kernels/test_double.py": "E NameError: FACTR"}))
    assert bed.validate() is ExitCode.FAILED
    assert "E NameError: FACTR" in bed.printed


def test_a_kernel_that_conftest_cannot_import_is_a_failed_attempt(bed: Bed) -> None:
    """conftest.py imports the package: then pytest ends with a usage error and no results."""
    bed.programs.statuses = {"pytest": (4, "ImportError while loading conftest 'tests/conftest.py'.\nE NameError: tl")}
    assert bed.validate() is ExitCode.FAILED
    assert "E NameError: tl" in bed.printed


def test_results_of_an_earlier_run_are_not_read(bed: Bed) -> None:
    bed.validate()
    bed.change("other")
    bed.programs.tests = (1, None)
    with pytest.raises(StepError, match="could not run"):
        bed.validate()


def test_a_kernel_that_kills_its_process_is_a_failed_attempt(bed: Bed) -> None:
    bed.programs.tests_by_pass = {"interpreter": (-11, None)}
    assert bed.validate() is ExitCode.FAILED
    assert "ended by signal 11" in bed.printed


def test_a_pass_that_cannot_run_does_not_hide_a_red_one(bed: Bed) -> None:
    bed.fail()
    bed.programs.tests_by_pass = {"interpreter": (5, None)}
    assert bed.validate() is ExitCode.FAILED
    assert "1 of 3 versions failed" in bed.printed
    assert "selects no test" in bed.printed


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"format": 2, "verdicts": []}), json.dumps({"format": 1})])
def test_a_damaged_state_file_is_an_error_in_words(bed: Bed, text: str) -> None:
    bed.context.state_file.parent.mkdir(parents=True)
    bed.context.state_file.write_text(text)
    with pytest.raises(StepError, match="Delete it to start anew"):
        bed.validate()
