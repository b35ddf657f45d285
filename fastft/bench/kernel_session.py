"""What a worker does for `fastft bench kernels`: makes one operation of one provider ready, and times it when asked.

Requests and replies are plain dictionaries (they travel as JSON lines). Everything on the GPU runs on one side stream,
because that is where a graph can be captured. Nothing heavy is imported above: the provider's library comes first in
its process, since some patch others when they are imported.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fastft.bench.imports import import_library
from fastft.bench.machine import device_facts, free_bytes
from fastft.bench.registry import ModelShape

if TYPE_CHECKING:
    from fastft.bench.prepared import Prepared

__all__ = ["LIBRARIES", "KernelSession"]

# Provider → the library it is.
LIBRARIES = {
    "fastft": "fastft",
    "torch": "torch",
    "torch.compile": "torch",
    "liger": "liger_kernel",
    "unsloth": "unsloth",
    "cce": "cut_cross_entropy",
    "trl": "trl",
    "bitsandbytes": "bitsandbytes",
}


class KernelSession:
    """One provider in this process. `handle` answers requests; what the provider raises becomes a reply's `status`."""

    def __init__(self, provider: str) -> None:
        self.provider = provider
        self._facts: dict[str, Any] = {}
        self._stream: Any = None
        self._prepared: Prepared | None = None
        self._checked: dict[tuple[Any, ...], tuple[str, float]] = {}
        self._actions: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "open": self._open,
            "prepare": self._prepare,
            "sample": self._sample,
            "release": self._release,
        }

    def handle(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a request, by its "do".

        open: import the library → device facts, `import_s`.
        prepare (operation, mode, shape, tokens, dtype): → `timer`, `note`, `error`, `extra_bytes`, `footprint_bytes`.
        sample (count): → `device_ms`, `host_ms`.
        release: drop all tensors → `free_bytes`.

        Every reply has a `status`: ok, wrong, out of memory or error, the last three with a `note`.
        """
        action = self._actions[request["do"]]
        try:
            with self._on_stream():
                return action(request)
        except Exception as error:  # noqa: BLE001  (whatever another library raises is a row of the table, not our end)
            self._prepared = None
            status = "out of memory" if type(error).__name__ == "OutOfMemoryError" else "error"
            return {"status": status, "note": _short(error)}

    def _on_stream(self) -> Any:
        if self._stream is None:
            return contextlib.nullcontext()
        import torch

        return torch.cuda.stream(self._stream)

    def _open(self, request: Mapping[str, Any]) -> dict[str, Any]:
        seconds = import_library(LIBRARIES[self.provider])
        import torch

        self._facts = device_facts()
        if self._facts["device"] == "cuda":
            self._stream = torch.cuda.Stream()
        return {"status": "ok", "import_s": seconds, **self._facts}

    def _release(self, request: Mapping[str, Any]) -> dict[str, Any]:
        import torch

        self._prepared = None
        gc.collect()
        if self._facts["device"] == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        return {"status": "ok", "free_bytes": free_bytes(self._facts["device"])}

    def _prepare(self, request: Mapping[str, Any]) -> dict[str, Any]:
        import torch

        from fastft.bench.operations import find_operation
        from fastft.bench.operations.base import Problem
        from fastft.bench.prepared import Prepared

        self._release(request)
        device = self._facts["device"]
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        operation = find_operation(request["operation"])
        problem = Problem(ModelShape(**request["shape"]), request["tokens"], getattr(torch, request["dtype"]), device)
        prepared = Prepared(operation, self.provider, problem, request["mode"])
        key = (operation.name, problem)
        if key not in self._checked:  # once a size, not once a mode
            self._checked[key] = prepared.check()
        wrong, error = self._checked[key]
        finite_error = error if math.isfinite(error) else None  # JSON has no infinity
        if wrong:
            return {"status": "wrong", "note": wrong, "error": finite_error}
        extra_bytes = prepared.make_ready(self._facts["l2_bytes"])
        self._prepared = prepared
        return {
            "status": "ok",
            "timer": prepared.timer.kind,
            "note": prepared.timer.note,
            "error": finite_error,
            "extra_bytes": extra_bytes,
            "footprint_bytes": torch.cuda.max_memory_reserved() if device == "cuda" else 0,
        }

    def _sample(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if self._prepared is None:
            raise RuntimeError("nothing is ready to be timed; ask for `prepare` first.")
        device_ms, host_ms = self._prepared.sample(request["count"])
        return {"status": "ok", "device_ms": device_ms, "host_ms": host_ms}


def _short(error: Exception) -> str:
    """Type and first line: a table's cell."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}" if text else type(error).__name__
