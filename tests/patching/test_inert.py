"""Patches are inert (C35), undone by identity (C39), and a plan survives whatever is done to a model."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama

import fastft
import fastft.patching
from fastft.patching import registry
from fastft.patching.plan import inner_model
from tests import support
from tests.patching.helpers import (
    assert_ran_fast,
    assert_same_step,
    decoder_layers,
    run_python,
    runs,
    sites,
    step,
    twins,
)

SWAPPED = {
    modeling_llama.LlamaRMSNorm: "forward",
    modeling_llama.LlamaMLP: "forward",
    modeling_llama.LlamaAttention: "forward",
    modeling_llama.LlamaForCausalLM: "forward",
    PreTrainedModel: "_set_gradient_checkpointing",
}


@pytest.fixture
def reinstalled() -> Iterator[None]:
    """For tests that unpatch everything: the patches of `import fastft` are back afterwards."""
    yield
    fastft.unpatch()
    fastft.patching.install()


# What a plain model computes, as digests, in a process where fastft trains a model beside it ("fastft") or is absent:
# two children of one process, which has imported the others and built a model.
PLAIN_RUN = """
import hashlib, json, os, sys, warnings
warnings.simplefilter("ignore")
import datasets, torch
from peft import LoraConfig
from tests import support
from trl import SFTConfig, SFTTrainer

before = support.build_model("llama")
answers = {}
for name in ("fastft", "stock"):
    path = os.path.join(sys.argv[1], name + ".json")
    child = os.fork()
    if child == 0:
        with_fastft = name == "fastft"
        break
    assert os.waitpid(child, 0)[1] == 0, f"{name}: see above"
    with open(path) as file:
        answers[name] = json.load(file)
else:
    assert "fastft" not in sys.modules
    print(json.dumps(answers))
    sys.exit()

if with_fastft:
    import fastft

def digest(tensors):
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().float().numpy().tobytes())
    return sha.hexdigest()

def trainer_for(model):
    rows = [{"prompt": f"add {i} and {i + 1}", "completion": f" it is {2 * i + 1}"} for i in range(8)]
    config = SFTConfig(
        output_dir=sys.argv[1], max_steps=2, per_device_train_batch_size=2, logging_steps=1, report_to=[], use_cpu=True,
        bf16=False, save_strategy="no", disable_tqdm=True, learning_rate=1e-3, seed=0, gradient_checkpointing=True,
    )
    trainer = SFTTrainer(
        model=model, args=config, train_dataset=datasets.Dataset.from_list(rows),
        processing_class=support.build_tokenizer(),
        peft_config=LoraConfig(r=4, target_modules=list(support.PROJECTIONS), task_type="CAUSAL_LM"),
    )
    support.randomize_adapters(trainer.model)
    trainer.train()
    return trainer

layers_fast = 0
if with_fastft:  # a fast model first, through the same trainer, so that everything fastft does is in place
    fast = trainer_for(fastft.patch(support.build_model("llama"))).model
    layers_fast = sum(m.__dict__["_fastft"].fast_runs for m in fast.get_base_model().model.layers)

batch = support.random_batch(padded=True)
digests = {}
for name, model in {"before": before, "after": support.build_model("llama")}.items():
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        outputs = model(**batch)
        outputs.loss.backward()
        digests[f"{name}, training, checkpointing {checkpointing}"] = digest(
            [outputs.loss, outputs.logits, *(p.grad for p in model.parameters())]
        )
    model.gradient_checkpointing_disable()
    model.eval()
    tokens = model.generate(input_ids=batch["input_ids"][:1], max_new_tokens=4, do_sample=False)
    with torch.no_grad():
        digests[f"{name}, evaluation"] = digest([tokens, model(**batch).logits])
    assert not any("_fastft" in module.__dict__ for module in model.modules())
trainer = trainer_for(support.build_model("llama"))
digests["SFTTrainer"] = digest([p for p in trainer.model.parameters()])
digests["SFTTrainer's log"] = json.dumps([[e.get("loss"), e.get("grad_norm")] for e in trainer.state.log_history])
with open(path, "w") as file:
    json.dump({"digests": digests, "layers_fast": layers_fast}, file)
"""


@pytest.mark.slow
@pytest.mark.trl
def test_a_plain_model_is_bit_equal_to_its_run_in_a_process_without_fastft(tmp_path: Any) -> None:
    """C35: built before or after the import, called directly, generating, checkpointed, and through SFTTrainer."""
    answers = run_python(PLAIN_RUN, str(tmp_path))
    without, beside = answers["stock"], answers["fastft"]
    assert beside["layers_fast"] == 2 * 2, "the fast model beside the plain one did not run fast"
    assert beside["digests"] == without["digests"]
    # training (twice two ways), evaluation (twice), the trainer's weights and its log
    assert len(set(without["digests"].values())) == 4, without["digests"]


def test_a_plain_model_beside_a_fast_one_gets_nothing(batch: dict[str, torch.Tensor]) -> None:
    """C35 in this process: the originals run, bit for bit, and the plain model carries no attribute of ours."""
    plain = support.build_model()
    seen = step(plain, batch)
    fast = fastft.patch(support.build_model())
    step(fast, batch)
    for owner, name in SWAPPED.items():
        if name == "forward":
            assert inspect.signature(owner.forward) == inspect.signature(registry.original_of(owner, name))
    again = step(plain, batch)
    assert torch.equal(seen.loss, again.loss)
    assert all(torch.equal(seen.gradients[n], again.gradients[n]) for n in seen.gradients)
    assert not any(registry.PLAN in m.__dict__ or "forward" in m.__dict__ for m in plain.modules())
    assert plain(**batch).logits is not None


def test_unpatch_restores_by_identity(reinstalled: None, batch: dict[str, torch.Tensor]) -> None:
    """C39: patched twice, unpatched once: the very objects are back, and the model is plain."""
    originals = {owner: registry.original_of(owner, name) for owner, name in SWAPPED.items()}
    stock, fast = twins(support.add_lora(support.build_model()))
    fastft.patch(fast)
    listed = "\n".join(fastft.patched())
    for owner, name in SWAPPED.items():
        assert owner.__dict__[name] is not originals[owner]
        assert f"{owner.__qualname__}.{name}" in listed
    assert "LlamaForCausalLM instance" in listed
    fast.gradient_checkpointing_enable()
    fastft.unpatch()
    assert fastft.patched() == []
    for owner, name in SWAPPED.items():
        assert owner.__dict__[name] is originals[owner]
    assert not any(registry.PLAN in m.__dict__ or "forward" in m.__dict__ for m in inner_model(fast).modules())
    assert not inner_model(fast).model._forward_pre_hooks
    assert all(layer.gradient_checkpointing for layer in decoder_layers(fast)), "checkpointing was lost"
    stock.gradient_checkpointing_enable()
    expected, got = step(stock, batch), step(fast, batch)
    assert torch.equal(expected.loss, got.loss)
    assert all(torch.equal(expected.gradients[n], got.gradients[n]) for n in expected.gradients)


def test_a_method_wrapped_by_another_library_after_us_keeps_being_called(
    monkeypatch: pytest.MonkeyPatch, batch: dict[str, torch.Tensor]
) -> None:
    """Patching again does not swap over the wrapper: its class runs stock, with the reason in the report."""
    fastft.patch(support.build_model())
    ours, calls = modeling_llama.LlamaMLP.forward, []

    def wrapper(self: Any, x: torch.Tensor) -> torch.Tensor:
        calls.append(x.shape)
        return ours(self, x)

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", wrapper)
    model = fastft.patch(support.build_model())
    assert modeling_llama.LlamaMLP.forward is wrapper
    model(**batch).loss.backward()
    assert len(calls) == 2  # one a layer
    reasons = {row.reason for row in fastft.report(model).rows if row.runs == "stock"}
    assert reasons == {"LlamaMLP.forward was replaced by another library after fastft"}
    monkeypatch.undo()
    step(fastft.patch(model), batch)
    assert {row.runs for row in fastft.report(model).rows} == {"fast", "—"}, "gone, it is no reason any more"


def test_unpatch_leaves_a_method_that_somebody_else_has_replaced(
    reinstalled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = registry.original_of(modeling_llama.LlamaMLP, "forward")

    def foreign(self: Any, x: torch.Tensor) -> torch.Tensor:
        return original(self, x)

    modeling_llama.LlamaMLP.forward = foreign
    try:
        fastft.unpatch()
        assert modeling_llama.LlamaMLP.__dict__["forward"] is foreign
    finally:
        modeling_llama.LlamaMLP.forward = original


def test_unpatch_of_one_model_leaves_the_others(batch: dict[str, torch.Tensor]) -> None:
    first, second = (fastft.patch(support.add_lora(support.build_model())) for _ in range(2))
    fastft.unpatch(first)
    assert not any(registry.PLAN in m.__dict__ for m in first.modules())
    expected, got = step(first, batch), step(second, batch)
    assert_same_step(expected, got)
    assert_ran_fast(second)


def test_a_model_patched_again_after_unpatch_is_fast(reinstalled: None, batch: dict[str, torch.Tensor]) -> None:
    model = fastft.patch(support.add_lora(support.build_model()))
    fastft.unpatch()
    fastft.patch(model)
    step(model, batch)
    assert_ran_fast(model)


def test_patch_is_idempotent(batch: dict[str, torch.Tensor]) -> None:
    """C39: the same plans, counters, bindings and hooks after a second call."""
    model = support.add_lora(support.build_model())
    assert fastft.patch(model) is model
    step(model, batch)
    plans = [registry.site_of(m) for m in model.modules()]
    bound = [layer.__dict__["forward"] for layer in decoder_layers(model)]
    fastft.patch(model)
    fastft.patch(inner_model(model))
    assert all(a is b for a, b in zip(plans, [registry.site_of(m) for m in model.modules()], strict=True))
    assert all(a is layer.__dict__["forward"] for a, layer in zip(bound, decoder_layers(model), strict=True))
    assert len(inner_model(model).model._forward_pre_hooks) == 1
    assert_ran_fast(model)


def test_a_plan_is_pure_data(batch: dict[str, torch.Tensor]) -> None:
    model = fastft.patch(support.add_lora(support.build_model()), max_seq_length=64)
    step(model, batch)
    plans = [site for m in model.modules() if (site := registry.site_of(m)) is not None]
    assert len(plans) == 1 + 1 + 1 + 2 * 5  # backbone, loss, final norm; layer, attention, MLP and two norms, twice
    for plan in plans:
        for field in dataclasses.fields(plan):
            assert isinstance(getattr(plan, field.name), (str, int, bool, type(None))), field.name


@pytest.mark.parametrize("quantized", [False, True], ids=["dense", "nf4"])
def test_state_dict_and_config_are_unchanged(quantized: bool, tmp_path: Any, batch: dict[str, torch.Tensor]) -> None:
    model = support.build_model()
    if quantized:
        model = support.load_4bit(model, tmp_path)
    stock, fast = twins(support.add_lora(model))
    step(fast, batch)
    assert list(fast.state_dict()) == list(stock.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(fast.state_dict().values(), stock.state_dict().values(), strict=True))
    assert inner_model(fast).config.to_dict() == inner_model(stock).config.to_dict()
    assert [n for n, _ in fast.named_modules()] == [n for n, _ in stock.named_modules()]


@pytest.mark.parametrize("level", ["keep", "auto", "recompute", "offload"])
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_is_as_fast_as_the_model(how: str, level: str, batch: dict[str, torch.Tensor]) -> None:
    """C39: plan, bindings and level travel; the copy is independent of the model."""
    stock, fast = twins(support.add_lora(support.build_model()))
    if level != "keep":
        fast.gradient_checkpointing_enable()
        inner_model(fast).disable_input_require_grads()  # transformers' hooks are closures, which pickle refuses
        fastft.patch(fast, memory_levels=None if level == "auto" else level)
    copied = copy.deepcopy(fast) if how == "deepcopy" else pickle.loads(pickle.dumps(fast))
    expected = step(stock, batch)
    assert_same_step(expected, step(copied, batch))
    assert_ran_fast(copied)
    assert {site.level for site in sites(copied, "decoder layer")} == {level}
    assert runs(fast, "decoder layer") == (0, 0), "the copy ran through the original"
    assert all(layer.forward.__self__ is layer for layer in decoder_layers(copied))
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.add_(1.0)
    assert_same_step(expected, step(fast, batch))
    assert_ran_fast(fast)


def test_merge_and_unload(batch: dict[str, torch.Tensor]) -> None:
    stock, fast = (model.merge_and_unload() for model in twins(support.add_lora(support.build_model())))
    for model in (stock, fast):
        model.requires_grad_(True)
    assert_same_step(step(stock, batch), step(fast, batch))
    assert_ran_fast(fast)


def test_unload(batch: dict[str, torch.Tensor]) -> None:
    stock, fast = (model.unload() for model in twins(support.add_lora(support.build_model())))
    for model in (stock, fast):
        model.requires_grad_(True)
    assert_same_step(step(stock, batch), step(fast, batch))
    assert_ran_fast(fast)


def test_adapters_added_and_deleted_after_patching(batch: dict[str, torch.Tensor]) -> None:
    from peft import LoraConfig

    stock, fast = twins(support.add_lora(support.build_model()))
    results = []
    for model in (stock, fast):
        steps = [step(model, batch)]
        model.add_adapter("second", LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj", "down_proj"]))
        support.randomize_adapters(model, seed=5)
        model.set_adapter("second")
        steps.append(step(model, batch))
        model.delete_adapter("default")
        model.set_adapter("second")
        steps.append(step(model, batch))
        results.append(steps)
    assert not torch.isclose(results[0][0].loss, results[0][1].loss)
    for expected, got in zip(*results, strict=True):
        assert_same_step(expected, got)
    assert_ran_fast(fast, forwards=3)


def test_an_adapter_put_on_after_patching_is_seen(batch: dict[str, torch.Tensor]) -> None:
    """`patch`, then get_peft_model: as SFTTrainer's own peft_config does."""
    stock, fast = (support.add_lora(model) for model in twins(support.build_model()))
    assert_same_step(step(stock, batch), step(fast, batch))
    assert_ran_fast(fast)


def test_weights_replaced_after_patching_are_seen(batch: dict[str, torch.Tensor]) -> None:
    """Adapter and base weights exchanged, and all of them by `.to(dtype)` (stock's norms and loss stay float32)."""
    stock, fast = twins(support.add_lora(support.build_model()))
    step(fast, batch)
    for model in (stock, fast):
        projection = decoder_layers(model)[0].self_attn.q_proj
        projection.lora_A["default"].weight = torch.nn.Parameter(projection.lora_A["default"].weight.detach() * 3)
        projection.base_layer.weight = torch.nn.Parameter(
            projection.base_layer.weight.detach() * 2, requires_grad=False
        )
        model.double()
    assert_same_step(step(stock, batch), step(fast, batch))
    assert_ran_fast(fast, forwards=2)
