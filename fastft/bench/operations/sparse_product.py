"""The loss's second product with small columns left out (`approximations=["skip_probabilities"]`): [tokens, vocabulary]
times the head [vocabulary, hidden], beside the whole product that it replaces.

The left factor stands for P − Y of a trained model: of each block of 256 rows 30 % of the columns are kept, as
docs/approximations.md found; they hold one entry above the threshold each, and are drawn anew for each block. All other
entries lie evenly between ± the threshold. That is more than a model has there, and on purpose: what is left out makes
some per cent of the product, so that the check can tell a product that leaves columns out from the whole one in every
dtype. Each is compared with what it should be: ours with the product of the kept columns, a whole one with the whole.

In training the kernel runs on one chunk of tokens after another, of up to 2,048 rows with the 8B's vocabulary: `--bt
2048` is such a chunk. There is no backward: the product is part of one.
"""

from __future__ import annotations

import math
from dataclasses import replace
from importlib import import_module

import torch
from torch import Tensor

from fastft.bench.checking import worst_error
from fastft.bench.operations.base import COMPILE, Cost, Function, Inputs, Operation, Problem, normal
from fastft.bench.registry import ModelShape

KEPT = 0.3  # of each block's columns
# The kernel's own; not imported, because a peer's process never imports fastft. A test compares them.
THRESHOLD, ROW_BLOCK = 2.0**-16, 256


def _kept(vocabulary: int) -> int:
    """Columns of a block that are kept."""
    return round(KEPT * vocabulary)


def _draw(problem: Problem, generator: torch.Generator) -> Inputs:
    vocabulary, device = problem.shape.vocabulary, problem.device
    gradient = torch.empty(problem.tokens, vocabulary, dtype=problem.dtype, device=device)
    for block in gradient.split(ROW_BLOCK):  # of float32 numbers there are never more than a block's
        block.copy_(torch.rand(block.shape, generator=generator, device=device).mul_(2).sub_(1).mul_(THRESHOLD))
        columns = torch.randperm(vocabulary, generator=generator, device=device)[: _kept(vocabulary)]
        rows = torch.randint(block.shape[0], columns.shape, generator=generator, device=device)
        signs = torch.randn(columns.shape, generator=generator, device=device).sign()
        exponents = torch.rand(columns.shape, generator=generator, device=device).mul_(8).sub_(14)  # up to 2⁻⁶
        block[rows, columns] = (signs * exponents.exp2()).to(problem.dtype)
    weight = normal(problem, generator, vocabulary, problem.shape.hidden, scale=0.02, grad=False)
    return Inputs({"gradient": gradient, "weight": weight}, overwritten=("gradient",))


def _reference(gradient: Tensor, weight: Tensor) -> Tensor:
    """The product with zeros in the columns that are left out."""
    blocks = gradient.split(ROW_BLOCK)
    return torch.cat([block * (block.abs() > THRESHOLD).any(0) for block in blocks]) @ weight


def _whole(gradient: Tensor, weight: Tensor) -> Tensor:
    return torch.mm(gradient, weight)


def _check_whole(operation: Operation, function: Function, inputs: Inputs, flops: float) -> tuple[str, float]:
    """A peer leaves nothing out."""
    return worst_error(replace(operation, reference=_whole), function, inputs, flops)


def _cost(shape: ModelShape, tokens: int, itemsize: int, mode: str) -> Cost:
    """Products of the kept columns alone. All of the left factor must be looked at; of the head, whatever a block
    keeps: with columns drawn anew for each, 30 % of its rows for one block, 94 % for eight."""
    kept, blocks = _kept(shape.vocabulary), math.ceil(tokens / ROW_BLOCK)
    head_rows = shape.vocabulary * (1 - (1 - kept / shape.vocabulary) ** blocks)
    elements = tokens * shape.vocabulary + head_rows * shape.hidden + tokens * shape.hidden
    return Cost(2 * tokens * kept * shape.hidden, elements * itemsize)


def _fastft() -> Function:
    kernel = import_module("fastft.kernels.sparse_product").sparse_product

    def call(gradient: Tensor, weight: Tensor) -> Tensor:
        out: Tensor = kernel(gradient, weight, THRESHOLD, out=gradient.new_empty(len(gradient), weight.shape[1]))
        return out

    return call


OPERATION = Operation(
    name="sparse_product",
    draw=_draw,
    reference=_reference,
    cost=_cost,
    providers={"fastft": _fastft, "torch": lambda: _whole},
    rowwise=("gradient",),
    check_rows=4 * ROW_BLOCK,
    checks={"torch": _check_whole, COMPILE: _check_whole},
    has_backward=False,
)
