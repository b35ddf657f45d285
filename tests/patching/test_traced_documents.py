"""Packed documents under `torch.compile`: kept apart as without it, or refused; C27 and C28 for a compiled graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fastft
from tests import support
from tests.patching.helpers import relative_error

POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 0, 1]])
MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1, 0]])
BATCHES: dict[str, dict[str, Any]] = {
    "positions": {"position_ids": POSITIONS},
    "all-ones mask": {"position_ids": POSITIONS, "attention_mask": torch.ones(2, 9).long()},
    "boundaries": {"cu_seq_lens_q": torch.tensor([0, 4, 9, 16, 18], dtype=torch.int32)},
    "padding, one document a row": {"position_ids": (MASK.cumsum(1) - 1).clamp(min=0), "attention_mask": MASK},
}
WINDOW = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}


@pytest.fixture(autouse=True)
def forget_traces() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def patched(family: str = "llama", **settings: Any) -> Any:
    return fastft.patch(support.build_model(family, **settings), padding_free=False)


def batch(which: str) -> dict[str, torch.Tensor]:
    given = BATCHES[which]
    with support.seeded(5):
        ids = torch.randint(3, support.VOCABULARY, (2, 9))
    labels = ids if which != "padding, one document a row" else ids.masked_fill(MASK == 0, -100)
    return {"input_ids": ids, "labels": labels, **given}


def step(model: Any, forward: Any, inputs: dict[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = forward(**inputs).loss
    loss.backward()
    return loss.item(), support.trainable_gradients(model)


@pytest.mark.parametrize(
    ("which", "family", "settings"),
    [
        *((which, "llama", {}) for which in BATCHES),
        ("all-ones mask", "llama", {"attn_implementation": "eager"}),
        ("all-ones mask", "mistral", {"sliding_window": 3}),
        ("padding, one document a row", "qwen2", WINDOW),
    ],
)
def test_a_compiled_graph_keeps_documents_apart_c27_c28(which: str, family: str, settings: dict[str, Any]) -> None:
    model, inputs = patched(family, **settings), batch(which)
    expected, theirs = step(model, model, inputs)
    loss, ours = step(model, torch.compile(model, fullgraph=True, backend="eager"), inputs)
    assert loss == pytest.approx(expected, rel=1e-6)
    for name, gradient in ours.items():
        assert relative_error(gradient, theirs[name]) < 1e-5, name


def test_evaluation_makes_no_cache_that_hides_them() -> None:
    model, inputs = patched().eval(), batch("positions")
    with torch.no_grad():
        together = model(**inputs).loss
        torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="eager")(**inputs).loss, together)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"cu_seq_lens_q": BATCHES["boundaries"]["cu_seq_lens_q"], "attention_mask": MASK}, "Leave both out"),
        ({"position_ids": POSITIONS, "use_cache": True}, "Leave use_cache out"),
        ({"position_ids": POSITIONS, "attention_mask": MASK}, "attn_implementation='sdpa'"),
    ],
)
def test_what_cannot_be_kept_apart_is_refused(more: dict[str, Any], message: str) -> None:
    model = patched()
    if "attention_mask" in more:
        model.config._attn_implementation = "flex_attention"
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
        compiled(**{**batch("positions"), **more})
