"""Every format written by llm-compressor, loaded by plain transformers, and checked."""

from __future__ import annotations

import errno
import hashlib
import json
import pathlib
import shutil
from typing import Any

import pytest
import torch

from fastft import FastModel
from fastft.saving.check import SaveCheckError
from fastft.saving.compressed import checkpoint as checkpoint_file
from fastft.saving.compressed import quantize
from fastft.saving.compressed.checkpoint import compress_checkpoint
from tests import support
from tests.saving.compressed.harness import TEXTS, needs_llmcompressor, tiny
from tests.saving.tokenizers import byte_level

pytestmark = needs_llmcompressor

SCHEMES: list[tuple[str, dict[str, Any], str, torch.dtype, float]] = [
    ("fp8_dynamic", {}, "weight", torch.float8_e4m3fn, 0.25),
    ("fp8", {"calibration": TEXTS}, "weight", torch.float8_e4m3fn, 0.25),
    ("int8", {}, "weight", torch.int8, 0.1),
    ("int8", {"calibration": TEXTS}, "weight", torch.int8, 0.1),
    ("w4a16", {}, "weight_packed", torch.int32, 0.6),
    ("w4a16", {"calibration": TEXTS, "group_size": 32}, "weight_packed", torch.int32, 0.6),
    ("nvfp4", {"calibration": TEXTS}, "weight_packed", torch.uint8, 0.7),
    ("nvfp4a16", {}, "weight_packed", torch.uint8, 0.6),
    ("mxfp4", {}, "weight_packed", torch.uint8, 0.8),
]


def lora(**overrides: Any) -> Any:
    return support.add_lora(tiny(**overrides))


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("merged") / "merged"
    FastModel.save_merged(lora(), byte_level(), folder, dtype="bfloat16")
    return folder


@pytest.mark.parametrize(
    ("scheme", "options", "stored", "dtype", "nearness"), SCHEMES, ids=[f"{s[0]}-{len(s[1])}" for s in SCHEMES]
)
def test_each_format_is_stored_as_it_says_and_answers_as_its_rounding_allows(
    scheme: str, options: Any, stored: str, dtype: torch.dtype, nearness: float, merged: pathlib.Path,
    tmp_path: pathlib.Path,
) -> None:  # fmt: skip
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM, AutoTokenizer

    saved = compress_checkpoint(merged, tmp_path / "out", scheme=scheme, **options)
    config = json.loads((saved.folder / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert config["fastft_merge"] == {"base": "dequantized"}
    with safe_open(saved.folder / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
        for part in ("self_attn.q_proj", "mlp.down_proj"):
            tensor = file.get_tensor(f"model.layers.1.{part}.{stored}")
            assert tensor.dtype == dtype
        assert file.get_tensor("lm_head.weight").dtype == torch.bfloat16
    assert ("model.layers.0.mlp.up_proj.input_scale" in names) == (scheme == "fp8")
    tokens = support.random_batch(vocabulary=300)["input_ids"]
    with torch.no_grad():
        dense = AutoModelForCausalLM.from_pretrained(merged)(tokens).logits.float()
        found = AutoModelForCausalLM.from_pretrained(saved.folder)(tokens).logits.float()
    difference = float((found - dense).norm() / dense.norm())
    assert 0.01 < difference < nearness
    assert saved.difference == pytest.approx(difference, rel=0.5)
    assert 0 < saved.largest_error < nearness / 3
    assert AutoTokenizer.from_pretrained(saved.folder)(TEXTS[0]) == byte_level()(TEXTS[0])
    assert saved.bytes == (saved.folder / "model.safetensors").stat().st_size


def test_data_makes_four_bits_better(merged: pathlib.Path, tmp_path: pathlib.Path) -> None:
    from transformers import AutoModelForCausalLM

    rows = [support.random_batch(seed, length=64, vocabulary=300)["input_ids"][0] for seed in range(24)]
    held_out = support.random_batch(99, length=64, vocabulary=300)["input_ids"]
    with torch.no_grad():
        dense = AutoModelForCausalLM.from_pretrained(merged)(held_out).logits.float()
        off = {}
        for name, options in (("rtn", {}), ("gptq", {"calibration": [{"input_ids": row} for row in rows]})):
            compress_checkpoint(merged, tmp_path / name, scheme="w4a16", **options)
            answer = AutoModelForCausalLM.from_pretrained(tmp_path / name)(held_out).logits.float()
            off[name] = float((answer - dense).norm())
    assert off["gptq"] < 0.93 * off["rtn"]


@pytest.mark.parametrize("family", [*support.FAMILIES, "gemma2", "phi3"])
def test_families_with_data(family: str, tmp_path: pathlib.Path) -> None:
    """INT8 by SmoothQuant and GPTQ traces the model; a wrong smoothing is off by as much as the logits."""
    tiny(family, dtype=torch.bfloat16).save_pretrained(tmp_path / "plain")
    byte_level().save_pretrained(tmp_path / "plain")
    saved = compress_checkpoint(tmp_path / "plain", tmp_path / "out", scheme="int8", calibration=TEXTS[:8])
    assert saved.algorithm == ("gptq" if family == "gemma2" else "smoothquant+gptq")
    assert saved.difference < 0.08
    assert saved.update_kept is None


def test_tied_weights_stay_one_and_what_is_ignored_is_bit_equal(tmp_path: pathlib.Path) -> None:
    from safetensors.torch import load_file

    tiny(tie_word_embeddings=True, dtype=torch.bfloat16).save_pretrained(tmp_path / "plain")
    byte_level().save_pretrained(tmp_path / "plain")
    ignore = ["lm_head", "re:.*down_proj$"]
    saved = compress_checkpoint(
        tmp_path / "plain", tmp_path / "out", scheme="int8", calibration=TEXTS, ignore=[*ignore, "re:.*0.*q_proj$"]
    )
    assert saved.layers == 2 * 6 - 1
    new, old = (load_file(folder / "model.safetensors") for folder in (saved.folder, tmp_path / "plain"))
    assert "lm_head.weight" not in new
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight"):
        assert torch.equal(new[name], old[name])


def test_shards_are_as_large_as_asked(merged: pathlib.Path, tmp_path: pathlib.Path) -> None:
    saved = compress_checkpoint(merged, tmp_path / "out", max_shard_size="100KB")
    assert len(list(saved.folder.glob("model-*.safetensors"))) > 2
    assert (saved.folder / "model.safetensors.index.json").is_file()


def test_weights_in_another_dtype_than_the_configuration_names_are_read_as_transformers_reads_them(
    tmp_path: pathlib.Path,
) -> None:
    tiny().save_pretrained(tmp_path / "plain")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    (tmp_path / "plain" / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    saved = compress_checkpoint(tmp_path / "plain", tmp_path / "out", scheme="mxfp4")
    assert saved.update_kept is saved.merged is None


def test_what_is_no_unquantized_checkpoint_is_refused(merged: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no config.json"):
        compress_checkpoint(tmp_path, tmp_path / "out")
    saved = compress_checkpoint(merged, tmp_path / "once")
    with pytest.raises(ValueError, match=r"quantized already \(compressed-tensors\)"):
        compress_checkpoint(saved.folder, tmp_path / "twice")
    with pytest.raises(ValueError, match="loaded from"):
        compress_checkpoint(merged, merged)
    assert not (tmp_path / "twice").exists()


def _tampered(name: str, change: Any) -> Any:
    """`quantize_into`, with one tensor of what it wrote changed."""
    from safetensors.torch import load_file, save_file

    stock = quantize.quantize_into

    def written(model: Any, tokenizer: Any, folder: pathlib.Path, *rest: Any) -> torch.Tensor:
        logits = stock(model, tokenizer, folder, *rest)
        tensors = load_file(folder / "model.safetensors")
        tensors[name] = change(tensors[name])
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return logits

    return written


LAYER = "model.layers.1.self_attn.v_proj"


@pytest.mark.parametrize(
    ("scheme", "name", "change", "message"),
    [
        ("int8", f"{LAYER}.weight", lambda t: t.roll(1, 0), "v_proj.weight made dense again is off by 1"),
        ("int8", f"{LAYER}.weight_scale", lambda t: t * 1.03, "v_proj.weight made dense again is off by 0.0[23]"),
        ("mxfp4", f"{LAYER}.weight_scale", lambda t: t + 1, "v_proj.weight made dense again is off by 1"),
        ("mxfp4", "model.embed_tokens.weight", lambda t: t * 1.01, "embed_tokens.weight is not quantized, and yet"),
    ],
)
def test_a_wrong_file_is_found_and_removed(
    scheme: str, name: str, change: Any, message: str, merged: pathlib.Path, tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(checkpoint_file, "quantize_into", _tampered(name, change))
    with pytest.raises(SaveCheckError, match=message):
        compress_checkpoint(merged, tmp_path / "out", scheme=scheme)
    assert not list(tmp_path.iterdir())


def test_an_activation_scale_that_was_written_wrong_shows_in_the_answers(
    merged: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_file, "quantize_into", _tampered(f"{LAYER}.input_scale", lambda t: t / 64))
    with pytest.raises(SaveCheckError, match="answers otherwise than before it was written"):
        compress_checkpoint(merged, tmp_path / "out", scheme="fp8", calibration=TEXTS)


def test_smoothing_where_norms_do_not_feed_projections_is_found(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As llm-compressor's own table would have it for Gemma 2."""
    from fastft.saving.compressed import plan

    monkeypatch.setattr(plan, "_SMOOTHED_FAMILIES", ("gemma2",))
    tiny("gemma2", dtype=torch.bfloat16).save_pretrained(tmp_path / "plain")
    byte_level().save_pretrained(tmp_path / "plain")
    with pytest.raises(SaveCheckError):
        compress_checkpoint(tmp_path / "plain", tmp_path / "out", scheme="int8", calibration=TEXTS)
    assert not (tmp_path / "out").exists()


def test_a_failure_leaves_the_earlier_save(
    merged: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = compress_checkpoint(merged, tmp_path / "out")
    before = {path.name: hashlib.sha256(path.read_bytes()).digest() for path in saved.folder.iterdir()}

    def full(*_: Any) -> torch.Tensor:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_file, "quantize_into", full)
        with pytest.raises(OSError, match="the disk became full"):
            compress_checkpoint(merged, tmp_path / "out", scheme="int8")
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 0))  # type: ignore[attr-defined]
        with pytest.raises(OSError, match="Nothing was written"):
            compress_checkpoint(merged, tmp_path / "out", scheme="int8")
    assert {path.name: hashlib.sha256(path.read_bytes()).digest() for path in saved.folder.iterdir()} == before
    compress_checkpoint(merged, tmp_path / "out", scheme="int8")  # an earlier save is replaced, recipe.yaml included
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_llmcompressor_says_when_it_fails_is_passed_on(
    merged: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import llmcompressor

    def fail(**_: Any) -> None:
        raise KeyError("no such observer")

    monkeypatch.setattr(llmcompressor, "oneshot", fail)
    with pytest.raises(RuntimeError, match=r"llm-compressor failed on LlamaForCausalLM .*KeyError: 'no such observer'"):
        compress_checkpoint(merged, tmp_path / "out")
    assert not list(tmp_path.iterdir())
