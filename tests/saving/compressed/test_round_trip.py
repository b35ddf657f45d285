"""Train, save in each format, load in a fresh process without fastft: the same answers, up to the format's rounding."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from fastft import FastModel
from tests import support
from tests.saving.compressed.harness import needs_llmcompressor, tiny
from tests.saving.tokenizers import VOCABULARY, byte_level

pytestmark = needs_llmcompressor

FRESH = """
import sys, torch
from transformers import AutoModelForCausalLM
root, tokens = sys.argv[1], torch.load(sys.argv[1] + "/tokens.pt")
with torch.no_grad():
    answers = {name: AutoModelForCausalLM.from_pretrained(f"{root}/{name}").eval()(input_ids=tokens).logits.float()
               for name in sys.argv[2:]}
assert not any(name.partition(".")[0] in ("fastft", "llmcompressor", "peft") for name in sys.modules)
torch.save(answers, root + "/answers.pt")
"""
# scheme → largest relative difference of the logits. What was learned must be there in every format.
EXPECTED = {
    "fp8_dynamic": 0.16, "fp8": 0.16, "int8": 0.04, "w4a16": 0.1, "nvfp4": 0.42, "nvfp4a16": 0.3, "mxfp4": 0.5,
}  # fmt: skip


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Answers of each format in a fresh process, the live model's, and the losses, after 20 steps of QLoRA."""
    root = tmp_path_factory.mktemp("round_trip")
    tiny().save_pretrained(root / "base")
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
    rows = [{"input_ids": row} for row in batch["input_ids"]]
    for scheme in EXPECTED:
        data = rows if scheme in ("fp8", "int8", "w4a16", "nvfp4") else None
        model.save_pretrained_compressed(root / scheme, tokenizer, scheme, calibration=data)
    torch.save(batch["input_ids"], root / "tokens.pt")
    subprocess.run([sys.executable, "-c", FRESH, str(root), *EXPECTED], check=True, cwd=root, capture_output=True)
    with torch.no_grad():
        live = model.eval()(input_ids=batch["input_ids"]).logits
    return torch.load(root / "answers.pt") | {"live": live, "labels": batch["labels"], "untrained loss": losses[0]}


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> float:
    return float(torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))


@pytest.mark.parametrize("scheme", EXPECTED)
def test_a_fresh_process_gives_the_same_answers(scheme: str, answers: dict[str, Any]) -> None:
    live, found = answers["live"], answers[scheme]
    difference = float((found - live).norm() / live.norm())
    trained = loss_of(live, answers["labels"])
    lost = (loss_of(found, answers["labels"]) - trained) / (answers["untrained loss"] - trained)
    assert 1e-3 < difference < EXPECTED[scheme], (difference, lost)
    assert lost < 0.02, (difference, lost)
