"""lora_dropout on the GPU: the twin's masks, stock's numbers under them, the same ones at every level."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch

import fastft
from fastft.autograd.projection import Dropout
from fastft.kernels.dropout import dropout, dropout_torch
from fastft.patching import levels
from tests import support
from tests.autograd.pieces import Masked
from tests.gpu import models

pytestmark = pytest.mark.gpu
P = 0.2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 173), (4096, 4096), (2, 1000, 14336)])
def test_the_kernel_has_the_twins_mask(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    seed = torch.tensor([2**62 + 12345])
    x = torch.randn(shape, device=models.DEVICE).to(dtype)
    ours = dropout(x, P, seed.to(models.DEVICE), stream=6, first_row=2048)
    rows = slice(0, 40)  # the twin is slow
    line = x.flatten(0, -2)[rows].cpu()
    twin = dropout_torch(line, P, seed, stream=6, first_row=2048)
    torch.testing.assert_close(ours.flatten(0, -2)[rows].cpu(), twin, rtol=2 * torch.finfo(dtype).eps, atol=0)
    assert (ours == 0).float().mean().item() == pytest.approx(P, abs=5 * (P / x.numel()) ** 0.5)


def seeded(model: Any, batch: dict[str, torch.Tensor], level: str | None) -> dict[str, torch.Tensor]:
    """Loss and gradients of one step after seed 3."""
    if level is not None:
        fastft.patch(model, memory_levels=level)
    torch.manual_seed(3)
    return {name: tensor.clone() for name, tensor in models.loss_and_gradients(model, batch).items()}


def test_every_level_drops_the_same_and_stocks_numbers_come_out(tmp_path: pathlib.Path) -> None:
    model = models.load_qlora(tmp_path, torch.float32, **models.MIDDLE)
    support.randomize_adapters(model)
    layers = model.get_base_model().model.layers
    for module in model.modules():
        if hasattr(module, "lora_dropout"):
            module.lora_dropout["default"] = torch.nn.Dropout(P)
    batch = models.on_gpu(support.random_batch(1, rows=2, length=256, vocabulary=2048))
    fast = fastft.patch(model)
    found = {level: seeded(fast, batch, level) for level in ("keep", "lean", "recompute", "offload")}
    assert not torch.equal(found["keep"]["loss"], models.loss_and_gradients(fast, batch)["loss"]), "another seed"
    models.assert_ran_fast(model)
    torch.manual_seed(3)
    for layer in layers:
        seed = torch.randint(2**63 - 1, (1,), device=models.DEVICE)
        for stream, name in enumerate(support.PROJECTIONS, 1):
            owner = layer.self_attn if hasattr(layer.self_attn, name) else layer.mlp
            getattr(owner, name).lora_dropout["default"] = Masked(Dropout(P, seed, stream))
    fastft.unpatch(model)
    stock = seeded(model, batch, None)
    for level, ours in found.items():
        for name, expected in stock.items():
            assert (ours[name] - expected).norm() <= 2e-3 * expected.norm(), f"{level}: {name}"


def test_replays_draw_masks_as_eager_layers_do(tmp_path: pathlib.Path) -> None:
    """To the bit, a seed of its own for each of two steps."""
    model = models.load_qlora(tmp_path, torch.bfloat16, **models.MIDDLE)
    for module in model.modules():
        if hasattr(module, "lora_dropout"):
            module.lora_dropout["default"] = torch.nn.Dropout(P)
    batch = models.on_gpu(support.random_batch(1, rows=2, length=256, vocabulary=2048))
    fastft.patch(model, memory_levels="keep")
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(5):
            models.loss_and_gradients(model, batch)
        assert levels.graphs_of(model.get_base_model().model).captured == models.MIDDLE["num_hidden_layers"]
        found = []
        for graphs in (True, False):
            fastft.patch(model, cuda_graphs=graphs)
            torch.manual_seed(5)
            steps = []
            for _ in range(2):
                made = models.loss_and_gradients(model, batch)
                steps.append({name: tensor.clone() for name, tensor in made.items()})
            found.append(steps)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not torch.equal(found[0][0]["loss"], found[0][1]["loss"])
    for ours, theirs in zip(*found, strict=True):
        assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
