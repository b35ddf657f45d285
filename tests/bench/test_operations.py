"""Every operation: its providers against its reference, its cost against what it really reads and writes."""

from __future__ import annotations

import math
from importlib import util

import pytest
import torch

from fastft.bench.checking import check_provider, worst_error
from fastft.bench.operations import OPERATIONS, find_operation, operation_names
from fastft.bench.operations.base import Inputs, Operation, Problem, outputs_of
from fastft.bench.registry import find_model

TINY = find_model("tiny")
PROBLEM = Problem(TINY, 80, torch.float32, "cpu")
every_operation = pytest.mark.parametrize("name", OPERATIONS)


def draw(operation: Operation, seed: int = 0, problem: Problem = PROBLEM) -> Inputs:
    return operation.draw(problem, torch.Generator().manual_seed(seed))


@every_operation
def test_what_can_run_here_is_right(name: str) -> None:
    operation = find_operation(name)
    libraries = {"fastft": "fastft", "torch": "torch", "bitsandbytes": "bitsandbytes"}
    for provider in libraries.keys() & operation.providers.keys():
        error = check_provider(operation, provider, operation.load(provider, "full"), draw(operation), 0.0)
        assert error[1] < 1e-5, (provider, error)


@pytest.mark.trl
def test_trl_head_is_right() -> None:
    operation = find_operation("cross_entropy")
    assert worst_error(operation, operation.load("trl", "full"), draw(operation), 0.0)[1] < 1e-5


@every_operation
def test_a_seed_gives_the_same_inputs(name: str) -> None:
    operation = find_operation(name)
    first, again, other = (draw(operation, seed) for seed in (0, 0, 1))
    for tensor, same, different in zip(first.incoming, again.incoming, other.incoming, strict=True):
        assert torch.equal(tensor, same)
        assert tensor.dim() == 0 or not torch.equal(tensor, different)
    for key, tensor in first.exposed().items():
        assert torch.equal(tensor, again.exposed()[key])
        assert not torch.equal(tensor, other.exposed()[key])


@every_operation
def test_incoming_gradients_fit_the_outputs(name: str) -> None:
    operation = find_operation(name)
    inputs = draw(operation)
    outputs = outputs_of(operation.reference(**inputs.arguments))
    if operation.has_backward:
        assert [grad.shape for grad in inputs.incoming] == [output.shape for output in outputs]
        assert all(output.requires_grad for output in outputs)
    else:
        assert inputs.incoming == ()


@pytest.mark.parametrize("name", ["rms_norm", "swiglu", "rope", "dropout"])
def test_bytes_are_those_of_the_tensors(name: str) -> None:
    """Inputs read, outputs written; small tables and weights aside, of which the cost knows nothing."""
    operation = find_operation(name)
    inputs = draw(operation)
    read = sum(tensor.nbytes for tensor in inputs.trained().values())
    written = sum(output.nbytes for output in outputs_of(operation.reference(**inputs.arguments)))
    incoming = sum(grad.nbytes for grad in inputs.incoming)
    needs_input = 0 if name in ("rope", "dropout") else read  # their backwards need the angles, or the seed, only
    cost = {mode: operation.cost(TINY, 80, 4, mode) for mode in operation.modes()}
    assert cost["forward"] is not None
    assert cost["forward"].bytes == read + written
    assert cost["backward"] is not None
    assert cost["backward"].bytes == incoming + needs_input + read  # read: as large as the gradients written
    assert cost["full"] is not None
    assert cost["full"].bytes == cost["forward"].bytes + cost["backward"].bytes
    assert cost["full"].flops == cost["forward"].flops + cost["backward"].flops


def test_flops_of_the_products() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    for name in ("cross_entropy", "lora_linear"):
        operation = find_operation(name)
        inputs = draw(operation)
        with FlopCounterMode(display=False) as counter:
            outputs = outputs_of(operation.reference(**inputs.arguments))
            torch.autograd.grad(outputs, list(inputs.trained().values()), list(inputs.incoming))
        cost = operation.cost(TINY, 80, 4, "full")
        assert cost is not None
        assert cost.flops == counter.get_total_flops(), name


def test_a_quantized_weight_costs_what_bitsandbytes_stores() -> None:
    operation = find_operation("dequantize")
    weight = draw(operation).arguments["weight"]
    state = weight.state
    stored = weight.packed.nbytes + state.absmax.nbytes + state.state2.absmax.nbytes
    cost = operation.cost(TINY, 80, 4, "forward")
    assert cost is not None
    assert cost.bytes == pytest.approx(stored + 4 * math.prod(state.shape), rel=0.01)


def test_loss_modes_are_compared_together_only() -> None:
    """A loss may compute its gradient in the forward: the split between the modes is the provider's."""
    operation = find_operation("cross_entropy")
    assert operation.cost(TINY, 80, 2, "forward") is None
    assert operation.cost(TINY, 80, 2, "backward") is None


def test_rope_takes_rows_of_2048_or_one() -> None:
    operation = find_operation("rope")
    shapes = {
        tokens: tuple(draw(operation, problem=Problem(TINY, tokens, torch.float32, "cpu")).arguments["q"].shape)
        for tokens in (96, 4096)
    }
    assert shapes == {96: (1, 4, 96, 16), 4096: (2, 4, 2048, 16)}


def test_names() -> None:
    assert operation_names([]) == list(OPERATIONS)
    assert operation_names(["nf4", "linear_cross_entropy", "dequantize"]) == ["dequantize", "cross_entropy"]
    with pytest.raises(ValueError, match=r"layer_norm.*rms_norm"):
        operation_names(["layer_norm"])


def test_torch_compile_stands_beside_torch() -> None:
    names = find_operation("rms_norm").provider_names()
    assert names[:3] == ("fastft", "torch", "torch.compile")


@pytest.mark.skipif(util.find_spec("liger_kernel") is not None, reason="liger is installed")
def test_a_library_that_is_missing_is_an_import_error() -> None:
    with pytest.raises(ImportError):
        find_operation("rms_norm").load("liger", "forward")
