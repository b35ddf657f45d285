"""A list of executors out of those that are here.

Thunder raises for a name it does not know, and nvFuser has no build for current torch releases: the list in litgpt's
own examples cannot be used as it stands.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

import thunder
from thunder.extend import Executor, get_executor

__all__ = ["executors"]

_log = logging.getLogger(__name__)
_DEFAULT = ("sdpa", "fastft", "torchcompile_cat", "torch")
# Where executors are registered only when their module is imported
_MODULES = {"torchcompile_cat": "thunder.executors.torch_compile", "torchcompile": "thunder.executors.torch_compile"}


def executors(*wanted: str | Executor) -> list[Any]:
    """The executors of `wanted` that exist, in that order; for `thunder.jit(…, executors=…)`.

    Args:
        wanted: names or executors; none at all stands for sdpa, fastft, torchcompile_cat and torch.

    Returns:
        Executors. An absent one is left out with a note in the log (logger `fastft.integrations.thunder.choice`).

    Raises:
        ValueError: where not one of them exists.
    """
    found: list[Any] = []
    absent: list[str] = []
    for one in wanted or _DEFAULT:
        known = one if isinstance(one, Executor) else _named(one)
        if known is None:
            absent.append(str(one))
        elif known not in found:
            found.append(known)
    if absent:
        _log.warning("Thunder has no executor %s here; going on without.", ", ".join(map(repr, absent)))
    if not found:
        names = ", ".join(sorted(str(executor.name) for executor in thunder.get_all_executors()))
        raise ValueError(f"none of the executors {absent} exists here; Thunder has: {names}.")
    return found


def _named(name: str) -> Any:
    if name in _MODULES:
        importlib.import_module(_MODULES[name])
    return get_executor(name)
