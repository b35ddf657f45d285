"""The child process: one provider, answering requests that arrive as JSON lines on stdin, on the pipe it is given.

Run by path (`python -P worker.py PROVIDER FD`) and not as a module: importing `fastft` patches transformers, which no
peer's process may have seen, and takes time that must be counted. So the package is made importable first, and its
`__init__` runs later, in fastft's own process alone.

What libraries print goes to stderr; replies have a pipe of their own.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import json
import os
import sys
from pathlib import Path

PACKAGE = "fastft"
# "do" of a request → module and function that answer it; every other request is the kernel session's.
TASKS = {
    "limit": ("fastft.bench.limit", "measure"),
    "checkpoint": ("fastft.bench.checkpoint", "write"),
    "train": ("fastft.bench.training", "train"),
}


def make_package_importable() -> None:
    """`fastft.bench` from this very tree, the package itself made but not executed (`imports.import_library` does that
    where fastft is what is measured).

    Raises:
        ImportError: this file does not lie in the package.
    """
    root = str(Path(__file__).resolve().parents[2])
    spec = importlib.machinery.PathFinder.find_spec(PACKAGE, [root])
    if spec is None:
        raise ImportError(f"{root} holds no package {PACKAGE}; the benchmark's files were moved.")
    sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)


def serve(provider: str, replies: int) -> None:
    """Answer requests until stdin ends.

    Args:
        provider: see `kernel_session.LIBRARIES`.
        replies: file descriptor that replies are written to.
    """
    make_package_importable()
    session = importlib.import_module("fastft.bench.kernel_session").KernelSession(provider)
    with os.fdopen(replies, "w", encoding="utf-8") as pipe:
        for line in sys.stdin:
            request = json.loads(line)
            task = TASKS.get(request["do"])
            answer = getattr(importlib.import_module(task[0]), task[1]) if task else session.handle
            pipe.write(json.dumps(answer(request)) + "\n")
            pipe.flush()


if __name__ == "__main__":
    os.dup2(2, 1)  # what a library prints must not be read as a reply, nor break a pipe nobody reads
    serve(sys.argv[1], int(sys.argv[2]))
