"""C51: a run that is interrupted and resumed ends where a straight one does, bit for bit."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastft
from tests import support
from tests.trainers.cases import arguments, plain, sft
from tests.trainers.harness import Build, Log

SETTINGS = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
Prepare = Callable[[pathlib.Path, int], Any]


def adapted(**patching: Any) -> Prepare:
    """A model with adapters from a seed, dropout in them, patched as said."""

    def prepare(folder: pathlib.Path, seed: int) -> Any:
        return fastft.patch(support.add_lora(support.build_model(), seed=seed, lora_dropout=0.1), **patching)

    return prepare


def quantized(folder: pathlib.Path, seed: int) -> Any:
    """The same over a base in 4 bits, without dropout: its layers run as one node."""
    base = support.load_4bit(support.build_model(), folder / "base")
    return fastft.patch(support.add_lora(base, seed=seed), memory_levels=["recompute", "lean"])


def with_groups(model: Any, folder: pathlib.Path, **settings: Any) -> Any:
    """A trainer whose optimizer has LoRA+'s groups."""
    from transformers import TrainingArguments

    args = TrainingArguments(**arguments(folder, **settings))
    optimizer = fastft.create_optimizer(model, args, loraplus_lr_ratio=8)
    return plain(trainer={"optimizers": (optimizer, None)}, **settings)(model, folder)


def train(
    make: Build, prepare: Prepare, folder: pathlib.Path, resume: pathlib.Path | None = None
) -> tuple[Log, dict[str, torch.Tensor]]:
    """One run of a planned model: its losses by step, and the trained weights.

    A model that resumes starts with other adapters: what it ends with must have come from the checkpoint.
    """
    model = prepare(folder, 1 if resume is None else 2)
    trainer = make(model, folder)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    weights = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    return [entry for entry in trainer.state.log_history if "loss" in entry], weights


TRL = [pytest.mark.trl, pytest.mark.slow]


@pytest.mark.parametrize(
    ("make", "prepare"),
    [
        pytest.param(sft(**SETTINGS), adapted(), marks=TRL, id="sft"),
        pytest.param(sft(packing=True, max_length=32, **SETTINGS), adapted(), marks=TRL, id="sft packed"),
        pytest.param(plain(gradient_accumulation_steps=2, **SETTINGS), adapted(), id="accumulated, padding left out"),
        pytest.param(plain(**SETTINGS), adapted(padding_free=False), id="padding run"),
        pytest.param(plain(**SETTINGS), quantized, id="4 bits, levels"),
        pytest.param(
            lambda model, folder: with_groups(model, folder, lr_scheduler_type="linear", **SETTINGS),
            adapted(),
            id="LoRA+",
        ),
    ],
)
def test_resuming_equals_a_straight_run_c51(make: Build, prepare: Prepare, tmp_path: pathlib.Path) -> None:
    straight, weights = train(make, prepare, tmp_path / "straight")
    resumed, again = train(make, prepare, tmp_path / "resumed", tmp_path / "straight" / "checkpoint-2")
    assert len(straight) == 4
    # the history comes along in the checkpoint: the first two entries are the straight run's own
    assert [entry["loss"] for entry in resumed] == [entry["loss"] for entry in straight]
    assert [entry["grad_norm"] for entry in resumed] == [entry["grad_norm"] for entry in straight]
    for name, weight in weights.items():
        assert torch.equal(again[name], weight), name
