"""RMSNorm over [tokens, hidden], the weight frozen as in LoRA training."""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

from fastft.bench.operations.base import Cost, Function, Inputs, Operation, Problem, normal, normal_like
from fastft.bench.registry import ModelShape

EPSILON = 1e-5


def _draw(problem: Problem, generator: torch.Generator) -> Inputs:
    hidden = problem.shape.hidden
    x = normal(problem, generator, problem.tokens, hidden)
    weight = normal(problem, generator, hidden, scale=0.1, grad=False).add_(1)
    return Inputs({"x": x, "weight": weight}, (normal_like(x, generator),))


def _eager(x: Tensor, weight: Tensor) -> Tensor:
    """As transformers' LlamaRMSNorm; in float64 for a float64 x."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
    return weight * wide.to(x.dtype)


def _cost(shape: ModelShape, tokens: int, itemsize: int, mode: str) -> Cost:
    tensors = {"forward": 2, "backward": 3, "full": 5}[mode]  # x, y; x, dy, dx
    flops = {"forward": 4, "backward": 8, "full": 12}[mode]
    return Cost(flops * tokens * shape.hidden, tensors * tokens * shape.hidden * itemsize)


def _fastft() -> Function:
    functional = import_module("fastft.functional")
    return lambda x, weight: functional.rms_norm(x, weight, EPSILON)


def _liger() -> Function:
    function = import_module("liger_kernel.ops").LigerRMSNormFunction
    return lambda x, weight: function.apply(x, weight, EPSILON)


def _unsloth() -> Function:
    function = import_module("unsloth.kernels.rms_layernorm").Fast_RMS_Layernorm
    return lambda x, weight: function.apply(x, weight, EPSILON, False)


OPERATION = Operation(
    name="rms_norm",
    draw=_draw,
    reference=_eager,
    cost=_cost,
    providers={
        "fastft": _fastft,
        "torch": lambda: _eager,
        "liger": _liger,
        "unsloth": _unsloth,
    },
    rowwise=("x",),
)
