"""What get_peft_model refuses, keeps and leaves alone; on plain PEFT models, without planning them."""

from __future__ import annotations

import logging
import pathlib
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from fastft.loading.adapter import check_names, keep_existing, require_trainable, seeded
from tests import support


def lora(**settings: Any) -> LoraConfig:
    return LoraConfig(**({"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"} | settings))


def test_names_that_exist_pass(tiny_llama: Any) -> None:
    check_names(tiny_llama, lora(target_modules=["q_proj", "embed_tokens", "lm_head", "layers.0.mlp.down_proj"]))
    check_names(tiny_llama, lora(target_modules="all-linear"))
    check_names(tiny_llama, lora(target_modules=r".*\.layers\.1\..*_proj", layers_to_transform=None))
    check_names(tiny_llama, lora(modules_to_save=["norm", "embed_tokens"], layers_to_transform=[0, 1]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_modules": ["no_such"]}, "target_modules: 'no_such' matches no module of LlamaForCausalLM"),
        ({"target_modules": ["q_proj", "o_prog", "k_prj"]}, "target_modules: 'k_prj', 'o_prog' matches no module"),
        ({"target_modules": ["proj"]}, "target_modules: 'proj' matches no module"),
        ({"target_modules": r"model\.layer\..*"}, "matches no module"),
        ({"target_modules": []}, "target_modules is empty"),
        ({"modules_to_save": ["nrom"]}, "modules_to_save: 'nrom' matches no module"),
        ({"layers_to_transform": [0, 2]}, r"\[2\] outside of the model's 2 layers \(0 to 1\)"),
        ({"layers_to_transform": -1}, r"\[-1\] outside"),
    ],
)
def test_a_name_that_matches_nothing_is_refused(tiny_llama: Any, settings: dict[str, Any], message: str) -> None:
    """C11: PEFT is content when one of several names matches."""
    with pytest.raises(ValueError, match=message):
        check_names(tiny_llama, lora(**settings))


def test_what_could_be_targeted_is_listed(tiny_llama: Any) -> None:
    with pytest.raises(ValueError, match=r"embed_tokens \(1\), q_proj \(2\), .*down_proj \(2\), lm_head \(1\)"):
        check_names(tiny_llama, lora(target_modules=["no_such"]))


def test_a_seed_decides_the_initialization_and_leaves_the_generator_as_it_was() -> None:
    def initial(random_state: int | None) -> tuple[torch.Tensor, bool]:
        model = support.build_model("llama")
        before = torch.get_rng_state()
        with seeded(model, random_state):
            wrapped = get_peft_model(model, lora())
        same_state = torch.equal(before, torch.get_rng_state())
        return wrapped.get_parameter(FIRST_A).detach().clone(), same_state

    first, first_state_kept = initial(3407)
    torch.randn(7)
    again, _ = initial(3407)
    other, _ = initial(1)
    unseeded, unseeded_state_kept = initial(None)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, unseeded)
    assert first_state_kept
    assert not unseeded_state_kept


FIRST_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"


def reloaded(folder: pathlib.Path, **settings: Any) -> Any:
    """A model whose adapter was saved with a marker value and loaded again."""
    model = get_peft_model(support.build_model("llama"), lora(**settings))
    with torch.no_grad():
        model.get_parameter(FIRST_A).fill_(0.125)
    model.save_pretrained(folder)
    return PeftModel.from_pretrained(support.build_model("llama"), folder, is_trainable=True)


def test_the_same_request_keeps_the_loaded_weights(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """C44."""
    model = reloaded(tmp_path)
    with caplog.at_level(logging.INFO, logger="fastft"):
        keep_existing(model, lora(target_modules=["v_proj", "q_proj"]), None)
    assert (model.get_parameter(FIRST_A) == 0.125).all()
    assert "its weights are kept" in caplog.text


def test_another_request_names_the_fields_that_differ(tmp_path: pathlib.Path) -> None:
    """C44."""
    model = reloaded(tmp_path)
    with pytest.raises(ValueError, match="r: has 4, asked for 8") as caught:
        keep_existing(model, lora(r=8, target_modules=["q_proj"]), None)
    message = str(caught.value)
    assert r"target_modules: has ['q_proj', 'v_proj'], asked for ['q_proj']" in message
    assert "lora_alpha" not in message
    assert "model.add_adapter" in message
    assert "model.unload()" in message


def test_an_adapter_that_is_not_there_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"adapters \['default'\], and none called 'other'"):
        keep_existing(reloaded(tmp_path), lora(), "other")


def test_all_linear_is_recognized_though_peft_stored_the_names(tmp_path: pathlib.Path) -> None:
    model = reloaded(tmp_path / "all", target_modules="all-linear")
    keep_existing(model, lora(target_modules="all-linear"), None)
    with pytest.raises(ValueError, match="target_modules: has"):
        keep_existing(reloaded(tmp_path / "two"), lora(target_modules="all-linear"), None)


def test_nothing_trainable_is_refused(tmp_path: pathlib.Path) -> None:
    reloaded(tmp_path)
    with pytest.raises(ValueError, match=r"No parameter of this model is trainable.*is_trainable=True"):
        require_trainable(PeftModel.from_pretrained(support.build_model("llama"), tmp_path))
