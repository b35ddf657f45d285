"""`approximations=["skip_probabilities"]`: off unasked, on by both roads to the loss, and what the report says."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import fastft
from fastft.autograd import linear_cross_entropy as operator
from fastft.kernels.sparse_product import THRESHOLD
from fastft.patching import registry
from fastft.patching import trl as hook
from tests import support


@pytest.fixture
def model() -> Any:
    """A bfloat16 model with adapters, planned and asked to skip."""
    planned = support.add_lora(support.build_model(dtype=torch.bfloat16))
    return fastft.patch(planned, approximations=["skip_probabilities"])


@pytest.fixture
def thresholds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the sparse product was called with."""
    seen: list[float] = []
    original = operator.sparse_product

    def sparse_product(gradient: Any, weight: Any, threshold: float, **settings: Any) -> Any:
        seen.append(threshold)
        return original(gradient, weight, threshold, **settings)

    monkeypatch.setattr(operator, "sparse_product", sparse_product)
    return seen


def loss_site(model: Any) -> registry.Site:
    site = registry.site_of(model.get_base_model())
    assert site is not None
    return site


def trl_log_probs(model: Any, temperature: float = 1.0) -> Any:
    """The call that TRL's trainers make."""
    head = model.get_output_embeddings()
    hidden = torch.randn(9, head.in_features, dtype=head.weight.dtype, requires_grad=True)
    targets = torch.randint(0, head.out_features, (9,))
    outputs = ("log_probs", "entropy", "is_top1")
    return hook.LogProbFunction.apply(hidden, head.weight, head.bias, targets, temperature, 32768, None, 1.0, outputs)


def test_it_is_off_unless_asked_for(thresholds: list[float]) -> None:
    model = fastft.patch(support.add_lora(support.build_model(dtype=torch.bfloat16)))
    model(**support.random_batch()).loss.backward()
    trl_log_probs(model)[0].sum().backward()
    assert not thresholds
    assert not loss_site(model).skip_probabilities
    assert "skip_probabilities" not in str(fastft.report(model))


def test_the_models_own_loss_skips(model: Any, thresholds: list[float]) -> None:
    batch = support.random_batch()
    loss = model(**batch).loss
    loss.backward()
    assert thresholds == [THRESHOLD]
    skipped = support.trainable_gradients(model)
    model.zero_grad()
    fastft.patch(model, approximations=())
    whole_loss = model(**batch).loss
    whole_loss.backward()
    assert thresholds == [THRESHOLD]
    assert torch.equal(loss, whole_loss)
    for name, gradient in support.trainable_gradients(model).items():
        torch.testing.assert_close(skipped[name], gradient, rtol=2e-2, atol=2e-3)


def test_trls_road_skips_and_reads_the_plan_at_call_time(model: Any, thresholds: list[float]) -> None:
    log_probs, entropy, *_ = trl_log_probs(model, temperature=0.5)
    assert thresholds == [2 * THRESHOLD]  # on G, which the temperature has doubled
    (log_probs.sum() + entropy.sum()).backward()  # the entropy's gradient is computed whole
    assert len(thresholds) == 1
    fastft.patch(model, approximations=())
    trl_log_probs(model)
    assert len(thresholds) == 1


def test_evaluation_multiplies_nothing_back(model: Any, thresholds: list[float]) -> None:
    with torch.no_grad():
        model.eval()(**support.random_batch())
    assert not thresholds


def test_the_report_names_it_and_what_it_does_not_cover(model: Any, thresholds: list[float]) -> None:
    model(**support.random_batch()).loss.backward()
    text = " ".join(str(fastft.report(model)).split())
    assert "approximations: skip_probabilities" in text
    assert "gradients through the entropy take the whole head" in text
    assert "the last training loss" not in text


def test_the_report_says_why_a_loss_was_whole_until_one_is_not(model: Any, thresholds: list[float]) -> None:
    head = model.get_output_embeddings().weight
    head.requires_grad_(True)
    model(**support.random_batch()).loss.backward()
    assert not thresholds
    text = " ".join(str(fastft.report(model)).split())
    assert "and so did the last training loss: the head trains" in text
    head.requires_grad_(False)
    trl_log_probs(model)
    assert len(thresholds) == 1
    assert "the last training loss" not in str(fastft.report(model))


def test_a_float32_model_computes_all_of_it_and_says_so(thresholds: list[float]) -> None:
    model = fastft.patch(support.add_lora(support.build_model()), approximations=["skip_probabilities"])
    model(**support.random_batch()).loss.backward()
    assert not thresholds
    assert "the loss is computed in float32" in " ".join(str(fastft.report(model)).split())


def test_a_copy_keeps_the_choice_and_tells_only_its_own_plan(model: Any, thresholds: list[float]) -> None:
    other = copy.deepcopy(model)
    assert pickle.loads(pickle.dumps(loss_site(other))).skip_probabilities
    other.get_output_embeddings().weight.requires_grad_(True)
    other(**support.random_batch()).loss.backward()
    assert loss_site(other).whole_product == "the head trains"
    assert loss_site(model).whole_product is None


def test_both_approximations_at_once(model: Any) -> None:
    fastft.patch(model, approximations=["skip_probabilities", "fold_adapters"])
    assert "approximations: fold_adapters, skip_probabilities" in " ".join(str(fastft.report(model)).split())
    fastft.patch(model, approximations=["fold_adapters"])
    assert not loss_site(model).skip_probabilities
