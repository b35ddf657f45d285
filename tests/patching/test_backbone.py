"""Positions, padding, packing and lengths: what reaches the layers is what stock would give, documents kept apart."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.nn import functional

import fastft
from fastft.patching import backbone, decoder_layer
from fastft.patching.plan import inner_model
from tests import support
from tests.patching.helpers import (
    LEVELS,
    assert_ran_fast,
    assert_same_step,
    relative_error,
    runs,
    set_level,
    step,
    twins,
)

Batch = dict[str, torch.Tensor]
DOCUMENTS = (4, 5)
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    return request.param


def ids_of(length: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    return support.random_batch(seed, rows=rows, length=length)["input_ids"]


def logits(model: Any, **arguments: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**arguments).logits


def assert_close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert got.shape == expected.shape
    assert relative_error(got.detach(), expected.detach()) <= tolerance


# --- rotary embeddings (C22, C23) ------------------------------------------------------------------------------------

ROPES: dict[str, dict[str, Any]] = {
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
}


def roped(rope_type: str) -> Any:
    """One tiny Llama, head_dim 64 and theta 5e5, under each kind of scaling; the weights are the same."""
    return support.build_model(
        "llama",
        hidden_size=128,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=64,
        rope_parameters={"rope_type": rope_type, "rope_theta": 5e5, **ROPES.get(rope_type, {})},
    )


@pytest.mark.parametrize("rope_type", ROPES)
def test_rotary_scaling(rope_type: str, level: str) -> None:
    """C22: at length 200, logits, loss and gradients are stock's, and not those of the unscaled model."""
    batch = support.random_batch(rows=1, length=200)
    stock, fast = twins(support.add_lora(roped(rope_type)))
    plain = support.add_lora(roped("default"))
    expected = logits(stock, input_ids=batch["input_ids"])
    got = logits(fast, input_ids=batch["input_ids"], use_cache=False)
    assert_close(got, expected)
    assert relative_error(logits(plain, input_ids=batch["input_ids"]), expected) > 1e-3
    set_level(level, stock, fast)
    assert_same_step(step(stock, batch), step(fast, batch))
    assert runs(fast, "decoder layer") == (4, 0)
    # a short row after the long one: dynamic scaling goes back
    short = support.random_batch(rows=1, length=20)
    assert_same_step(step(stock, short), step(fast, short))
    if rope_type == "llama3":
        ratios = inner_model(fast).model.rotary_emb.inv_freq / inner_model(plain).model.rotary_emb.inv_freq
        assert {0.125, 1.0} <= {round(ratio, 6) for ratio in ratios.tolist()}


@pytest.mark.parametrize("limit", [0, -1, "64", 64.5])
def test_a_max_seq_length_that_is_none_is_refused_at_once(limit: Any) -> None:
    with pytest.raises(ValueError, match="is no number of tokens"):
        fastft.patch(support.build_model(), max_seq_length=limit)


@pytest.mark.parametrize("switch", ["strict", "cuda_graphs", "padding_free", "run_comfort"])
def test_a_switch_is_true_or_false(switch: str) -> None:
    with pytest.raises(TypeError, match=f"{switch}='no' is neither True nor False"):
        fastft.patch(support.build_model(), **{switch: "no"})


def test_max_seq_length_leaves_the_rotary_configuration_alone() -> None:
    """C23: a limit above the native window changes what length is allowed, nothing else."""
    stock, fast = twins(roped("llama3"), max_seq_length=1024)
    assert fast.config.to_dict() == stock.config.to_dict()
    assert torch.equal(fast.model.rotary_emb.inv_freq, stock.model.rotary_emb.inv_freq)
    assert_close(logits(fast, input_ids=ids_of(300)), logits(stock, input_ids=ids_of(300)))


def test_positions_of_each_row_s_own(level: str) -> None:
    """cos and sin then have a row per batch row, where they usually have one for all."""
    batch = support.random_batch(rows=2, length=7)
    positions = torch.stack([torch.arange(7), torch.arange(7) + 3])
    stock, fast = twins(support.add_lora(support.build_model()))
    set_level(level, stock, fast)
    expected = step(stock, batch, position_ids=positions)
    assert_same_step(expected, step(fast, batch, position_ids=positions))
    assert_ran_fast(fast)


# --- padding (C24, C25) ----------------------------------------------------------------------------------------------


def test_left_padded_logits(family: str) -> None:
    """C24: with a mask a left-padded row's real tokens have the logits of the row alone."""
    stock, fast = twins(support.add_lora(support.build_model(family)))
    alone = ids_of(6)
    padded = functional.pad(alone, (3, 0), value=0)
    mask = (torch.arange(9) >= 3).long()[None]
    for use_cache in (False, None):
        got = logits(fast, input_ids=padded, attention_mask=mask, use_cache=use_cache)
        assert_close(got[:, 3:], logits(stock, input_ids=alone))
        assert_close(got[:, 3:], logits(fast, input_ids=alone, use_cache=use_cache))
    assert relative_error(logits(stock, input_ids=padded)[:, 3:], logits(stock, input_ids=alone)) > 1e-3


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("rows", [1, 2])
def test_pads_without_a_mask_are_warned_about_once(side: str, rows: int) -> None:
    """C24."""
    fast = fastft.patch(support.build_model())
    ids = ids_of(6, rows)
    ids[:1] = functional.pad(ids[:1, :4], (2, 0) if side == "left" else (0, 2), value=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fast(input_ids=ids)
        fast(input_ids=ids)
    assert len([w for w in caught if "attention_mask" in str(w.message) and "fastft" in str(w.message)]) == 1


@pytest.mark.parametrize("pad_token_id", [0, 2, None], ids=["pad", "pad is eos", "no pad"])
def test_no_warning_where_nothing_is_padded(pad_token_id: int | None) -> None:
    """A row that ends with eos is not padded, also where pad is eos; a mask or positions settle the question."""
    fast = fastft.patch(support.build_model(pad_token_id=pad_token_id))
    ids = ids_of(6, 2)
    ids[:, -1] = 2
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fast(input_ids=ids)
        fast(input_ids=functional.pad(ids, (0, 2)), attention_mask=functional.pad(torch.ones_like(ids), (0, 2)))


@pytest.mark.parametrize("quantized", [False, True], ids=["dense", "nf4"])
def test_left_padded_generation(family: str, quantized: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """C25: prompts of 3, 6 and 9 tokens, left-padded in one batch: as one by one, and as stock."""
    monkeypatch.setattr(decoder_layer, "_FEW_TOKENS_ON_CPU", 0)  # as on a GPU
    model = support.build_model(family)
    if quantized:
        model = support.load_4bit(model, tmp_path)
    stock, fast = twins(support.add_lora(model))
    prompts = [ids_of(n, seed=n) for n in (3, 6, 9)]
    batch = torch.cat([functional.pad(p, (9 - p.shape[1], 0), value=0) for p in prompts])
    mask = torch.cat([functional.pad(torch.ones_like(p), (9 - p.shape[1], 0), value=0) for p in prompts])
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    tokens = {}
    for name, candidate in (("stock", stock.eval()), ("fast", fast.eval())):
        together = candidate.generate(input_ids=batch, attention_mask=mask, **settings)[:, 9:]
        alone = [
            candidate.generate(input_ids=p, attention_mask=torch.ones_like(p), **settings)[:, p.shape[1] :]
            for p in prompts
        ]
        assert torch.equal(together, torch.cat(alone)), name
        tokens[name] = together
    assert tokens["fast"].shape == (3, 12)
    assert torch.equal(tokens["fast"], tokens["stock"])
    assert runs(fast, "decoder layer") == (2 * 12 * 4, 0), "prompt and tokens"


@pytest.mark.parametrize("way", ["static cache", "prompt in two parts", "beams", "sampled"])
def test_other_ways_to_generate(way: str) -> None:
    """The cache is transformers' own: filled in place, by parts, reordered."""
    stock, fast = (m.eval() for m in twins(support.add_lora(support.build_model("mistral"))))
    ids = ids_of(9, 2)
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    if way == "static cache":
        settings |= {"cache_implementation": "static", "disable_compile": True}
    elif way == "beams":
        settings |= {"num_beams": 3}
    elif way == "sampled":
        settings |= {"do_sample": True, "temperature": 0.7, "num_return_sequences": 2}
    else:
        settings |= {"prefill_chunk_size": 4}
    tokens = []
    for model in (stock, fast):
        with support.seeded(5):
            tokens.append(model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings))
    assert torch.equal(tokens[1], tokens[0])
    assert runs(fast, "decoder layer")[1] == 0


def test_the_cache_holds_what_stocks_holds(family: str) -> None:
    """Keys and values of a prompt and of one more token, and their logits."""
    stock, fast = (m.eval() for m in twins(support.add_lora(support.build_model(family))))
    ids = ids_of(7, 2)
    with torch.no_grad():
        first = [m(input_ids=ids, use_cache=True) for m in (stock, fast)]
        caches = [getattr(o, "cache", None) or o.past_key_values for o in first]
        second = [m(input_ids=ids[:, :1], past_key_values=c) for m, c in zip((stock, fast), caches, strict=True)]
    assert_close(second[1].logits, second[0].logits)
    for theirs, ours in zip(caches[0].layers, caches[1].layers, strict=True):
        assert ours.keys.shape[2] == 8
        assert_close(ours.keys, theirs.keys)
        assert_close(ours.values, theirs.values)


def test_a_few_tokens_over_4bit_weights_stay_with_bitsandbytes_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Making every weight dense for a few rows takes longer there than its own products (0.19 s a token for 0.11)."""
    fast = fastft.patch(support.load_4bit(support.build_model(), tmp_path), strict=True).eval()
    fast.generate(input_ids=ids_of(40), max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert runs(fast, "decoder layer") == (2, 4), "the prompt fast, two tokens stock"
    monkeypatch.setattr(decoder_layer, "_FEW_TOKENS_ON_CPU", 0)
    fast.generate(input_ids=ids_of(40), max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert runs(fast, "decoder layer") == (8, 4)


def test_generation_in_training_mode_under_checkpointing() -> None:
    """GRPO and demos do it: generate from a model that trains, then train on."""
    batch = support.random_batch()
    stock, fast = twins(support.add_lora(support.build_model()))
    set_level("recompute", stock, fast)
    settings = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    # stock in evaluation: in training mode under checkpointing, transformers before 5.24 drops its own cache
    expected = stock.eval().generate(input_ids=batch["input_ids"][:1], **settings)
    stock.train()
    assert torch.equal(fast.generate(input_ids=batch["input_ids"][:1], **settings), expected)
    assert_same_step(step(stock, batch), step(fast, batch))


def test_a_cache_asked_for_in_training_is_filled() -> None:
    """use_cache=True by the caller's word: the layers run stock, and the cache holds every token."""
    batch = support.random_batch()
    stock, fast = twins(support.add_lora(support.build_model()))
    outputs = [m(**batch, use_cache=True) for m in (stock, fast)]
    caches = [getattr(o, "cache", None) or o.past_key_values for o in outputs]
    assert caches[1].get_seq_length() == caches[0].get_seq_length() == 13
    assert_close(outputs[1].loss, outputs[0].loss)
    assert runs(fast, "decoder layer") == (0, 2)


# --- packing (C27) ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("packing", ["positions", "all-ones mask", "cache left on", "two rows"])
def test_packed_documents_are_isolated(packing: str, implementation: str, training: bool) -> None:
    """C27: the second document's logits are its own in all four (stock: only in the first and the last)."""
    fast = fastft.patch(support.add_lora(support.build_model(attn_implementation=implementation)))
    fast.train(training)
    ids = ids_of(9)
    arguments: dict[str, Any] = {"input_ids": ids, "position_ids": POSITIONS}
    if packing in ("positions", "two rows"):
        arguments["use_cache"] = False
    if packing == "all-ones mask":
        arguments["attention_mask"] = torch.ones_like(ids)
    if packing == "two rows":
        arguments = {"input_ids": ids.repeat(2, 1), "position_ids": POSITIONS.repeat(2, 1), "use_cache": False}
    alone = logits(fast, input_ids=ids[:, 4:], use_cache=False)
    got = logits(fast, **arguments)
    assert_close(got[:1, 4:], alone)
    assert_close(got[:1, :4], logits(fast, input_ids=ids[:, :4], use_cache=False))
    together = logits(fast, input_ids=ids, position_ids=POSITIONS, attention_mask=torch.ones(1, 1, 9, 9).tril().bool())
    assert relative_error(together[:, 4:], alone) > 1e-3, "isolation would not be seen"


def test_packing_that_cannot_be_isolated_is_refused() -> None:
    """C27: "if we cannot isolate, raise"."""
    fast = fastft.patch(support.build_model())
    ids = ids_of(9)
    with pytest.raises(ValueError, match="use_cache=True"):
        fast(input_ids=ids, position_ids=POSITIONS, use_cache=True)
    padded = torch.ones_like(ids)
    padded[:, -1] = 0
    with pytest.raises(ValueError, match="attention_mask marks padding"):
        fast(input_ids=ids, position_ids=POSITIONS, attention_mask=padded)


def test_packed_training_equals_stock_s(level: str, family: str) -> None:
    """Padding-free rows as TRL's collator makes them: labels of first tokens ignored, positions, no mask."""
    ids = ids_of(9)
    labels = ids.masked_fill(POSITIONS == 0, -100)
    batch = {"input_ids": ids, "labels": labels, "position_ids": POSITIONS}
    stock, fast = twins(support.add_lora(support.build_model(family)))
    set_level(level, stock, fast)
    expected = step(stock, batch, use_cache=False)
    assert_same_step(expected, step(fast, batch))
    assert_ran_fast(fast)
    assert relative_error(step(stock, {"input_ids": ids, "labels": labels}).loss, expected.loss) > 1e-4


def test_document_boundaries_given_as_keywords(level: str) -> None:
    """cu_seq_lens and friends, as DataCollatorWithFlattening(return_flash_attn_kwargs=True) gives them."""
    ids = ids_of(9)
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32)
    batch: dict[str, Any] = {
        "input_ids": ids,
        "labels": ids.masked_fill(POSITIONS == 0, -100),
        "position_ids": POSITIONS,
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": 5,
        "max_length_k": 5,
        "seq_idx": torch.tensor([[0] * 4 + [1] * 5], dtype=torch.int32),
    }
    stock, fast = twins(support.add_lora(support.build_model()))
    set_level(level, stock, fast)
    assert_same_step(step(stock, batch, use_cache=False), step(fast, batch))
    assert_ran_fast(fast)


# (stock's eager attention adds the mask, so that a boolean one means nothing there)
@pytest.mark.parametrize(
    ("implementation", "dtype"), [("sdpa", torch.bool), ("sdpa", torch.float32), ("eager", torch.float32)]
)
def test_four_dimensional_masks(level: str, implementation: str, dtype: torch.dtype) -> None:
    """A prepared mask says itself who attends to whom."""
    batch = support.random_batch(rows=2, length=9)
    allowed = torch.ones(2, 1, 9, 9).tril().bool()
    allowed[0, :, 4:, :4] = False
    mask = allowed if dtype == torch.bool else torch.zeros(2, 1, 9, 9).masked_fill(~allowed, torch.finfo(dtype).min)
    stock, fast = twins(support.add_lora(support.build_model(attn_implementation=implementation)))
    set_level(level, stock, fast)
    expected = step(stock, batch, attention_mask=mask)
    assert_same_step(expected, step(fast, batch, attention_mask=mask))
    assert_ran_fast(fast)
    assert relative_error(step(stock, batch).loss, expected.loss) > 1e-4


# --- lengths (C29) ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("labelled", [True, False])
def test_a_document_over_max_seq_length_is_refused(labelled: bool) -> None:
    """C29: the error names both lengths and says what to do; nothing is cut."""
    fast = fastft.patch(support.build_model(), max_seq_length=64)
    ids = ids_of(100)
    with pytest.raises(ValueError, match=r"(?s)100.*64.*max_seq_length=100"):
        fast(input_ids=ids, **({"labels": ids} if labelled else {}))
    assert logits(fast, input_ids=ids_of(64)).shape[1] == 64


def test_a_packed_row_may_be_longer_than_its_documents() -> None:
    """C29: the limit is on a document; positions or max_length_q say how long the longest is."""
    fast = fastft.patch(support.build_model(), max_seq_length=64)
    ids = ids_of(100)
    fine = torch.cat([torch.arange(50), torch.arange(50)])[None]
    assert torch.isfinite(fast(input_ids=ids, labels=ids, position_ids=fine).loss)
    too_long = torch.cat([torch.arange(70), torch.arange(30)])[None]
    with pytest.raises(ValueError, match=r"70 tokens.*max_seq_length=64"):
        fast(input_ids=ids, labels=ids, position_ids=too_long)
    with pytest.raises(ValueError, match=r"70 tokens.*max_seq_length=64"):
        fast(input_ids=ids, labels=ids, position_ids=too_long, max_length_q=70)


def test_inputs_embeds_are_measured_too() -> None:
    fast = fastft.patch(support.build_model(), max_seq_length=8)
    embeds = fast.get_input_embeddings()(ids_of(9))
    with pytest.raises(ValueError, match=r"9 tokens.*max_seq_length=8"):
        fast(inputs_embeds=embeds)


def test_generation_past_max_seq_length_is_whole() -> None:
    """C29: the limit is on what is trained on; generation goes as far as stock's."""
    stock, fast = twins(support.build_model().eval(), max_seq_length=12)
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    got = fast.generate(input_ids=ids_of(9), **settings)
    assert got.shape == (1, 17)
    assert torch.equal(got, stock.generate(input_ids=ids_of(9), **settings))


def test_positions_are_looked_at_once_for_a_padded_prompt_and_never_for_a_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """C29: looking waits for the device. A row over the limit may be padding; one more token never is such a row."""
    fast = fastft.patch(support.build_model().eval(), max_seq_length=12)
    looked: list[int] = []
    check = backbone._check_length
    monkeypatch.setattr(
        backbone, "_check_length", lambda limit, row, kwargs: looked.append(row) or check(limit, row, kwargs)
    )
    padded = functional.pad(ids_of(10), (4, 0), value=0)
    mask = functional.pad(torch.ones(1, 10, dtype=torch.long), (4, 0))
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    got = fast.generate(input_ids=padded, attention_mask=mask, **settings)
    assert looked == [14]
    assert torch.equal(got[:, 14:], fast.generate(input_ids=ids_of(10), **settings)[:, 10:])
    assert looked == [14]
    with pytest.raises(ValueError, match=r"13 tokens.*max_seq_length=12"):
        fast.generate(input_ids=ids_of(13), **settings)


def test_a_limit_stays_when_the_model_is_patched_again() -> None:
    fast = fastft.patch(support.build_model(), max_seq_length=8)
    fastft.patch(fast)
    with pytest.raises(ValueError, match="max_seq_length=8"):
        fast(input_ids=ids_of(9))
    fastft.patch(fast, max_seq_length=16)
    assert logits(fast, input_ids=ids_of(9)).shape[1] == 9


def test_a_single_token() -> None:
    stock, fast = twins(support.build_model())
    for use_cache in (False, None):
        got = logits(fast, input_ids=ids_of(1), use_cache=use_cache)
        assert_close(got, logits(stock, input_ids=ids_of(1)))
