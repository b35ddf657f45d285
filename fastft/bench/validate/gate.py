"""Step 2: the kernel's tests, as a hard gate.

Passes: the plain-torch twins; the Triton kernels in the interpreter; compilation for every GPU; on a CUDA machine the
kernels themselves. All of them run even if the first is red, so that one attempt shows everything that is wrong.
"""

from __future__ import annotations

import difflib
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from fastft.bench.validate.checkout import check_files, fingerprint, read_files, source_files
from fastft.bench.validate.context import Context, StepError, printed, python_module
from fastft.bench.validate.state import Failure, State, Verdict, save_state

COMPILE_TESTS = Path("tests/kernels/test_compile.py")
# As `make test` sets them: one thread a process, no hub, no fork warnings.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
USAGE_ERROR, NOTHING_SELECTED = 4, 5  # pytest's exit statuses
CUT = "full report in element text]"  # how pytest ends a message that it cut; what is whole is the element's text


@dataclass(frozen=True)
class Pass:
    """One run of pytest: what is asked, of which file, with which arguments, and whether in Triton's interpreter."""

    name: str
    file: Path
    arguments: tuple[str, ...]
    interpreted: bool = False


def passes(context: Context) -> list[Pass]:
    """The passes this machine can run."""
    kernel = context.kernel
    chosen = [Pass("twins", kernel.tests, (str(kernel.tests),))]
    if context.has_triton:
        chosen.append(Pass("interpreter", kernel.tests, (str(kernel.tests),), interpreted=True))
        if (context.root / COMPILE_TESTS).is_file():
            chosen.append(
                Pass("compile", COMPILE_TESTS, (f"{COMPILE_TESTS}::test_compiles_for_every_gpu[{kernel.name}]",))
            )
    if context.on_gpu and (context.root / kernel.gpu_file).is_file():
        chosen.append(Pass("gpu", kernel.gpu_file, (str(kernel.gpu_file), "-k", kernel.gpu_tests)))
    return chosen


def judge(context: Context, state: State) -> tuple[Verdict, bool]:
    """The verdict on the code as it is: recorded if these checks have judged it before, else of a run, which is saved.

    Returns:
        The verdict, and whether it is a repeated one.

    Raises:
        StepError: the tests could not run, which says nothing about the kernel and is no attempt.
    """
    planned = passes(context)
    source = read_files(context.root, source_files(context.root, context.kernel))
    checks = read_files(context.root, check_files(context.root, [each.file for each in planned]))
    source_hash = fingerprint(source)
    checks_hash = fingerprint(checks, *(" ".join((each.name, *each.arguments)) for each in planned), context.versions)
    recorded = state.find(source_hash, checks_hash)
    if recorded:
        return recorded, True
    passed, failures = _run_all(context, planned)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    verdict = Verdict(source_hash, checks_hash, date, passed, failures)
    state.record(verdict, source)
    save_state(state, context.state_file)
    return verdict, False


def _run_all(context: Context, planned: Sequence[Pass]) -> tuple[dict[str, int], list[Failure]]:
    """Every pass; one that cannot run stops this, unless another was red already: then there is a verdict."""
    passed: dict[str, int] = {}
    failures: list[Failure] = []
    for each in planned:
        try:
            with context.console.status(f"Tests: {each.name}"):
                passed[each.name], failed = run_pass(context, each)
        except StepError as error:
            if not failures:
                raise
            failed = [Failure("the pass as a whole", each.name, str(error))]
        failures += failed
    return passed, failures


def run_pass(context: Context, planned: Pass) -> tuple[int, list[Failure]]:
    """Run one pass.

    Returns:
        How many tests passed, and those that did not.

    Raises:
        StepError: no test ran: pytest found none, skipped all, or failed itself.
    """
    results = context.folder / f"tests-{planned.name}.xml"
    results.unlink(missing_ok=True)
    completed = python_module(
        context,
        "pytest",
        *planned.arguments,
        "-q",
        "-p",
        "no:cacheprovider",
        f"--junitxml={results}",
        "-o",
        "junit_family=xunit1",  # the one that names a test's file
        **ENVIRONMENT,
        TRITON_INTERPRET="1" if planned.interpreted else None,
    )
    (context.folder / f"tests-{planned.name}.log").write_text(printed(completed, lines=100_000), encoding="utf-8")
    if completed.returncode == NOTHING_SELECTED:
        raise StepError(f"the pass {planned.name!r} selects no test with {' '.join(planned.arguments)}: write one.")
    if completed.returncode < 0:  # a kernel that reads where it may not
        death = f"ended by signal {-completed.returncode}\n{printed(completed)}"
        return 0, [Failure("the test process", planned.name, death)]
    if completed.returncode == USAGE_ERROR and "while loading conftest" in completed.stderr:  # it imports the kernels
        return 0, [Failure("tests/conftest.py", planned.name, printed(completed))]
    if completed.returncode not in (0, 1, 2) or not results.is_file():
        raise StepError(f"pytest could not run the pass {planned.name!r}:\n{printed(completed)}")
    passed, failures = read_results(results, planned.name)
    if completed.returncode and not failures:
        raise StepError(f"pytest ended with {completed.returncode} and names no failing test:\n{printed(completed)}")
    if not passed and not failures:
        raise StepError(
            f"every test of the pass {planned.name!r} was skipped, which proves nothing:\n{printed(completed)}"
        )
    return passed, failures


def read_results(path: Path, during: str) -> tuple[int, list[Failure]]:
    """Count of passed tests, and the failures, from pytest's JUnit XML."""
    passed, failures = 0, []
    for case in ElementTree.parse(path).iter("testcase"):
        file, name, class_name = (case.get(key, "") for key in ("file", "name", "classname"))
        # A test in a class has the class as the last part of its classname; a file that does not import has no class.
        group = class_name.rpartition(".")[2]
        parts = [file, group, name] if group and class_name and group != Path(file).stem else [file, name]
        test = "::".join(parts) if class_name else file
        failed, broken = case.find("failure"), case.find("error")
        if failed is not None:
            message = failed.get("message") or ""
            if not message or message.endswith(CUT):
                message = failed.text or message
            failures.append(Failure(test, during, message))
        if broken is not None:  # outside the test: the message only says where, the text says what
            failures.append(Failure(test, during, broken.text or broken.get("message") or ""))
        passed += failed is None and broken is None and case.find("skipped") is None
    return passed, failures


def diff_since_green(context: Context, state: State) -> str:
    """Unified diff from the last green source (git's HEAD if no run was green yet) to the files as they are."""
    files = sorted({*map(Path, state.green_source), *source_files(context.root, context.kernel)})
    now = read_files(context.root, files)
    lines: list[str] = []
    for path in (file.as_posix() for file in files):
        before = state.green_source.get(path, "") if state.green_source else _committed(context, path)
        label = f"last green {state.green_date}" if state.green_source else "git HEAD: no run was green yet"
        lines += difflib.unified_diff(
            before.splitlines(), now.get(path, "").splitlines(), f"{path} ({label})", path, lineterm=""
        )
    return "\n".join(lines)


def _committed(context: Context, path: str) -> str:
    completed = context.run(["git", "show", f"HEAD:{path}"])
    return completed.stdout if completed.returncode == 0 else ""
