"""The gate projection with a LoRA of rank 16 over its NF4 weight: [tokens, hidden] to [tokens, intermediate]."""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastft.bench.operations.base import Cost, Function, Inputs, Operation, Problem, normal
from fastft.bench.operations.quantized import (
    QuantizedInput,
    dequantize_eager,
    fastft_weight,
    quantize,
    quantized_bytes,
)
from fastft.bench.registry import ModelShape

RANK, SCALE = 16, 1.0


def _draw(problem: Problem, generator: torch.Generator) -> Inputs:
    inputs, outputs = problem.shape.hidden, problem.shape.intermediate
    dense = normal(problem, generator, outputs, inputs, scale=0.02, grad=False)
    arguments = {
        "x": normal(problem, generator, problem.tokens, inputs),
        "weight": quantize(dense),
        "lora_a": normal(problem, generator, RANK, inputs, scale=0.02),
        "lora_b": normal(problem, generator, outputs, RANK, scale=0.02),
    }
    return Inputs(arguments, (normal(problem, generator, problem.tokens, outputs, grad=False),))


def _reference(x: Tensor, weight: QuantizedInput, lora_a: Tensor, lora_b: Tensor) -> Tensor:
    base = F.linear(x, dequantize_eager(weight).to(x.dtype))
    return base + SCALE * F.linear(F.linear(x, lora_a), lora_b)


def _cost(shape: ModelShape, tokens: int, itemsize: int, mode: str) -> Cost:
    """Backward: dX = dY W + (dY B) A, dA = (dY B)ᵀ X, dB = dYᵀ (X Aᵀ). The dense weight need never reach memory."""
    inputs, outputs = shape.hidden, shape.intermediate
    base, low_rank = 2 * tokens * inputs * outputs, 2 * tokens * RANK * (inputs + outputs)
    products = {"forward": base + low_rank, "backward": base + 2 * low_rank, "full": 2 * base + 3 * low_rank}[mode]
    x, y = tokens * inputs * itemsize, tokens * outputs * itemsize
    weight = quantized_bytes(inputs * outputs)
    moved = {"forward": x + weight + y, "backward": y + weight + 2 * x, "full": 3 * x + 2 * weight + 2 * y}[mode]
    return Cost(products, moved)


def _torch() -> Function:
    """What PEFT runs over bitsandbytes' Linear4bit."""
    matmul_4bit = import_module("bitsandbytes").matmul_4bit

    def call(x: Tensor, weight: QuantizedInput, lora_a: Tensor, lora_b: Tensor) -> Tensor:
        base: Tensor = matmul_4bit(x, weight.packed.t(), quant_state=weight.state)
        return base + SCALE * F.linear(F.linear(x, lora_a), lora_b)

    return call


def _fastft() -> Function:
    functional = import_module("fastft.functional")
    view = functools.cache(fastft_weight)  # once a weight, as in a model
    return lambda x, weight, lora_a, lora_b: functional.lora_linear(x, view(weight), lora_a, lora_b, scale=SCALE)


def _unsloth() -> Function:
    function = import_module("unsloth.kernels.fast_lora").LoRA_W

    def call(x: Tensor, weight: QuantizedInput, lora_a: Tensor, lora_b: Tensor) -> Any:
        return function.apply(x[None], weight.packed, weight.state, lora_a, lora_b, SCALE)[0]

    return call


OPERATION = Operation(
    name="lora_linear",
    draw=_draw,
    reference=_reference,
    cost=_cost,
    providers={"fastft": _fastft, "torch": _torch, "unsloth": _unsloth},
    rowwise=("x",),
)
