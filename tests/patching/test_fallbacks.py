"""What is not as a fast piece assumes runs stock, that piece alone: right, counted, and reported with its reason."""

from __future__ import annotations

import copy
import inspect
import pathlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama

import fastft
import fastft.patching
from fastft.autograd import mlp_half
from fastft.autograd.projection import Dropout
from fastft.patching import layer_costs, registry
from fastft.patching.plan import inner_model
from tests import support
from tests.autograd import pieces
from tests.patching.helpers import (
    ALL_LEVELS,
    LEVELS,
    Step,
    assert_ran_fast,
    assert_same_step,
    decoder_layers,
    relative_error,
    rows,
    runs,
    set_level,
    sites,
    step,
    twins,
)

Batch = dict[str, torch.Tensor]


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def unpatched() -> Iterator[None]:
    """Original classes at the start; fastft's patches back at the end, whatever the test did to the classes."""
    fastft.unpatch()
    names = ("LlamaRMSNorm", "LlamaMLP", "LlamaAttention", "LlamaForCausalLM")
    originals = {getattr(modeling_llama, n): getattr(modeling_llama, n).__dict__["forward"] for n in names}
    set_checkpointing = PreTrainedModel.__dict__["_set_gradient_checkpointing"]
    yield
    fastft.unpatch()
    for owner, original in originals.items():
        owner.forward = original
    PreTrainedModel._set_gradient_checkpointing = set_checkpointing
    fastft.patching.install()


def seeded_step(model: Any, batch: Batch, seed: int = 3, **arguments: Any) -> Any:
    with support.seeded(seed):
        return step(model, batch, **arguments)


def assert_layers_ran_stock(model: Any, reason: str, layers: tuple[int, ...] = (0, 1), forwards: int = 1) -> None:
    """Layers `layers` ran stock for `reason`, by their counters and by the report; the others ran fast."""
    for index, site in enumerate(sites(model, "decoder layer")):
        expected = (0, forwards) if index in layers else (forwards, 0)
        assert (site.fast_runs, site.stock_runs) == expected, f"{site.path}: {site}"
        if index in layers:
            assert reason in (site.last_reason or ""), site.last_reason
    found = [row for row in fastft.report(model).rows if ".layers." in row.site and row.site.endswith("]")]
    assert sum(row.count for row in found) == len(sites(model, "decoder layer"))
    stock_rows = [row for row in found if row.runs == "stock"]
    assert sum(row.count for row in stock_rows) == len(layers)
    assert all(reason in row.reason for row in stock_rows), fastft.report(model)
    assert sum(row.stock_runs for row in stock_rows) == len(layers) * forwards


# --- upstream changed (C37) ------------------------------------------------------------------------------------------


def _renamed(original: Callable[..., Any]) -> Callable[..., Any]:
    """The same method with another signature: one more required parameter, which the original's callers do not pass."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs)

    parameters = list(inspect.signature(original).parameters.values())
    surprise = inspect.Parameter("surprise", inspect.Parameter.KEYWORD_ONLY)
    last = len(parameters) - (parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)
    forward.__signature__ = inspect.Signature([*parameters[:last], surprise, *parameters[last:]])  # type: ignore[attr-defined]
    return forward


STILL_FAST = {
    "LlamaRMSNorm": ("attention", "mlp", "loss"),
    "LlamaMLP": ("norm", "attention", "loss"),
    "LlamaAttention": ("norm", "mlp", "loss"),
    "LlamaForCausalLM": ("decoder layer", "norm"),
}


@pytest.mark.parametrize("name", STILL_FAST)
def test_an_unknown_signature_turns_off_that_piece_alone(
    name: str, unpatched: None, monkeypatch: pytest.MonkeyPatch, batch: Batch
) -> None:
    """C37: `import fastft` neither fails nor touches the method; the rest is fast; the version is not looked at."""
    monkeypatch.setattr("transformers.__version__", "99.0")
    owner = getattr(modeling_llama, name)
    changed = _renamed(owner.__dict__["forward"])
    owner.forward = changed
    fastft.patching.install()
    assert owner.__dict__["forward"] is changed
    stock, fast = twins(support.add_lora(support.build_model()))
    assert_same_step(step(stock, batch), step(fast, batch))
    report = fastft.report(fast)
    assert any(f"{name}.forward has an unknown signature" in note for note in report.notes), report.notes
    part = {"LlamaRMSNorm": "norm", "LlamaMLP": "mlp", "LlamaAttention": "attention", "LlamaForCausalLM": "loss"}[name]
    assert runs(fast, part)[0] == 0
    for other in STILL_FAST[name]:
        assert runs(fast, other)[0] > 0, f"{other} should still run fast"
    if part != "loss":
        assert_layers_ran_stock(fast, "unknown signature")


def test_a_missing_method_is_no_reason_to_fail(unpatched: None, batch: Batch) -> None:
    """C37: without `_set_gradient_checkpointing` a layer is checkpointed by transformers, once, and reported so."""
    original = PreTrainedModel.__dict__["_set_gradient_checkpointing"]
    assert not registry.class_patches()
    del PreTrainedModel._set_gradient_checkpointing
    try:
        fastft.patching.install()
    finally:
        PreTrainedModel._set_gradient_checkpointing = original
    assert "PreTrainedModel._set_gradient_checkpointing" in registry.skipped()


def test_unknown_keywords_reach_attention(level: str, batch: Batch) -> None:
    """C37: a keyword we do not know is passed on, as stock passes it."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    seen: list[Any] = []

    def probe(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        seen.append(kwargs.get("surprise"))
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register("fastft_test_probe", probe)
    stock, fast = twins(support.add_lora(support.build_model()))
    set_level(level, stock, fast)
    for model in (stock, fast):
        inner_model(model).config._attn_implementation = "fastft_test_probe"
    results = []
    for model in (stock, fast):
        seen.clear()
        results.append(step(model, batch, surprise=7))
        assert seen
        assert set(seen) == {7}
    assert_same_step(*results)
    assert_ran_fast(fast)


# --- strict mode and the report (C38) --------------------------------------------------------------------------------


def test_lora_on_one_projection_is_fast_and_listed(batch: Batch) -> None:
    """C38: every site has a row that says fast or stock, and how."""
    stock, fast = twins(support.add_lora(support.build_model(), target_modules=["q_proj"]))
    assert_same_step(step(stock, batch), step(fast, batch))
    assert_ran_fast(fast)
    assert {row.runs for row in fastft.report(fast).rows} == {"fast", "—"}
    paths = {site.path for m in fast.modules() if (site := registry.site_of(m)) is not None and site.part != "model"}
    assert sum(row.count for row in fastft.report(fast).rows) == len(paths)


def test_strict_refuses_a_model_that_would_run_stock() -> None:
    model = support.add_lora(support.build_model(), use_dora=True)
    with pytest.raises(RuntimeError, match=r"model\.layers\.0 .*would run stock.*DoraLinearVariant"):
        fastft.patch(model, strict=True)


def test_strict_refuses_a_call_that_would_run_stock(batch: Batch) -> None:
    model = fastft.patch(support.add_lora(support.build_model()), strict=True)
    step(model, batch)
    decoder_layers(model)[1].mlp.register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match=r"model\.layers\.1 .*mlp has a hook"):
        model(**batch)


def test_strict_allows_generation(batch: Batch) -> None:
    model = fastft.patch(support.add_lora(support.build_model()), strict=True).eval()
    assert model.generate(input_ids=batch["input_ids"][:1], max_new_tokens=3, do_sample=False).shape[1] > 13
    step(model.train(), batch)


def test_an_unknown_architecture_runs_stock_with_one_warning() -> None:
    """C56, and strict mode refuses it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32, n_positions=16))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert fastft.patch(model) is model
        fastft.patch(model)
    (message,) = [str(w.message) for w in caught if "fastft" in str(w.message)]
    assert "gpt2" in message
    assert "runs stock" in message
    assert not any(registry.PLAN in m.__dict__ for m in model.modules())
    with pytest.raises(RuntimeError, match="gpt2"):
        fastft.patch(model, strict=True)
    assert "not planned" in str(fastft.report(model))


def test_patch_refuses_what_is_no_model() -> None:
    with pytest.raises(TypeError, match="Linear"):
        fastft.patch(torch.nn.Linear(2, 2))


# --- adapters (C40 to C43) -------------------------------------------------------------------------------------------


def masked_as_fast(stock: Any, seed: int, p: float) -> Any:
    """`stock` with the masks that a fast model draws after `support.seeded(seed)`."""
    with support.seeded(seed):
        for layer in decoder_layers(stock):
            layer_seed = torch.randint(2**63 - 1, (1,))
            for stream, name in enumerate(support.PROJECTIONS, 1):
                owner = layer.self_attn if hasattr(layer.self_attn, name) else layer.mlp
                getattr(owner, name).lora_dropout["default"] = pieces.Masked(Dropout(p, layer_seed, stream))
    return stock


@pytest.mark.parametrize("bits", [32, 4])
@pytest.mark.parametrize("level", ALL_LEVELS)
def test_lora_dropout_is_fast_in_training(
    level: str, bits: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C40: loss and every gradient are those of stock with the same masks; small tiles and recomputation drop alike."""
    batch = support.random_batch(rows=3, length=96)
    base = support.build_model() if bits == 32 else support.load_4bit(support.build_model(), tmp_path)
    stock, fast = twins(support.add_lora(base, lora_dropout=0.3))
    set_level(level, stock, fast)
    expected = seeded_step(masked_as_fast(stock, 3, 0.3), batch)
    assert_same_step(expected, seeded_step(fast, batch, seed=3))
    assert_ran_fast(fast)
    monkeypatch.setattr(mlp_half, "TILE_BYTES", 1)  # three tiles
    assert_same_step(expected, seeded_step(fast, batch, seed=3))
    assert relative_error(seeded_step(fast, batch, seed=4).loss, expected.loss) > 1e-4, "dropout did nothing"
    fastft.patch(fast, strict=True)


def test_looking_at_a_model_with_lora_dropout_draws_no_random_numbers() -> None:
    """Plans and reports come at other times in a run that was resumed."""
    model = support.add_lora(support.build_model(), lora_dropout=0.3)
    state = torch.get_rng_state()
    fastft.report(fastft.patch(model, strict=True, memory_budget="1GiB"))
    layers = decoder_layers(model)
    assert layer_costs.costs_of(inner_model(model).model, layers, 64, 64) is not None
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("module", [torch.nn.Dropout(1.0), torch.nn.AlphaDropout(0.3)])
def test_dropout_of_another_kind_runs_stock(module: torch.nn.Module, batch: Batch) -> None:
    """With the masks of stock from the same seed: a layer that does not run here draws nothing here."""
    losses, states = [], []
    for model in twins(support.add_lora(support.build_model(), lora_dropout=0.3)):
        for layer in decoder_layers(model):
            layer.mlp.down_proj.lora_dropout["default"] = module
        with support.seeded(3):
            losses.append(model(**batch).loss)
            states.append(torch.get_rng_state())
    assert torch.equal(*states)
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)  # the loss itself is ours in one of them
    assert_layers_ran_stock(model, f"down_proj has lora_dropout={module.p} in training")


def test_lora_dropout_is_fast_in_evaluation(batch: Batch) -> None:
    """C40: evaluation equals dropout 0, with a gradient as without."""
    plain, dropped = (support.add_lora(support.build_model(), lora_dropout=p) for p in (0.0, 0.3))
    fastft.patch(dropped)
    assert_same_step(step(plain.eval(), batch, use_cache=False), step(dropped.eval(), batch, use_cache=False))
    assert_ran_fast(dropped)


def test_lora_dropout_backward_uses_the_forward_s_mask(level: str, batch: Batch) -> None:
    """C40: finite differences along a random direction, the seed fixed, in float64."""
    model = fastft.patch(support.add_lora(support.build_model(), lora_dropout=0.3).double())
    set_level(level, model)
    gradients = seeded_step(model, batch).gradients
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    direction = {n: torch.randn_like(p) for n, p in parameters.items()}
    slope = sum((gradients[n] * direction[n]).sum().item() for n in parameters)
    losses = []
    for sign in (1, -1):
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.add_(direction[name], alpha=sign * 1e-4)
        with support.seeded(3):
            losses.append(model(**batch).loss.item())
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.add_(direction[name], alpha=-sign * 1e-4)
    assert (losses[0] - losses[1]) / 2e-4 == pytest.approx(slope, rel=1e-3)


def test_lora_dropout_averages_to_evaluation() -> None:
    """C40: one planned attention projection, 200 seeds."""
    model = fastft.patch(support.add_lora(support.build_model(), lora_dropout=0.3))
    projection, x = decoder_layers(model)[0].self_attn.q_proj, torch.randn(5, 64)
    with torch.no_grad():
        expected = projection.eval()(x)
        projection.train()
        mean = torch.stack([projection(x) for _ in range(200)]).mean(0)
        base = projection.base_layer(x)
    assert (mean - expected).norm() < 0.15 * (expected - base).norm()


def test_dora_runs_stock(level: str, batch: Batch) -> None:
    """C41."""
    stock, fast = twins(support.add_lora(support.build_model(), use_dora=True))
    set_level(level, stock, fast)
    assert any("magnitude" in name for name, _ in fast.named_parameters())
    assert_same_step(step(stock, batch), step(fast, batch))
    assert_layers_ran_stock(fast, "LoRA variant (DoraLinearVariant)")
    assert runs(fast, "loss") == (1, 0)


def test_dora_on_some_projections_leaves_the_other_pieces_fast(batch: Batch) -> None:
    """One odd projection costs its piece, not the layer: the attention of these layers is still ours."""
    stock, fast = twins(support.add_lora(support.build_model(), use_dora=True, target_modules=["down_proj"]))
    assert_same_step(step(stock, batch), step(fast, batch))
    assert_layers_ran_stock(fast, "down_proj")
    assert runs(fast, "attention") == (2, 0)
    assert runs(fast, "mlp") == (0, 2)
    assert runs(fast, "norm") == (5, 0)


def test_rslora_is_fast(level: str, batch: Batch) -> None:
    """C41: another scale, nothing else."""
    stock, fast = twins(support.add_lora(support.build_model(), use_rslora=True, lora_alpha=3))
    set_level(level, stock, fast)
    assert_same_step(step(stock, batch), step(fast, batch))
    assert_ran_fast(fast)


@pytest.mark.parametrize("trained", ["lora_only", "all"])
def test_trained_base_biases_are_fast(level: str, trained: str, batch: Batch) -> None:
    """C41: bias="lora_only" trains the bias of the base layer under the adapter."""
    model = support.build_model(attention_bias=True, mlp_bias=True)
    stock, fast = twins(support.add_lora(model, bias=trained))
    assert any(name.endswith("bias") and p.requires_grad for name, p in fast.named_parameters())
    set_level(level, stock, fast)
    assert_same_step(step(stock, batch), step(fast, batch))
    assert_ran_fast(fast)


def test_a_bias_inside_the_adapter_runs_stock(level: str, batch: Batch) -> None:
    """C41: lora_bias=True."""
    model = support.build_model(attention_bias=True, mlp_bias=True)
    stock, fast = twins(support.add_lora(model, lora_bias=True))
    set_level(level, stock, fast)
    assert_same_step(step(stock, batch), step(fast, batch))
    assert_layers_ran_stock(fast, "lora_bias")


@pytest.mark.parametrize("quantized", [False, True], ids=["dense", "nf4"])
def test_a_disabled_adapter_is_the_base(quantized: bool, tmp_path: Any, batch: Batch) -> None:
    """C42: with labels and without, with gradients and without, and the adapter is back afterwards."""
    base = support.load_4bit(support.build_model(), tmp_path) if quantized else support.build_model()
    plain = copy.deepcopy(base)
    stock, fast = twins(support.add_lora(base))
    on = fast(**batch).loss
    with fast.disable_adapter():
        loss = fast(**batch).loss
        with torch.no_grad():
            quiet = fast(**batch, use_cache=False).loss
            logits = fast(input_ids=batch["input_ids"], use_cache=False).logits
    assert runs(fast, "decoder layer") == (8, 0)
    fast_base = fastft.patch(plain)
    assert torch.equal(loss, fast_base(**batch).loss), "equal bit for bit to a fast model without the adapter"
    assert torch.equal(loss, quiet)
    with stock.disable_adapter(), torch.no_grad():
        assert relative_error(loss, stock(**batch).loss) < 1e-5
        assert relative_error(logits, stock(input_ids=batch["input_ids"]).logits) < 1e-5
    assert relative_error(on.detach(), loss.detach()) > 1e-3
    assert torch.equal(on, fast(**batch).loss)


@pytest.mark.parametrize("level", ALL_LEVELS)
def test_adapter_state_changed_between_forward_and_backward(level: str, batch: Batch) -> None:
    """A backward belongs to its own forward's adapter state, not to what it is when the backward runs."""
    from peft.tuners.lora import LoraLayer

    stock, fast = twins(support.add_lora(support.build_model()))
    set_level(level, fast)
    expected = step(stock, batch)
    loss = fast(**batch).loss
    for module in fast.modules():
        if isinstance(module, LoraLayer):
            module._disable_adapters = True
            module.set_scale("default", 7.0)
    loss.backward()
    assert_same_step(expected, Step(loss.detach(), support.trainable_gradients(fast)))


def test_a_merged_adapter_is_fast(batch: Batch) -> None:
    stock, fast = twins(support.add_lora(support.build_model()))
    for model in (stock, fast):
        model.merge_adapter()
        inner_model(model).get_input_embeddings().weight.requires_grad_(True)
    losses = [model(**batch).loss for model in (stock, fast)]
    assert relative_error(losses[1].detach(), losses[0].detach()) < 1e-5
    for loss in losses:
        loss.backward()
    a, b = (inner_model(m).get_input_embeddings().weight.grad for m in (stock, fast))
    assert relative_error(b, a) < 1e-5
    assert_ran_fast(fast)
    for model in (stock, fast):
        model.unmerge_adapter()
    assert_same_step(step(stock, batch), step(fast, batch))


def _two_adapters(model: Any) -> None:
    from peft import LoraConfig

    model.add_adapter("b", LoraConfig(r=8, lora_alpha=3, target_modules=["q_proj", "v_proj"]))
    support.randomize_adapters(model, seed=7)


def test_switching_between_two_adapters(batch: Batch) -> None:
    """C43: right at each switch, bit-equal on return, and training b leaves a alone."""
    stock, fast = twins(support.add_lora(support.build_model()))
    losses: dict[str, list[torch.Tensor]] = {"stock": [], "fast": []}
    for name, model in (("stock", stock), ("fast", fast)):
        _two_adapters(model)
        for active in ("default", "b", "default"):
            model.set_adapter(active)
            losses[name].append(step(model, batch).loss)
    for expected, got in zip(losses["stock"], losses["fast"], strict=True):
        assert relative_error(got, expected) < 1e-5
    assert torch.equal(losses["fast"][0], losses["fast"][2])
    assert relative_error(losses["fast"][1], losses["fast"][0]) > 1e-3
    assert_ran_fast(fast, forwards=3)
    before = {n: p.detach().clone() for n, p in fast.named_parameters() if ".default." in n}
    fast.set_adapter("b")
    optimizer = torch.optim.SGD([p for p in fast.parameters() if p.requires_grad], lr=0.1)
    trained = step(fast, batch)
    assert all(".b." in name for name in trained.gradients)
    optimizer.step()
    assert all(torch.equal(p, before[n]) for n, p in fast.named_parameters() if n in before)


def test_two_active_adapters_run_stock(batch: Batch) -> None:
    """C43: both at once; q_proj and v_proj carry both, so their layers are stock; the MLP carries one and is fast."""
    stock, fast = twins(support.add_lora(support.build_model()))
    for model in (stock, fast):
        _two_adapters(model)
        model.base_model.set_adapter(["default", "b"])
    assert_same_step(step(stock, batch), step(fast, batch))
    assert_layers_ran_stock(fast, "q_proj has 2 active adapters (default, b)")
    assert runs(fast, "mlp") == (2, 0)


def test_mixed_adapter_batches_run_as_in_peft(batch: Batch) -> None:
    """PEFT's `adapter_names=` reaches the projections through hooks, which a fused layer would not fire."""
    stock, fast = twins(support.add_lora(support.build_model()))
    outputs = []
    for model in (stock, fast):
        _two_adapters(model)
        model.eval()
        with torch.no_grad():
            outputs.append(model(input_ids=batch["input_ids"], adapter_names=["default", "b"]).logits)
    assert relative_error(outputs[1], outputs[0]) < 1e-5
    assert runs(fast, "decoder layer")[0] == 0


# --- hooks, instance forwards, what transformers collects ------------------------------------------------------------

HOOKED = {
    "self_attn.q_proj": "q_proj has a hook",
    "self_attn.o_proj.base_layer": "o_proj's base layer has a hook",
    "mlp.gate_proj.lora_A.default": "gate_proj's adapter has a hook",
    "mlp": "mlp has a hook",
    "mlp.act_fn": "act_fn has a hook",
    "self_attn": "self_attn has a hook",
    "input_layernorm": "input_layernorm has a hook",
    "post_attention_layernorm": "post_attention_layernorm has a hook",
}


@pytest.mark.parametrize("place", HOOKED)
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
def test_a_hook_fires_and_costs_its_layer_alone(place: str, kind: str, batch: Batch) -> None:
    stock, fast = twins(support.add_lora(support.build_model()))
    fired = {id(stock): 0, id(fast): 0}
    for model in (stock, fast):

        def count(*_: Any, model: Any = model) -> None:
            fired[id(model)] += 1

        getattr(decoder_layers(model)[1].get_submodule(place), f"register_{kind}_hook")(count)
    assert_same_step(step(stock, batch), step(fast, batch))
    assert fired[id(fast)] == fired[id(stock)] == 1
    assert_layers_ran_stock(fast, HOOKED[place], layers=(1,))


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
def test_hooks_on_the_layer_itself_fire_and_it_stays_fast(kind: str, level: str, batch: Batch) -> None:
    stock, fast = twins(support.add_lora(support.build_model()))
    set_level(level, stock, fast)
    seen: dict[int, list[Any]] = {id(stock): [], id(fast): []}
    for model in (stock, fast):

        def note(module: Any, *tensors: Any, model: Any = model) -> None:
            first = tensors[-1][0] if isinstance(tensors[-1], tuple) else tensors[-1]
            seen[id(model)].append(first.detach())

        getattr(decoder_layers(model)[1], f"register_{kind}_hook")(note)
    assert_same_step(step(stock, batch), step(fast, batch))
    assert_ran_fast(fast)
    a, b = seen[id(stock)], seen[id(fast)]
    assert len(b) == 1
    assert len(a) in (1, 2), "before 5.23 stock's recomputation fires a layer's hooks a second time"
    assert relative_error(b[0], a[0]) < 1e-5


def test_a_hook_that_is_removed_gives_the_layer_back(batch: Batch) -> None:
    fast = fastft.patch(support.add_lora(support.build_model()))
    handle = decoder_layers(fast)[0].mlp.register_forward_hook(lambda *_: None)
    step(fast, batch)
    handle.remove()
    step(fast, batch)
    assert runs(fast, "decoder layer") == (3, 1)


@pytest.mark.parametrize("place", ["mlp", "self_attn", "self_attn.k_proj", "post_attention_layernorm"])
def test_another_library_s_instance_forward_is_called(place: str, batch: Batch) -> None:
    stock, fast = twins(support.add_lora(support.build_model()))
    for model in (stock, fast):
        module = decoder_layers(model)[0].get_submodule(place)

        def doubled(*args: Any, original: Any = module.forward, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            return (2 * result[0], *result[1:]) if isinstance(result, tuple) else 2 * result

        module.forward = doubled
    assert_same_step(step(stock, batch), step(fast, batch))
    assert_layers_ran_stock(fast, "has a hook or its own forward", layers=(0,))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_layer_with_its_own_forward_keeps_it(when: str, batch: Batch) -> None:
    """A plain function put on the instance, before patching or after."""
    stock = support.add_lora(support.build_model())
    fast = support.add_lora(support.build_model())
    if when == "after":
        fastft.patch(fast)
    for model in (stock, fast):
        layer = decoder_layers(model)[0]

        def doubled(x: torch.Tensor, *, layer: Any = layer, **kwargs: Any) -> Any:
            return 2 * type(layer).forward(layer, x, **kwargs)

        layer.forward = doubled
    if when == "before":
        fastft.patch(fast)
    assert_same_step(step(stock, batch), step(fast, batch))
    site = sites(fast, "decoder layer")[0]
    assert site.fast_runs == 0
    assert rows(fast, "[0]")[0].runs == "stock"
    assert "its own forward" in rows(fast, "[0]")[0].reason


@pytest.mark.parametrize("place", ["", "mlp", "self_attn.q_proj"], ids=["layer", "mlp", "q_proj"])
def test_accelerate_s_hooks(place: str, level: str, batch: Batch) -> None:
    """`add_hook_to_module` puts a partial on the instance: a hooked layer stays fast, a hooked part runs stock."""
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    class Counting(ModelHook):
        forwards = 0

        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            self.forwards += 1
            return args, kwargs

    stock, fast = twins(support.add_lora(support.build_model()))
    set_level(level, stock, fast)
    hook = Counting()
    target = decoder_layers(fast)[0].get_submodule(place)
    add_hook_to_module(target, hook)
    expected = step(stock, batch)
    assert_same_step(expected, step(fast, batch))
    assert hook.forwards >= 1
    if place:
        assert_layers_ran_stock(fast, "has a hook or its own forward", layers=(0,))
    else:
        assert_ran_fast(fast)
    remove_hook_from_module(target)
    assert_same_step(expected, step(fast, batch))
    assert sites(fast, "decoder layer")[0].fast_runs == (1 if place else 2)


def test_global_module_hooks_run_stock(batch: Batch) -> None:
    stock, fast = twins(support.add_lora(support.build_model()))
    names: list[str] = []
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, *_: names.append(type(module).__name__)
    )
    try:
        expected = step(stock, batch)
        calls, names[:] = sorted(names), []
        assert_same_step(expected, step(fast, batch))
    finally:
        handle.remove()
    assert runs(fast, "decoder layer") == (0, 2)
    assert sites(fast, "decoder layer")[0].last_reason == "global module hooks are installed"
    # The head is not called as a module: the loss multiplies by its weight. Everything else fires as in stock.
    assert sorted([*names, "Linear"]) == calls


def test_output_attentions_runs_stock(level: str, batch: Batch) -> None:
    stock, fast = twins(support.add_lora(support.build_model(attn_implementation="eager")))
    set_level(level, stock, fast)
    outputs = [model(**batch, output_attentions=True) for model in (stock, fast)]
    assert len(outputs[0].attentions) == len(outputs[1].attentions) == 2
    for a, b in zip(*(o.attentions for o in outputs), strict=True):
        assert relative_error(b.detach(), a.detach()) < 1e-5
    for output in outputs:
        output.loss.backward()
    expected, got = (support.trainable_gradients(m) for m in (stock, fast))
    assert all(relative_error(got[n], expected[n]) < 1e-5 for n in expected)
    assert_layers_ran_stock(fast, "output_attentions")
    step(fast, batch)
    assert runs(fast, "decoder layer") == (2, 2), "transformers' hooks, there for good now, must not cost the layers"


def test_output_hidden_states_stays_fast(level: str, batch: Batch) -> None:
    stock, fast = twins(support.add_lora(support.build_model()))
    set_level(level, stock, fast)
    outputs = [model(**batch, output_hidden_states=True) for model in (stock, fast)]
    assert len(outputs[0].hidden_states) == len(outputs[1].hidden_states) == 3
    for a, b in zip(*(o.hidden_states for o in outputs), strict=True):
        assert relative_error(b.detach(), a.detach()) < 1e-5
    # a loss on the hidden states, too, reaches the adapters
    for output in outputs:
        (output.loss + output.hidden_states[1].pow(2).mean()).backward()
    expected, got = (support.trainable_gradients(m) for m in (stock, fast))
    assert all(relative_error(got[n], expected[n]) < 1e-5 for n in expected)
    assert_ran_fast(fast)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_dropout_runs_stock_in_training(implementation: str, level: str, batch: Batch) -> None:
    model = support.build_model(attention_dropout=0.2, attn_implementation=implementation)
    stock, fast = twins(support.add_lora(model))
    set_level(level, stock, fast)
    expected = seeded_step(stock, batch)
    assert_same_step(expected, seeded_step(fast, batch))
    assert relative_error(seeded_step(stock, batch, seed=4).loss, expected.loss) > 1e-4
    assert_layers_ran_stock(fast, "attention_dropout=0.2 in training")
    assert_same_step(step(stock.eval(), batch, use_cache=False), step(fast.eval(), batch, use_cache=False))
    assert runs(fast, "decoder layer") == (2, 2)


def test_an_activation_that_is_not_silu_runs_stock(batch: Batch) -> None:
    stock, fast = twins(support.add_lora(support.build_model(hidden_act="gelu")))
    assert_same_step(step(stock, batch), step(fast, batch))
    assert_layers_ran_stock(fast, "not SiLU")
    assert runs(fast, "mlp") == (0, 2)
    assert runs(fast, "attention") == (2, 0)


def test_an_exotic_projection_runs_stock(batch: Batch) -> None:
    """A subclass of Linear may compute anything: only the two classes that are known are read."""

    class Halved(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) / 2

    model = support.build_model()
    for layer in model.model.layers:
        layer.mlp.up_proj.__class__ = Halved
    stock, fast = twins(model)
    assert_same_step(step(stock, batch), step(fast, batch))
    assert_layers_ran_stock(fast, "up_proj is")
    assert runs(fast, "attention") == (2, 0)


@pytest.mark.parametrize("level", ALL_LEVELS)
def test_stock_only_runs_a_planned_model_stock(level: str, batch: Batch) -> None:
    stock, fast = twins(support.add_lora(support.build_model()))
    set_level(level, stock, fast)
    expected = step(stock, batch)
    with fastft.stock_only():
        got = step(fast, batch)
        assert fast(**batch).logits is not None
    assert torch.equal(expected.loss, got.loss)
    assert all(torch.equal(expected.gradients[n], got.gradients[n]) for n in expected.gradients)
    assert runs(fast, "decoder layer") == (0, 0), "what was asked for is not counted"
    step(fast, batch)
    assert_ran_fast(fast)


@pytest.mark.parametrize("level", ALL_LEVELS)
def test_stock_only_ends_before_the_backward(level: str, batch: Batch) -> None:
    """A checkpointed stock layer runs again in the backward: as stock as in its forward."""
    stock, fast = twins(support.add_lora(support.build_model()))
    set_level(level, stock, fast)
    with fastft.stock_only():
        loss = fast(**batch).loss
    loss.backward()
    assert_same_step(step(stock, batch), Step(loss.detach(), support.trainable_gradients(fast)))


def _replica(model: torch.nn.Module) -> torch.nn.Module:
    """What nn.DataParallel makes of `model` for one more GPU (torch.nn.parallel.replicate), on the CPU."""
    values = {parameter: parameter * 1 for parameter in model.parameters()}
    copies = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, copied in copies.items():
        for name, child in module._modules.items():
            copied._modules[name] = None if child is None else copies[child]
        for name, parameter in module._parameters.items():
            if parameter is None:
                copied._parameters[name] = None
            else:  # replicas hold no parameters of their own: plain attributes
                setattr(copied, name, values[parameter])
    return copies[model]


def test_data_parallel_replicas_use_their_own_weights(level: str, batch: Batch) -> None:
    """A replica's dictionary is a copy, and so is the binding in it: it must not run the layer it was copied from."""
    stock, fast = twins(support.add_lora(support.build_model()))
    set_level(level, stock, fast)
    expected = step(stock, batch)
    fast.zero_grad(set_to_none=True)
    replica = _replica(fast)
    loss = replica(**batch).loss
    loss.backward()
    assert_same_step(expected, Step(loss.detach(), support.trainable_gradients(fast)))
    assert_layers_ran_stock(fast, "nn.DataParallel")
    for layer in decoder_layers(replica):
        assert layer.__dict__["forward"].__self__ is layer
    assert_same_step(expected, step(fast, batch))
    assert runs(fast, "decoder layer")[0] == 2  # the model itself is still fast
