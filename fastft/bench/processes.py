"""The parent's end of a worker process: start it, ask it, and say what became of it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

__all__ = ["ProcessWorker", "Worker", "WorkerError", "is_installed"]

_WORKER = Path(__file__).resolve().with_name("worker.py")
_SECONDS_TO_EXIT = 20.0
_LOG_LINES = 3


class WorkerError(RuntimeError):
    """A worker ended, or did not answer in time."""


class Worker(Protocol):
    """Something that answers requests: a process, or in tests a session in this one."""

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The reply.

        Raises:
            WorkerError: there is none and there will be none.
        """
        ...

    def close(self) -> None:
        """End it. Safe to call twice."""
        ...


def is_installed(library: str) -> bool:
    """Whether a top-level package can be found; nothing is imported."""
    return importlib.util.find_spec(library) is not None


class ProcessWorker:
    """A worker process for one provider, in a temporary folder of its own (some libraries write where they are)."""

    def __init__(self, provider: str, *, timeout: float = 1800.0, cold_cache: bool = False) -> None:
        """Start it.

        Args:
            provider: see `kernel_session.LIBRARIES`.
            timeout: seconds to wait for a reply.
            cold_cache: empty caches of compiled kernels (Triton's, inductor's), in its folder.
        """
        self.provider, self._timeout = provider, timeout
        self._folder = tempfile.TemporaryDirectory(prefix=f"fastft-bench-{provider}-", ignore_cleanup_errors=True)
        self._log = Path(self._folder.name) / "worker.log"
        read_end, write_end = os.pipe()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_WORKER), provider, str(write_end)],
                stdin=subprocess.PIPE,
                stderr=log,
                stdout=log,
                pass_fds=[write_end],
                cwd=self._folder.name,
                env=_child_environment(self._folder.name if cold_cache else None),
                text=True,
            )
        os.close(write_end)
        self._read_end = read_end
        self._unread = b""

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send `request` and wait for the reply.

        Raises:
            WorkerError: the process ended (the message has its last words), or took too long and was killed.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError) as error:  # ValueError: closed
            raise WorkerError(self._last_words()) from error
        reply: dict[str, Any] = json.loads(self._read_line())
        return reply

    def _read_line(self) -> bytes:
        deadline = time.monotonic() + self._timeout
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._read_end], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self._process.kill()
                raise WorkerError(f"{self.provider}: no answer within {self._timeout:.0f} s; its process was ended.")
            data = os.read(self._read_end, 1 << 16)
            if not data:
                raise WorkerError(self._last_words())
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _last_words(self) -> str:
        try:
            code: int | str = self._process.wait(timeout=_SECONDS_TO_EXIT)
        except subprocess.TimeoutExpired:
            code = "none yet"
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        said = " | ".join(lines[-_LOG_LINES:]) or "it printed nothing"
        return f"{self.provider}: the process ended (exit status {code}): {said[:600]}"

    def close(self) -> None:
        """End the process: by the end of its input, or if it does not listen, by a kill."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(OSError):  # it is gone already
                self._process.stdin.close()
            os.close(self._read_end)
        try:
            self._process.wait(timeout=_SECONDS_TO_EXIT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()


def _child_environment(cache: str | None) -> dict[str, str]:
    """This process's environment, offline: all files are local. Import paths absolute: the child starts elsewhere."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    if environment.get("PYTHONPATH"):
        paths = environment["PYTHONPATH"].split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in paths)
    if cache is not None:
        environment["TRITON_CACHE_DIR"] = os.path.join(cache, "triton")
        environment["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(cache, "inductor")
    return environment
