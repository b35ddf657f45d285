"""Adapters are PEFT's own files: plain PEFT loads them, with the tokenizer beside them."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch

from fastft import FastModel
from fastft.saving import adapter
from fastft.saving.check import SaveCheckError
from tests import support


def test_plain_peft_loads_what_is_saved(tmp_path: pathlib.Path, tokenizer: Any, batch: Any) -> None:
    from peft import PeftModel
    from transformers import AutoTokenizer

    model = support.add_lora(support.build_model()).eval()
    FastModel.save_adapter(model, tokenizer, tmp_path / "adapter")
    FastModel.save_adapter(model, tokenizer, tmp_path / "adapter")  # over itself
    again = PeftModel.from_pretrained(support.build_model(), tmp_path / "adapter").eval()
    with torch.no_grad():
        assert torch.equal(again(batch["input_ids"]).logits, model(batch["input_ids"]).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "adapter").get_vocab() == tokenizer.get_vocab()
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {p.name for p in (tmp_path / "adapter").iterdir()}


def test_a_file_that_is_not_the_live_adapter_is_an_error(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    model = support.add_lora(support.build_model())
    stock = model.save_pretrained

    def changed(*args: Any, **options: Any) -> None:
        with torch.no_grad():
            next(p for p in model.parameters() if p.requires_grad).add_(1)
        stock(*args, **options)
        with torch.no_grad():
            next(p for p in model.parameters() if p.requires_grad).sub_(1)

    monkeypatch.setattr(model, "save_pretrained", changed)
    with pytest.raises(SaveCheckError, match="was not written as it is"):
        adapter.save_adapter(model, None, tmp_path / "adapter")
    assert not list(tmp_path.iterdir())


def test_a_model_without_adapter_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(TypeError, match="no PeftModel"):
        FastModel.save_adapter(support.build_model(), None, tmp_path / "adapter")
