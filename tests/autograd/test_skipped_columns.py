"""Linear cross-entropy with `skip_below`: the gradient it gives, where it applies, and what it says where not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fastft.autograd import head_products
from fastft.autograd import linear_cross_entropy as module
from fastft.autograd.linear_cross_entropy import linear_cross_entropy, linear_log_probs
from fastft.kernels.sparse_product import ROW_BLOCK
from tests.kernels.reference import INTERPRETED, relative_error

ROWS, HIDDEN, VOCABULARY = 400, 32, 97
SKIP_BELOW = 2.0**-4  # of 97 tokens, what 2⁻¹⁶ is of 49,152
ROUNDING = 1.6e-2 if INTERPRETED else 6e-3  # bfloat16 logits, G and result; the interpreter truncates
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "warmer, bias": {"temperature": 1.5},
    "scaled": {"logit_scale": 0.5, "temperature": 0.8},
}


def make_inputs(dtype: torch.dtype = torch.bfloat16, biased: bool = False) -> tuple[Any, ...]:
    """hidden, weight, bias, labels, every fifth label ignored.

    Ten tokens are labels, the next twenty are likely in some rows, the others never are. What the others would add to
    the gradient lies along the first hidden direction, which no row of `hidden` has: much in sum, little in each.
    """
    x = torch.randn(ROWS, HIDDEN)
    weight = torch.randn(VOCABULARY, HIDDEN) * 0.05
    weight[:30] *= 8.0
    x[:, 0], weight[30:, 0] = 0.0, 2.0
    bias = (torch.randn(VOCABULARY) * 0.2).to(dtype) if biased else None
    labels = torch.randint(0, 10, (ROWS,))
    labels[4::5] = -100
    return x.to(dtype).requires_grad_(), weight.to(dtype), bias, labels


def expected_gradients(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    incoming: torch.Tensor,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """d Σ incoming · loss / d x in float64: whole, and less the columns that no counted row of a block needs."""
    counted = labels != -100
    logits = F.linear(x.detach()[counted], weight, bias).double() * logit_scale / temperature
    difference = logits.softmax(-1) - F.one_hot(labels[counted], VOCABULARY)
    scale = incoming[counted, None].double() * logit_scale / temperature
    results = []
    for skip_below in (0.0, SKIP_BELOW):
        part = difference.clone()
        for block in part.split(ROW_BLOCK):
            block[:, (block.abs() <= skip_below).all(0)] = 0.0
        result = torch.zeros(x.shape, dtype=torch.float64)
        result[counted] = scale * (part @ weight.double())
        results.append(result)
    return results[0], results[1]


def hidden_gradient(x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss, x)[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_gradient_lacks_the_small_columns_and_nothing_else(kind: str, reduction: Any) -> None:
    """The threshold is on P − Y, before temperature, scale and incoming gradients; losses do not change at all."""
    transform = KINDS[kind]
    x, weight, bias, labels = make_inputs(biased="bias" in kind)
    count = int((labels != -100).sum())
    incoming = torch.rand(ROWS) if reduction == "none" else torch.full((ROWS,), 1.0 / count)
    said: list[str | None] = []
    settings = {"bias": bias, "reduction": reduction, **transform}
    losses = [
        linear_cross_entropy(x, weight, labels, skip_below=skip_below, on_skip=said.append, **settings)
        for skip_below in (None, SKIP_BELOW)
    ]
    assert torch.equal(*losses)
    assert said == [None]
    factor = incoming if reduction == "none" else torch.ones(())
    whole, skipped = (hidden_gradient(x, (loss * factor).sum()) for loss in losses)
    exact_whole, exact_skipped = expected_gradients(x, weight, bias, labels, incoming, **transform)
    assert relative_error(skipped, exact_skipped) < ROUNDING
    assert relative_error(whole, exact_whole) < ROUNDING
    assert relative_error(exact_skipped, exact_whole) > 2 * ROUNDING  # else this test could not tell them apart


def test_a_threshold_of_zero_leaves_out_nothing() -> None:
    x, weight, _, labels = make_inputs()
    gradients = [
        hidden_gradient(x, linear_cross_entropy(x, weight, labels, skip_below=skip_below)) for skip_below in (None, 0.0)
    ]
    assert relative_error(gradients[1], gradients[0]) < ROUNDING / 2


def test_small_chunks_are_blocks_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffer that a chunk's columns are moved about in is the next chunk's logits."""
    x, weight, _, labels = make_inputs()
    one = hidden_gradient(x, linear_cross_entropy(x, weight, labels, skip_below=0.0))
    monkeypatch.setattr(head_products, "chunk_rows", lambda *_: 128)
    several = hidden_gradient(x, linear_cross_entropy(x, weight, labels, skip_below=0.0))
    assert relative_error(several, one) < 1e-3


def test_float32_hidden_under_autocast_with_a_float32_head() -> None:
    x, weight, _, labels = make_inputs(torch.float32)
    said: list[str | None] = []
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(x, weight, labels, reduction="sum", skip_below=SKIP_BELOW, on_skip=said.append)
    rounded = x.detach().bfloat16(), weight.bfloat16()
    _, expected = expected_gradients(*rounded, None, labels, torch.ones(ROWS))
    assert relative_error(hidden_gradient(x, loss), expected) < ROUNDING
    assert said == [None]


WHOLE: dict[str, tuple[dict[str, Any], str]] = {
    "trained head": ({"trained": True}, "the head trains"),
    "softcap": ({"softcap": 5.0}, "the logits are capped"),
    "smoothing": ({"label_smoothing": 0.1}, "labels are smoothed"),
    "float32": ({"dtype": torch.float32}, "the loss is computed in float32"),
}


@pytest.mark.parametrize(("settings", "reason"), WHOLE.values(), ids=WHOLE)
def test_where_it_does_not_apply_the_product_is_whole_and_the_reason_is_told(
    settings: dict[str, Any], reason: str
) -> None:
    settings = dict(settings)
    x, weight, _, labels = make_inputs(settings.pop("dtype", torch.bfloat16))
    weight.requires_grad_(settings.pop("trained", False))
    said: list[str | None] = []
    gradients = [
        hidden_gradient(x, linear_cross_entropy(x, weight, labels, skip_below=skip, on_skip=said.append, **settings))
        for skip in (None, SKIP_BELOW)
    ]
    assert torch.equal(*gradients)
    assert said == [reason]


def test_a_gpu_without_matrix_units_for_triton_computes_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A T4: Triton would multiply elements one by one, slower than the whole product by cuBLAS."""
    statics = module.Statics(
        ignore_index=-100,
        outputs=(),
        summed=True,
        compute_dtype=torch.float16,
        needs_hidden=True,
        needs_weight=False,
        needs_bias=False,
        logit_scale=1.0,
        softcap=None,
        temperature=1.0,
        label_smoothing=0.0,
        skip_below=SKIP_BELOW,
    )
    said = {}
    for capability in ((7, 5), (8, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        said[capability] = module.whole_product_reason(statics, torch.device("cuda"))
    assert "below compute capability 8.0" in str(said.pop((7, 5)))
    assert set(said.values()) == {None}


def test_without_a_gradient_nothing_is_said() -> None:
    x, weight, _, labels = make_inputs()
    said: list[str | None] = []
    with torch.no_grad():
        linear_cross_entropy(x, weight, labels, skip_below=SKIP_BELOW, on_skip=said.append)
    linear_cross_entropy(x.detach(), weight, labels, skip_below=SKIP_BELOW, on_skip=said.append)
    assert not said


def test_log_probs_skip_and_a_gradient_through_the_entropy_is_whole() -> None:
    x, weight, _, labels = make_inputs()
    labels = labels.clamp(min=0)  # TRL gives every row a target
    incoming = torch.rand(ROWS)

    def gradient(skip_below: float | None, output: int) -> torch.Tensor:
        outputs = linear_log_probs(x, weight, None, labels, outputs=("entropy",), skip_below=skip_below)
        return torch.autograd.grad(outputs[output], x, incoming)[0]

    _, expected = expected_gradients(x, weight, None, labels, -incoming)
    assert relative_error(gradient(SKIP_BELOW, 0), expected) < ROUNDING
    assert torch.equal(gradient(SKIP_BELOW, 1), gradient(None, 1))


@pytest.mark.parametrize("skip_below", [-1.0, float("nan")])
def test_a_threshold_below_zero_is_refused(skip_below: float) -> None:
    x, weight, _, labels = make_inputs()
    with pytest.raises(ValueError, match="skip_below must be at least 0"):
        linear_cross_entropy(x, weight, labels, skip_below=skip_below)
