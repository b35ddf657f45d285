"""silu(gate) · up over [tokens, intermediate]."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastft.bench.operations.base import Cost, Function, Inputs, Operation, Problem, normal, normal_like
from fastft.bench.registry import ModelShape


def _draw(problem: Problem, generator: torch.Generator) -> Inputs:
    size = (problem.tokens, problem.shape.intermediate)
    gate, up = (normal(problem, generator, *size) for _ in range(2))
    return Inputs({"gate": gate, "up": up}, (normal_like(gate, generator),))


def _eager(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _cost(shape: ModelShape, tokens: int, itemsize: int, mode: str) -> Cost:
    tensors = {"forward": 3, "backward": 5, "full": 8}[mode]  # gate, up, y; gate, up, dy, dgate, dup
    flops = {"forward": 5, "backward": 10, "full": 15}[mode]
    return Cost(flops * tokens * shape.intermediate, tensors * tokens * shape.intermediate * itemsize)


def _fastft() -> Function:
    functional = import_module("fastft.functional")
    return lambda gate, up: functional.swiglu(gate, up)


def _liger() -> Function:
    function = import_module("liger_kernel.ops").LigerSiLUMulFunction
    return lambda gate, up: function.apply(gate, up)


def _unsloth() -> Function:
    """Unsloth's two kernels, which its MLP calls; the backward one writes over all three of its inputs, as there."""
    kernels = import_module("unsloth.kernels.swiglu")

    class UnslothSwiGLU(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
            ctx.save_for_backward(gate, up)
            product: Tensor = kernels.swiglu_fg_kernel(gate[None], up[None])
            return product[0]

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
            gate, up = ctx.saved_tensors
            _, grad_up, grad_gate = kernels.swiglu_DWf_DW_dfg_kernel(grads[0], gate, up)
            return grad_gate, grad_up

    return lambda gate, up: UnslothSwiGLU.apply(gate, up)


OPERATION = Operation(
    name="swiglu",
    draw=_draw,
    reference=_eager,
    cost=_cost,
    providers={
        "fastft": _fastft,
        "torch": lambda: _eager,
        "liger": _liger,
        "unsloth": _unsloth,
    },
    rowwise=("gate", "up"),
)
