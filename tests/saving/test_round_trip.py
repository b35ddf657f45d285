"""Train a few steps, save in each form, load in a fresh process: the same answers."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch

from fastft import FastModel
from tests import support
from tests.saving.tokenizers import VOCABULARY, byte_level

# Loads one form with plain transformers and PEFT, no fastft, and writes its logits.
FRESH = """
import sys, torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from peft import PeftModel
root, tokens = sys.argv[1], torch.load(sys.argv[1] + "/tokens.pt")
answers = {}
def ask(model):
    with torch.no_grad():
        return model.eval()(input_ids=tokens).logits.float()
nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                         bnb_4bit_compute_dtype=torch.float32)
base = AutoModelForCausalLM.from_pretrained(root + "/base", dtype=torch.float32, quantization_config=nf4)
for module in base.modules():
    if hasattr(module, "support_avx512bf16_for_cpu"):
        module.support_avx512bf16_for_cpu = False
answers["adapter"] = ask(PeftModel.from_pretrained(base, root + "/adapter"))
answers["merged"] = ask(AutoModelForCausalLM.from_pretrained(root + "/merged"))
answers["gguf"] = ask(AutoModelForCausalLM.from_pretrained(root + "/gguf", gguf_file="gguf-q8_0.gguf"))
assert not any(name.partition(".")[0] == "fastft" for name in sys.modules)
torch.save(answers, root + "/answers.pt")
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Answers of each form in a fresh process, and the live model's, after 20 steps of QLoRA."""
    pytest.importorskip("gguf")
    root = tmp_path_factory.mktemp("round_trip")
    support.build_model(vocab_size=VOCABULARY).save_pretrained(root / "base")
    byte_level().save_pretrained(root / "base")
    model, tokenizer = FastModel.from_pretrained(root / "base", dtype="float32")
    model = FastModel.get_peft_model(model, r=4).train()
    batch = support.random_batch(vocabulary=VOCABULARY)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    losses = []
    for _ in range(20):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]
    FastModel.save_adapter(model, tokenizer, root / "adapter")
    model.save_pretrained_merged(root / "merged", tokenizer)
    model.save_pretrained_gguf(root / "gguf", tokenizer, quantization="q8_0")
    torch.save(batch["input_ids"], root / "tokens.pt")
    subprocess.run([sys.executable, "-c", FRESH, str(root)], check=True, cwd=pathlib.Path(root))
    with torch.no_grad():
        live = model.eval()(input_ids=batch["input_ids"]).logits
    return torch.load(root / "answers.pt"), live


@pytest.mark.parametrize(("form", "tolerance"), [("adapter", 1e-5), ("merged", 1e-5), ("gguf", 0.03)])
def test_a_fresh_process_gives_the_same_answers(form: str, tolerance: float, answers: Any) -> None:
    found, live = answers
    difference = (found[form] - live).square().mean().sqrt() / live.square().mean().sqrt()
    assert difference < tolerance
    agreement = (found[form].argmax(-1) == live.argmax(-1)).float().mean()
    assert agreement == 1 or form == "gguf"
    assert agreement > 0.9
