"""From a live model with adapters to a compressed folder; what is on disk when something fails in between."""

from __future__ import annotations

import filecmp
import pathlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastft import FastModel, patch
from fastft.saving.check import SaveCheckError
from fastft.saving.compressed import checkpoint, live
from fastft.saving.hub import push_compressed
from fastft.saving.methods import bind
from tests import support
from tests.saving.compressed.harness import TEXTS, needs_llmcompressor, tiny
from tests.saving.tokenizers import VOCABULARY, byte_level

pytestmark = needs_llmcompressor

TOKENS = support.random_batch(vocabulary=VOCABULARY)["input_ids"]


def lora(**overrides: Any) -> Any:
    return support.add_lora(tiny(**overrides))


def answers(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=TOKENS, use_cache=False).logits.float()
    return logits


def load(folder: pathlib.Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize(
    "options", [{}, {"scheme": "w4a16"}, {"scheme": "int8", "calibration": TEXTS}], ids=["fp8", "w4a16", "int8"]
)
def test_the_adapters_are_in_what_is_saved_and_the_live_model_is_as_before(
    options: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    model = patch(lora()).train()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    saved = FastModel.save_compressed(model, byte_level(), tmp_path / "out", **options)
    assert model.training
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    expected = answers(model)
    with model.disable_adapter():
        effect = float((answers(model) - expected).norm())
    off = float((answers(load(saved.folder)) - expected).norm())
    assert off < effect
    assert off / float(expected.norm()) == pytest.approx(saved.difference, rel=0.5)
    assert saved.update_kept == pytest.approx(1, abs=0.03)
    assert saved.merged is not None
    assert saved.merged.difference < 1e-5
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_four_bit_training_ends_in_four_bit_serving(tmp_path: pathlib.Path) -> None:
    plain = tiny()
    model = patch(support.add_lora(support.load_4bit(plain, tmp_path / "base")))
    saved = FastModel.save_compressed(model, byte_level(), tmp_path / "out", scheme="nvfp4a16", dtype="bfloat16")
    assert saved.update_kept == pytest.approx(1, abs=0.03)
    assert saved.bytes < 0.5 * (tmp_path / "base" / "model.safetensors").stat().st_size


@pytest.mark.parametrize("options", [{}, {"scheme": "int8", "calibration": TEXTS}], ids=["fp8", "int8"])
def test_autocast_changes_nothing(options: dict[str, Any], tmp_path: pathlib.Path) -> None:
    """Neither the update that is looked for, nor GPTQ's sums, nor what the check allows."""
    model = lora()
    plain = FastModel.save_compressed(model, byte_level(), tmp_path / "plain", **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = FastModel.save_compressed(model, byte_level(), tmp_path / "found", **options)
    assert (found.update_kept, found.difference) == (plain.update_kept, plain.difference)
    assert filecmp.cmp(*(tmp_path / name / "model.safetensors" for name in ("plain", "found")), shallow=False)


def test_methods_of_the_model(tmp_path: pathlib.Path) -> None:
    model = bind(lora())
    saved = model.save_pretrained_compressed(tmp_path / "out", byte_level(), "mxfp4")
    assert (saved.folder, saved.scheme) == (tmp_path / "out", "MXFP4")
    assert load(saved.folder).dtype == torch.bfloat16  # a float32 model, in a format that has no other
    with pytest.raises(ValueError, match="calibration=texts"):
        model.push_to_hub_compressed("tester/model", byte_level(), "fp8", api=SimpleNamespace(whoami=dict))


def test_an_update_that_is_not_in_the_compressed_weights_is_found(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C47's kind, with an update below what MXFP4 rounds away: weights and logits alone could not tell."""
    model = lora(dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(0.05)
    FastModel.save_merged(tiny(dtype=torch.bfloat16), byte_level(), tmp_path / "base")
    right = FastModel.save_compressed(model, byte_level(), tmp_path / "right", scheme="mxfp4")
    assert right.update_kept == pytest.approx(1, abs=0.3)
    stock = checkpoint.quantize_into
    monkeypatch.setattr(checkpoint, "quantize_into", lambda _, *rest: stock(load(tmp_path / "base"), *rest))
    with pytest.raises(SaveCheckError, match="the adapters' change vanished"):
        FastModel.save_compressed(model, byte_level(), tmp_path / "out", scheme="mxfp4")
    assert not (tmp_path / "out").exists()


def test_c50_a_failure_leaves_the_merged_folder_that_was_asked_for(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = lora()

    def fail(*_: Any) -> Any:
        raise RuntimeError("llm-compressor failed")

    with monkeypatch.context() as patched:
        patched.setattr(live, "write_compressed", fail)
        with pytest.raises(RuntimeError, match="llm-compressor failed") as failed:
            FastModel.save_compressed(model, byte_level(), tmp_path / "out", keep_merged=tmp_path / "merged")
        assert any("is whole" in note for note in failed.value.__notes__)
        with pytest.raises(RuntimeError, match="llm-compressor failed"):
            FastModel.save_compressed(model, byte_level(), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]
    torch.testing.assert_close(answers(load(tmp_path / "merged")), answers(model), atol=1e-4, rtol=0)
    FastModel.save_compressed(model, byte_level(), tmp_path / "out", keep_merged=tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["merged", "out"]


def test_pushed_is_what_was_checked(tmp_path: pathlib.Path) -> None:
    sent: dict[str, Any] = {}

    def upload(**options: Any) -> None:
        sent.update(options, files=sorted(path.name for path in pathlib.Path(options["folder_path"]).iterdir()))

    api = SimpleNamespace(
        whoami=lambda: {"name": "tester"}, create_repo=lambda *_, **__: sent.update(made=True), upload_folder=upload
    )
    saved = push_compressed(lora(), byte_level(), "tester/model", scheme="fp8_dynamic", api=api)
    assert sent["repo_id"] == "tester/model"
    assert {"config.json", "model.safetensors", "recipe.yaml", "tokenizer.json"} <= set(sent["files"])
    assert not saved.folder.exists()
    sent.clear()
    with pytest.raises(ValueError, match="calibration=texts"):
        push_compressed(lora(), byte_level(), "tester/model", scheme="fp8", api=api)
    assert not sent
