"""What is asked for by name and computed with a larger error than stock's: never by itself, listed, undone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import fastft
from fastft.autograd import products
from tests import support
from tests.patching.helpers import sites


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A 4-bit model with adapters, fast."""
    quantized = support.load_4bit(support.build_model(), Path(tmp_path_factory.mktemp("nf4")))
    return fastft.patch(support.add_lora(quantized))


def folds(model: Any) -> list[bool]:
    return [site.fold_adapters for site in sites(model, "decoder layer")]


def step(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad(set_to_none=True)
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), support.trainable_gradients(model)


def test_nothing_is_approximated_unasked(model: Any) -> None:
    assert not any(folds(fastft.patch(model)))
    assert "approximations" not in str(fastft.report(model))


def test_folded_adapters_run_are_listed_and_are_switched_off(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = support.random_batch()
    loss, gradients = step(model, batch)
    made: list[str] = []
    original = products.FoldedProducts.__init__
    monkeypatch.setattr(
        products.FoldedProducts, "__init__", lambda self, *given: (made.append("folded"), original(self, *given))[1]
    )
    fastft.patch(model, approximations=["fold_adapters"])
    assert all(folds(model))
    assert "approximations: fold_adapters" in str(fastft.report(model))
    fastft.patch(model)  # anything else leaves it as it is
    folded_loss, folded_gradients = step(model, batch)
    assert made
    torch.testing.assert_close(folded_loss, loss, rtol=1e-5, atol=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(folded_gradients[name], gradient, rtol=1e-3, atol=1e-5)
    assert all(folds(copy.deepcopy(model)))
    fastft.patch(model, approximations=())
    assert not any(folds(model))
    again, _ = step(model, batch)
    assert torch.equal(again, loss)


def test_an_unknown_name_is_refused_and_changes_nothing(model: Any) -> None:
    with pytest.raises(ValueError, match=r"'fold_adapter', which is not known; choose from fold_adapters"):
        fastft.patch(model, approximations=["fold_adapter"])
    assert not any(folds(model))
