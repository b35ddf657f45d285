"""Whole QLoRA models on the GPU, fast against stock, both against float64: the contract of DESIGN.md, "Numbers"."""

from __future__ import annotations

import contextlib
import pathlib
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fastft
from fastft.memory.planner import LEVELS
from tests import support
from tests.contract import Run, assert_contract, relative_error
from tests.gpu import models

SEEDS = range(9)


class Precision(NamedTuple):
    """How a user may run: dtype of the model, of the adapters, autocast's, and the loss scale fp16 needs."""

    dtype: torch.dtype
    adapters: torch.dtype
    autocast: torch.dtype | None = None
    scale: float = 1.0

    @property
    def compute(self) -> torch.dtype:
        """Dtype of the products."""
        return self.autocast or self.dtype

    def context(self) -> Any:
        """Autocast as Trainer's bf16=True or fp16=True has it."""
        return contextlib.nullcontext() if self.autocast is None else torch.autocast("cuda", self.autocast)


PRECISIONS = {
    "bf16": Precision(torch.bfloat16, torch.bfloat16),
    "bf16, fp32 adapters": Precision(torch.bfloat16, torch.float32),
    "bf16 under autocast, fp32 adapters": Precision(torch.bfloat16, torch.float32, torch.bfloat16),
    "fp16, fp32 adapters": Precision(torch.float16, torch.float32, scale=1024.0),
    "fp16 under autocast, fp32 adapters": Precision(torch.float16, torch.float32, torch.float16, 1024.0),
    "fp32": Precision(torch.float32, torch.float32),
}


def measure(
    folder: pathlib.Path,
    precision: Precision,
    config: dict[str, Any],
    *,
    family: str = "llama",
    length: int = 256,
    padded: bool = False,
    nested: bool = True,
) -> dict[str, list[Run]]:
    """Stock, float64 and fast, for each level, over the seeds: adapters and batch drawn anew for each seed."""
    model = models.load_qlora(
        folder, precision.dtype, family=family, adapter_dtype=precision.adapters, nested=nested, **config
    )
    reference = models.float64_reference(model, family, **config)
    vocabulary = model.config.vocab_size
    batches = [
        models.on_gpu(support.random_batch(seed, length=length, vocabulary=vocabulary, padded=padded)) for seed in SEEDS
    ]

    def run() -> list[dict[str, Tensor]]:
        results = []
        for seed, batch in zip(SEEDS, batches, strict=True):
            support.randomize_adapters(model, seed)
            with precision.context():
                results.append(models.loss_and_gradients(model, batch, precision.scale))
        return results

    stock, wide = run(), []
    for seed, batch in zip(SEEDS, batches, strict=True):
        support.randomize_adapters(model, seed)
        models.copy_adapters(model, reference)
        wide.append(models.wide_loss_and_gradients(reference, batch, precision.scale))
    runs = {}
    for level in LEVELS:
        fastft.patch(model, memory_levels=level)
        runs[level] = [Run(*three) for three in zip(run(), stock, wide, strict=True)]
    models.assert_ran_fast(model)
    return runs


@pytest.mark.parametrize("name", PRECISIONS)
def test_qlora_gradients_of_a_middle_size_llama(name: str, tmp_path: pathlib.Path) -> None:
    """Hidden 512, four layers, nested NF4: every trainable gradient, and the loss."""
    precision = PRECISIONS[name]
    for runs in measure(tmp_path, precision, models.MIDDLE).values():
        assert_contract(runs, precision.compute)
        if precision.compute == torch.float32:
            assert_fp32_agrees(runs)


def assert_fp32_agrees(runs: list[Run]) -> None:
    """fp32: loss and gradient norm within 1e-5 of stock's."""
    for run in runs:
        fast, stock = (
            torch.cat([g.flatten() for name, g in side.items() if name != "loss"]).norm()
            for side in (run.fast, run.stock)
        )
        assert relative_error(fast, stock) < 1e-5
        assert relative_error(run.fast["loss"], run.stock["loss"]) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_qlora_gradients_of_each_tiny_family(family: str, dtype: torch.dtype, tmp_path: pathlib.Path) -> None:
    """Llama, Mistral, Qwen2 (biases), Qwen3 (head norms), with a right-padded batch (C26)."""
    precision = Precision(dtype, torch.float32)
    for runs in measure(tmp_path, precision, models.TINY, family=family, length=40, padded=True).values():
        assert_contract(runs, dtype)


def test_flat_scales_of_4_bits(tmp_path: pathlib.Path) -> None:
    """NF4 without double quantization."""
    precision = Precision(torch.bfloat16, torch.float32)
    for runs in measure(tmp_path, precision, models.MIDDLE, length=128, nested=False).values():
        assert_contract(runs, torch.bfloat16)


def test_logits_are_stocks(tmp_path: pathlib.Path) -> None:
    """No labels: real logits, and they are those of the stock model (C20)."""
    model = models.load_qlora(tmp_path, torch.float32, **models.MIDDLE)
    batch = models.on_gpu(support.random_batch(0, length=64, vocabulary=2048))

    def logits() -> Tensor:
        with torch.no_grad():
            return model(input_ids=batch["input_ids"]).logits

    expected = logits()
    fastft.patch(model)
    torch.testing.assert_close(logits(), expected, rtol=1e-4, atol=1e-4)
