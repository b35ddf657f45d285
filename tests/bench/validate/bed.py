"""A small checkout to validate a kernel in, with every other program played.

`Programs` stands where commands are run: it answers for ruff, pytest, `fastft bench`, git and ncu, and keeps what was
asked.
"""

from __future__ import annotations

import csv
import io
import pathlib
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console

from fastft.bench.validate import command
from fastft.bench.validate.checkout import find_kernel
from fastft.bench.validate.context import Context, ExitCode
from fastft.bench.validate.measure import Sizes

REPOSITORY = pathlib.Path(__file__).parents[3]
KERNEL = '''"""A kernel."""

from fastft.kernels.helper import FACTOR
from fastft.kernels.jit import triton


@triton.jit
def double(value):
    return value * FACTOR
'''
TEST = """from fastft.kernels.double import double
from tests.kernels.numbers import THREE


def test_doubles():
    assert double(THREE) == 6, "doubling is off"
"""
FILES = {
    "fastft/__init__.py": "",
    "fastft/kernels/__init__.py": "",
    "fastft/kernels/double.py": KERNEL,
    "fastft/kernels/helper.py": "FACTOR = 2\n",
    "fastft/kernels/jit.py": "class triton:\n    jit = staticmethod(lambda function: function)\n",
    "tests/__init__.py": "",
    "tests/kernels/__init__.py": "",
    "tests/kernels/numbers.py": "THREE = 3\n",
    "tests/kernels/test_double.py": TEST,
}
SIZES = Sizes("tiny", (64,), 20)


def junit(passed: int, failures: Mapping[str, str], broken: Mapping[str, str] | None = None) -> str:
    """pytest's results file (-o junit_family=xunit1), as pytest 9 writes it."""
    place = 'classname="tests.kernels.test_double" file="tests/kernels/test_double.py"'
    cases = [f'<testcase {place} name="test_{index}" time="0.1" />' for index in range(passed)]
    for name, message in failures.items():
        cases.append(f'<testcase {place} name="{name}"><failure message="{message}">trace</failure></testcase>')
    for file, text in (broken or {}).items():
        error = f'<error message="collection failure">{text}</error>'
        cases.append(f'<testcase classname="" name="{file}" file="{file}">{error}</testcase>')
    return f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>"


def bench_row(provider: str, mode: str, ms: float | str, mib: float | str, **more: str) -> dict[str, str]:
    row = {"gpu": "H200", "torch": "2.11", "commit": "abc", "kind": "kernels", "name": "double", "mode": mode}
    row |= {"provider": provider, "model": "tiny", "tokens": "64", "ms_50": str(ms), "extra_mib": str(mib)}
    return row | {"status": "ok", "note": ""} | more


@dataclass
class Programs:
    """Plays the programs. What they answer can be set; `asked` holds the command lines."""

    root: pathlib.Path
    complaints: list[str] = field(default_factory=list)  # of `ruff check`, one for each time it is called
    tests: tuple[int, str | None] = (0, junit(2, {}))  # exit status and results file
    tests_by_pass: dict[str, tuple[int, str | None]] = field(default_factory=dict)  # where a pass answers otherwise
    rows: list[dict[str, str]] = field(
        default_factory=lambda: [bench_row("fastft", "full", 1.0, 50), bench_row("torch", "full", 2.0, 100)]
    )
    bench_status: int = 0
    plot_status: int = 0
    ncu_log: str = ""
    ncu_status: int = 0
    statuses: dict[str, tuple[int, str]] = field(default_factory=dict)  # of command lines that begin so, whatever else
    head: str | None = None  # what git has of a file
    asked: list[str] = field(default_factory=list)
    environments: list[Mapping[str, str | None]] = field(default_factory=list)

    def __call__(
        self, arguments: Sequence[str], *, environment: Mapping[str, str | None] | None = None
    ) -> subprocess.CompletedProcess[str]:
        line = " ".join(arguments[2:] if arguments[1] == "-m" else arguments)
        self.asked.append(line)
        self.environments.append(environment or {})
        for start, (status, complaint) in self.statuses.items():
            if line.startswith(start):
                return subprocess.CompletedProcess(list(arguments), status, "", complaint)
        status, said = self.answer(line, list(arguments))
        return subprocess.CompletedProcess(list(arguments), status, said, "")

    def answer(self, line: str, arguments: list[str]) -> tuple[int, str]:
        if line.startswith("ruff check --fix"):
            (self.root / "fastft/kernels/double.py").write_text(KERNEL + "# mended\n")
            return 0, ""
        if line.startswith("ruff check"):
            complaint = self.complaints.pop(0) if self.complaints else ""
            return int(bool(complaint)), complaint
        if line.startswith("ruff format"):
            return 0, ""
        if line.startswith("pytest"):
            results = pathlib.Path(next(word for word in arguments if word.startswith("--junitxml=")).split("=")[1])
            status, text = self.tests_by_pass.get(results.stem.removeprefix("tests-"), self.tests)
            if text is not None:
                results.write_text(text)
            return status, "what pytest printed"
        if line.startswith("fastft.cli bench kernels"):
            if not self.bench_status:
                with open(arguments[arguments.index("--csv") + 1], "w", newline="") as file:
                    writer = csv.DictWriter(file, bench_row("", "", "", ""))
                    writer.writeheader()
                    writer.writerows(self.rows)
            return self.bench_status, "what bench printed"
        if line.startswith("fastft.cli bench plot"):
            folder = pathlib.Path(arguments[arguments.index("--out") + 1])
            if not self.plot_status:
                folder.mkdir(exist_ok=True)
                (folder / "speed.png").touch()
            return self.plot_status, "no matplotlib"
        if line.startswith("git show"):
            return (128, "") if self.head is None else (0, self.head)
        if line.startswith("/bin/ncu"):
            pathlib.Path(arguments[arguments.index("--log-file") + 1]).write_text(self.ncu_log)
            return self.ncu_status, ""
        raise AssertionError(f"nobody plays {line!r}")

    def ran(self, program: str) -> list[str]:
        """The command lines that began with `program`."""
        return [line for line in self.asked if line.startswith(program)]


class Bed:
    """A checkout, the programs, and the command run over them."""

    def __init__(self, root: pathlib.Path) -> None:
        for path, text in FILES.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
        shutil.copy(REPOSITORY / "pyproject.toml", root)
        self.programs = Programs(root)
        self.output = io.StringIO()
        self.context = Context(
            root=root,
            kernel=find_kernel(root, "double"),
            run=self.programs,
            console=Console(file=self.output, width=150),
            on_gpu=True,
            has_triton=True,
            find_program=lambda name: f"/bin/{name}",
        )
        self.root = root

    def validate(self, *, reset: bool = False, ncu: bool = False) -> ExitCode:
        """Run the six steps; what was printed before is forgotten."""
        self.output.truncate(0)
        self.output.seek(0)
        self.programs.asked.clear()
        return command.validate(self.context, SIZES, reset=reset, ncu=ncu)

    @property
    def printed(self) -> str:
        return self.output.getvalue()

    def change(self, comment: str, path: str = "fastft/kernels/double.py") -> None:
        """Make the code another one."""
        (self.root / path).write_text(f"{FILES[path]}# {comment}\n")

    def fail(self, message: str = "assert 5 == 6") -> None:
        """From now on the tests fail."""
        self.programs.tests = (1, junit(1, {"test_doubles": message}))

    def mend(self) -> None:
        self.programs.tests = (0, junit(2, {}))

    def lock(self) -> None:
        """Three distinct versions fail."""
        self.fail()
        for number in range(3):
            self.change(f"version {number}")
            self.validate()
