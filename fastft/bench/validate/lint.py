"""Step 1: ruff on the kernel's file and its test's. What ruff can mend it mends; what is left stops the run."""

from __future__ import annotations

from fastft.bench.validate.checkout import read_files
from fastft.bench.validate.context import Context, StepError, printed, python_module


def lint(context: Context) -> list[str]:
    """Check, let ruff fix, check again.

    Returns:
        The files that ruff changed.

    Raises:
        StepError: ruff is not installed, cannot run, or still complains after its own fixes; with its messages.
    """
    if not _problems(context):
        return []
    files = [context.kernel.source, context.kernel.tests]
    before = read_files(context.root, files)
    python_module(context, "ruff", "check", "--fix", *files)
    python_module(context, "ruff", "format", *files)
    problems = _problems(context)
    if problems:
        raise StepError(f"ruff still complains after its own fixes; mend this by hand:\n{problems}")
    after = read_files(context.root, files)
    return [path for path in after if after[path] != before.get(path)]


def _problems(context: Context) -> str:
    """What ruff complains about; empty if nothing."""
    files = [context.kernel.source, context.kernel.tests]
    found = []
    for command in (("check",), ("format", "--check")):
        completed = python_module(context, "ruff", *command, *files)
        if completed.returncode not in (0, 1):  # 1: complaints; 2: it could not run
            raise StepError(f"`ruff {' '.join(command)}` could not run:\n{printed(completed)}")
        if completed.returncode:
            found.append(printed(completed))
    return "\n".join(found)
