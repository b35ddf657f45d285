"""Running a function under Thunder with our executor and comparing it with eager, values and gradients.

Names are read from the traces' bound symbols, never from their text: the text quotes the caller's source lines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

import fastft.integrations.thunder as fastft_thunder

import thunder  # isort: skip  (ours knows how to import it)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # litgpt's own tests need CUDA; the twins serve without


def leaf(*shape: int, dtype: torch.dtype = torch.float32, needs: bool = True) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, device=DEVICE).requires_grad_(needs)


def jit(function: Any, *wanted: Any) -> Any:
    return thunder.jit(function, executors=fastft_thunder.executors(*(wanted or ("sdpa", "fastft", "torch"))))


def names(trace: Any) -> Counter[str]:
    """Our operators among a trace's bound symbols."""
    found = (symbol.sym.name for symbol in trace.bound_symbols)
    return Counter(name.removeprefix("fastft_") for name in found if name.startswith("fastft_"))


def forward_names(jitted: Any) -> Counter[str]:
    return names(thunder.last_traces(jitted)[-1])


def backward_names(jitted: Any) -> Counter[str]:
    return names(thunder.last_backward_traces(jitted)[-1])


def assert_same(
    function: Callable[..., Any],
    *arguments: Any,
    forward: dict[str, int],
    backward: dict[str, int],
    tolerance: float = 1e-5,
) -> Any:
    """`function` jitted gives eager's values and gradients (none of them zero), with these operators in its traces."""
    jitted = jit(function)
    trained = [a for a in arguments if isinstance(a, torch.Tensor) and a.requires_grad]
    results = []
    for run in (function, jitted):
        outputs = run(*arguments)
        outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
        generator = torch.Generator().manual_seed(3)
        weights = [torch.randn(o.shape, generator=generator).to(o) for o in outputs]
        results.append([*outputs, *(torch.autograd.grad(outputs, trained, weights) if trained else [])])
    for ours, theirs in zip(results[1], results[0], strict=True):
        assert ours.dtype == theirs.dtype
        assert theirs.count_nonzero()
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    assert forward_names(jitted) == forward
    if trained:
        assert backward_names(jitted) == backward
    return jitted
