"""train(), parameters(), zero_grad() and num_parameters() of a planned model: the inherited answers, in a flat walk."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
from peft import PeftModel
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaForCausalLM

import fastft
from fastft.patching.plan import inner_model
from tests import support
from tests.patching.test_inert import reinstalled

__all__ = ["reinstalled"]  # a fixture

COUNTS = [{"only_trainable": trainable, "exclude_embeddings": exclude} for trainable in (0, 1) for exclude in (0, 1)]


def dense(_: Any) -> Any:
    return support.build_model()


def lora(_: Any) -> Any:
    return support.add_lora(support.build_model())


def tied(_: Any) -> Any:
    return support.build_model(tie_word_embeddings=True)


def nf4(path: Any) -> Any:
    return support.add_lora(support.load_4bit(support.build_model(), path))


def adapted_embeddings(_: Any) -> Any:
    return support.add_lora(support.build_model(), target_modules=["embed_tokens", "q_proj"])


def saved_head(_: Any) -> Any:
    return support.add_lora(support.build_model(), modules_to_save=["lm_head"])


def dora(_: Any) -> Any:
    return support.add_lora(support.build_model(), use_dora=True)


def shared_layer(_: Any) -> Any:
    """One module in two places, and a place without a module."""
    model = support.build_model()
    model.model.layers[1].mlp = model.model.layers[0].mlp
    model.model.layers[0].register_module("nothing", None)
    return model


def prompt_tuning(_: Any) -> Any:
    from peft import PromptTuningConfig, get_peft_model

    return get_peft_model(support.build_model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))


def classifier(_: Any) -> Any:
    """What a RewardTrainer trains: its backbone is planned, its head is not ours."""
    with support.seeded(0):
        return AutoModelForSequenceClassification.from_config(support.tiny_config("llama", num_labels=1))


EVERY = [classifier, dense, lora, tied, nf4, adapted_embeddings, saved_head, dora, shared_layer, prompt_tuning]


@pytest.mark.parametrize("build", EVERY)
def test_parameters_are_the_same_in_the_same_order(build: Callable[..., Any], tmp_path: Any) -> None:
    model = build(tmp_path)
    model = fastft.patch(model)
    for root in (model, inner_model(model)):
        for recurse in (True, False):
            expected, found = list(nn.Module.parameters(root, recurse)), list(root.parameters(recurse))
            assert [id(p) for p in found] == [id(p) for p in expected]
        assert len(list(root.parameters())) > 10


@pytest.mark.parametrize("options", COUNTS, ids=str)
@pytest.mark.parametrize("build", EVERY)
def test_the_count_of_parameters_is_transformers(
    build: Callable[..., Any], options: dict[str, bool], tmp_path: Any
) -> None:
    model = inner_model(fastft.patch(build(tmp_path)))
    count = PreTrainedModel.num_parameters(model, **options)
    assert model.num_parameters(**options) == count
    assert type(model.num_parameters(**options)) is int


@pytest.mark.parametrize("build", EVERY)
def test_training_and_evaluation_reach_every_module(build: Callable[..., Any], tmp_path: Any) -> None:
    model = fastft.patch(build(tmp_path))
    for mode in (False, True, True):
        assert model.train(mode) is model
        assert {m.training for m in model.modules()} == {mode}
        assert inner_model(model).eval() is inner_model(model)
        assert {m.training for m in inner_model(model).modules()} == {False}


def test_what_is_no_truth_value_is_refused_as_by_torch() -> None:
    with pytest.raises(ValueError, match="expected to be boolean"):
        fastft.patch(support.build_model()).train("yes")


def test_zero_grad_reaches_every_parameter() -> None:
    model = fastft.patch(support.add_lora(support.build_model()))
    trainable = [p for p in model.parameters() if p.requires_grad]
    for to_none in (True, False):
        model(**support.random_batch()).loss.backward()
        assert all(p.grad is not None for p in trainable)
        model.zero_grad(set_to_none=to_none)
        assert all(p.grad is None if to_none else not p.grad.any() for p in trainable)


@pytest.mark.parametrize("build", [lora, dense, classifier, prompt_tuning])
def test_nothing_is_answered_by_recursion(
    build: Callable[..., Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a trainer calls at every step never enters the generators of nn.Module."""
    model = fastft.patch(build(tmp_path))

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("recursed")

    monkeypatch.setattr(nn.Module, "_named_members", refuse)
    monkeypatch.setattr(type(inner_model(model).model.layers[0]), "children", refuse)
    model.train()
    model.zero_grad()
    assert list(model.parameters())
    assert model.num_parameters(exclude_embeddings=True) > 0  # Trainer.floating_point_ops


def test_the_walk_is_lazy() -> None:
    """transformers asks `next(model.parameters())` for a dtype or a device."""
    model = fastft.patch(support.build_model())
    walk = model.parameters()
    assert next(walk) is model.model.embed_tokens.weight
    model.model.layers[1].mlp = nn.Linear(3, 3)
    assert any(p.shape == (3, 3) for p in walk)


def test_adapters_that_come_and_go_are_seen() -> None:
    from peft import LoraConfig

    model = fastft.patch(support.add_lora(support.build_model()))
    before = len(list(model.parameters()))
    model.eval()
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
    assert len(list(model.parameters())) == before + 2 * 2
    model.train()
    assert all(m.training for m in model.modules())
    model.delete_adapter("second")
    assert len(list(model.parameters())) == before


class OwnWalk(nn.Module):
    """Hides one of its two children, and counts how often it is told its mode."""

    def __init__(self) -> None:
        super().__init__()
        self.shown, self.hidden, self.told = nn.Linear(2, 2), nn.Linear(2, 2), 0

    def named_modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Any:
        lead = prefix + "." if prefix else ""
        yield from [(prefix, self), (lead + "shown", self.shown)]

    def train(self, mode: bool = True) -> Any:
        self.told += 1
        return super().train(mode)


def test_a_planned_base_model_walks_too() -> None:
    """Alone, and inside a planned causal LM, whose class then has a walk of its own inside it."""
    base, model = fastft.patch(support.build_model().model), fastft.patch(support.build_model())
    for root in (base, model):
        assert [id(p) for p in root.parameters()] == [id(p) for p in nn.Module.parameters(root)]
        assert root.num_parameters() == PreTrainedModel.num_parameters(root)
        root.eval()
        assert {m.training for m in root.modules()} == {False}


def test_a_module_with_ways_of_its_own_is_asked_itself() -> None:
    model = fastft.patch(support.build_model())
    model.model.layers[1].own = own = OwnWalk()
    assert [id(p) for p in model.parameters()] == [id(p) for p in nn.Module.parameters(model)]
    assert not any(p is own.hidden.weight for p in model.parameters())
    assert model.num_parameters() == PreTrainedModel.num_parameters(model)
    model.eval()
    model.train()
    assert own.told == 2
    assert own.hidden.training


def test_a_method_put_on_an_instance_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    model, told = fastft.patch(support.build_model()), []
    monkeypatch.setattr(model.model.layers[0].mlp, "train", lambda mode=True: told.append(mode), raising=False)
    model.eval()
    assert told == [False]


def test_hub_kernels_are_exchanged_by_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """With use_kernels on, a change of mode is transformers' own business."""
    model, told = fastft.patch(support.build_model()), []
    model._use_kernels = True
    monkeypatch.setattr(PreTrainedModel, "set_use_kernels", lambda self, on, *_, **__: told.append(type(self).__name__))
    model.eval()
    assert "LlamaForCausalLM" in told


def test_a_train_that_another_library_puts_on_transformers_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model, told = support.build_model(), fastft.patch(support.build_model()), []

    def train(self: Any, mode: bool = True) -> Any:
        told.append(type(self).__name__)
        return nn.Module.train(self, mode)

    monkeypatch.setattr(PreTrainedModel, "train", train)
    model.eval()
    assert told == ["LlamaForCausalLM", "LlamaModel"]
    assert {m.training for m in model.modules()} == {False}
    plain.eval()
    assert told == ["LlamaForCausalLM", "LlamaModel"] * 2


def test_a_plain_model_is_answered_by_what_it_inherits(monkeypatch: pytest.MonkeyPatch) -> None:
    """C35: a model without a plan, beside one that has one."""
    plain, planned = (support.add_lora(support.build_model()) for _ in range(2))
    fastft.patch(planned)
    asked: list[str] = []
    original = nn.Module._named_members

    def named_members(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(type(self).__name__)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "_named_members", named_members)
    list(plain.parameters())
    plain.get_base_model().num_parameters()
    assert asked == ["PeftModelForCausalLM", "LlamaForCausalLM"]
    told: list[str] = []
    monkeypatch.setattr(
        type(plain.get_base_model().model), "children", lambda self: told.append("recursed") or iter(())
    )
    plain.train()
    assert told == ["recursed"]


def test_unpatch_leaves_the_classes_as_they_were(reinstalled: None) -> None:
    """C39: what was inherited is inherited again."""
    model = fastft.patch(support.add_lora(support.build_model()))
    listed = "\n".join(fastft.patched())
    added = [(LlamaForCausalLM, name) for name in ("train", "parameters", "num_parameters")]
    for owner, name in [*added, (PeftModel, "parameters")]:
        assert name in owner.__dict__
        assert f"{owner.__qualname__}.{name}" in listed
        assert owner.__dict__[name].__doc__ == getattr(super(owner, owner), name).__doc__
    fastft.unpatch()
    for owner, name in [*added, (PeftModel, "parameters")]:
        assert name not in owner.__dict__
    assert model.train() is model
    assert len(list(model.parameters())) > 10


def test_a_class_with_a_method_of_its_own_keeps_it(reinstalled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    fastft.unpatch()

    def parameters(self: Any, recurse: bool = True) -> Any:
        return nn.Module.parameters(self, recurse)

    monkeypatch.setattr(LlamaForCausalLM, "parameters", parameters, raising=False)
    model = fastft.patch(support.build_model())
    assert LlamaForCausalLM.__dict__["parameters"] is parameters
    assert any("LlamaForCausalLM.parameters" in note for note in fastft.report(model).notes)


def test_peft_that_comes_after_patching_is_met_at_the_next_forward(
    reinstalled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fastft.unpatch()
    model = support.build_model()
    with monkeypatch.context() as without_peft:
        without_peft.delitem(sys.modules, "peft")
        fastft.patch(model)
        assert "parameters" not in PeftModel.__dict__
    model(**support.random_batch())
    assert "parameters" in PeftModel.__dict__


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_walks_over_itself(how: str) -> None:
    model = fastft.patch(support.add_lora(support.build_model()))
    copied = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    mine = {id(p) for p in model.parameters()}
    assert not any(id(p) in mine for p in copied.parameters())
    copied.eval()
    assert model.training
