"""The checkout: which kernels it holds, and which files make a kernel what it is.

A kernel is a file of fastft/kernels that holds a Triton kernel, so a new one is known without being registered here.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import fastft
from fastft.bench.validate.context import StepError

KERNELS = Path("fastft/kernels")
TESTS = Path("tests/kernels")
HELPERS = ("fastft.kernels", "tests")  # imports that are part of the code under test, and of its tests

# Where another name is used than the kernel file's. A kernel that runs inside an operation is measured as that one.
BENCH_NAMES = {"nf4": "dequantize", "join": "lora_linear", "fold": "lora_linear"}
TESTED_WITH = {"fold": "join"}  # whose launch it is a part of
# On a CUDA machine: the file under tests/gpu, and the expression that selects the kernel's tests in it.
GPU_TESTS = {
    "nf4": ("test_kernels", "dequantization"),
    "cross_entropy": ("test_kernels", "cross_entropy or a_label_outside"),
    "join": ("test_parity", "qlora_gradients_of_each_tiny_family or flat_scales"),
    "fold": ("test_levels", "folded"),
    "sparse_product": ("test_sparse_product", "not milliseconds"),
    "dropout": ("test_dropout", "twins_mask"),
}


@dataclass(frozen=True)
class Kernel:
    """One kernel of a checkout; paths are relative to its root."""

    name: str
    source: Path
    tests: Path

    @property
    def bench_name(self) -> str:
        """What `fastft bench kernels` calls it."""
        return BENCH_NAMES.get(self.name, self.name)

    @property
    def gpu_file(self) -> Path:
        """Where its tests on a CUDA machine are."""
        return Path("tests/gpu") / f"{GPU_TESTS.get(self.name, ('test_kernels', ''))[0]}.py"

    @property
    def gpu_tests(self) -> str:
        """The expression that selects them there."""
        return GPU_TESTS.get(self.name, ("", self.name))[1]


def find_root(package: Path | None = None) -> Path:
    """The root of the checkout that this fastft runs from.

    Args:
        package: the folder of the fastft package; default: the one imported.

    Raises:
        StepError: fastft was installed from a wheel: there are no tests to run.
    """
    package = Path(fastft.__file__).parent if package is None else package
    root = package.resolve().parent
    if not ((root / "pyproject.toml").is_file() and (root / TESTS).is_dir()):
        raise StepError(
            f"`fastft validate` runs a kernel's tests, and {root} has no {TESTS}: this fastft is an installed package, "
            "not a checkout. Clone the repository and run `pip install -e '.[test,bench]'` in it, then try again there."
        )
    return root


def known_kernels(root: Path) -> list[str]:
    """Names of the files under fastft/kernels that hold a Triton kernel."""
    return sorted(
        path.stem
        for path in (root / KERNELS).glob("*.py")
        if re.search(r"^@triton\.jit\b", path.read_text(encoding="utf-8"), re.MULTILINE)
    )


def find_kernel(root: Path, name: str) -> Kernel:
    """The kernel called `name`.

    Raises:
        StepError: there is no such kernel, or it has no test file.
    """
    known = known_kernels(root)
    if name not in known:
        raise StepError(f"there is no kernel {name!r} in {root / KERNELS}. Known: {', '.join(known)}.")
    kernel = Kernel(name, KERNELS / f"{name}.py", TESTS / f"test_{TESTED_WITH.get(name, name)}.py")
    if not (root / kernel.tests).is_file():
        raise StepError(f"{kernel.source} has no tests: write {kernel.tests} first.")
    return kernel


def source_files(root: Path, kernel: Kernel) -> list[Path]:
    """The kernel's file and those of fastft/kernels it imports, directly or not."""
    return _closure(root, [kernel.source], HELPERS[:1])


def check_files(root: Path, tests: Sequence[Path]) -> list[Path]:
    """Test files, the conftest.py above them, and what they import from tests/."""
    conftests = {folder / "conftest.py" for test in tests for folder in test.parents}
    return _closure(root, [*tests, *sorted(path for path in conftests if (root / path).is_file())], HELPERS[1:])


def read_files(root: Path, files: Iterable[Path]) -> dict[str, str]:
    """Text by path as the state file holds it; a file that is gone is left out."""
    return {path.as_posix(): (root / path).read_text(encoding="utf-8") for path in files if (root / path).is_file()}


def fingerprint(texts: dict[str, str], *more: str) -> str:
    """sha256 over paths and texts, and over what else tells two runs apart."""
    digest = hashlib.sha256()
    for part in (*(piece for item in sorted(texts.items()) for piece in item), *more):
        encoded = part.encode()
        digest.update(f"{len(encoded)}:".encode())  # so that text cannot move from one part to the next unseen
        digest.update(encoded)
    return digest.hexdigest()


def _closure(root: Path, start: Sequence[Path], packages: Sequence[str]) -> list[Path]:
    found: list[Path] = []
    waiting = list(start)
    while waiting:
        path = waiting.pop(0)
        if path not in found:
            found.append(path)
            waiting += [file for module in _imports(root / path) if (file := _file(root, module, packages))]
    return found


def _imports(path: Path) -> list[str]:
    """Dotted names a file imports; for `from a import b` both a and a.b, since b may be a module."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except SyntaxError:
        return []  # the tests will say so
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def _file(root: Path, module: str, packages: Sequence[str]) -> Path | None:
    if not any(module == package or module.startswith(f"{package}.") for package in packages):
        return None
    path = Path(*module.split(".")).with_suffix(".py")
    return path if (root / path).is_file() else None
