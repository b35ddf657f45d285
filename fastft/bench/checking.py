"""Correct first: a provider's outputs and gradients against a reference in higher precision, before it is timed.

The reference is the operation's plain formula in float64, or in float32 where float64 would take too long, on the same
inputs; it is computed in pieces of rows, so that it costs little memory. The error is ‖result − reference‖ ÷
‖reference‖, per output and per gradient. An operation may have another check for one of its providers
(`Operation.checks`), made of the same parts: `Expected`, `results_of`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastft.bench.operations.base import Function, Inputs, Operation, outputs_of

__all__ = ["TOLERANCE", "Expected", "check_provider", "results_of", "worst_error"]

# Two roundings of a 16-bit result and an intermediate one or two; float32 leaves room for tf32 products.
TOLERANCE = {torch.float32: 2e-3, torch.float16: 4e-3, torch.bfloat16: 1.5e-2}
_FLOPS_IN_FLOAT64 = 5e11  # more than this is too slow in float64 on cards that are no data centre's


def check_provider(
    operation: Operation, provider: str, function: Function, inputs: Inputs, flops: float
) -> tuple[str, float]:
    """`worst_error` of the provider's `function`, or what the operation's own check of that provider says."""
    return operation.checks.get(provider, worst_error)(operation, function, inputs, flops)


def worst_error(operation: Operation, function: Function, inputs: Inputs, flops: float) -> tuple[str, float]:
    """Which of the outputs and gradients is furthest from the reference, and its relative error.

    Args:
        operation: what `function` should compute.
        function: the provider's. It may write over what it is given: it is given copies.
        inputs: arguments and incoming gradients.
        flops: of the operation, to choose the reference's precision.

    Returns:
        Name ("output 0", "gradient of x") and error; NaN and results of another shape are an infinite error.
    """
    expected = Expected(operation, inputs, flops)  # before the function has seen the inputs
    return expected.worst_error(results_of(function, inputs))


def results_of(function: Function, inputs: Inputs) -> dict[str, Tensor]:
    """Outputs ("output 0") and gradients ("gradient of x") of one call, which may write over what it is given."""
    copies = {
        name: torch.empty_like(value, requires_grad=False).copy_(value.detach()).requires_grad_(value.requires_grad)
        for name, value in inputs.exposed().items()  # in its own layout
    }
    trained = {name: copies[name] for name in inputs.trained()}
    outputs = outputs_of(function(**(inputs.arguments | copies)))
    results = {f"output {i}": output.detach().clone() for i, output in enumerate(outputs)}
    if trained:
        incoming = [grad.clone() for grad in inputs.incoming]
        gradients = torch.autograd.grad(outputs, list(trained.values()), incoming)
        results |= {f"gradient of {name}": grad for name, grad in zip(trained, gradients, strict=True)}
    return results


class Expected:
    """The reference's results: those that have rows as a list of (rows, piece), the others summed over the pieces.

    Args:
        operation: whose reference.
        inputs: arguments and incoming gradients.
        flops: of the operation, to choose the reference's precision.
    """

    def __init__(self, operation: Operation, inputs: Inputs, flops: float) -> None:
        wide = torch.float64 if flops <= _FLOPS_IN_FLOAT64 else torch.float32
        self._pieces: dict[str, list[tuple[slice, Tensor]]] = {}
        self._sums: dict[str, Tensor] = {}
        self._operation, self._wide = operation, wide
        rowwise = operation.rowwise
        rows = inputs.arguments[rowwise[0]].shape[0] if rowwise else 1
        step = operation.check_rows if rowwise else 1
        for first in range(0, rows, step):
            where = slice(first, min(first + step, rows)) if rowwise else slice(None)
            arguments = {name: value[where] if name in rowwise else value for name, value in inputs.arguments.items()}
            incoming = [grad[where] if grad.dim() else grad for grad in inputs.incoming]
            share = min(step, rows - first) / rows
            self._add(arguments, list(inputs.trained()), incoming, where, share)

    def _add(
        self, arguments: dict[str, Any], trained: list[str], incoming: list[Tensor], where: slice, share: float
    ) -> None:
        """One piece, `share` of the rows: a scalar output is a mean, so it and its gradient count by their share."""
        wide = {name: self._widen(value, name in trained) for name, value in arguments.items()}
        outputs = outputs_of(self._operation.reference(**wide))
        for i, output in enumerate(outputs):
            self._keep(f"output {i}", output.detach(), where, share, has_rows=output.dim() > 0)
        if not trained:
            return
        grads = [grad.to(self._wide) * (1.0 if grad.dim() else share) for grad in incoming]
        gradients = torch.autograd.grad(outputs, [wide[name] for name in trained], grads)
        for name, gradient in zip(trained, gradients, strict=True):
            has_rows = name in self._operation.rowwise
            self._keep(f"gradient of {name}", gradient, where, 1.0, has_rows=has_rows)

    def _widen(self, value: Any, trained: bool) -> Any:
        if not (isinstance(value, Tensor) and value.is_floating_point()):
            return value
        return value.detach().to(self._wide).requires_grad_(trained)

    def _keep(self, name: str, value: Tensor, where: slice, share: float, *, has_rows: bool) -> None:
        if has_rows:
            self._pieces.setdefault(name, []).append((where, value))
        else:
            self._sums[name] = self._sums.get(name, torch.zeros_like(value)) + value * share

    def worst_error(self, results: dict[str, Tensor]) -> tuple[str, float]:
        """As the function of that name, of what `results_of` returned."""
        errors = {name: self._error_of(name, result) for name, result in results.items()}
        worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
        return worst, math.inf if math.isnan(errors[worst]) else errors[worst]

    def _error_of(self, name: str, result: Tensor) -> float:
        """Relative error of `result`; infinite where its shape is not the reference's."""
        pieces: Sequence[tuple[slice, Tensor]]
        pieces = self._pieces[name] if name in self._pieces else [(slice(None), self._sums[name])]
        squares = size = 0.0
        for where, expected in pieces:
            got = result.detach()[where] if result.dim() else result.detach()
            if got.shape != expected.shape:
                return math.inf
            squares += float((got.to(expected.dtype) - expected).square().sum())
            size += float(expected.square().sum())
        return math.sqrt(squares / size) if size else math.sqrt(squares)
