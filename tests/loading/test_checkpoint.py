"""Configuration, quantization and tokenizer of a checkpoint: read, not rewritten."""

from __future__ import annotations

import json
import logging
import pathlib
from typing import Any

import pytest
import torch

from fastft.loading import checkpoint
from fastft.loading.checkpoint import load_config, load_tokenizer, note_native_window, quantization_for
from fastft.loading.source import Source
from tests import support

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def saved(folder: pathlib.Path, **settings: Any) -> Source:
    support.tiny_config("llama", **settings).save_pretrained(folder)
    return Source("model", str(folder), local=True)


def read(source: Source, **options: Any) -> tuple[Any, dict[str, Any]]:
    return load_config(source, trust_remote_code=False, options=options)


def test_options_of_the_configuration_are_taken_and_the_rest_left_over(tmp_path: pathlib.Path) -> None:
    config, rest = read(saved(tmp_path), attention_dropout=0.25, low_cpu_mem_usage=True)
    assert config.attention_dropout == 0.25
    assert rest == {"low_cpu_mem_usage": True}


def test_a_given_configuration_is_used_as_it_is(tmp_path: pathlib.Path) -> None:
    given = support.tiny_config("llama")
    assert read(saved(tmp_path), config=given) == (given, {})


def test_a_requested_scaling_keeps_the_trained_theta(tmp_path: pathlib.Path) -> None:
    """C23: transformers alone would fill in 10000."""
    source = saved(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    config, _ = read(source, rope_parameters={"rope_type": "linear", "factor": 2.0})
    assert config.rope_parameters == {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}


def test_a_requested_theta_is_taken(tmp_path: pathlib.Path) -> None:
    source = saved(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    config, _ = read(source, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 7e5})
    assert config.rope_parameters["rope_theta"] == 7e5


def test_without_a_request_the_scaling_is_the_checkpoints(tmp_path: pathlib.Path) -> None:
    config, _ = read(saved(tmp_path, rope_parameters=LLAMA3))
    assert config.rope_parameters == LLAMA3


def test_a_longer_limit_than_the_trained_window_is_said_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """C23."""
    config = support.tiny_config("llama", max_position_embeddings=256, rope_parameters=LLAMA3)
    before = config.to_dict()
    with caplog.at_level(logging.WARNING, logger="fastft"):
        note_native_window(config, 256)
        note_native_window(config, None)
        assert not caplog.records
        note_native_window(config, 1024)
    assert "max_seq_length=1024 is above the model's own window of 256" in caplog.text
    assert config.to_dict() == before


def test_an_unknown_hub_name_says_what_was_tried_and_keeps_the_hubs_error() -> None:
    source = Source("model", "owner/no-such-model", local=False, hub={"local_files_only": True})
    with pytest.raises(OSError, match=r"'owner/no-such-model' could not be loaded.*no folder here.*hub") as caught:
        read(source)
    assert isinstance(caught.value.__cause__, OSError)
    assert "token=" in str(caught.value)


def test_the_default_quantization_is_nested_nf4_computing_in_the_chosen_dtype() -> None:
    config = support.tiny_config("llama")
    made = quantization_for(config, load_in_4bit=True, requested=None, dtype=torch.float16)
    assert made.load_in_4bit
    assert made.bnb_4bit_quant_type == "nf4"
    assert made.bnb_4bit_use_double_quant
    assert made.bnb_4bit_compute_dtype is torch.float16


def test_no_quantization_where_none_is_asked_for() -> None:
    config = support.tiny_config("llama")
    assert quantization_for(config, load_in_4bit=False, requested=None, dtype=torch.float32) is None


def test_a_given_quantization_goes_first() -> None:
    given = object()
    made = quantization_for(support.tiny_config("llama"), load_in_4bit=True, requested=given, dtype=torch.float32)
    assert made is given


def test_a_4bit_checkpoint_is_kept_and_computes_in_the_chosen_dtype() -> None:
    config = support.tiny_config("llama")
    own = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}
    config.quantization_config = {**own, "bnb_4bit_compute_dtype": "bfloat16"}
    assert quantization_for(config, load_in_4bit=True, requested=None, dtype=torch.float16) is None
    assert config.quantization_config == {**own, "bnb_4bit_compute_dtype": "float16"}


def test_missing_bitsandbytes_is_said_with_the_way_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"load_in_4bit=True, which needs bitsandbytes.*load_in_4bit=False"):
        quantization_for(support.tiny_config("llama"), load_in_4bit=True, requested=None, dtype=torch.float32)


@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_the_tokenizer_is_as_it_was_saved(tmp_path: pathlib.Path, padding_side: str) -> None:
    """Pain 5 and 8: no padding side flipped, no token added, not even a pad token that is missing."""
    from transformers import AutoTokenizer

    tokenizer = support.build_tokenizer()
    tokenizer.pad_token = None
    saved(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "padding_side": padding_side}))
    loaded = load_tokenizer(Source("model", str(tmp_path), local=True), trust_remote_code=False)
    stock = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.padding_side == padding_side
    assert loaded.pad_token is None
    assert loaded.get_vocab() == stock.get_vocab()
    assert loaded.special_tokens_map == stock.special_tokens_map
    assert loaded.chat_template == tokenizer.chat_template


def test_a_model_without_a_tokenizer_says_where_one_was_looked_for(tmp_path: pathlib.Path) -> None:
    with pytest.raises(OSError, match=r"(?s)No tokenizer could be read from .*save_pretrained") as caught:
        load_tokenizer(saved(tmp_path), trust_remote_code=False)
    assert caught.value.__cause__ is not None
