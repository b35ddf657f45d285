"""How each provider loads and adapts a model for `fastft bench step` and `sft`: the same work for all.

LoRA on the seven projections, no dropout, base weights in NF4 with double quantization or in 16 bits. Runs in a worker;
everything is imported when it is called, the provider's library first.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastft.bench.imports import import_library

__all__ = ["CHECKPOINTING", "TRAINERS", "Settings", "import_provider", "load_adapted", "load_base", "lora_config"]

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

# `--checkpointing` → what FastModel.get_peft_model is told; peers know only whether.
CHECKPOINTING: dict[str, bool | str] = {"auto": True, "recompute": "recompute", "offload": "offload", "keep": False}

# Provider → the library that is imported first. The last three are transformers and PEFT with one thing exchanged.
TRAINERS = {
    "fastft": "fastft",
    "hf": "transformers",
    "liger": "liger_kernel",
    "unsloth": "unsloth",
    "trl": "trl",
    "cce": "cut_cross_entropy",
    "torch.compile": "transformers",
}


@dataclass(frozen=True)
class Settings:
    """One provider's training run.

    Attributes:
        kind: "step" (forward, backward and optimizer by hand) or "sft" (through TRL's SFTTrainer).
        steps: timed ones; `warmup` come before.
        bits: 4 or 16, of the base weights.
        rank: of the adapters.
        checkpointing: a key of `CHECKPOINTING`.
        memory_budget: for fastft's planner; "" leaves it to the free memory.
        dtype: of activations, torch's name.
        folder: of the checkpoint.
    """

    kind: str
    batch: int
    steps: int
    warmup: int
    bits: int
    rank: int
    checkpointing: str
    memory_budget: str
    dtype: str
    provider: str = ""
    folder: str = ""
    length: int = 0


def import_provider(provider: str) -> float:
    """Everything that a user of the provider imports before loading a model; returns the seconds it took."""
    seconds = import_library(TRAINERS[provider])
    if provider == "fastft":
        seconds += import_library("fastft.model")
    return seconds + sum(import_library(name) for name in ("torch", "transformers", "peft"))


def load_base(settings: Settings) -> tuple[Any, Any]:
    """The model, quantized if asked for, without adapters; and its tokenizer."""
    dtype = getattr(importlib.import_module("torch"), settings.dtype)
    if settings.provider in ("fastft", "unsloth"):
        model, tokenizer = _fast_model(settings).from_pretrained(
            settings.folder, max_seq_length=settings.length, load_in_4bit=settings.bits == 4, dtype=dtype
        )
        return model, tokenizer
    if settings.provider == "liger":
        _apply_liger(settings)
    transformers = importlib.import_module("transformers")
    quantization = None
    if settings.bits == 4:
        quantization = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    on_gpu = importlib.import_module("torch").cuda.is_available()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        settings.folder, quantization_config=quantization, dtype=dtype, device_map={"": 0 if on_gpu else "cpu"}
    )
    model.config.use_cache = False
    return model, transformers.AutoTokenizer.from_pretrained(settings.folder)


def load_adapted(settings: Settings) -> tuple[Any, Any]:
    """The model with adapters and gradient checkpointing as asked for; and its tokenizer."""
    model, tokenizer = load_base(settings)
    if settings.provider in ("fastft", "unsloth"):
        return _adapt_fast(model, settings), tokenizer
    return _adapt_stock(model, settings), tokenizer


def lora_config(settings: Settings) -> Any:
    """PEFT's configuration of the adapters."""
    return importlib.import_module("peft").LoraConfig(
        r=settings.rank, lora_alpha=settings.rank, lora_dropout=0.0, target_modules=TARGETS, task_type="CAUSAL_LM"
    )


def _fast_model(settings: Settings) -> Any:
    if settings.provider == "unsloth":
        return importlib.import_module("unsloth").FastLanguageModel
    return importlib.import_module("fastft.model").FastModel


def _adapt_fast(model: Any, settings: Settings) -> Any:
    checkpointing = CHECKPOINTING[settings.checkpointing]
    if settings.provider == "unsloth":
        checkpointing = "unsloth" if checkpointing else False
    more = {"memory_budget": settings.memory_budget} if settings.memory_budget else {}
    return _fast_model(settings).get_peft_model(
        model,
        r=settings.rank,
        lora_alpha=settings.rank,
        lora_dropout=0,
        target_modules=TARGETS,
        bias="none",
        use_gradient_checkpointing=checkpointing,
        random_state=0,
        **(more if settings.provider == "fastft" else {}),
    )


def _adapt_stock(model: Any, settings: Settings) -> Any:
    """As PEFT's own guide to QLoRA has it."""
    torch, peft = importlib.import_module("torch"), importlib.import_module("peft")
    checkpointing = settings.checkpointing != "keep"
    if settings.provider == "trl":
        importlib.import_module("trl.trainer.utils").add_fused_lm_head(model)
    if settings.bits == 4:
        model = peft.prepare_model_for_kbit_training(
            model,
            use_gradient_checkpointing=checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": False},
        )
    elif checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = peft.get_peft_model(model, lora_config(settings))
    return torch.compile(model) if settings.provider == "torch.compile" else model


def _apply_liger(settings: Settings) -> None:
    """Liger's patch for the model's family. Its fused loss stays out where TRL brings its own."""
    family = json.loads((Path(settings.folder) / "config.json").read_text(encoding="utf-8"))["model_type"]
    patches: dict[str, Callable[..., None]]
    patches = importlib.import_module("liger_kernel.transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN
    if settings.kind == "sft":
        patches[family](fused_linear_cross_entropy=False)
    else:
        patches[family]()
