"""C51: a run that is interrupted and resumed ends where a straight one does, bit for bit."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch

import fastft
from tests import support
from tests.trainers.cases import plain, sft
from tests.trainers.harness import Build, Log


def train(make: Build, folder: pathlib.Path, resume: pathlib.Path | None = None) -> tuple[Log, dict[str, torch.Tensor]]:
    """One run of a planned model: its losses by step, and the trained weights.

    A model that resumes starts with other adapters: what it ends with must have come from the checkpoint.
    """
    model: Any = fastft.patch(support.add_lora(support.build_model(), seed=1 if resume is None else 2))
    trainer = make(model, folder)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    weights = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    return [entry for entry in trainer.state.log_history if "loss" in entry], weights


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(sft, marks=[pytest.mark.trl, pytest.mark.slow], id="sft"),
        pytest.param(plain, id="trainer"),
    ],
)
def test_resuming_equals_a_straight_run_c51(make: Any, tmp_path: pathlib.Path) -> None:
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    straight, weights = train(make(**settings), tmp_path / "straight")
    resumed, again = train(make(**settings), tmp_path / "resumed", tmp_path / "straight" / "checkpoint-2")
    assert len(straight) == 4
    # the history comes along in the checkpoint: the first two entries are the straight run's own
    assert [entry["loss"] for entry in resumed] == [entry["loss"] for entry in straight]
    assert [entry["grad_norm"] for entry in resumed] == [entry["grad_norm"] for entry in straight]
    for name, weight in weights.items():
        assert torch.equal(again[name], weight), name
