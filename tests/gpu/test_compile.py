"""torch.compile with inductor on CUDA: the operators launch our Triton kernels, the step is the planned model's own."""

from __future__ import annotations

import pathlib

import torch
import torch._dynamo
import torch._dynamo.testing
import torch._dynamo.utils

import fastft
from tests import support
from tests.gpu.models import DEVICE, MIDDLE, load_qlora
from tests.operators.test_compile import fresh_dynamo, operators_in, recompilations, step

__all__ = ["fresh_dynamo"]  # a fixture, for every test here
ALIGNMENT = "in is_aligned_realized_tensor"  # torch/_inductor/ir.py, where the guard was made


def assert_alike(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, grad in ours.items():
        assert (grad - theirs[name]).norm() <= tolerance * theirs[name].norm(), name


def test_a_planned_qlora_model_compiles_to_one_graph_and_the_same_step_c58(tmp_path: pathlib.Path) -> None:
    """C58 on the GPU: two graphs for lengths that are multiples of 8, and a third for all others.

    The third is inductor's own: where flash or cuDNN attention runs (16 bits), their backward reads log-sums [batch,
    heads, length], and inductor compiles again where such a tensor's rows lose the alignment it saw first.
    """
    model = fastft.patch(load_qlora(tmp_path, torch.bfloat16, **MIDDLE))
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for length in (64, 96, 136, 130, 99):
        batch = {k: v.to(DEVICE) for k, v in support.random_batch(length, length=length, vocabulary=2048).items()}
        (loss, grads), (compiled_loss, compiled_grads) = step(model, model, batch), step(model, compiled, batch)
        torch.testing.assert_close(compiled_loss, loss, rtol=1e-2, atol=1e-2)
        assert_alike(compiled_grads, grads, 0.05)
        if length % 8 == 0:
            assert counter.frame_count <= 2, recompilations()
    assert counter.frame_count <= 3, recompilations()
    assert all(ALIGNMENT in reason for reason in recompilations()[1:]), recompilations()
    found = operators_in(counter.graphs[-1])
    assert found == {"rms_norm": 9, "rope": 4, "swiglu": 4, "linear_cross_entropy": 1, "lora_linear_4bit": 28}


def test_the_stock_model_compiles_as_often_for_the_same_reason() -> None:
    """Where this fails the alignment guard is no more, or is ours."""
    reasons = []
    for planned in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.clear_compilation_metrics()
        model = support.build_model(dtype=torch.bfloat16, **MIDDLE).to(DEVICE)
        compiled = torch.compile(fastft.patch(model) if planned else model, fullgraph=True)
        for length in (64, 96, 130):
            batch = support.random_batch(length, length=length, vocabulary=2048)
            step(model, compiled, {k: v.to(DEVICE) for k, v in batch.items()})
        reasons.append([ALIGNMENT in reason for reason in recompilations()])
    assert reasons[0] == reasons[1], recompilations()
