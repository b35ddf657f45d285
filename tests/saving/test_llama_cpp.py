"""llama.cpp itself, as PyPI's xllamacpp carries it ready-made, answers from our files as the merged model does."""

from __future__ import annotations

import copy
import importlib.util
import pathlib
from typing import Any

import pytest
import torch

from fastft import FastModel
from tests import support
from tests.saving.test_gguf import LLAMA3
from tests.saving.tokenizers import VOCABULARY, byte_level

pytest.importorskip("gguf")
pytestmark = pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed")

PROMPT = "the cat in the hat 123"
REST = " sat on a mug, purred, left by 4"  # ASCII: llama.cpp reports no token that ends inside of a character
LENGTH = 16
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
FAMILIES = {
    "gpt-2": {},
    "llama-bpe": {"rope_parameters": LLAMA3, "max_position_embeddings": 512},
    "qwen2": {"head_dim": 32},
}


def learned(split: str) -> tuple[Any, Any]:
    """A model that was taught what comes after PROMPT by LoRA, so that its first choice is far ahead, and tokenizer."""
    tokenizer = byte_level(split)
    family = "qwen2" if split == "qwen2" else "llama"
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    base = support.build_model(family, vocab_size=VOCABULARY, **SIZES, **FAMILIES[split], **ends)
    model = support.add_lora(base)
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"] + tokenizer(REST)["input_ids"]])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(25):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), tokenizer


def continued(model: Any, tokenizer: Any) -> list[int]:
    """Greedily, by transformers."""
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    found = model.generate(input_ids=ids, max_new_tokens=LENGTH, do_sample=False, eos_token_id=None)
    return found[0, ids.shape[1] :].tolist()


def continued_by_llama_cpp(file: pathlib.Path, tokenizer: Any, adapter: pathlib.Path | None = None) -> list[int]:
    """Greedily, from the prompt's text, which must be the same tokens there."""
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path, settings.n_ctx, settings.warmup, settings.verbosity = str(file), 64, False, 0
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    if adapter is not None:
        settings.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(str(adapter), 1.0)]
    request = {"prompt": PROMPT, "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    answer = xllamacpp.Server(settings).handle_completions(request)
    assert answer["usage"]["prompt_tokens"] == len(tokenizer(PROMPT)["input_ids"])
    return [token["id"] for token in answer["choices"][0]["logprobs"]["content"]]


@pytest.fixture(scope="module", params=list(FAMILIES))
def model_and_tokenizer(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    return learned(request.param)


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_k_m"])
def test_llama_cpp_continues_as_the_merged_model_does(
    kind: str, model_and_tokenizer: Any, tmp_path: pathlib.Path
) -> None:
    """Tokens, greedy text; Llama with and without Llama 3's RoPE scaling, Qwen2 with its biases."""
    from transformers import AutoModelForCausalLM

    model, tokenizer = model_and_tokenizer
    saved = FastModel.save_gguf(model, tokenizer, tmp_path / "out", quantization=kind)
    expected = continued(AutoModelForCausalLM.from_pretrained(saved.merged.folder), tokenizer)
    assert len(set(expected)) > LENGTH // 2
    assert continued_by_llama_cpp(saved.file, tokenizer) == expected


def test_llama_cpp_continues_with_the_adapter_as_peft_does(model_and_tokenizer: Any, tmp_path: pathlib.Path) -> None:
    """The adapter's file on the base's; without the adapter the base says something else."""
    model, tokenizer = model_and_tokenizer
    adapter = FastModel.save_gguf_adapter(model, tmp_path / "adapter").file
    plain = copy.deepcopy(model).unload()
    base = FastModel.save_gguf(plain, tokenizer, tmp_path / "base", quantization="f16").file
    assert continued_by_llama_cpp(base, tokenizer, adapter) == continued(model, tokenizer)
    assert continued_by_llama_cpp(base, tokenizer) != continued(model, tokenizer)
