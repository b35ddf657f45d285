"""The head and the mean cross-entropy over [tokens, hidden], the head frozen as in LoRA training, every row counted."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastft.bench.operations.base import Cost, Function, Inputs, Operation, Problem, normal
from fastft.bench.registry import ModelShape

TRL_TILE = 32768  # columns of the logits that TRL's trainers ask of its head


def _draw(problem: Problem, generator: torch.Generator) -> Inputs:
    shape, tokens = problem.shape, problem.tokens
    labels = torch.randint(0, shape.vocabulary, (tokens,), generator=generator, device=problem.device)
    arguments = {
        "hidden": normal(problem, generator, tokens, shape.hidden),
        "weight": normal(problem, generator, shape.vocabulary, shape.hidden, scale=0.02, grad=False),
        "labels": labels,
    }
    return Inputs(arguments, (torch.ones((), device=problem.device),))


def _eager(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """As transformers: all logits, upcast to float32 (float64 stays)."""
    logits = hidden @ weight.t()
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels)


def _cost(shape: ModelShape, tokens: int, itemsize: int, mode: str) -> Cost | None:
    if mode != "full":
        return None
    product = 2 * tokens * shape.hidden * shape.vocabulary
    head = shape.vocabulary * shape.hidden * itemsize
    return Cost(2 * product, head + 2 * tokens * shape.hidden * itemsize)


def _fastft() -> Function:
    functional = import_module("fastft.functional")
    return lambda hidden, weight, labels: functional.linear_cross_entropy(hidden, weight, labels)


def _liger() -> Function:
    function = import_module("liger_kernel.ops").LigerFusedLinearCrossEntropyFunction

    def call(hidden: Tensor, weight: Tensor, labels: Tensor) -> Any:
        result = function.apply(hidden, weight, labels)
        return result[0] if isinstance(result, tuple) else result  # versions differ

    return call


def _unsloth() -> Function:
    function = import_module("unsloth_zoo.loss_utils").unsloth_fused_ce_loss

    def call(hidden: Tensor, weight: Tensor, labels: Tensor) -> Any:
        return function(
            trainer=None,
            hidden_states=hidden[None],
            lm_head_weight=weight,
            lm_head_bias=None,
            labels=labels[None],
            mask=None,
            n_items=None,
            scaling=None,
            target_gb=None,
            torch_compile=True,
            logit_softcapping=0,
            shift_labels=False,
        )

    return call


def _cut_cross_entropy() -> Function:
    function = import_module("cut_cross_entropy").linear_cross_entropy
    return lambda hidden, weight, labels: function(hidden, weight, labels)


def _trl() -> Function:
    """TRL's head, asked for what SFTTrainer asks of it by default."""
    function = import_module("trl.trainer.utils")._ChunkedLogProbFunction
    outputs = ("log_probs", "entropy", "is_top1")

    def call(hidden: Tensor, weight: Tensor, labels: Tensor) -> Any:
        return -function.apply(hidden, weight, None, labels, 1.0, TRL_TILE, None, 1.0, outputs)[0].mean()

    return call


OPERATION = Operation(
    name="cross_entropy",
    draw=_draw,
    reference=_eager,
    cost=_cost,
    providers={
        "fastft": _fastft,
        "torch": lambda: _eager,
        "liger": _liger,
        "unsloth": _unsloth,
        "cce": _cut_cross_entropy,
        "trl": _trl,
    },
    rowwise=("hidden", "labels"),
)
