"""The process that Nsight Compute looks at: one operation of the benchmark, forward and backward, once.

    python -m fastft.bench.validate.target OPERATION PROVIDER MODEL TOKENS

Drawing inputs, compiling and a first call come before the profiled range (`ncu --profile-from-start off`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from fastft.bench.operations import find_operation
from fastft.bench.operations.base import Function, Inputs, Problem, outputs_of
from fastft.bench.registry import find_model


def run_once(
    operation_name: str, provider: str, problem: Problem, profiled: contextlib.AbstractContextManager[None]
) -> list[Tensor]:
    """Run the operation once to warm up, and once inside `profiled`.

    Args:
        operation_name: one of `fastft bench kernels`.
        provider: who computes it.
        problem: shape, token count, dtype, device.
        profiled: entered around the second run.

    Returns:
        Outputs and gradients of the second run.
    """
    operation = find_operation(operation_name)
    function = operation.load(provider, "full")

    def draw() -> Inputs:
        return operation.draw(problem, torch.Generator(problem.device).manual_seed(0))

    _call(function, draw())
    fresh = draw()  # the first call may have written over its own
    with profiled:
        return _call(function, fresh)


def _call(function: Function, inputs: Inputs) -> list[Tensor]:
    """Outputs and gradients. `grad`, not `backward`: adding to leaves' gradients is no part of an operation."""
    outputs = outputs_of(function(**inputs.arguments))
    leaves = list(inputs.trained().values())
    gradients = torch.autograd.grad(outputs, leaves, inputs.incoming) if leaves else ()
    return [*outputs, *gradients]


@contextlib.contextmanager
def _nsight_range() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    yield
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def main(operation_name: str, provider: str, model: str, tokens: str) -> None:
    """Run it on the GPU in bfloat16."""
    run_once(operation_name, provider, Problem(find_model(model), int(tokens), torch.bfloat16, "cuda"), _nsight_range())


if __name__ == "__main__":
    main(*sys.argv[1:])
