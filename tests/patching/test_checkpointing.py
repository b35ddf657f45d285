"""Gradient checkpointing, whoever asks for it: planned layers go to the planner, plain ones stay untouched (C46).

What the planner then decides is in test_levels.py; what a recomputation does is tested here with the level pinned.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fastft
from fastft.patching.plan import inner_model
from tests import support
from tests.patching.helpers import (
    assert_ran_fast,
    assert_same_step,
    counted_forwards,
    decoder_layers,
    runs,
    saved_bytes,
    sites,
    step,
    twins,
)

Batch = dict[str, torch.Tensor]
REENTRANT = (None, False, True)


def enable(model: Any, use_reentrant: bool | None = None) -> None:
    """As a user or a Trainer of either transformers asks for it."""
    arguments = None if use_reentrant is None else {"use_reentrant": use_reentrant}
    if hasattr(inner_model(model), "activation_checkpointing_enable"):
        inner_model(model).activation_checkpointing_enable(activation_checkpointing_kwargs=arguments)
    else:
        inner_model(model).gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)


def recompute(model: Any, use_reentrant: bool | None = None) -> None:
    """Checkpointing for certain: with memory to spare the planner would keep everything."""
    enable(model, use_reentrant)
    fastft.patch(model, memory_levels="recompute")


def levels(model: Any) -> list[str]:
    """What is asked of each layer."""
    return [site.level for site in sites(model, "decoder layer")]


@pytest.mark.parametrize("use_reentrant", REENTRANT)
def test_every_gradient_equals_the_run_without_checkpointing(use_reentrant: bool | None, batch: Batch) -> None:
    """C46: frozen embeddings, LoRA, reentrant or not: all gradients there, equal to level keep's and to stock's."""
    stock, fast = twins(support.add_lora(support.build_model()))
    kept = step(fast, batch)
    enable(stock, use_reentrant)
    recompute(fast, use_reentrant)
    for model in (stock, fast):
        model.enable_input_require_grads()  # what reentrant checkpointing over frozen embeddings needs
    again = step(fast, batch)
    assert levels(fast) == ["recompute"] * 2
    assert torch.equal(again.loss, kept.loss)
    assert_same_step(kept, again, tolerance=1e-6)
    assert_same_step(step(stock, batch), again)
    assert_ran_fast(fast, forwards=2)


@pytest.mark.parametrize("use_reentrant", REENTRANT)
@pytest.mark.parametrize("trained", ["nothing below", "everything"])
def test_the_lowest_layer_trains_without_a_gradient_to_its_input(
    trained: str, use_reentrant: bool | None, batch: Batch
) -> None:
    """C46: our recomputation needs no input_require_grads hook (stock's reentrant one loses all gradients without)."""
    model = support.build_model()
    model = support.add_lora(model) if trained == "nothing below" else model
    fast = fastft.patch(model)
    kept = step(fast, batch)
    recompute(fast, use_reentrant)
    if trained == "nothing below":
        inner_model(fast).disable_input_require_grads()
    assert_same_step(kept, step(fast, batch), tolerance=1e-6)


def test_flags_are_the_layers_off_and_the_backbone_s_as_transformers_set_it(batch: Batch) -> None:
    fast = fastft.patch(support.add_lora(support.build_model()))
    assert levels(fast) == ["keep"] * 2
    enable(fast)
    assert levels(fast) == ["auto"] * 2
    assert not any(layer.gradient_checkpointing for layer in decoder_layers(fast))
    assert inner_model(fast).model.gradient_checkpointing
    assert inner_model(fast).is_gradient_checkpointing
    inner_model(fast).gradient_checkpointing_disable()
    assert levels(fast) == ["keep"] * 2
    assert not inner_model(fast).is_gradient_checkpointing
    assert_same_step(step(fast, batch), step(fast, batch))


def test_asked_for_before_patching(batch: Batch) -> None:
    stock = support.add_lora(support.build_model())
    enable(stock)
    fast = support.add_lora(support.build_model())
    enable(fast)
    fastft.patch(fast)
    assert levels(fast) == ["auto"] * 2
    assert not any(layer.gradient_checkpointing for layer in decoder_layers(fast))
    assert_same_step(step(stock, batch), step(fast, batch))
    assert_ran_fast(fast)


def test_patching_again_keeps_the_level() -> None:
    fast = fastft.patch(support.add_lora(support.build_model()))
    enable(fast)
    fastft.patch(fast)
    assert levels(fast) == ["auto"] * 2


def test_every_n_layers_means_levels_per_layer(batch: Batch) -> None:
    stock, fast = twins(support.add_lora(support.build_model(num_hidden_layers=3)))
    for model in (stock, fast):
        inner = inner_model(model)
        if not hasattr(inner, "activation_checkpointing_enable"):
            inner.gradient_checkpointing_enable(every_n_layers=2)
        else:
            inner.activation_checkpointing_enable(every_n_layers=2)
    assert levels(fast) == ["auto", "keep", "auto"]
    assert_same_step(step(stock, batch), step(fast, batch))


def _attention_calls(model: Any, batch: Batch) -> int:
    """How often attention is computed in one step: recomputations included, whoever does them."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    calls = 0

    def counting(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        return ALL_ATTENTION_FUNCTIONS["sdpa"](*arguments, **keywords)

    ALL_ATTENTION_FUNCTIONS.register("fastft_test_counting", counting)
    config = inner_model(model).config
    config._attn_implementation = "fastft_test_counting"
    try:
        step(model, batch)
    finally:
        config._attn_implementation = "sdpa"
    return calls


@pytest.mark.parametrize("attention_dropout", [0.0, 0.1], ids=["fast", "stock fallback"])
def test_a_layer_is_computed_once_or_twice_a_step(attention_dropout: float, batch: Batch) -> None:
    """Once a layer at level keep, twice at recompute, never three times, in fast layers as in those that fell back."""
    fast = fastft.patch(support.add_lora(support.build_model(attention_dropout=attention_dropout)))
    assert _attention_calls(fast, batch) == 2 * 1
    recompute(fast)
    assert _attention_calls(fast, batch) == 2 * 2
    fast_runs, stock_runs = runs(fast, "decoder layer")
    assert (fast_runs, stock_runs) == ((0, 4) if attention_dropout else (4, 0))


@pytest.mark.parametrize("plain_is_built", ["before a model is patched", "after"])
def test_a_plain_model_s_checkpointing_is_untouched(plain_is_built: str, batch: Batch) -> None:
    """Two forwards of each plain layer's attention and MLP a step, and the flags where transformers puts them."""
    if plain_is_built == "after":
        step(fastft.patch(support.add_lora(support.build_model())), batch)
    plain = support.add_lora(support.build_model())
    if plain_is_built != "after":
        step(fastft.patch(support.add_lora(support.build_model())), batch)
    parts = [part for layer in decoder_layers(plain) for part in (layer.self_attn, layer.mlp)]
    for checkpointed in (False, True):
        if checkpointed:
            enable(plain)
        with counted_forwards(*parts) as counts:
            step(plain, batch)
        assert set(counts.values()) == {2 if checkpointed else 1}
        assert all(bool(layer.gradient_checkpointing) == checkpointed for layer in decoder_layers(plain))
    # the layer classes, whose forward transformers compares by identity, are as transformers made them
    assert not any("forward" in layer.__dict__ for layer in decoder_layers(plain))


def test_what_is_saved() -> None:
    """Recompute saves a fraction of what keep saves, and a stock fallback no more than stock's own checkpointing."""
    batch = support.random_batch(rows=2, length=64)
    kept, recomputed = (fastft.patch(support.add_lora(support.build_model())) for _ in range(2))
    stock, fallback = twins(support.add_lora(support.build_model(attention_dropout=0.1)))
    unasked = saved_bytes(stock, batch)
    recompute(recomputed)
    for model in (stock, fallback):
        enable(model)
    assert saved_bytes(recomputed, batch) < 0.5 * saved_bytes(kept, batch)
    checkpointed = saved_bytes(stock, batch)
    assert checkpointed < 0.5 * unasked, "stock's checkpointing is what this is compared with"
    assert saved_bytes(fallback, batch) <= checkpointed
    assert runs(fallback, "decoder layer")[0] == 0
    assert saved_bytes(recomputed, batch) <= checkpointed


@pytest.mark.parametrize("how", ["instance forward", "accelerate hook"])
@pytest.mark.parametrize("when", ["before patching", "after enabling"])
def test_a_layer_that_others_run_is_still_checkpointed(how: str, when: str) -> None:
    """A forward put on the layer by another library is beyond the plan: transformers' own flag serves it."""
    from accelerate.hooks import ModelHook, add_hook_to_module

    def interfere(model: Any) -> None:
        for layer in decoder_layers(model):
            if how == "accelerate hook":
                add_hook_to_module(layer, ModelHook())
            else:
                layer.forward = lambda x, layer=layer, **kwargs: type(layer).forward(layer, x, **kwargs)

    batch = support.random_batch(rows=2, length=64)
    stock, fast = (support.add_lora(support.build_model()) for _ in range(2))
    enable(stock)
    if when == "before patching":
        interfere(fast)
    fastft.patch(fast)
    recompute(fast)
    if when != "before patching":
        interfere(fast)
    assert saved_bytes(fast, batch) <= 1.05 * saved_bytes(stock, batch)
    assert_same_step(step(stock, batch), step(fast, batch))
    inner_model(fast).gradient_checkpointing_disable()
    assert not any(layer.gradient_checkpointing for layer in decoder_layers(fast))
    assert_same_step(step(stock, batch), step(fast, batch))


@pytest.mark.parametrize("pinned", [None, "recompute", "keep"])
def test_a_preference_trainer_s_toggles(pinned: str | None, batch: Batch) -> None:
    """DPO, KTO: each step switches checkpointing off for a reference pass, then on again, positionally."""
    trl_utils = pytest.importorskip("trl.trainer.utils")
    models = pytest.importorskip("trl.models.utils")
    toggle = getattr(models, "disable_gradient_checkpointing", None) or trl_utils.disable_gradient_checkpointing
    stock, fast = twins(support.add_lora(support.build_model()))
    fastft.patch(fast, memory_levels=pinned)
    results = []
    for model in (stock, fast):
        enable(model, use_reentrant=False)
        steps = []
        for _ in range(2):
            with torch.no_grad(), toggle(model, {"use_reentrant": False}), model.disable_adapter():
                if model is fast:
                    assert levels(fast) == ["keep"] * 2
                reference = model(**batch, use_cache=False).loss
            if model is fast:
                assert levels(fast) == [pinned or "auto"] * 2
                assert not any(layer.gradient_checkpointing for layer in decoder_layers(fast))
            steps.append((reference, step(model, batch)))
        results.append(steps)
    for (reference, expected), (fast_reference, got) in zip(*results, strict=True):
        torch.testing.assert_close(fast_reference, reference, rtol=1e-5, atol=0)
        assert_same_step(expected, got)
    assert_ran_fast(fast, forwards=4)
    assert _attention_calls(fast, batch) == (4 if pinned == "recompute" else 2)


def test_peft_s_preparation_for_k_bit_training(tmp_path: Any, batch: Batch) -> None:
    from peft import prepare_model_for_kbit_training

    stock, fast = twins(support.load_4bit(support.build_model(), tmp_path))
    results = []
    for model in (stock, fast):
        prepared = support.add_lora(prepare_model_for_kbit_training(model))
        results.append(step(prepared, batch))
    assert levels(fast) == ["auto"] * 2
    assert_same_step(*results)
    assert_ran_fast(fast)


@pytest.mark.trl
@pytest.mark.parametrize("pinned", [None, "keep", "recompute"])
def test_asked_for_by_a_trainer(pinned: str | None, tmp_path: Any) -> None:
    """SFTTrainer with gradient_checkpointing=True means the planner, and a level that the user named that level."""
    import datasets
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from trl import SFTConfig, SFTTrainer

    calls = 0

    def counting(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        return ALL_ATTENTION_FUNCTIONS["sdpa"](*arguments, **keywords)

    ALL_ATTENTION_FUNCTIONS.register("fastft_test_trainer", counting)
    losses = []
    for planned in (False, True):
        model = support.add_lora(support.build_model())
        if planned:
            fastft.patch(model, memory_levels=pinned)
        inner_model(model).config._attn_implementation = "fastft_test_trainer"
        rows = [{"prompt": f"add {i} and {i + 1}", "completion": f" it is {2 * i + 1}"} for i in range(4)]
        config = SFTConfig(
            output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2, logging_steps=1, report_to=[],
            use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True, seed=0, gradient_checkpointing=True,
        )  # fmt: skip
        trainer = SFTTrainer(
            model=model,
            args=config,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=support.build_tokenizer(),
        )
        calls = 0
        trainer.train()
        again = not planned or pinned == "recompute"  # the planner keeps what so tiny a model has
        assert calls == 2 * 2 * (2 if again else 1), "steps × layers × (forward and recomputation)"
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert levels(model) == [pinned or "auto"] * 2
    assert runs(model, "decoder layer") == (2 * 2, 0)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
