"""Ways off the straight road of forward, backward, step: evaluation between, live graphs, second backwards."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import fastft
from fastft.patching.plan import inner_model
from tests import support
from tests.patching.helpers import (
    ALL_LEVELS,
    Step,
    assert_ran_fast,
    assert_same_step,
    decoder_layers,
    relative_error,
    runs,
    set_level,
    step,
    twins,
)

Batch = dict[str, torch.Tensor]


@pytest.fixture(params=ALL_LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["dense", "nf4"])
def fast(request: pytest.FixtureRequest, level: str, tmp_path: Any) -> Any:
    """A fast model with adapters, over dense and over 4-bit weights, at each level."""
    base = support.build_model()
    if request.param == "nf4":
        base = support.load_4bit(base, tmp_path)
    model = fastft.patch(support.add_lora(base))
    set_level(level, model)
    return model


def assert_equal_bits(first: Step, second: Step) -> None:
    assert torch.equal(first.loss, second.loss)
    for name, gradient in first.gradients.items():
        assert torch.equal(gradient, second.gradients[name]), name


DETOURS = {
    "inference_mode": lambda model, batch: _forward(torch.inference_mode(), model, batch),
    "no_grad": lambda model, batch: _forward(torch.no_grad(), model, batch),
    "inference_mode, no cache": lambda model, batch: _forward(torch.inference_mode(), model, batch, use_cache=False),
    "evaluation": lambda model, batch: (_forward(torch.no_grad(), model.eval(), batch), model.train()),
    "generation": lambda model, batch: (
        model.eval().generate(input_ids=batch["input_ids"][:1], max_new_tokens=3, do_sample=False),
        model.train(),
    ),
    "disabled adapter": lambda model, batch: _without_adapter(model, batch),
    "stock only": lambda model, batch: _stock_only(model, batch),
    "a forward that raised": lambda model, batch: _raising(model, batch),
    "other shapes": lambda model, batch: model(**support.random_batch(5, rows=3, length=7)).loss.backward(),
}


def _forward(context: Any, model: Any, batch: Batch, **arguments: Any) -> None:
    with context:
        model(**batch, **arguments)
        model(input_ids=batch["input_ids"], **arguments)


def _without_adapter(model: Any, batch: Batch) -> None:
    with model.disable_adapter(), torch.inference_mode():
        model(**batch)


def _stock_only(model: Any, batch: Batch) -> None:
    with fastft.stock_only():
        model(**batch).loss.backward()


def _raising(model: Any, batch: Batch) -> None:
    with pytest.raises(ValueError, match="vocabulary"):
        model(input_ids=batch["input_ids"], labels=batch["labels"] + 1000)


@pytest.mark.parametrize("detour", DETOURS)
def test_a_detour_leaves_training_as_it_was(detour: str, fast: Any, batch: Batch) -> None:
    """C53: gradients after it are bit for bit those of a run without it."""
    straight = step(fast, batch)
    DETOURS[detour](fast, batch)
    assert_equal_bits(straight, step(fast, batch))


def test_train_evaluate_train(level: str, batch: Batch) -> None:
    """C53, with steps taken: the curve is stock's, evaluation losses too."""
    curves = []
    for model in twins(support.add_lora(support.build_model())):
        set_level(level, model)
        optimizer, curve = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2), []
        for seed in range(4):
            optimizer.zero_grad()
            loss = model.train()(**support.random_batch(seed)).loss
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                curve += [loss.item(), model.eval()(**batch).loss.item()]
        curves.append(curve)
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)
    assert len(set(curves[0])) == 8


def test_two_runs_are_bit_equal(fast: Any, batch: Batch) -> None:
    """Same seed, same bits."""
    assert_equal_bits(step(fast, batch), step(fast, batch))


@pytest.mark.parametrize("level", ["lean", "recompute", "offload"])
def test_levels_are_bit_equal(level: str, batch: Batch) -> None:
    """What is made again in the backward, or brought back, is what the forward made."""
    model = fastft.patch(support.add_lora(support.build_model()))
    kept = step(model, batch)
    set_level(level, model)
    assert_equal_bits(kept, step(model, batch))


def test_two_live_graphs(fast: Any, batch: Batch) -> None:
    """Accumulation with both forwards before both backwards, the later one first."""
    other = support.random_batch(9, rows=3, length=7)
    separate = [step(fast, b) for b in (batch, other)]
    fast.zero_grad(set_to_none=True)
    losses = [fast(**b).loss for b in (batch, other)]
    for loss in reversed(losses):
        loss.backward()
    got = support.trainable_gradients(fast)
    for name, gradient in got.items():
        assert relative_error(gradient, separate[0].gradients[name] + separate[1].gradients[name]) < 1e-5, name
    fast.zero_grad(set_to_none=True)
    sum(fast(**b).loss for b in (batch, other)).backward()
    for name, gradient in support.trainable_gradients(fast).items():
        assert relative_error(gradient, got[name]) < 1e-5, name


def test_backward_twice_with_retain_graph(fast: Any, batch: Batch) -> None:
    """The second backward adds the same gradients: attention's small graph, freed by the first, is built again."""
    once = step(fast, batch)
    fast.zero_grad(set_to_none=True)
    loss = fast(**batch).loss
    loss.backward(retain_graph=True)
    assert_equal_bits(once, Step(loss.detach(), support.trainable_gradients(fast)))
    loss.backward(retain_graph=True)
    loss.backward()
    for name, gradient in support.trainable_gradients(fast).items():
        assert relative_error(gradient, 3 * once.gradients[name]) < 1e-6, name


def test_a_backward_without_retain_graph_ends_the_graph(fast: Any, batch: Batch) -> None:
    loss = fast(**batch).loss
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("which", ["lora_A", "lora_B"])
def test_an_optimizer_step_between_forward_and_backward_raises(which: str, fast: Any, batch: Batch) -> None:
    """As in stock PyTorch: the backward would need weights that are no longer there."""
    loss = fast(**batch).loss
    with torch.no_grad():
        for name, parameter in fast.named_parameters():
            if which in name:
                parameter.add_(0.01)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_trained_weight_changed_between_forward_and_backward_raises(level: str, batch: Batch) -> None:
    """Full fine-tuning: base weights and norms are saved as such."""
    for ending in ("mlp.down_proj.weight", "post_attention_layernorm.weight"):
        model = fastft.patch(support.build_model())
        set_level(level, model)
        loss = model(**batch).loss
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(ending):
                    parameter.mul_(1.1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_double_backward_raises(fast: Any, batch: Batch) -> None:
    """No second derivative rather than a wrong one, through the layers and through our loss, squared or bare."""
    parameters = [p for p in fast.parameters() if p.requires_grad]
    for loss in (
        fast(input_ids=batch["input_ids"]).logits.pow(2).mean(),
        fast(**batch).loss.pow(2),
        fast(**batch).loss,
    ):
        with pytest.raises(RuntimeError, match="double backward"):
            torch.autograd.grad(loss, parameters, create_graph=True)


def test_the_incoming_gradient_and_the_inputs_are_never_written(level: str, batch: Batch) -> None:
    """Backward writes over its own buffers only: the caller's embeddings and gradients stay as they were."""
    model = fastft.patch(support.add_lora(support.build_model()))
    set_level(level, model)
    embeds = inner_model(model).get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
    before = embeds.detach().clone()
    received: list[tuple[torch.Tensor, torch.Tensor]] = []  # the top layer's incoming gradient, and a copy made in time

    def note(module: Any, gradients: Any) -> None:
        received.append((gradients[0], gradients[0].clone()))

    decoder_layers(model)[1].register_full_backward_pre_hook(note)
    hidden = inner_model(model).model(inputs_embeds=embeds).last_hidden_state
    output = hidden.detach().clone()
    incoming = torch.randn_like(hidden)
    kept = incoming.clone()
    hidden.backward(incoming)
    assert torch.equal(incoming, kept)
    assert torch.equal(embeds.detach(), before)
    assert torch.equal(hidden.detach(), output)
    assert len(received) == 1
    assert torch.equal(*received[0])
    assert runs(model, "decoder layer") == (2, 0)


def test_only_some_gradients_asked_for(fast: Any, batch: Batch) -> None:
    """autograd.grad of a few tensors equals the full backward's, at any place in the model."""
    full = step(fast, batch).gradients
    names = [n for n in full if "layers.0.self_attn.v_proj.lora_B" in n or "layers.1.mlp.up_proj.lora_A" in n]
    assert len(names) == 2
    parameters = dict(fast.named_parameters())
    found = torch.autograd.grad(fast(**batch).loss, [parameters[n] for n in names])
    for name, gradient in zip(names, found, strict=True):
        assert torch.equal(gradient, full[name]), name


def test_adapters_frozen_in_part(level: str, batch: Batch) -> None:
    """A trains without B and the other way round; `needs_input_grad` is honoured."""
    stock, fast_model = twins(support.add_lora(support.build_model()))
    for model in (stock, fast_model):
        set_level(level, model)
        for name, parameter in model.named_parameters():
            if ("lora_A" in name and "layers.0" in name) or ("lora_B" in name and "layers.1" in name):
                parameter.requires_grad_(False)
    got = step(fast_model, batch)
    assert len(got.gradients) == 14
    assert_same_step(step(stock, batch), got)


def test_the_base_receives_no_gradient(fast: Any, batch: Batch) -> None:
    """C45: through a whole model."""
    step(fast, batch)
    assert all(p.grad is None for p in fast.parameters() if not p.requires_grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_a_4bit_projection_equals_autograd_through_the_dequantized_matrix(
    quant_type: str, nested: bool, dtype: torch.dtype
) -> None:
    """C45: a 64 × 64 layer on CPU: output, input gradient and adapter gradients; nothing flows to the base."""
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    from fastft.autograd.lora_linear import lora_linear
    from fastft.kernels.nf4 import quantized_weight

    layer = Linear4bit(64, 64, bias=False, compute_dtype=dtype, compress_statistics=nested, quant_type=quant_type)
    layer = layer.to("cpu")
    weight: Any = layer.weight
    assert weight.quant_state is not None
    assert weight.quant_state.nested is nested
    dense = dequantize_4bit(weight.data, weight.quant_state).to(dtype)
    lora_a, lora_b = (torch.randn(shape, dtype=torch.float32) * 0.1 for shape in ((4, 64), (64, 4)))
    x, grad = torch.randn(2, 7, 64).to(dtype), torch.randn(2, 7, 64).to(dtype)

    def run(compute: Any) -> list[torch.Tensor]:
        leaves = [t.clone().requires_grad_() for t in (x, lora_a, lora_b)]
        output = compute(*leaves)
        output.backward(grad.to(output.dtype))
        return [output.detach(), *(leaf.grad for leaf in leaves)]

    got = run(lambda x, a, b: lora_linear(x, quantized_weight(weight, weight.quant_state), a, b, scale=0.5))
    expected = run(
        lambda x, a, b: x.double() @ dense.double().t() + 0.5 * (x.double() @ a.double().t()) @ b.double().t()
    )
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    for found, wanted in zip(got, expected, strict=True):
        assert relative_error(found, wanted) < tolerance
    assert [t.dtype for t in got] == [dtype, dtype, torch.float32, torch.float32]
    assert weight.grad is None


def test_a_model_is_freed(batch: Batch) -> None:
    """Registries and readers hold models weakly."""
    model = fastft.patch(support.add_lora(support.build_model()))
    step(model, batch)
    watched = [
        weakref.ref(inner_model(model)),
        weakref.ref(decoder_layers(model)[0]),
        weakref.ref(inner_model(model).lm_head),
    ]
    del model
    gc.collect()
    assert [w() for w in watched] == [None, None, None]


def test_what_a_merge_replaces_is_freed(tmp_path: Any, batch: Batch) -> None:
    """Generation never reads the projections again: what the last training step saw must not live on in a reader."""
    fast = fastft.patch(support.add_lora(support.load_4bit(support.build_model(), tmp_path)))
    step(fast, batch)
    adapted = fast.get_base_model().model.layers[0].self_attn.q_proj
    old = [
        weakref.ref(adapted),
        weakref.ref(adapted.base_layer.weight),
        weakref.ref(adapted.base_layer.quant_state.absmax),
    ]
    del adapted
    merged = fast.merge_and_unload()
    del fast
    gc.collect()
    assert [reference() is None for reference in old] == [True, True, True]
    assert merged(**batch).loss.isfinite()


def test_graphs_are_freed_with_their_loss(level: str, batch: Batch) -> None:
    """No cycle keeps a forward's activations: they go with the last reference, without a garbage collection."""
    model = fastft.patch(support.add_lora(support.build_model()))
    set_level(level, model)
    outputs = inner_model(model).model(input_ids=batch["input_ids"], output_hidden_states=True)
    watched = [weakref.ref(h) for h in outputs.hidden_states]
    gc.disable()
    try:
        del outputs
        assert [w() for w in watched] == [None] * 3
        loss = model(**batch).loss
        node = weakref.ref(loss)
        loss.backward()
        del loss
        assert node() is None
    finally:
        gc.enable()


def test_autocast_turned_off_again(level: str, batch: Batch) -> None:
    """Forward under autocast, backward outside, then a plain step: each in its own precision."""
    stock, fast_model = twins(support.add_lora(support.build_model()))
    set_level(level, stock, fast_model)
    plain = step(fast_model, batch)
    losses = []
    for model in (stock, fast_model):
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        losses.append(loss.detach())
        assert all(p.grad.dtype == p.dtype for p in model.parameters() if p.grad is not None)
    assert relative_error(losses[1], losses[0]) < 2e-2
    assert losses[1] != plain.loss
    assert_equal_bits(plain, step(fast_model, batch))
    assert runs(fast_model, "decoder layer")[1] == 0


def test_random_state_is_not_touched(fast: Any, batch: Batch) -> None:
    before = torch.random.get_rng_state()
    step(fast, batch)
    assert str(fastft.report(fast))
    assert torch.equal(before, torch.random.get_rng_state())
    assert_ran_fast(fast)
