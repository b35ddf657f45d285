"""Plants faults one at a time: a process that has imported what is heavy, and forks once per fault.

    TRITON_INTERPRET=1 python -m tests.faults.worker 0::2     every second fault of a Triton kernel, from the first
    python -m tests.faults.worker 1::2                        every second one of the others, from the second

Each child copies the package to a temporary folder, puts the fault into the copy, imports fastft from there (before
pytest can find the checkout, installed or not), and runs the named test in-process. The checkout is never written. One
JSON line per result goes to standard output.

A test of a few milliseconds costs its child half a second, and cost it more than a second before three things were
seen to: the garbage collector does not look again at the half million objects that the parent has imported (pytest
alone collects twice at its end), the bytecode of all files but the faulted one is copied with them, and what a library
works out at its first call is worked out before the fork.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import sys
import tempfile
import time

import pytest

from tests import support
from tests.faults.table import FAULTS, Fault

ROOT = pathlib.Path(__file__).parents[2]
PRELOADED = (
    "numpy",
    "torch",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gemma.modeling_gemma",
    "transformers.models.olmo2.modeling_olmo2",
    "transformers.modeling_utils",
    "transformers.trainer",
    "transformers.integrations.bitsandbytes",
    "peft.tuners.lora.bnb",
    "peft.utils.transformers_weight_conversion",
    "bitsandbytes.functional",
    "datasets",
    "gguf",
    "rich.table",
    "trl.chat_template_utils",
    "numpy.ctypeslib",
    "pdb",  # pytest's
    "tomllib",  # pytest's
)
PYTEST_OPTIONS = (
    *("-x", "-q", "--no-header", "-p", "no:cacheprovider", "-o", "addopts="),
    "--disable-plugin-autoload",  # of those installed it needs none: wait() is the time limit
    # No one reads why a planted fault's test failed, and where CI is set pytest compares two files' bytes in full for
    # it, which takes minutes.
    *("--assert=plain", "--tb=short"),
)
SECONDS_PER_FAULT = 60
CRASHES = (-signal.SIGSEGV, -signal.SIGBUS)
# A test that fails for one of these was broken by the fault's text, not by the fault.
NOT_A_FAULT = re.compile(
    r"^E +(SyntaxError|IndentationError|NameError|UnboundLocalError|ImportError|ModuleNotFoundError)", re.M
)


def main() -> None:
    """The tests without a fault, then every fault of this process's kind."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    for name in (*PRELOADED, *(("triton.language",) if interpreted else ())):
        importlib.import_module(name)
    support.add_lora(support.build_model("llama"))  # transformers and peft fill their own caches
    gc.collect()
    gc.freeze()
    assert not any(name.partition(".")[0] == "fastft" for name in sys.modules)
    first, _, step = sys.argv[1].partition("::")
    faults = [fault for fault in FAULTS if fault.interpreted == interpreted][int(first) :: int(step)]
    report({"baseline": True, **run_forked(None, sorted({fault.test for fault in faults}))})
    for fault in faults:
        report({"index": FAULTS.index(fault), **run_forked(fault, [fault.test])})


def report(result: dict[str, object]) -> None:
    """One line on the real standard output."""
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


def run_forked(fault: Fault | None, tests: list[str]) -> dict[str, object]:
    """Verdict ("green", "red" or "broken"), seconds and first error line of `tests` over a copy with `fault`."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="fastft-fault-") as folder:
        log = pathlib.Path(folder) / "log"
        child = os.fork()
        if child == 0:
            run_child(pathlib.Path(folder), log, fault, tests)
        status = wait(child, SECONDS_PER_FAULT if fault is not None else 10 * SECONDS_PER_FAULT)
        text = log.read_text(errors="replace") if log.exists() else ""
    errors = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    verdict = {0: "green", 1: "red"}.get(status, "broken")
    if status in CRASHES and fault is not None:  # what a wrapped offset reads may not even exist
        verdict = "red"
    if verdict == "red" and NOT_A_FAULT.search(text):
        verdict = "broken"
    if verdict == "broken" and not errors:
        errors = [f"exit status {status}", *text.strip().splitlines()[-1:]]
    return {"verdict": verdict, "seconds": time.perf_counter() - start, "error": errors[0] if errors else ""}


def wait(child: int, seconds: float) -> int:
    """Exit status of the child, which is ended if it takes longer than `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return 124
        time.sleep(0.01)


def run_child(folder: pathlib.Path, log: pathlib.Path, fault: Fault | None, tests: list[str]) -> None:
    """Never returns: exits with pytest's status, or 3 if the copy could not be prepared."""
    status = 3
    try:
        with log.open("w") as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
            os.chdir(ROOT)
            copy = plant(folder, fault)
            sys.path.insert(0, str(folder))
            fastft = importlib.import_module("fastft")
            assert pathlib.Path(fastft.__file__).is_relative_to(copy), f"imported {fastft.__file__}"
            status = int(pytest.main([*PYTEST_OPTIONS, *tests]))
            outside = [
                name
                for name, module in sys.modules.items()
                if name.partition(".")[0] == "fastft" and not pathlib.Path(module.__file__).is_relative_to(copy)
            ]
            assert not outside, f"not from the copy: {outside}"
    except BaseException as error:  # noqa: BLE001  a child must not return into the parent's loop
        status = 3
        with contextlib.suppress(OSError):
            os.write(1, f"\nE {type(error).__name__}: {error}\n".encode())
    os._exit(status)


def plant(folder: pathlib.Path, fault: Fault | None) -> pathlib.Path:
    """A copy of the package in `folder`, with the fault in it: times of files are kept, so bytecode stays valid."""
    copy = folder / "fastft"
    shutil.copytree(ROOT / "fastft", copy, ignore=shutil.ignore_patterns("*.jsonl"))
    if fault is not None:
        path = copy / fault.file
        text = path.read_text(encoding="utf-8")
        assert text.count(fault.old) == 1, "the old text is not there, or not once"
        path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
        # Bytecode is taken for its file's by size and time of writing, to the second: both could be the same.
        pathlib.Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
    return copy


if __name__ == "__main__":
    main()
