"""What the GPU holds at the peak: the loss's buffers, what a layer keeps at each level, and nothing that grows."""

from __future__ import annotations

import gc
import pathlib
from typing import Any

import pytest
import torch

import fastft
from fastft import functional
from fastft.autograd.head_products import _CUDA_CHUNK_BYTES
from fastft.memory import planner
from fastft.memory.costs import LayerShape, step_costs
from tests import support
from tests.gpu import models


def loss_peak(tokens: int, hidden: int, vocabulary: int, ignored: float) -> int:
    """Bytes above inputs at the peak of the loss's forward and backward, head frozen, bf16."""
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, hidden, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(0, vocabulary, (tokens,), device="cuda")
    labels[torch.rand(tokens, device="cuda") < ignored] = -100
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    functional.linear_cross_entropy(x, weight, labels).backward()
    assert x.grad is not None
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("ignored", [0.0, 0.3], ids=["all supervised", "a third ignored"])
def test_doubling_tokens_adds_two_hidden_buffers_to_the_loss(ignored: float) -> None:
    """C14: G W and the gradient of hidden, [N, H] each, at most 5 per cent more; logits are never built."""
    hidden, vocabulary = 2048, 32000
    loss_peak(512, hidden, vocabulary, ignored)  # what is allocated once (cuBLAS workspace) is there before we count
    small, large = (loss_peak(tokens, hidden, vocabulary, ignored) for tokens in (16384, 32768))
    buffer = 16384 * hidden * 2
    assert large - small <= 1.05 * 2 * buffer
    assert large < 32768 * vocabulary * 2, "the logits alone would be more"


def test_doubling_the_vocabulary_adds_at_most_a_chunk_to_the_loss() -> None:
    """C13, C14: and a frozen head costs no buffer of its size, which would be 1 GB here."""
    loss_peak(512, 2048, 128256, 0.0)
    small, large = (loss_peak(8192, 2048, vocabulary, 0.0) for vocabulary in (128256, 256512))
    assert large - small <= _CUDA_CHUNK_BYTES
    assert large < 256512 * 2048 * 2


def kept_by_forward(layers: int, level: str, shape: tuple[int, int]) -> int:
    """Bytes that a forward in training leaves allocated, for a dense bf16 Llama with adapters."""
    model = support.build_model(dtype=torch.bfloat16, **{**models.MIDDLE, "num_hidden_layers": layers}).to("cuda")
    model = fastft.patch(support.add_lora(model, r=8), memory_levels=level, cuda_graphs=False)
    ids = torch.randint(3, 2048, shape, device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad(set_to_none=True)
    gc.collect()
    before = torch.cuda.memory_allocated()
    loss = model(input_ids=ids, labels=ids).loss
    kept = torch.cuda.memory_allocated() - before
    loss.backward()
    models.assert_ran_fast(model)
    return kept


def test_what_a_layer_keeps_at_each_level() -> None:
    """Recompute: its input; offload: nothing, once the copies to the host are over; keep and lean: as reckoned with."""
    shape = (8, 1024)
    x_bytes = shape[0] * shape[1] * 512 * 2
    per_layer = {
        level: (kept_by_forward(6, level, shape) - kept_by_forward(2, level, shape)) / 4 for level in planner.LEVELS
    }
    assert per_layer["recompute"] == pytest.approx(x_bytes, rel=0.05)
    assert abs(per_layer["offload"]) <= 0.05 * x_bytes
    layer = LayerShape(
        hidden=512, query=512, key_value=128, heads=8, intermediate=1408, qkv_rank=24, output_rank=8, gate_up_rank=16,
        down_rank=8, head_norms=False, compute_bytes=2, stream_bytes=2, copied=False,
    )  # fmt: skip
    costs = step_costs(layer, tokens=shape[0] * shape[1], longest=shape[1], vocabulary=2048, loss_chunk=0)
    for level in ("keep", "lean"):
        assert per_layer[level] == pytest.approx(costs.levels[level].saved, rel=0.05), level


@pytest.mark.parametrize("level", planner.LEVELS)
def test_200_steps_leave_allocated_memory_flat(level: str, tmp_path: pathlib.Path) -> None:
    model: Any = fastft.patch(models.load_qlora(tmp_path, torch.bfloat16), memory_levels=level)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    batch = models.on_gpu(support.random_batch(length=48))
    allocated = []
    for _ in range(200):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        allocated.append(torch.cuda.memory_allocated())
    models.assert_ran_fast(model)
    assert max(allocated[20:]) == min(allocated[20:])
