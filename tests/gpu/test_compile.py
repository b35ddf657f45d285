"""torch.compile with inductor on CUDA: the operators launch our Triton kernels, the step is the planned model's own."""

from __future__ import annotations

import pathlib

import pytest
import torch
import torch._dynamo
import torch._dynamo.testing

import fastft
from tests import support
from tests.gpu.models import DEVICE, MIDDLE, load_qlora
from tests.operators.test_compile import operators_in, step


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def assert_alike(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, grad in ours.items():
        assert (grad - theirs[name]).norm() <= tolerance * theirs[name].norm(), name


def test_a_planned_qlora_model_compiles_to_one_graph_and_the_same_step_c58(tmp_path: pathlib.Path) -> None:
    """C58 on the GPU: three lengths, two graphs at most."""
    model = fastft.patch(load_qlora(tmp_path, torch.bfloat16, **MIDDLE))
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for length in (64, 96, 130):
        batch = {k: v.to(DEVICE) for k, v in support.random_batch(length, length=length, vocabulary=2048).items()}
        (loss, grads), (compiled_loss, compiled_grads) = step(model, model, batch), step(model, compiled, batch)
        torch.testing.assert_close(compiled_loss, loss, rtol=1e-2, atol=1e-2)
        assert_alike(compiled_grads, grads, 0.05)
    assert counter.frame_count <= 2
    found = operators_in(counter.graphs[-1])
    assert found == {"rms_norm": 9, "rope": 4, "swiglu": 4, "linear_cross_entropy": 1, "lora_linear_4bit": 28}
