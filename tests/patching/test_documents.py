"""Packed documents and padding: every backend keeps documents apart, and what is left out is missed by nobody."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.masking_utils import flash_attention_mask, flex_attention_mask

import fastft
from fastft.kernels.document_attention import Documents, document_attention
from fastft.patching import documents, registry
from tests import support
from tests.patching.helpers import relative_error

LENGTHS = (4, 7, 1, 6)
TOTAL = sum(LENGTHS)
ENDS = torch.tensor([0, 4, 11, 12, 18], dtype=torch.int32)
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])[None]
BACK = torch.repeat_interleave(torch.tensor([5, 3, 9, 1]), torch.tensor(LENGTHS))[None]  # where each document begins
AHEAD = torch.repeat_interleave(torch.tensor([0, 10, 30, 40]), torch.tensor(LENGTHS))[None]
WINDOWS = {
    "mistral": {"sliding_window": 3},
    "qwen2": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
}
seen: list[dict[str, Any]] = []


def flash(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
    """Stands for transformers' flash attention: it isolates by the varlen keywords, or not at all."""
    seen.append(kwargs)
    assert attention_mask is None
    ends = kwargs.get("cu_seq_lens_q")
    rows, _, length, _ = query.shape
    ends = [0, rows * length] if ends is None else ends.tolist()
    lengths = tuple(b - a for a, b in itertools.pairwise(ends))
    docs = Documents(1, rows * length, lengths, query.device)
    line = [x.transpose(0, 1).reshape(1, x.shape[1], rows * length, -1) for x in (query, key, value)]
    window = kwargs.get("sliding_window")
    output = document_attention(*line, docs, scale=kwargs["scaling"], window=window)
    return output.view(rows, length, *output.shape[2:]), None


def flex(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
    """Stands for flex attention, which has no backward on a CPU: it asks the block mask for every pair."""
    place = torch.arange(query.shape[2])
    rows = torch.arange(query.shape[0])
    grid = (rows[:, None, None, None], torch.zeros(1, 1, 1, 1).long(), place[:, None], place)
    allowed = attention_mask.mask_mod(*grid).expand(len(rows), 1, len(place), len(place))
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    output = functional.scaled_dot_product_attention(query, key, value, allowed, scale=kwargs["scaling"])
    return output.transpose(1, 2), None


@pytest.fixture(autouse=True)
def backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-ins, under names of their own; "bare" has no mask function. Block masks are not compiled: seconds."""
    make = masking_utils.create_block_mask
    monkeypatch.setattr(masking_utils, "create_block_mask", lambda *a, **k: make(*a, **(k | {"_compile": False})))
    for name, function, mask in (("flash_x", flash, flash_attention_mask), ("flex_x", flex, flex_attention_mask)):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, mask)
    AttentionInterface.register("bare", flash)
    seen.clear()
    yield
    for name in ("flash_x", "flex_x", "bare"):
        AttentionInterface._global_mapping.pop(name)
        AttentionMaskInterface._global_mapping.pop(name, None)


def patched(backend: str = "sdpa", family: str = "llama", lora: bool = True, **settings: Any) -> Any:
    model = support.build_model(family, **settings)
    model.config._attn_implementation = backend
    model = support.add_lora(model) if lora else model
    return fastft.patch(model)


def ids(rows: int = 1) -> Tensor:
    with support.seeded(3):
        return torch.randint(3, support.VOCABULARY, (rows, TOTAL))


def gradients(model: Any) -> dict[str, Tensor]:
    found = support.trainable_gradients(model)
    model.zero_grad()
    return found


def separately(model: Any, tokens: Tensor) -> tuple[float, dict[str, Tensor]]:
    """Token-weighted mean of each document's own loss, and its gradients."""
    rows = tokens.shape[0]
    total = rows * (TOTAL - len(LENGTHS))
    loss = 0.0
    for row in range(rows):
        for begin, end in zip(ENDS.tolist(), ENDS.tolist()[1:], strict=False):
            if end - begin > 1:
                part = tokens[row : row + 1, begin:end]
                one = model(input_ids=part, labels=part, num_items_in_batch=total).loss
                one.backward()
                loss += one.item()
    return loss, gradients(model)


def assert_same(model: Any, tokens: Tensor, batch: dict[str, Any], tolerance: float = 2e-5) -> None:
    """The packed loss and its gradients are the separate ones; and isolation is what makes them so."""
    expected, theirs = separately(model, tokens)
    loss = model(input_ids=tokens, labels=tokens, **batch).loss
    loss.backward()
    assert abs(loss.item() - expected) <= tolerance * expected
    for name, ours in gradients(model).items():
        assert relative_error(ours, theirs[name]) <= tolerance, name


PACKINGS: dict[str, Any] = {
    "positions": lambda rows: {"position_ids": POSITIONS.repeat(rows, 1)},
    "positions of one row for all": lambda rows: {"position_ids": POSITIONS},
    "all-ones mask": lambda rows: {
        "position_ids": POSITIONS.repeat(rows, 1),
        "attention_mask": torch.ones(rows, TOTAL).long(),
    },
    "positions that begin anywhere": lambda rows: {"position_ids": (POSITIONS + BACK).repeat(rows, 1)},
    "positions that begin anywhere, all-ones mask": lambda rows: {
        "position_ids": (POSITIONS + BACK).repeat(rows, 1),
        "attention_mask": torch.ones(rows, TOTAL).long(),
    },
    "positions that jump ahead": lambda rows: {"position_ids": (POSITIONS + AHEAD).repeat(rows, 1)},
    "boundaries alone": lambda rows: {"cu_seq_lens_q": torch.cat([ENDS + TOTAL * i for i in range(rows)]).unique()},
}


@pytest.mark.parametrize("backend", ["eager", "sdpa", "flash_x", "flex_x"])
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("rows", [1, 2])
def test_a_packed_loss_is_the_token_weighted_mean_of_separate_ones_c27_c28(
    backend: str, packing: str, rows: int
) -> None:
    """C27, C28; labels are the ids themselves: the first token of a later document must not be a target."""
    assert_same(patched(backend), ids(rows), PACKINGS[packing](rows))


@pytest.mark.parametrize(
    ("positions", "mask", "begin"),
    [
        ([1, 1, 0, 1, 2, 3], [0, 0, 1, 1, 1, 1], []),  # behind padding a text begins, not another document
        ([0, 1, 2, 7, 8, 9], [1, 1, 1, 1, 1, 1], []),  # with a mask a jump ahead keeps nobody apart
        ([0, 1, 2, 7, 0, 1], [1, 1, 1, 1, 1, 1], [3, 4]),  # until something restarts: then it does
        ([0, 1, 2, 7, 0, 1], None, [0, 3, 4]),
    ],
)
def test_a_target_is_left_out_where_attention_is_kept_apart(
    positions: list[int], mask: list[int] | None, begin: list[int]
) -> None:
    found = documents.first_tokens(torch.tensor([positions]), None if mask is None else torch.tensor([mask]))
    assert found[0].nonzero().flatten().tolist() == begin


@pytest.mark.parametrize("backend", ["eager", "sdpa", "flash_x"])
@pytest.mark.parametrize("family", WINDOWS)
def test_windows_hold_inside_documents(family: str, backend: str) -> None:
    model = patched(backend, family, **WINDOWS[family])
    assert_same(model, ids(), PACKINGS["positions"](1))
    wide = patched(backend, family, **(WINDOWS[family] | {"sliding_window": 100}))
    batch = {"input_ids": ids(), "labels": ids(), "position_ids": POSITIONS}
    assert abs(model(**batch).loss.item() - wide(**batch).loss.item()) > 1e-4, "the window would not be seen"


@pytest.mark.parametrize("level", ["lean", "recompute"])
def test_levels_do_not_matter(level: str) -> None:
    model = patched()
    fastft.patch(model, memory_levels=level)
    assert_same(model, ids(), PACKINGS["positions"](1))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_layer_that_runs_stock_is_isolated_too(checkpointing: bool) -> None:
    """DoRA runs stock: transformers' own sdpa function gets the mask, in the recomputation as well."""
    model = fastft.patch(support.add_lora(support.build_model(), use_dora=True))
    if checkpointing:
        model.gradient_checkpointing_enable()
    assert_same(model, ids(), PACKINGS["positions"](1))
    layers = [s for m in model.modules() if (s := registry.site_of(m)) and s.part == "decoder layer"]
    assert all(site.stock_runs and not site.fast_runs for site in layers)


@pytest.mark.parametrize("training", [False, True])
def test_without_gradient(training: bool) -> None:
    model = patched().train(training)
    with torch.no_grad():
        whole = model(input_ids=ids(), position_ids=POSITIONS).logits
        for begin, end in zip(ENDS.tolist(), ENDS.tolist()[1:], strict=False):
            alone = model(input_ids=ids()[:, begin:end], use_cache=False).logits
            assert relative_error(whole[:, begin:end], alone) < 1e-5


def test_sdpa_never_builds_the_dense_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for fast layers, not for stock ones, not without gradient."""

    def refuse(*_: Any) -> None:
        raise AssertionError("a T × T mask was built")

    monkeypatch.setattr(Documents, "dense_mask", refuse)
    models = [patched(), fastft.patch(support.add_lora(support.build_model(), use_dora=True))]
    for model in models:
        model(input_ids=ids(), labels=ids(), position_ids=POSITIONS).loss.backward()
        with torch.no_grad():
            model.eval()(input_ids=ids(), position_ids=POSITIONS)


def test_the_mask_is_an_ordinary_mask_to_everybody_else() -> None:
    docs = Documents(1, TOTAL, LENGTHS, torch.device("cpu"))
    mask, dense = documents.DocumentMask(docs, 3), docs.dense_mask(3)
    assert isinstance(mask, Tensor)
    assert (mask.shape, mask.dtype, mask.dim()) == (dense.shape, torch.bool, 4)
    assert torch.equal(~mask, ~dense)
    assert torch.equal(mask[:, :, -1:], dense[:, :, -1:])
    assert torch.equal(torch.where(mask, 0.0, -1.0), torch.where(dense, 0.0, -1.0))
    query = torch.randn(1, 2, 1, 8)  # one query against all keys is no packed row
    keys = torch.randn(2, 1, 2, TOTAL, 8)
    attend = functional.scaled_dot_product_attention
    torch.testing.assert_close(attend(query, *keys, mask[:, :, -1:]), attend(query, *keys, dense[:, :, -1:]))
    assert "DocumentMask" in repr(mask)


def test_flash_is_told_once_and_for_the_whole_batch() -> None:
    """transformers looks for documents in a batch of one row only, and in every layer."""
    patched("flash_x")(input_ids=ids(2), labels=ids(2), position_ids=POSITIONS.repeat(2, 1))
    assert len(seen) == 2
    for call in seen:
        ends = [0, 4, 11, 12, 18, 22, 29, 30, 36]
        assert call["cu_seq_lens_q"].tolist() == call["cu_seq_lens_k"].tolist() == ends
        assert call["cu_seq_lens_q"].dtype == torch.int32
        assert call["max_length_q"] == call["max_length_k"] == 7


def test_a_backend_without_a_mask_function_is_refused() -> None:
    with pytest.raises(ValueError, match=r"attn_implementation='bare' has no mask function.*'sdpa'.*packing=False"):
        patched("bare")(input_ids=ids(), labels=ids(), position_ids=POSITIONS)


def test_one_document_a_row_is_nobodys_business() -> None:
    patched("bare")(input_ids=ids(2), labels=ids(2), position_ids=torch.arange(TOTAL)[None])
    patched("bare")(input_ids=ids(2), labels=ids(2))


@pytest.mark.parametrize("backend", ["eager", "sdpa", "flash_x"])
def test_boundaries_that_contradict_the_positions(backend: str) -> None:
    """Explicit lengths first; a backend that isolates by positions alone must refuse."""
    model = patched(backend)
    batch = {"input_ids": ids(), "labels": ids(), "position_ids": torch.arange(TOTAL)[None], "cu_seq_lens_q": ENDS}
    if backend == "eager":
        with pytest.raises(ValueError, match="name different documents"):
            model(**batch)
        return
    expected, _ = separately(model, ids())
    assert abs(model(**batch).loss.item() - expected) < 1e-4  # rotary positions are relative


def test_boundaries_of_another_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="cu_seq_lens_q must rise from 0"):
        patched()(input_ids=ids(), labels=ids(), cu_seq_lens_q=ENDS[:-1])


def test_the_longest_document_by_boundaries_counts_for_max_seq_length() -> None:
    model = patched()
    fastft.patch(model, max_seq_length=7)
    model(input_ids=ids(), labels=ids(), cu_seq_lens_q=ENDS)
    fastft.patch(model, max_seq_length=6)
    with pytest.raises(ValueError, match="7 tokens"):
        model(input_ids=ids(), labels=ids(), cu_seq_lens_q=ENDS)


# Padding left out.


def padded(side: str = "right", rows: int = 3) -> dict[str, Tensor]:
    """Rows of 9, 6 and 3 tokens in nine places."""
    batch = support.random_batch(rows=rows, length=9, padded=True)
    if side == "left":
        shifts = (batch["attention_mask"] == 0).sum(1).tolist()
        batch = {
            name: torch.stack([row.roll(shift) for row, shift in zip(x, shifts, strict=True)])
            for name, x in batch.items()
        }
    return batch


def backbone(model: Any) -> Any:
    return model.get_base_model().model


def site(model: Any) -> registry.Site:
    found = registry.site_of(backbone(model))
    assert found is not None
    return found


@pytest.mark.parametrize("family", ["llama", *WINDOWS])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_left_out_changes_no_loss_and_no_gradient_c26(side: str, family: str) -> None:
    stock = support.add_lora(support.build_model(family, **WINDOWS.get(family, {})))
    fast = fastft.patch(copy.deepcopy(stock))
    batch = padded(side)
    losses = [model(**batch).loss for model in (stock, fast)]
    if side == "right":  # (of a left-padded row stock counts the first token, which the pad before it predicts)
        assert abs(losses[1].item() - losses[0].item()) < 2e-5
    real = batch["attention_mask"].bool()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    hidden = [backbone(model)(**inputs).last_hidden_state for model in (stock, fast)]
    assert hidden[1].shape == hidden[0].shape
    assert relative_error(hidden[1][real], hidden[0][real]) < 1e-5
    assert hidden[1][~real].count_nonzero() == 0
    upstream = torch.randn(hidden[0].shape) * real[..., None]
    for states in hidden:
        states.backward(upstream)
    ours, theirs = gradients(fast), gradients(stock)
    for name, expected in theirs.items():
        assert relative_error(ours[name], expected) < 2e-5, name
    assert (site(fast).tokens_padded, site(fast).tokens_real) == (54, 36)


def test_the_layers_never_see_a_pad() -> None:
    model, lengths = patched(), []
    backbone(model).embed_tokens.register_forward_hook(lambda *a: lengths.append(tuple(a[-1].shape[:2])))
    model(**padded())
    fastft.patch(model, padding_free=False)
    model(**padded())
    fastft.patch(model)  # says nothing: stays off
    model(**padded())
    fastft.patch(model, padding_free=True)
    model(**padded())
    assert lengths == [(1, 18), (3, 9), (3, 9), (1, 18)]


def test_the_report_says_so() -> None:
    model = patched()
    model(**padded())
    assert any("33% of 27 tokens" in note for note in fastft.report(model).notes), fastft.report(model).notes


@pytest.mark.parametrize(
    "reader", ["evaluation", "logits", "return_logits", "hidden states", "attentions", "NEFTune", "cache", "no padding"]
)
def test_padding_runs_where_somebody_could_see_it(reader: str) -> None:
    model, batch, options = patched(), padded(), {}
    if reader == "evaluation":
        model.eval()
        options["use_cache"] = False
    elif reader == "logits":
        batch.pop("labels")
    elif reader == "NEFTune":
        model.get_input_embeddings().neftune_noise_alpha = 5
    elif reader == "no padding":
        batch = support.random_batch() | {"attention_mask": torch.ones(2, 13).long()}
    else:
        names = {"cache": "use_cache", "hidden states": "output_hidden_states", "attentions": "output_attentions"}
        options[names.get(reader, reader)] = True
    model(**batch, **options)
    assert site(model).tokens_padded == 0
    assert site(model).padding_free  # asked for all the while


def test_values_without_gradient_are_those_with() -> None:
    """What GRPO and RLOO compare: the first ratio is exp(0)."""
    model, batch = patched(), padded()
    arguments = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "use_cache": False}
    with torch.no_grad():
        without = backbone(model)(**arguments).last_hidden_state
    assert torch.equal(backbone(model)(**arguments).last_hidden_state, without)


def test_a_row_of_padding_alone_and_a_batch_of_it() -> None:
    model, batch = patched(), padded()
    batch["attention_mask"][1] = 0
    batch["labels"][1] = -100
    batch["labels"][0, 1] = 5
    assert torch.isfinite(model(**batch).loss)
    batch["attention_mask"][:] = 0
    backbone(model)(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    assert site(model).tokens_padded == 27  # the second batch ran as it is


def test_embeddings_instead_of_ids() -> None:
    model, batch = patched(), padded()
    embeds = model.get_input_embeddings()(batch["input_ids"])
    expected = model(**batch).loss
    got = model(inputs_embeds=embeds, attention_mask=batch["attention_mask"], labels=batch["labels"]).loss
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_unpatch_takes_both_hooks_away() -> None:
    model = patched()
    inner = backbone(model)
    assert len(inner._forward_pre_hooks) == len(inner._forward_hooks) == 1
    fastft.patch(model)
    assert len(inner._forward_pre_hooks) == len(inner._forward_hooks) == 1
    fastft.unpatch(model)
    assert len(inner._forward_pre_hooks) == len(inner._forward_hooks) == 0
    assert not inner._forward_hooks_with_kwargs
