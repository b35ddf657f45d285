"""TRL's SFTTrainer on the GPU, fast beside stock: the same losses and gradient norms, ten steps."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch

import fastft
from tests import support
from tests.gpu import models

STEPS = 10


def train(folder: pathlib.Path, *, fast: bool, dtype: torch.dtype, checkpointing: bool) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step, on a tiny QLoRA model."""
    import datasets
    from trl import SFTConfig, SFTTrainer

    model = models.load_qlora(folder / "base", dtype)
    if fast:
        fastft.patch(model)
    rows = [{"prompt": f"add {i} and {i + 1}", "completion": f" it is {2 * i + 1}"} for i in range(4 * STEPS)]
    config = SFTConfig(
        output_dir=str(folder / "out"),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        logging_steps=1,
        report_to=[],
        bf16=dtype == torch.bfloat16,
        gradient_checkpointing=checkpointing,
        save_strategy="no",
        disable_tqdm=True,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        seed=0,
    )
    trainer: Any = SFTTrainer(
        model=model,
        args=config,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=support.build_tokenizer(),
    )
    trainer.train()
    if fast:
        layer = model.get_base_model().model.layers[0]
        assert layer.__dict__["_fastft"].fast_runs >= STEPS
        assert layer.__dict__["_fastft"].stock_runs == 0
        assert layer.__dict__["_fastft"].level == ("auto" if checkpointing else "keep")
    return [(entry["loss"], float(entry["grad_norm"])) for entry in trainer.state.log_history if "grad_norm" in entry]


@pytest.mark.parametrize(
    ("dtype", "checkpointing", "tolerance"), [(torch.bfloat16, True, 3e-2), (torch.float32, False, 1e-3)], ids=str
)
def test_ten_steps_follow_stocks_curve(
    dtype: torch.dtype, checkpointing: bool, tolerance: float, tmp_path: pathlib.Path
) -> None:
    stock = train(tmp_path / "stock", fast=False, dtype=dtype, checkpointing=checkpointing)
    fast = train(tmp_path / "fast", fast=True, dtype=dtype, checkpointing=checkpointing)
    assert len(stock) == len(fast) == STEPS
    assert stock[-1][0] < stock[0][0], "the stock run does not learn: nothing to follow"
    for (our_loss, our_norm), (loss, norm) in zip(fast, stock, strict=True):
        assert our_loss == pytest.approx(loss, rel=tolerance)
        assert our_norm == pytest.approx(norm, rel=3e-2)  # TRL casts the adapters of a 4-bit model to bfloat16
