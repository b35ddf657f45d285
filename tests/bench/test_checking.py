"""The check before timing must see what is wrong: an output, a gradient, a few rows, a NaN, a shape."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastft.bench.checking import check_provider, worst_error
from fastft.bench.operations import find_operation
from fastft.bench.operations.base import Function, Inputs, Problem
from fastft.bench.registry import find_model

ROWS = 1500  # two pieces of the reference, the second shorter


def inputs_of(name: str) -> Inputs:
    problem = Problem(find_model("tiny"), ROWS, torch.float32, "cpu")
    return find_operation(name).draw(problem, torch.Generator().manual_seed(0))


def error_of(name: str, function: Function) -> tuple[str, float]:
    return worst_error(find_operation(name), function, inputs_of(name), 0.0)


def right(name: str) -> Function:
    return find_operation(name).load("torch", "full")


@pytest.mark.parametrize("name", ["rms_norm", "cross_entropy", "lora_linear", "rope"])
def test_a_right_result_passes_also_in_pieces(name: str) -> None:
    assert error_of(name, right(name))[1] < 1e-5


def test_a_wrong_output_is_named() -> None:
    name, error = error_of("rope", lambda **x: (right("rope")(**x)[0], -right("rope")(**x)[1]))
    assert name in ("output 1", "gradient of k")
    assert error == pytest.approx(2.0, rel=1e-3)


class HalfGradient(torch.autograd.Function):
    """The identity, with half its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] / 2


def test_a_wrong_gradient_is_named() -> None:
    def wrong(x: Tensor, lora_b: Tensor, **rest: Any) -> Any:
        return right("lora_linear")(x=x, lora_b=HalfGradient.apply(lora_b), **rest)

    name, error = error_of("lora_linear", wrong)
    assert name == "gradient of lora_b"
    assert error == pytest.approx(0.5, rel=1e-3)


def test_a_few_wrong_rows_at_the_end_are_seen() -> None:
    def wrong(x: Tensor, weight: Tensor) -> Tensor:
        y = right("rms_norm")(x=x, weight=weight)
        return torch.cat((y[:-4], torch.zeros_like(y[-4:])))

    assert error_of("rms_norm", wrong)[1] > 0.03


def test_a_mean_over_the_wrong_number_is_seen() -> None:
    name, error = error_of("cross_entropy", lambda **x: right("cross_entropy")(**x) * 1.1)
    assert error == pytest.approx(0.1, rel=1e-3)
    assert name in ("output 0", "gradient of hidden")


@pytest.mark.parametrize("wrong", [lambda y: y * math.nan, lambda y: y[:, :32]], ids=["nan", "shape"])
def test_nan_and_other_shapes_are_infinitely_wrong(wrong: Any) -> None:
    operation, inputs = find_operation("rms_norm"), inputs_of("rms_norm")
    inputs = Inputs({name: value.detach() for name, value in inputs.arguments.items()})  # the outputs alone
    error = worst_error(operation, lambda **x: wrong(right("rms_norm")(**x)), inputs, 0.0)
    assert error == ("output 0", math.inf)


def test_the_inputs_are_left_alone_by_a_function_that_writes_over_them() -> None:
    inputs = inputs_of("swiglu")
    before = [tensor.detach().clone() for tensor in inputs.trained().values()]

    def overwriting(gate: Tensor, up: Tensor) -> Tensor:
        y = right("swiglu")(gate=gate.clone(), up=up.clone())
        gate.data.zero_()
        return y

    worst_error(find_operation("swiglu"), overwriting, inputs, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(inputs.trained().values(), before, strict=True))


def test_the_reference_is_that_of_the_inputs_as_drawn() -> None:
    """Also of those that no call is expected to write to, and that are not copied for it."""

    def spoiling(x: Tensor, weight: Tensor) -> Any:
        return right("rms_norm")(x=x, weight=weight.mul_(2))

    assert error_of("rms_norm", spoiling)[1] == pytest.approx(1.0, rel=1e-3)


def test_what_a_call_may_use_up_is_left_alone_too() -> None:
    inputs = inputs_of("sparse_product")
    before = inputs.arguments["gradient"].clone()

    def using_up(gradient: Tensor, weight: Tensor) -> Tensor:
        product = gradient @ weight
        gradient.zero_()
        return product

    worst_error(find_operation("sparse_product"), using_up, inputs, 0.0)
    assert torch.equal(inputs.arguments["gradient"], before)


def test_a_providers_own_check_is_asked_in_place_of_the_reference() -> None:
    operation = replace(find_operation("rms_norm"), checks={"theirs": lambda *given: ("their word", 0.5)})
    given = right("rms_norm"), inputs_of("rms_norm"), 0.0
    assert check_provider(operation, "theirs", *given) == ("their word", 0.5)
    assert check_provider(operation, "ours", *given) == worst_error(operation, *given)


def test_much_arithmetic_is_checked_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    operation = find_operation("rms_norm")
    dtypes = []

    def reference(**arguments: Tensor) -> Any:
        dtypes.append(arguments["x"].dtype)
        return operation.reference(**arguments)

    watched = replace(operation, reference=reference)
    worst_error(watched, right("rms_norm"), inputs_of("rms_norm"), 1e10)
    worst_error(watched, right("rms_norm"), inputs_of("rms_norm"), 1e13)
    assert dtypes == [torch.float64] * 2 + [torch.float32] * 2
