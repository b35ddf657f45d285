"""Model shapes: names, checkpoints, and the sums that costs are made of."""

from __future__ import annotations

import json
import pathlib

import pytest

from fastft.bench.registry import MODELS, find_model, shape_of_folder
from tests import support


@pytest.mark.parametrize(
    ("typed", "name"), [("llama-8b", "Llama-3.1-8B"), ("QWEN3-0.6b", "Qwen3-0.6B"), ("smollm2", "SmolLM2-135M")]
)
def test_a_model_is_found_by_any_of_its_names(typed: str, name: str) -> None:
    assert find_model(typed) is MODELS[name]


def test_an_unknown_model_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"llama-9b.*Llama-3.1-8B"):
        find_model("llama-9b")


def test_sums_are_those_of_a_real_model(tmp_path: pathlib.Path) -> None:
    """Weights of a layer's projections, and LoRA's parameters: counted by transformers and PEFT."""
    model = support.build_model("llama")
    model.save_pretrained(tmp_path / "checkpoint")
    shape = shape_of_folder(tmp_path / "checkpoint")
    projections = [
        parameter.numel()
        for name, parameter in model.named_parameters()
        if "layers.0." in name and name.endswith("proj.weight")
    ]
    assert len(projections) == 7
    assert shape.layer_weights == sum(projections)
    adapters = support.add_lora(model, r=4)
    lora = [parameter.numel() for name, parameter in adapters.named_parameters() if "lora_" in name]
    assert 4 * shape.adapter_widths * shape.layers == sum(lora)


def test_published_parameter_counts() -> None:
    """Totals as their makers state them, in billions: a wrong size would show."""
    stated = {
        "Llama-3.2-1B": 1.24,
        "Llama-3.2-3B": 3.21,
        "Llama-3.1-8B": 8.03,
        "Llama-3.1-70B": 70.55,
        "Qwen2.5-0.5B": 0.49,
        "Qwen2.5-7B": 7.62,
        "Qwen3-0.6B": 0.60,
        "Qwen3-8B": 8.19,
        "Mistral-7B": 7.25,
        "SmolLM2-135M": 0.135,
    }
    for name, billions in stated.items():
        shape = MODELS[name]
        embeddings = shape.vocabulary * shape.hidden * (1 if shape.tied else 2)
        total = shape.layers * shape.layer_weights + embeddings
        assert total / 1e9 == pytest.approx(billions, rel=0.01), name


def test_a_folder_without_a_decoder_model_is_an_error(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        shape_of_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", "hidden_size": 8}))
    with pytest.raises(ValueError, match="num_attention_heads"):
        shape_of_folder(tmp_path)
