"""The ways of training that the harness runs: TRL's trainers, transformers' own, a hand-written loop.

Each builder makes the trainer as a user would; only sizes, steps and the CPU are set here. A kind that covers several
variants (DPO's losses) is one function with arguments.
"""

from __future__ import annotations

import pathlib
from typing import Any

import torch
from torch import nn

from tests import support
from tests.trainers.data import dataset
from tests.trainers.harness import STEPS, Build, Case, reference

TOKENIZER = support.build_tokenizer()


def arguments(folder: pathlib.Path, **settings: Any) -> dict[str, Any]:
    """A quiet fp32 run on the CPU that logs every step."""
    return {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "logging_steps": 1,
        "learning_rate": 2e-3,
        "lr_scheduler_type": "constant",
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **settings,
    }


def sft(kind: str = "text", trainer: dict[str, Any] | None = None, **settings: Any) -> Build:
    """SFTTrainer over rows of `kind`; with one evaluation where `eval_strategy` says so."""

    def make(model: Any, folder: pathlib.Path) -> Any:
        from trl import SFTConfig, SFTTrainer

        keywords: dict[str, Any] = {"max_length": 48, **settings}
        return SFTTrainer(
            model=model,
            args=SFTConfig(**arguments(folder, **keywords)),
            train_dataset=dataset(kind),
            eval_dataset=dataset(kind, 4, seed=1) if "eval_strategy" in settings else None,
            processing_class=TOKENIZER,
            **(trainer or {}),
        )

    return make


def second_half_only(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A user's own loss over real logits."""
    logits, targets = outputs.logits[:, :-1].float(), labels[:, 1:].clone()
    targets[:, : targets.shape[1] // 2] = -100
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def predicted_sum(prediction: Any) -> dict[str, float]:
    """A metric that depends on every logit of every token."""
    logits = torch.as_tensor(prediction.predictions).float()
    return {"lse": logits.logsumexp(-1).mean().item(), "tokens": float((prediction.label_ids != -100).sum())}


def dpo(explicit: bool = False, **settings: Any) -> Build:
    """DPOTrainer; the reference is a model of its own, or the policy with its adapter disabled."""

    def make(model: Any, folder: pathlib.Path) -> Any:
        from trl import DPOConfig, DPOTrainer

        return DPOTrainer(
            model=model,
            ref_model=reference(model) if explicit else None,
            args=DPOConfig(**arguments(folder, max_length=48, **settings)),
            train_dataset=dataset("preference"),
            eval_dataset=dataset("preference", 4, seed=1) if "eval_strategy" in settings else None,
            processing_class=TOKENIZER,
        )

    return make


def kto(explicit: bool = False, **settings: Any) -> Build:
    """KTOTrainer."""

    def make(model: Any, folder: pathlib.Path) -> Any:
        from trl import KTOConfig, KTOTrainer

        return KTOTrainer(
            model=model,
            ref_model=reference(model) if explicit else None,
            args=KTOConfig(**arguments(folder, max_length=48, per_device_train_batch_size=4, **settings)),
            train_dataset=dataset("unpaired"),
            processing_class=TOKENIZER,
        )

    return make


def paired(name: str, **settings: Any) -> Build:
    """ORPO and CPO, which read logits."""

    def make(model: Any, folder: pathlib.Path) -> Any:
        import importlib

        module = importlib.import_module(f"trl.experimental.{name}")
        config, trainer = (getattr(module, name.upper() + part) for part in ("Config", "Trainer"))
        return trainer(
            model=model,
            args=config(**arguments(folder, max_length=48, **settings)),
            train_dataset=dataset("preference"),
            processing_class=TOKENIZER,
        )

    return make


def online(name: str, greedy: bool = False, **settings: Any) -> Build:
    """GRPO and RLOO, generation included; the completions are noted."""

    def make(model: Any, folder: pathlib.Path) -> Any:
        import trl

        config, trainer = (getattr(trl, name.upper() + part) for part in ("Config", "Trainer"))
        noted: list[str] = []

        def vowels(completions: list[str], **_: Any) -> list[float]:
            noted.extend(completions)
            return [sum(c in "aeiou" for c in text) / 4 - 0.1 * len(text) for text in completions]

        sampling = {"generation_kwargs": {"do_sample": False}} if greedy else {}
        made = trainer(
            model=model,
            reward_funcs=vowels,
            args=config(
                **arguments(
                    folder,
                    num_generations=2,
                    max_completion_length=8,
                    **sampling,
                    **settings,
                )
            ),
            train_dataset=dataset("prompt"),
            processing_class=TOKENIZER,
        )
        made.noted = noted
        return made

    return make


def reward() -> Build:
    """RewardTrainer over a classifier with one label."""

    def make(model: Any, folder: pathlib.Path) -> Any:
        from trl import RewardConfig, RewardTrainer

        return RewardTrainer(
            model=model,
            args=RewardConfig(**arguments(folder, max_length=48)),
            train_dataset=dataset("preference"),
            processing_class=TOKENIZER,
        )

    return make


def plain(kind: str = "text", trainer: dict[str, Any] | None = None, **settings: Any) -> Build:
    """`transformers.Trainer`: language modelling, or classification for rows with a label."""

    def make(model: Any, folder: pathlib.Path) -> Any:
        from transformers import DataCollatorForLanguageModeling, DataCollatorWithPadding, Trainer, TrainingArguments

        def rows(count: int, seed: int = 0) -> Any:
            data = dataset(kind, count, seed)
            return data.map(lambda row: TOKENIZER(row["text"] + "<eos>"), remove_columns=["text"])

        collator = (
            DataCollatorForLanguageModeling(TOKENIZER, mlm=False)
            if kind == "text"
            else DataCollatorWithPadding(TOKENIZER)
        )
        return Trainer(
            model=model,
            args=TrainingArguments(**arguments(folder, **settings)),
            train_dataset=rows(40),
            eval_dataset=rows(4, 1) if "eval_strategy" in settings else None,
            data_collator=collator,
            **(trainer or {}),
        )

    return make


class Loop:
    """A hand-written loop with gradient accumulation, under the interface the harness needs."""

    def __init__(self, model: Any, accumulation: int) -> None:
        self.model, self.accumulation = model, accumulation
        self.state = type("State", (), {"log_history": []})()

    def train(self) -> None:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=2e-3)
        for step in range(STEPS):
            losses = []
            for part in range(self.accumulation):
                batch = support.random_batch(step * self.accumulation + part, padded=True)
                loss = self.model(**batch).loss / self.accumulation
                loss.backward()
                losses.append(loss.item())
            norm = nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            self.state.log_history.append({"step": step, "loss": sum(losses), "grad_norm": norm.item()})


EVALUATED: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": STEPS // 2}

CASES: tuple[Case, ...] = (
    Case("sft-text", sft(**EVALUATED), slow=False),
    Case("sft-text-full", sft(), family="qwen2", lora=False),
    Case("sft-prompt-completion", sft("prompt-completion"), family="qwen3"),
    Case("sft-messages", sft("messages", gradient_accumulation_steps=2), family="mistral"),
    Case("sft-assistant-only", sft("messages", assistant_only_loss=True)),
    Case("sft-packing-bfd", sft(packing=True, max_length=64), family="qwen2"),
    Case("sft-packing-wrapped", sft(packing=True, packing_strategy="wrapped", max_length=32)),
    Case("sft-padding-free", sft(padding_free=True, max_length=None), family="mistral"),
    Case("sft-dft", sft(loss_type="dft", packing=True, max_length=64)),
    Case("sft-label-smoothing", sft(label_smoothing_factor=0.1)),
    Case("sft-own-loss", sft(trainer={"compute_loss_func": second_half_only})),
    Case("sft-metrics", sft(trainer={"compute_metrics": predicted_sum}, **EVALUATED)),
    Case("dpo-reference", dpo(explicit=True), slow=False),
    Case("dpo-adapter", dpo(**EVALUATED)),
    Case("dpo-full", dpo(explicit=True), family="qwen2", lora=False),
    Case("dpo-ipo-weighted", dpo(loss_type=["ipo"], use_weighting=True), family="qwen3"),
    Case("dpo-mixed", dpo(loss_type=["sigmoid", "bco_pair", "sft"], loss_weights=[0.8, 0.2, 1.0]), family="mistral"),
    Case(
        "dpo-margins",
        dpo(
            explicit=True,
            loss_type=["hinge", "robust", "apo_zero", "discopop", "sigmoid_norm"],
            loss_weights=[1.0, 0.5, 0.5, 1.0, 1.0],
            label_smoothing=0.1,
        ),
    ),
    Case("kto-reference", kto(explicit=True)),
    Case("kto-adapter", kto()),
    Case("orpo", paired("orpo"), loss="none"),
    Case("cpo", paired("cpo"), loss="none"),
    Case("grpo", online("grpo", temperature=0.8), slow=False),
    Case("grpo-greedy", online("grpo", greedy=True, entropy_coef=0.05), family="qwen2"),
    Case("grpo-entropy", online("grpo", beta=0.2, entropy_coef=0.05, cast_lm_head_to_fp32=True)),
    Case("rloo", online("rloo", beta=0.2)),
    Case("rloo-greedy", online("rloo", greedy=True), family="qwen3", moves=False),
    Case("reward", reward(), architecture="classification", loss="none"),
    Case("classification", plain("classified"), architecture="classification", labels=3, loss="none"),
    Case("trainer", plain(**EVALUATED, gradient_accumulation_steps=2), lora=False, family="qwen3"),
    Case("trainer-metrics", plain(trainer={"compute_metrics": predicted_sum}, **EVALUATED)),
    Case("trainer-smoothing", plain(label_smoothing_factor=0.1), loss="none"),
    Case("loop", lambda model, _: Loop(model, 2), family="mistral"),
)
