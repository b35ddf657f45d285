"""An NF4 weight to a dense one: the gate projection's, [intermediate, hidden]. The token count plays no part."""

from __future__ import annotations

import functools
from importlib import import_module

import torch

from fastft.bench.operations.base import Cost, Function, Inputs, Operation, Problem, normal
from fastft.bench.operations.quantized import (
    dequantize_eager,
    fastft_weight,
    quantize,
    quantized_bytes,
)
from fastft.bench.registry import ModelShape


def _draw(problem: Problem, generator: torch.Generator) -> Inputs:
    shape = problem.shape
    dense = normal(problem, generator, shape.intermediate, shape.hidden, scale=0.02, grad=False)
    return Inputs({"weight": quantize(dense)})


def _cost(shape: ModelShape, tokens: int, itemsize: int, mode: str) -> Cost:
    elements = shape.intermediate * shape.hidden
    return Cost(elements, quantized_bytes(elements) + elements * itemsize)


def _fastft() -> Function:
    functional = import_module("fastft.functional")
    view = functools.cache(fastft_weight)  # once a weight, as in a model
    return lambda weight: functional.dequantize(view(weight))


def _bitsandbytes() -> Function:
    function = import_module("bitsandbytes.functional").dequantize_4bit
    return lambda weight: function(weight.packed, weight.state)


def _unsloth() -> Function:
    function = import_module("unsloth.kernels.utils").fast_dequantize
    return lambda weight: function(weight.packed, weight.state)


OPERATION = Operation(
    name="dequantize",
    draw=_draw,
    reference=dequantize_eager,
    cost=_cost,
    providers={
        "fastft": _fastft,
        "torch": lambda: dequantize_eager,
        "bitsandbytes": _bitsandbytes,
        "unsloth": _unsloth,
    },
    has_backward=False,
    sized_by_tokens=False,
)
