"""Whole runs through Trainer and TRL: the planned model follows the stock one, step by step, evaluation in between."""

from __future__ import annotations

import copy
import pathlib
from typing import Any

import pytest
import torch
from datasets import Dataset

import fastft
from fastft.patching import registry
from tests import support
from tests.kernels.reference import INTERPRETED


def rows(count: int, seed: int = 0, supervised: bool = True) -> Dataset:
    """`count` rows of varied length with uneven masks, `input_ids` and `labels`."""
    with support.seeded(seed):
        lengths = torch.randint(5, 14, (count,)).tolist()
        ids = [torch.randint(3, support.VOCABULARY, (n,)).tolist() for n in lengths]
        masks = [(torch.rand(n) < 0.4).tolist() for n in lengths]
    labels = [[-100 if m else i for i, m in zip(r, mask, strict=True)] for r, mask in zip(ids, masks, strict=True)]
    return Dataset.from_dict({"input_ids": ids, "labels": labels if supervised else [[-100] * len(r) for r in ids]})


def collate(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Right padding, with a mask."""
    length = max(len(e["input_ids"]) for e in examples)

    def pad(values: list[int], fill: int) -> list[int]:
        return values + [fill] * (length - len(values))

    return {
        "input_ids": torch.tensor([pad(e["input_ids"], 0) for e in examples]),
        "attention_mask": torch.tensor([pad([1] * len(e["input_ids"]), 0) for e in examples]),
        "labels": torch.tensor([pad(e["labels"], -100) for e in examples]),
    }


def trainer_arguments(folder: pathlib.Path, **settings: Any) -> dict[str, Any]:
    """Arguments for a quiet CPU run in fp32 that logs every step."""
    return {
        "output_dir": str(folder),
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        **settings,
    }


def run_trainer(
    model: Any, folder: pathlib.Path, data: Dataset, kind: Any = None, **settings: Any
) -> list[dict[str, Any]]:
    """One `transformers.Trainer` run in dataset order; its log."""
    from transformers import Trainer, TrainingArguments

    evaluation = settings.pop("eval_dataset", None)
    metrics = settings.pop("compute_metrics", None)
    trainer = (kind or Trainer)(
        model=model,
        args=TrainingArguments(**trainer_arguments(folder, **settings)),
        train_dataset=data,
        eval_dataset=evaluation,
        data_collator=collate,
        compute_metrics=metrics,
    )
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(data)
    trainer.train()
    return trainer.state.log_history


def run_sft(model: Any, folder: pathlib.Path, data: Dataset, tokenizer: Any, **settings: Any) -> list[dict[str, Any]]:
    """One SFTTrainer run over ready rows; its log."""
    from trl import SFTConfig, SFTTrainer

    evaluation = settings.pop("eval_dataset", None)
    peft_config = settings.pop("peft_config", None)
    arguments = trainer_arguments(folder, **{"bf16": False, "max_length": 64, "shuffle_dataset": False, **settings})
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(**arguments),
        train_dataset=data,
        eval_dataset=evaluation,
        processing_class=tokenizer,
        peft_config=peft_config,
    )
    trainer.train()
    return trainer.state.log_history


def curve(log: list[dict[str, Any]], key: str) -> list[float]:
    return [float(entry[key]) for entry in log if key in entry]


def assert_same_curve(
    fast: list[dict[str, Any]], stock: list[dict[str, Any]], relative: float = 1e-5, grad_norm: float = 1e-5
) -> None:
    """Losses, gradient norms and every logged metric, by name and value."""
    keys = {k for entry in stock for k in entry} - {"epoch", "step", "num_tokens"}
    timing = {k for k in keys if "runtime" in k or "per_second" in k or "flos" in k}
    assert {k for entry in fast for k in entry} == {k for entry in stock for k in entry}
    for key in keys - timing:
        # one token whose two best logits are nearly equal may flip: a step supervises about fifteen
        absolute = 0.1 if "accuracy" in key else grad_norm if key == "grad_norm" else relative
        torch.testing.assert_close(
            torch.tensor(curve(fast, key)),
            torch.tensor(curve(stock, key)),
            rtol=relative,
            atol=absolute,
            msg=lambda m, k=key: f"{k}: {m}",
        )


def assert_ran_fast(model: Any, forwards: int | None = None) -> None:
    """Every decoder layer ran as one node, and nothing ran stock."""
    layers = [s for m in model.modules() if (s := registry.site_of(m)) is not None and s.part == "decoder layer"]
    assert layers
    assert all(site.fast_runs > 0 and site.stock_runs == 0 for site in layers), [s.last_reason for s in layers]
    if forwards is not None:
        assert [site.fast_runs for site in layers] == [forwards] * len(layers)


@pytest.mark.trl
@pytest.mark.parametrize(
    ("checkpointing", "level"),
    [
        (True, "auto"),
        pytest.param(False, "keep", marks=pytest.mark.slow),  # in the interpreter
        pytest.param(True, "recompute", marks=pytest.mark.slow),
    ],
)
def test_sft_of_a_4bit_model_follows_stock_with_an_evaluation_in_the_middle(
    tmp_path: pathlib.Path, tokenizer: Any, checkpointing: bool, level: str
) -> None:
    """24 steps with SFTTrainer, NF4 nested, LoRA on the seven; C46: the planner, or the level that was named.

    In Triton's interpreter, where TRL 1.15's own loss takes a second a step, 6.
    """
    steps = 6 if INTERPRETED else 24
    stock = support.add_lora(support.load_4bit(support.build_model(), tmp_path / "base"))
    fast = fastft.patch(copy.deepcopy(stock), memory_levels="recompute" if level == "recompute" else None)
    settings = {
        "max_steps": steps,
        "eval_strategy": "steps",
        "eval_steps": steps // 3,
        "eval_dataset": rows(6, seed=9),
        "gradient_checkpointing": checkpointing,
        "learning_rate": 2e-3,
    }
    stock_log = run_sft(stock, tmp_path / "stock", rows(32), tokenizer, **settings)
    fast_log = run_sft(fast, tmp_path / "fast", rows(32), tokenizer, **settings)
    assert len(curve(stock_log, "loss")) == steps
    assert curve(stock_log, "loss")[-1] < curve(stock_log, "loss")[0]
    # TRL keeps the adapters of a 4-bit model in bf16: each step rounds, and the norm has steps of 2**-6 from 2 to 4
    assert_same_curve(fast_log, stock_log, 2e-3, grad_norm=2**-6 * 1.01)
    assert_ran_fast(fast, forwards=steps + 3)  # one forward a step and layer, three evaluations of one batch
    assert {s.level for m in fast.modules() if (s := registry.site_of(m)) and s.part == "decoder layer"} == {level}
    assert "mean_token_accuracy" in fast_log[0]
    assert "entropy" in fast_log[0]


@pytest.mark.trl
def test_sft_with_its_own_peft_config_is_fast_on_a_patched_auto_model(tmp_path: pathlib.Path, tokenizer: Any) -> None:
    """The adapter comes after the plan: SFTTrainer wraps the model that was patched."""
    from peft import LoraConfig

    logs = []
    for name in ("stock", "fast"):
        model = support.build_model()
        if name == "fast":
            fastft.patch(model)
        torch.manual_seed(5)
        config = LoraConfig(r=4, target_modules=list(support.PROJECTIONS), task_type="CAUSAL_LM")
        logs.append(run_sft(model, tmp_path / name, rows(16), tokenizer, max_steps=6, peft_config=config))
        if name == "fast":
            assert_ran_fast(model, forwards=6)
    assert_same_curve(logs[1], logs[0], 1e-4)


@pytest.mark.parametrize("trainer", [pytest.param("sft", marks=[pytest.mark.trl, pytest.mark.slow]), "trainer"])
def test_accumulation_does_not_change_the_loss(tmp_path: pathlib.Path, tokenizer: Any, trainer: str) -> None:
    """C04: batch 4 × 1 = 2 × 2 = 1 × 4, and each equals stock."""
    logs = {}
    for name in ("stock", "fast"):
        for batch, accumulation in ((4, 1), (2, 2), (1, 4)):
            model = support.add_lora(support.build_model())
            if name == "fast":
                fastft.patch(model)
            settings = {
                "per_device_train_batch_size": batch,
                "gradient_accumulation_steps": accumulation,
                "learning_rate": 1e-3,
            }
            folder = tmp_path / f"{name}{batch}"
            if trainer == "sft":
                log = run_sft(model, folder, rows(16), tokenizer, **settings)
            else:
                log = run_trainer(model, folder, rows(16), **settings)
            logs[name, batch] = [curve(log, "loss"), curve(log, "grad_norm")]
    for key, value in logs.items():
        torch.testing.assert_close(
            torch.tensor(value), torch.tensor(logs["stock", 4]), rtol=1e-4, atol=1e-4, msg=str(key)
        )


def test_full_fine_tuning_follows_stock(tmp_path: pathlib.Path, family: str) -> None:
    """C09: ten SGD steps, every parameter trained: loss and gradient norm of each step."""
    settings = {"max_steps": 10, "optim": "sgd", "learning_rate": 1e-2}
    stock = support.build_model(family)
    fast = fastft.patch(copy.deepcopy(stock))
    stock_log = run_trainer(stock, tmp_path / "stock", rows(16), **settings)
    fast_log = run_trainer(fast, tmp_path / "fast", rows(16), **settings)
    assert_same_curve(fast_log, stock_log, 1e-4)
    assert_ran_fast(fast, forwards=10)
    for (name, a), b in zip(fast.named_parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_an_empty_evaluation_batch_leaves_the_loss_finite(tmp_path: pathlib.Path) -> None:
    """C05: stock's eval_loss is NaN; ours counts the batch as 0, warns once and reports the count."""
    from datasets import concatenate_datasets

    evaluation = concatenate_datasets([rows(1, supervised=False), rows(3, seed=3)])
    model = fastft.patch(support.add_lora(support.build_model()))
    settings = {"eval_dataset": evaluation, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 1}
    with pytest.warns(UserWarning, match="no supervised token") as caught:
        log = run_trainer(model, tmp_path, rows(16), max_steps=1, **settings)
    assert sum("no supervised token" in str(w.message) for w in caught) == 1
    assert torch.isfinite(torch.tensor(curve(log, "eval_loss"))).all()
    assert "1 batches had no supervised token" in str(fastft.report(model))


def test_label_smoothing_is_stocks(tmp_path: pathlib.Path) -> None:
    """C21: the smoother reads logits, so the model gives it logits."""
    stock = support.add_lora(support.build_model())
    fast = fastft.patch(copy.deepcopy(stock))
    settings = {"label_smoothing_factor": 0.5, "max_steps": 2}
    plain = run_trainer(copy.deepcopy(stock), tmp_path / "plain", rows(16), max_steps=2)
    stock_log = run_trainer(stock, tmp_path / "stock", rows(16), **settings)
    fast_log = run_trainer(fast, tmp_path / "fast", rows(16), **settings)
    assert_same_curve(fast_log, stock_log, 1e-4)
    assert curve(fast_log, "loss")[0] != pytest.approx(curve(plain, "loss")[0], rel=1e-5)


def test_compute_metrics_gets_every_prediction(tmp_path: pathlib.Path) -> None:
    """C52: predictions [6, longest, vocabulary] and labels [6, longest], plain arrays, equal to stock's."""
    evaluation = rows(6, seed=4)
    longest = max(len(r) for r in evaluation["input_ids"])
    seen = []

    def metrics(prediction: Any) -> dict[str, float]:
        seen.append((prediction.predictions, prediction.label_ids))
        return {}

    stock = support.add_lora(support.build_model())
    fast = fastft.patch(copy.deepcopy(stock))
    for name, model in (("stock", stock), ("fast", fast)):
        run_trainer(
            model,
            tmp_path / name,
            rows(4),
            max_steps=1,
            learning_rate=0.0,
            eval_dataset=evaluation,
            eval_strategy="steps",
            eval_steps=1,
            per_device_eval_batch_size=6,
            compute_metrics=metrics,
        )
    (stock_logits, _), (fast_logits, labels) = seen
    assert fast_logits.shape == (6, longest, support.VOCABULARY)
    assert labels.shape == (6, longest)
    torch.testing.assert_close(torch.from_numpy(fast_logits), torch.from_numpy(stock_logits), rtol=1e-4, atol=1e-4)


@pytest.mark.trl
def test_padding_free_packing_through_sft_follows_stock(tmp_path: pathlib.Path, tokenizer: Any) -> None:
    """Best-fit packing: one row of documents with boundaries, no mask."""
    logs = []
    for name in ("stock", "fast"):
        model = support.add_lora(support.build_model())
        if name == "fast":
            fastft.patch(model, max_seq_length=64)
        settings = {"packing": True, "max_length": 32, "max_steps": 3, "per_device_train_batch_size": 2}
        logs.append(run_sft(model, tmp_path / name, rows(24), tokenizer, **settings))
        if name == "fast":
            assert_ran_fast(model, forwards=3)
    assert_same_curve(logs[1], logs[0], 1e-4)
