"""Importing the library that is measured, the first thing a worker does."""

from __future__ import annotations

import importlib
import time

__all__ = ["import_library"]


def import_library(name: str) -> float:
    """Import a top-level package; returns the seconds it took.

    A worker has fastft in place without having executed it (`worker.make_package_importable`): it is executed now.

    Raises:
        ImportError: it is not installed, or cannot be used here.
    """
    start = time.perf_counter()
    module = importlib.import_module(name)
    if name == "fastft" and not hasattr(module, "__version__"):
        assert module.__spec__ is not None
        assert module.__spec__.loader is not None
        module.__spec__.loader.exec_module(module)
    return time.perf_counter() - start
