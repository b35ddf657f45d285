"""GGUF files: what is in them reads back, transformers answers from them, and a failure leaves the checkpoint whole."""

from __future__ import annotations

import errno
import importlib.util
import pathlib
import shutil
from typing import Any

import pytest
import torch

import fastft
from fastft import FastModel
from fastft.saving import gguf_file
from fastft.saving.gguf_model import frequency_divisors
from fastft.saving.vocabulary import read_vocabulary
from tests import support
from tests.saving.tokenizers import VOCABULARY, byte_level, sentencepiece_like

gguf = pytest.importorskip("gguf")

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def build(family: str = "llama", **overrides: Any) -> Any:
    settings = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2} | overrides
    return support.add_lora(support.build_model(family, **settings))


def field(reader: Any, name: str) -> Any:
    return reader.get_field(name).contents()


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"])
def test_each_type_reads_back_within_its_error(kind: str, tmp_path: pathlib.Path) -> None:
    """gguf's own reader; matrices in the type asked for, vectors in float32."""
    saved = FastModel.save_gguf(build(), byte_level(), tmp_path / "out", quantization=kind)
    reader = gguf.GGUFReader(saved.file)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert tensors["blk.1.ffn_down.weight"].tensor_type.name.lower() == kind
    assert tensors["output_norm.weight"].tensor_type.name == "F32"
    assert tensors["output.weight"].tensor_type.name.lower() == ("q8_0" if kind[:2] in ("q4", "q5") else kind)
    assert (saved.largest_error == 0) == (kind == "f32") or saved.largest_error < gguf_file.ALLOWED_ERRORS[kind]
    assert len(tensors) == 2 * 9 + 3
    names = {path.name for path in saved.file.parent.iterdir()}
    assert {"out-" + kind + ".gguf", "Modelfile", "model.safetensors", "config.json"} <= names
    assert not [name for name in names if name.endswith(".partial")]
    assert (tmp_path / "out" / "Modelfile").read_text() == f'FROM ./out-{kind}.gguf\nPARAMETER stop "</s>"\n'


@pytest.fixture(scope="module")
def wide() -> Any:
    """Rows of 256 and 512: super-blocks."""
    return build(hidden_size=256, intermediate_size=512, num_attention_heads=8, num_key_value_heads=2, head_dim=32)


@pytest.mark.parametrize(("preset", "name"), [("quantized", "q4_k_m"), ("q2_k_l", "q2_k_l"), ("q6_k", "q6_k")])
def test_a_mixture_reads_back_and_transformers_answers_from_it(
    preset: str, name: str, wide: Any, tmp_path: pathlib.Path, batch: Any
) -> None:
    """As `mixture_types` says (test_mixtures.py), file type and all; the answers are near the checkpoint's."""
    from transformers import AutoModelForCausalLM

    saved = FastModel.save_gguf(wide, byte_level(), tmp_path / "out", quantization=preset)
    assert saved.file.name == f"out-{name}.gguf"
    reader = gguf.GGUFReader(saved.file)
    assert {tensor.name: tensor.tensor_type.name.lower() for tensor in reader.tensors} == saved.types
    assert field(reader, "general.file_type") == gguf.LlamaFileType[f"MOSTLY_{name.upper().removesuffix('_L')}"]
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file=saved.file.name).eval()
    with torch.no_grad():
        logits = expected(batch["input_ids"]).logits
        difference = (found(batch["input_ids"]).logits - logits).norm() / logits.norm()
    assert difference < {"q6_k": 0.15, "q4_k_m": 0.6, "q2_k_l": 1.0}[name]  # rows out of order: 1.4


@pytest.mark.parametrize("family", support.FAMILIES)
def test_transformers_answers_from_the_file_as_from_the_checkpoint(
    family: str, tmp_path: pathlib.Path, batch: Any
) -> None:
    """float32, so that a row out of order or a wrong number in the metadata shows; tied and untied."""
    from transformers import AutoModelForCausalLM

    # transformers' reader takes Qwen3's head width from the configuration class (128), not from the file.
    width = {"head_dim": 128} if family == "qwen3" else {}
    model = build(family, tie_word_embeddings=family in ("qwen2", "llama"), **width)
    saved = FastModel.save_gguf(model, byte_level(), tmp_path / "out", quantization="f32")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file=saved.file.name).eval()
    with torch.no_grad():
        logits = expected(batch["input_ids"]).logits
        torch.testing.assert_close(found(batch["input_ids"]).logits, logits, rtol=1e-4, atol=1e-4)


def test_the_metadata_says_what_the_model_is(tmp_path: pathlib.Path) -> None:
    """Llama-3-style: its split rule, its RoPE scaling as a tensor, the chat template, a second end token."""
    model = build(rope_parameters=LLAMA3, max_position_embeddings=512)
    model.get_base_model().generation_config.eos_token_id = [1, 5]
    tokenizer = byte_level("llama-bpe")
    saved = FastModel.save_gguf(model, tokenizer, tmp_path / "out", quantization="f16")
    reader = gguf.GGUFReader(saved.file)
    expected = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 128,
        "llama.context_length": 512,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": 16,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": tokenizer.chat_template,
    }
    assert {name: field(reader, name) for name in expected} == expected
    tokens = field(reader, "tokenizer.ggml.tokens")
    assert len(tokens) == VOCABULARY
    assert tokens[: len(tokenizer)] == tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    kinds = field(reader, "tokenizer.ggml.token_type")
    assert (kinds[0], kinds[10], kinds[-1]) == (3, 1, 5)  # control, normal, unused


def test_llama3_divisors_are_transformers_own_frequencies() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = support.tiny_config(rope_parameters=LLAMA3)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
    divisors = frequency_divisors(config)
    assert divisors is not None
    assert len(set(divisors.tolist())) > 2  # all three regions
    torch.testing.assert_close(plain / torch.from_numpy(divisors), scaled, rtol=1e-5, atol=0)


@pytest.mark.parametrize("split", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_the_split_rule_is_named_by_what_it_does(split: Any) -> None:
    assert read_vocabulary(byte_level(split), VOCABULARY).pre == split


def test_sentencepiece_merges_become_scores_in_their_order() -> None:
    vocabulary = read_vocabulary(sentencepiece_like(), VOCABULARY)
    score = dict(zip(vocabulary.tokens, vocabulary.scores, strict=True))
    assert vocabulary.model == "llama"
    assert vocabulary.add_space_prefix
    assert score["th"] > score["▁th"] > score["the"] > score["▁the"] > score["in"] > score["q"]
    kinds = dict(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
    assert (kinds["<unk>"], kinds["<s>"], kinds["<0x41>"], kinds["th"]) == (2, 3, 6, 1)


def test_what_cannot_be_written_is_refused_before_merging(tmp_path: pathlib.Path, tokenizer: Any) -> None:
    cases: list[tuple[Any, Any, dict[str, Any], str]] = [
        (build(), byte_level(), {"quantization": "q9_9"}, "not known here"),
        (build(), byte_level("unknown"), {}, "no known name"),
        (build(), tokenizer, {}, "no known name"),  # characters, no bytes
        (build(vocab_size=200), byte_level(), {}, "resize_token_embeddings"),
        (build(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), byte_level(), {}, "RoPE"),
        (build("mistral", sliding_window=64), byte_level(), {}, "max_position_embeddings = 64"),
        (build(), byte_level(), {"quantization": "q4_k_m", "size": "4bpw"}, "goes with quantization='dynamic'"),
        (build(), byte_level(), {"quantization": "dynamic", "size": "4 bits"}, "is no size"),
        (build(), byte_level(), {"quantization": "dynamic", "size": "4.4bpw"}, "cannot be had"),
        (build(), byte_level(), {"quantization": "dynamic", "size": "20kB"}, "cannot be had"),
        (build(), byte_level(), {"calibration": "one text"}, "a list of texts"),
        (build(), byte_level(), {"calibration": ["a", ""]}, "two tokens"),
    ]
    for model, vocabulary, options, message in cases:
        with pytest.raises(ValueError, match=message):
            FastModel.save_gguf(model, vocabulary, tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_c50_a_missing_gguf_package_is_said_before_merging(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(gguf_file, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match="nothing was merged yet"):
        FastModel.save_gguf(build(), byte_level(), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_c50_a_writer_that_fails_leaves_the_checkpoint_whole(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    from transformers import AutoModelForCausalLM

    stock, calls = gguf.GGUFWriter.write_tensor_data, []

    def fail(self: Any, *args: Any, **options: Any) -> None:
        calls.append(1)
        if len(calls) == 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        stock(self, *args, **options)

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", fail)
    with pytest.raises(OSError, match="The merged checkpoint beside it is whole"):
        FastModel.save_gguf(build(), byte_level(), tmp_path / "out")
    assert not [path for path in (tmp_path / "out").iterdir() if "gguf" in path.name]
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_too_little_space_for_both_files_is_said_before_merging(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    free = 700_000 + 64 * 2**20  # the checkpoint takes 460 kB in float32
    usage = type(shutil.disk_usage(tmp_path))(free, 0, free)
    monkeypatch.setattr(gguf_file.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OSError, match=r"for the GGUF.*Nothing was merged") as caught:
        FastModel.save_gguf(build(), byte_level(), tmp_path / "new" / "out", quantization="f32")
    assert caught.value.errno == errno.ENOSPC
    assert not list(tmp_path.iterdir())
    FastModel.save_gguf(build(), byte_level(), tmp_path / "new" / "out", quantization="q8_0")


def test_a_tensor_that_was_written_wrongly_is_found(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    stock = gguf.quantize
    monkeypatch.setattr(gguf, "quantize", lambda data, kind: stock(data * 1.05 if data.ndim == 2 else data, kind))
    with pytest.raises(gguf_file.SaveCheckError, match="read back"):
        FastModel.save_gguf(build(), byte_level(), tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.gguf"))


def test_four_bit_training_to_gguf_by_the_method(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "base"
    base = support.load_4bit(support.build_model(vocab_size=VOCABULARY), folder)
    model = FastModel.get_peft_model(fastft.patch(base), r=4)
    support.randomize_adapters(model)
    saved = model.save_pretrained_gguf(tmp_path / "out", byte_level(), quantization="q8_0")
    assert saved.merged.difference < 2e-6
    assert saved.largest_error < 0.02


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")
@pytest.mark.parametrize("split", ["gpt-2", "llama-bpe"])
def test_llama_cpp_says_the_same(split: Any, tmp_path: pathlib.Path) -> None:
    """Tokens and greedy continuation; with Llama 3's split rule and RoPE scaling, too."""
    from llama_cpp import Llama
    from transformers import AutoModelForCausalLM

    tokenizer = byte_level(split)
    model = build(rope_parameters=LLAMA3) if split == "llama-bpe" else build()
    saved = FastModel.save_gguf(model, tokenizer, tmp_path / "out", quantization="f16")
    ids = tokenizer("the cat in the hat 123")["input_ids"]
    engine = Llama(str(saved.file), n_ctx=64, verbose=False, n_threads=1)
    assert engine.tokenize(b"the cat in the hat 123", add_bos=False) == ids
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "out").generate(
        torch.tensor([ids]), max_new_tokens=8, do_sample=False
    )
    found = [token for token, _ in zip(engine.generate(ids, temp=0), range(8), strict=False)]
    assert found == expected[0, len(ids) :].tolist()
