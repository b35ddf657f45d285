"""Adapters as GGUF: the file makes the update that training made, and what it cannot hold is refused."""

from __future__ import annotations

import importlib.util
import pathlib
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from fastft import FastModel
from tests import support
from tests.saving.tokenizers import VOCABULARY, byte_level

gguf = pytest.importorskip("gguf")


def read(file: pathlib.Path) -> tuple[dict[str, Tensor], Any]:
    """float32 tensors by name, and the reader."""
    reader = gguf.GGUFReader(file)
    tensors = {
        tensor.name: torch.from_numpy(numpy.array(gguf.dequantize(tensor.data, tensor.tensor_type)))
        for tensor in reader.tensors
    }
    return tensors, reader


def halves(rows: Tensor, heads: int) -> Tensor:
    """Rows of q or k from llama.cpp's order (neighbours rotate together) to Hugging Face's (halves do)."""
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


OPTIONS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 3}},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_file_makes_the_update_that_training_made(option: str, family: str, tmp_path: pathlib.Path) -> None:
    """alpha / r · B·A, as llama.cpp computes it, is PEFT's own delta weight; only Llama's q and k are reordered."""
    model = support.add_lora(support.build_model(family), **OPTIONS[option])
    saved = FastModel.save_gguf_adapter(model, tmp_path / "adapter")
    tensors, reader = read(saved.file)
    assert saved.file == tmp_path / "adapter" / "adapter-lora.gguf"
    assert len(tensors) == 2 * saved.matrices == 2 * 2 * 7
    for layer, block in enumerate(model.get_base_model().model.layers):
        for name, module in {
            "attn_q": block.self_attn.q_proj,
            "attn_k": block.self_attn.k_proj,
            "attn_v": block.self_attn.v_proj,
            "ffn_down": block.mlp.down_proj,
        }.items():
            a, b = (tensors[f"blk.{layer}.{name}.weight.lora_{part}"] for part in "ab")
            if family == "llama" and name in ("attn_q", "attn_k"):
                b = halves(b, 4 if name == "attn_q" else 2)
            found = saved.alpha / len(a) * (b @ a)
            torch.testing.assert_close(found, module.get_delta_weight("default"), rtol=1e-5, atol=1e-7)
    metadata = {
        "general.type": "adapter",
        "general.architecture": family,
        "adapter.type": "lora",
        "adapter.lora.alpha": 8.0,
    }
    assert {key: reader.get_field(key).contents() for key in metadata} == metadata


def test_a_four_bit_model_and_half_precision(tmp_path: pathlib.Path) -> None:
    base = support.load_4bit(support.build_model(), tmp_path / "base")
    model = FastModel.get_peft_model(base, r=4)
    support.randomize_adapters(model)
    saved = model.save_pretrained_gguf_adapter(tmp_path / "adapter", dtype="f16")
    assert 0 < saved.largest_error < 2e-3
    tensors, reader = read(saved.file)
    assert {tensor.tensor_type.name for tensor in reader.tensors} == {"F16"}
    assert tensors["blk.0.attn_v.weight.lora_b"].shape == (32, 4)


def test_a_file_is_checked_in_float32_under_autocast(tmp_path: pathlib.Path) -> None:
    """Scales go into B (3/8 here), so in bfloat16 the file's B and the live one would be rounded apart."""
    model = support.add_lora(support.build_model(), **OPTIONS["patterns"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        saved = FastModel.save_gguf_adapter(model, tmp_path / "adapter")
    assert saved.largest_error < 1e-6


def test_one_of_several_adapters(tmp_path: pathlib.Path) -> None:
    from peft import LoraConfig

    model = support.add_lora(support.build_model())
    model.add_adapter("other", LoraConfig(r=2, target_modules=["v_proj"], task_type="CAUSAL_LM"))
    support.randomize_adapters(model)
    assert FastModel.save_gguf_adapter(model, tmp_path / "a", adapter="other").matrices == 2
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(ValueError, match="say which"):
        FastModel.save_gguf_adapter(model, tmp_path / "b")
    with pytest.raises(ValueError, match="has default, other"):
        FastModel.save_gguf_adapter(model, tmp_path / "b", adapter="third")
    assert not (tmp_path / "b").exists()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, "use_dora"),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "lora_bias": ({"lora_bias": True, "target_modules": ["q_proj"]}, "lora_bias"),
    "bias": ({"bias": "all"}, "bias='all'"),
    "embedding": ({"target_modules": ["q_proj", "embed_tokens"]}, "Embedding cannot be"),
    "tokens": ({"trainable_token_indices": [3]}, "trainable_token_indices"),
}


@pytest.mark.parametrize("option", REFUSED)
def test_what_the_format_has_no_place_for_is_refused(option: str, tmp_path: pathlib.Path) -> None:
    settings, message = REFUSED[option]
    family = "qwen2" if option in ("lora_bias", "bias") else "llama"
    model = support.add_lora(support.build_model(family), **settings)
    with pytest.raises(ValueError, match=f"{message}.*Save it merged"):
        FastModel.save_gguf_adapter(model, tmp_path / "adapter")
    assert not list(tmp_path.iterdir())


def test_a_head_can_be_adapted_where_it_is_a_tensor_of_its_own(tmp_path: pathlib.Path) -> None:
    targets = ["q_proj", "lm_head"]
    model = support.add_lora(support.build_model(), target_modules=targets)
    tensors, _ = read(FastModel.save_gguf_adapter(model, tmp_path / "adapter").file)
    assert tensors["output.weight.lora_b"].shape == (support.VOCABULARY, 4)
    tied = support.add_lora(support.build_model(tie_word_embeddings=True), target_modules=targets)
    with pytest.raises(ValueError, match="tied"):
        FastModel.save_gguf_adapter(tied, tmp_path / "tied")


def test_untrained_plain_and_unknown_are_refused(tmp_path: pathlib.Path) -> None:
    from peft import LoraConfig, get_peft_model

    with pytest.raises(TypeError, match="no PeftModel"):
        FastModel.save_gguf_adapter(support.build_model(), tmp_path / "adapter")
    fresh = get_peft_model(support.build_model(), LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="changes nothing"):
        FastModel.save_gguf_adapter(fresh, tmp_path / "adapter")
    with pytest.raises(ValueError, match="f32, f16"):
        FastModel.save_gguf_adapter(fresh, tmp_path / "adapter", dtype="q8_0")
    assert not list(tmp_path.iterdir())


def test_a_number_that_float16_cannot_hold_is_found_and_nothing_is_left(tmp_path: pathlib.Path) -> None:
    from fastft.saving.check import SaveCheckError

    model = support.add_lora(support.build_model())
    with torch.no_grad():
        model.get_base_model().model.layers[0].mlp.up_proj.lora_B["default"].weight.mul_(1e6)
    with pytest.raises(SaveCheckError, match="ffn_up"):
        FastModel.save_gguf_adapter(model, tmp_path / "adapter", dtype="f16")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")
def test_llama_cpp_answers_with_the_adapter_as_peft_does(tmp_path: pathlib.Path) -> None:
    from llama_cpp import Llama

    tokenizer = byte_level()
    base = support.build_model(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    file = FastModel.save_gguf(base, tokenizer, tmp_path / "base", quantization="f32").file
    model = support.add_lora(base, use_rslora=True, rank_pattern={"q_proj": 2}).eval()
    adapter = FastModel.save_gguf_adapter(model, tmp_path / "adapter").file
    ids = tokenizer("the cat in the hat 123")["input_ids"]
    engine = Llama(str(file), lora_path=str(adapter), n_ctx=64, verbose=False, n_threads=1, logits_all=True)
    engine.eval(ids)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    found = torch.from_numpy(numpy.array(engine.scores[: len(ids)]))
    assert float((found - expected).norm() / expected.norm()) < 2e-3  # its cache is float16
