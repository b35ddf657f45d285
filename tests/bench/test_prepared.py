"""Getting ready: what a kernel writes over is fresh for every round, and a mode runs what it says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastft.bench.operations import find_operation
from fastft.bench.operations.base import Function, Operation, Problem
from fastft.bench.prepared import Prepared
from fastft.bench.registry import find_model

PROBLEM = Problem(find_model("tiny"), 48, torch.float32, "cpu")


def swiglu_with(function: Function) -> Operation:
    operation = find_operation("swiglu")
    return replace(operation, providers={**operation.providers, "mine": lambda: function})


class Greedy(torch.autograd.Function):
    """SwiGLU that writes over its inputs and over the incoming gradient in its backward, as some providers do."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = (tensor.detach().clone().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            y = torch.nn.functional.silu(gate) * up
        results = torch.autograd.grad(y, (gate, up), grads[0].clone())
        for tensor in (*ctx.saved_tensors, grads[0]):
            tensor.data.fill_(float("nan"))
        return results[0], results[1]


@pytest.mark.parametrize("mode", ["full", "backward"])
def test_each_round_starts_from_the_drawn_inputs(mode: str) -> None:
    seen: list[Tensor] = []

    def watched(gate: Tensor, up: Tensor) -> Any:
        y = Greedy.apply(gate, up)
        y.register_hook(lambda grad: seen.append(grad.detach().clone()))
        return y

    prepared = Prepared(swiglu_with(watched), "mine", PROBLEM, mode)
    prepared.make_ready(l2_bytes=1)
    prepared.sample(3)
    assert len(seen) > 3
    assert not any(grad.isnan().any() for grad in seen)
    assert all(torch.equal(grad, seen[0]) for grad in seen)


def test_what_a_call_uses_up_is_there_again_in_each_round() -> None:
    """Not differentiated, and written over: the sparse product's left factor."""
    seen: list[Tensor] = []

    def greedy(gradient: Tensor, weight: Tensor) -> Tensor:
        seen.append(gradient.clone())
        product = gradient @ weight
        gradient.fill_(float("nan"))
        return product

    operation = find_operation("sparse_product")
    operation = replace(operation, providers={**operation.providers, "mine": lambda: greedy})
    prepared = Prepared(operation, "mine", PROBLEM, "forward")
    prepared.make_ready(l2_bytes=1)
    prepared.sample(3)
    assert len(seen) > 3
    assert all(torch.equal(gradient, seen[0]) for gradient in seen)


@pytest.mark.parametrize(
    ("mode", "forwards", "backwards"), [("forward", True, False), ("backward", False, True), ("full", True, True)]
)
def test_a_mode_times_what_it_says(mode: str, forwards: bool, backwards: bool) -> None:
    counts = {"forward": 0, "backward": 0}

    def counting(gate: Tensor, up: Tensor) -> Tensor:
        counts["forward"] += 1
        y = torch.nn.functional.silu(gate) * up
        y.register_hook(lambda grad: counts.__setitem__("backward", counts["backward"] + 1))
        return y

    prepared = Prepared(swiglu_with(counting), "mine", PROBLEM, mode)
    prepared.make_ready(l2_bytes=1)
    counts.update(forward=0, backward=0)
    device_ms, host_ms = prepared.sample(4)
    assert len(device_ms) == 4
    assert host_ms == []  # on a CPU
    assert counts == {"forward": 6 * forwards, "backward": 6 * backwards}  # two untimed rounds before


def test_a_wrong_result_says_what_is_wrong() -> None:
    wrong = Prepared(swiglu_with(lambda gate, up: gate * up), "mine", PROBLEM, "full")
    message, error = wrong.check()
    assert "relative error" in message
    assert error > 0.1
    right = Prepared(swiglu_with(find_operation("swiglu").reference), "mine", PROBLEM, "full")
    assert right.check()[0] == ""


def test_asking_for_the_timer_too_early_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="make_ready"):
        _ = Prepared(find_operation("swiglu"), "torch", PROBLEM, "forward").timer
