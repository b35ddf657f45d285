"""The executor "fastft": a set of Thunder operators, and what it says about calls it left alone.

An executor claims symbols of Thunder's traces (`torch.nn.functional.cross_entropy`) or Python functions met while a
program is traced (`litgpt.model.apply_rope`). A claim has a checker. Where it says no, Thunder takes the call apart as
it would have without us, and the reason is kept in `declined`: a fallback costs speed, and is never secret.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from fastft.integrations.thunder.shim import import_thunder

import_thunder()

from thunder.core.dtypes import to_torch_dtype  # noqa: E402
from thunder.core.proxies import ProxyTag, TensorProxy  # noqa: E402
from thunder.core.trace import get_tracectx  # noqa: E402
from thunder.extend import OperatorExecutor, register_executor  # noqa: E402

import fastft  # noqa: E402

__all__ = [
    "FLOATS",
    "FastftExecutor",
    "TensorProxy",
    "executor",
    "is_made_again",
    "made_again",
    "needs_gradient",
    "torch_dtype",
]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_log = logging.getLogger(__name__)


class FastftExecutor(OperatorExecutor):
    """Thunder's operator executor with a memory of what it declined.

    Attributes:
        declined: operation -> reasons why a call was left to Thunder since the process began, or since `clear`.
    """

    def __init__(self) -> None:
        super().__init__("fastft", version=fastft.__version__)
        self.declined: dict[str, set[str]] = {}

    def decline(self, operation: str, reason: str | None) -> bool:
        """Note why a call is not ours (None: it is); True where it is declined."""
        if reason is None:
            return False
        reasons = self.declined.setdefault(operation, set())
        if reason not in reasons:
            reasons.add(reason)
            _log.info("%s is left to Thunder: %s", operation, reason)
        return True

    def clear(self) -> None:
        """Forget what was declined."""
        self.declined.clear()

    def substitute(self, functions: Callable[..., Any] | tuple[Callable[..., Any], ...], dispatch: Any) -> None:
        """Have `dispatch` called, with proxies, wherever a traced program calls one of `functions`.

        `register_operator(replaces=…)` does so for a symbol; here `dispatch` may also decide against ours and spell the
        call out in Thunder's own operations.
        """
        for function in functions if isinstance(functions, tuple) else (functions,):
            self._lookasides[function] = dispatch


executor = FastftExecutor()
register_executor(executor)


def needs_gradient(proxy: Any) -> bool:
    """Whether a gradient of `proxy` may be wanted; to be asked inside a gradient transform.

    Inputs of the program know whether they require one: a frozen weight does not, and its gradient is not computed.
    Intermediate values do not know in Thunder 0.2.6, so theirs is always computed.
    """
    if proxy is None:
        return False
    trace = get_tracectx()
    inputs = {argument.name for argument in (trace.args or ()) if isinstance(argument, TensorProxy)}
    return bool(proxy.requires_grad) if proxy.name in inputs else True


def made_again(proxy: Any) -> Any:
    """`proxy`, whose operator the backward runs again instead of keeping what it made; to be asked where it is made.

    Thunder's own tag, which `torch.utils.checkpoint` sets on everything inside it. It concerns the whole operator:
    other outputs that the backward reads are made again with this one. What the operator reads is kept.
    """
    proxy.tags.add(ProxyTag.RECOMPUTE_IN_BACKWARD)
    return proxy


def is_made_again(proxy: Any) -> bool:
    """Whether `made_again` was said of `proxy`."""
    return isinstance(proxy, TensorProxy) and ProxyTag.RECOMPUTE_IN_BACKWARD in proxy.tags


def torch_dtype(proxy: Any) -> torch.dtype:
    """A proxy's dtype as torch has it."""
    return to_torch_dtype(proxy.dtype)
