"""`fastft.verify`: what it lets pass, what it does not, and that it leaves everything as it was."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
from torch import Tensor

import fastft
from fastft.verification import TOLERANCE
from tests import support
from tests.contract import FACTOR

POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 0, 1, 2]])
PACKINGS: dict[str, dict[str, Tensor]] = {
    "positions": {"position_ids": POSITIONS},
    "positions that begin anywhere": {"position_ids": POSITIONS + torch.tensor([5] * 6 + [3] * 4 + [1] * 3)},
    "all-ones mask": {"position_ids": POSITIONS, "attention_mask": torch.ones(1, 13).long()},
    "boundaries": {"cu_seq_lens_q": torch.tensor([0, 6, 10, 13], dtype=torch.int32)},
}


@pytest.fixture
def model() -> Any:
    return fastft.patch(support.add_lora(support.build_model()))


@pytest.mark.parametrize("padded", [False, True])
def test_a_planned_model_passes(model: Any, padded: bool) -> None:
    outcome = fastft.verify(model, support.random_batch(rows=3, padded=padded), reference=torch.float64)
    assert outcome.passed
    assert len(outcome.tensors) == 28
    assert all(check.difference > 0 for check in outcome.tensors), "fast and stock are one run"


@pytest.mark.parametrize("packing", PACKINGS)
def test_packed_documents_are_compared_with_documents_kept_apart(model: Any, packing: str) -> None:
    """Stock would let them attend to each other beside a mask, and count the first token of each.

    Held to the contract, a median over three batches: `passed` judges each tensor on its one.
    """
    outcomes = [
        fastft.verify(model, support.random_batch(seed, rows=1) | PACKINGS[packing], reference=torch.float64)
        for seed in range(3)
    ]
    assert all(outcome.loss_difference <= TOLERANCE[torch.float32] for outcome in outcomes)
    assert all(outcome.grad_norm_difference <= TOLERANCE[torch.float32] for outcome in outcomes)
    for checks in zip(*(outcome.tensors for outcome in outcomes), strict=True):
        fast = statistics.median(check.fast_error for check in checks)
        stock = statistics.median(check.stock_error for check in checks)
        assert fast <= max(FACTOR * stock, 2 * torch.finfo(torch.float32).eps), checks


def test_lora_dropout_is_off_while_both_run() -> None:
    """Stock draws other masks."""
    model = fastft.patch(support.add_lora(support.build_model(), lora_dropout=0.3))
    outcome = fastft.verify(model, support.random_batch())
    assert outcome.passed, str(outcome)
    assert all(check.difference > 0 for check in outcome.tensors), "fast and stock are one run"
    assert all(module.training for module in model.modules())


def test_a_wrong_gradient_does_not_pass(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastft.autograd import mlp_half

    right = mlp_half.swiglu_backward

    def wrong(*args: Any, **kwargs: Any) -> Any:
        product, gate, up = right(*args, **kwargs)
        return product, gate.mul_(1.01), up

    monkeypatch.setattr(mlp_half, "swiglu_backward", wrong)
    outcome = fastft.verify(model, support.random_batch())
    assert not outcome.passed
    assert any("gate_proj" in check.name and not check.passed for check in outcome.tensors)


def test_nothing_stays_changed() -> None:
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=4, target_modules=list(support.PROJECTIONS), task_type="CAUSAL_LM")
    model = fastft.patch(get_peft_model(support.build_model(), adapters)).eval()
    before, state = {n: p.clone() for n, p in model.named_parameters()}, torch.get_rng_state()
    assert fastft.verify(model, support.random_batch()).passed, "with B = 0, which is drawn for the comparison"
    assert not model.training
    assert torch.equal(torch.get_rng_state(), state)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name
        assert parameter.grad is None, name


@pytest.mark.parametrize("missing", ["plan", "labels", "something that trains"])
def test_what_is_missing_is_named(model: Any, missing: str) -> None:
    batch = support.random_batch()
    message = {"plan": "not planned", "labels": "no labels", "something that trains": "nothing in this model trains"}
    if missing == "plan":
        model = support.build_model()
    elif missing == "labels":
        del batch["labels"]
    else:
        model.requires_grad_(False)
    with pytest.raises(ValueError, match=message[missing]):
        fastft.verify(model, batch)
