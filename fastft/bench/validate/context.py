"""What every step is given, how it runs a command, and what `fastft validate` ends with."""

from __future__ import annotations

import enum
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rich.console import Console

if TYPE_CHECKING:
    from fastft.bench.validate.checkout import Kernel

FOLDER = Path(".fastft/validate")  # git-ignored


class ExitCode(enum.IntEnum):
    """Exit status of `fastft validate`."""

    PASSED = 0
    FAILED = 1  # lint or tests failed, or a step could not run
    USAGE = 2  # unknown kernel, no checkout, a wrong option
    LOCKED = 3  # three failed attempts since the last green one
    CATASTROPHE = 4  # in the benchmark wrong, failing, or at least twice torch's time or memory


class StepError(Exception):
    """A step cannot go on; the message says what is wrong, where, and what to do."""


class Run(Protocol):
    """Runs a command in the checkout's root and returns what it printed; it does not raise where the command fails."""

    def __call__(
        self, arguments: Sequence[str], *, environment: Mapping[str, str | None] | None = None
    ) -> subprocess.CompletedProcess[str]: ...


@dataclass(frozen=True)
class Context:
    """What a step works with.

    Attributes:
        root: the checkout.
        kernel: what is validated.
        run: runs commands.
        console: where to show things.
        on_gpu: whether a CUDA device is there.
        has_triton: whether Triton is installed.
        find_program: the path of a program, or None (`shutil.which`).
        versions: what besides the code may change a verdict.
    """

    root: Path
    kernel: Kernel
    run: Run
    console: Console
    on_gpu: bool
    has_triton: bool
    find_program: Callable[[str], str | None]
    versions: str = ""

    @property
    def folder(self) -> Path:
        """Where this kernel's report, figures and plots go; made if missing."""
        folder = self.root / FOLDER / self.kernel.name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @property
    def state_file(self) -> Path:
        return self.root / FOLDER / f"{self.kernel.name}.json"


def run_in(root: Path) -> Run:
    """A `Run` in `root`. In `environment`, None removes a variable; the rest of the environment is this process's."""

    def run(
        arguments: Sequence[str], *, environment: Mapping[str, str | None] | None = None
    ) -> subprocess.CompletedProcess[str]:
        merged = {**os.environ, **(environment or {})}
        return subprocess.run(
            list(arguments),
            cwd=root,
            env={name: value for name, value in merged.items() if value is not None},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )

    return run


def python_module(
    context: Context, module: str, *arguments: str | Path, **environment: str | None
) -> subprocess.CompletedProcess[str]:
    """Run `python -m module arguments` with this interpreter.

    Raises:
        StepError: the module is not installed.
    """
    completed = context.run([sys.executable, "-m", module, *map(str, arguments)], environment=environment)
    if completed.returncode and f"No module named {module}" in completed.stderr:
        raise StepError(f"{module} is not installed in {sys.executable}: `pip install -e '.[test,bench]'`.")
    return completed


def printed(completed: subprocess.CompletedProcess[str], lines: int = 60) -> str:
    """The last lines of what a command printed, standard output first."""
    text = "\n".join(part.strip() for part in (completed.stdout, completed.stderr) if part and part.strip())
    return "\n".join(text.splitlines()[-lines:])
