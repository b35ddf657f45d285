"""Dropout of [tokens, hidden] with p = 0.1, as `lora_dropout` drops out what goes into an adapter's A.

Masks are random, so there is no one right result. Ours is a function of a seed, and its plain-torch twin says which
(kernels/dropout.py): the reference is that twin. A peer draws masks of its own, by a generator that is nobody else's
business: its mask is read off its output, and then outputs and gradients must be those of that mask, and the share that
it keeps must be 1 − p as nearly as chance has it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastft.bench.checking import Expected, results_of
from fastft.bench.operations.base import COMPILE, Cost, Function, Inputs, Operation, Problem, normal, normal_like
from fastft.bench.registry import ModelShape

P = 0.1
DEVIATIONS = 5.0  # of the share kept: chance alone is further off six times in ten million


def _draw(problem: Problem, generator: torch.Generator) -> Inputs:
    """`row` numbers the rows, so that the reference masks a piece of them as the whole is masked."""
    x = normal(problem, generator, problem.tokens, problem.shape.hidden)
    arguments = {
        "x": x,
        "seed": torch.randint(2**63 - 1, (1,), generator=generator, device=problem.device),
        "row": torch.arange(problem.tokens, device=problem.device),
    }
    return Inputs(arguments, (normal_like(x, generator),))


def _reference(x: Tensor, seed: Tensor, row: Tensor) -> Tensor:
    """Our mask, by the kernel's twin."""
    result: Tensor = import_module("fastft.kernels.dropout").dropout_torch(x, P, seed, first_row=int(row[0]))
    return result


def _cost(shape: ModelShape, tokens: int, itemsize: int, mode: str) -> Cost:
    """A mask can be made again from its seed: it need never reach memory. Random numbers are integers: no flops."""
    passes = {"forward": 1, "backward": 1, "full": 2}[mode]  # x, y; dy, dx
    return Cost(passes * tokens * shape.hidden, 2 * passes * tokens * shape.hidden * itemsize)


def _fastft() -> Function:
    """The kernel, which serves both passes, as autograd/dropped_products.py calls it."""
    kernel = import_module("fastft.kernels.dropout").dropout

    class FastftDropout(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, seed: Tensor) -> Tensor:
            ctx.save_for_backward(seed)
            dropped: Tensor = kernel(x, P, seed)
            return dropped

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
            (seed,) = ctx.saved_tensors
            return kernel(grads[0], P, seed), None

    return lambda x, seed, row: FastftDropout.apply(x, seed)


def _torch(x: Tensor, seed: Tensor, row: Tensor) -> Tensor:
    """What PEFT's `nn.Dropout` calls, by torch's own generator."""
    return F.dropout(x, P)


def _masked(x: Tensor, kept: Tensor) -> Tensor:
    return x * kept / (1 - P)


def _check_own_mask(operation: Operation, function: Function, inputs: Inputs, flops: float) -> tuple[str, float]:
    """The errors under the mask that the output shows, or the share kept, whichever is further off."""
    x, results = inputs.arguments["x"], results_of(function, inputs)
    kept = results["output 0"] != 0  # an x that is 0 itself is one in many millions, and lost in a norm
    masked = replace(operation, reference=_masked, rowwise=("x", "kept"))
    expected = Expected(masked, replace(inputs, arguments={"x": x, "kept": kept}), flops)
    return max(expected.worst_error(results), ("share kept", _beyond_chance(kept)), key=lambda named: named[1])


def _beyond_chance(kept: Tensor) -> float:
    """How far the share of `kept` is from 1 − p, relative to it, less what chance explains."""
    count = kept.numel()
    distance = abs(kept.sum().item() / count - (1 - P))
    return max(0.0, distance - DEVIATIONS * math.sqrt(P * (1 - P) / count)) / (1 - P)


OPERATION = Operation(
    name="dropout",
    draw=_draw,
    reference=_reference,
    cost=_cost,
    providers={"fastft": _fastft, "torch": lambda: _torch},
    rowwise=("x", "row"),
    checks={"torch": _check_own_mask, COMPILE: _check_own_mask},
)
