"""Every layer that was folded is asked alone: a fault of one tensor that the logits of a deep model hide is found."""

from __future__ import annotations

import filecmp
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastft
from fastft import FastModel
from fastft.saving import merged, probe, shards
from fastft.saving.check import SaveCheckError
from tests import support

DROPPED = "model.layers.17.self_attn.v_proj.weight"


@pytest.fixture(scope="module")
def deep() -> Any:
    """32 layers in bfloat16, and an adapter that is a tenth of what tests usually have."""
    model = support.add_lora(support.build_model(num_hidden_layers=32, dtype=torch.bfloat16))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(0.1)
    return model


def break_fold(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    """`fold` gives `change(base, update)` for one tensor."""
    stock = shards.fold

    def wrong(module: Any, attribute: str, asked: str, **options: Any) -> Any:
        base, folded = stock(module, attribute, asked, **options)
        if asked != name:
            return base, folded
        changed = change(base, folded - base)
        return (base if folded is not base else changed), changed

    monkeypatch.setattr(shards, "fold", wrong)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda base, update: base, "differ by"),
        (lambda base, update: base + update.roll(1, 0), "differ by"),
        (lambda base, update: base + 1.1 * update, r"holds 1\.1 .* expected"),
    ],
    ids=["dropped", "another_row", "scale"],
)
def test_a_fault_of_one_of_224_projections_is_found(
    change: Any, message: str, deep: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits alone let it pass: rounding to bfloat16 in 32 layers allows more than it makes."""
    break_fold(monkeypatch, DROPPED, change)
    with pytest.raises(SaveCheckError, match=rf"layers\.17\.self_attn\.v_proj\.weight: the written layer.*{message}"):
        FastModel.save_merged(deep, None, tmp_path / "merged")
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(merged, "probe_layers", lambda *_: 0)
    assert FastModel.save_merged(deep, None, tmp_path / "merged").difference < 0.1


def test_a_deep_model_that_was_folded_rightly_passes(deep: Any, tmp_path: pathlib.Path) -> None:
    assert FastModel.save_merged(deep, None, tmp_path / "merged").layers_probed == 32 * 7


@pytest.mark.parametrize("base", ["dequantized", "original"])
def test_a_dropped_update_over_four_bits_is_found(
    base: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So is a base that is not the one that training saw, where it should be."""
    model = support.add_lora(support.load_4bit(support.build_model(), tmp_path / "base", dtype=torch.bfloat16))
    fastft.patch(model)
    name = "model.layers.1.mlp.down_proj.weight"
    with monkeypatch.context() as patch:
        break_fold(patch, name, lambda base, update: base)
        with pytest.raises(SaveCheckError, match=r"layers\.1\.mlp\.down_proj\.weight"):
            FastModel.save_merged(model, None, tmp_path / "merged", base=base)
    assert not (tmp_path / "merged").exists()
    assert FastModel.save_merged(model, None, tmp_path / "merged", base=base).layers_probed == 14


def test_a_tensor_without_an_adapter_must_be_the_live_one_bit_by_bit(
    deep: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "model.layers.3.input_layernorm.weight"
    break_fold(monkeypatch, name, lambda base, update: torch.cat([base[:-1], base[-1:] * (1 + 2**-7)]))
    with pytest.raises(SaveCheckError, match=r"layers\.3\.input_layernorm\.weight was not written as it is"):
        FastModel.save_merged(deep, None, tmp_path / "merged")


def test_a_trained_copy_that_was_not_taken_is_found(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = support.add_lora(support.build_model(dtype=torch.bfloat16), modules_to_save=["lm_head"])
    head = model.get_base_model().lm_head
    with torch.no_grad():
        head.modules_to_save["default"].weight.mul_(1.02)
    break_fold(monkeypatch, "lm_head.weight", lambda base, update: head.original_module.weight.detach())
    with pytest.raises(SaveCheckError, match=r"lm_head\.weight: the written layer"):
        FastModel.save_merged(model, None, tmp_path / "merged")


@pytest.mark.parametrize("settings", [{"use_dora": True}, {}])
def test_a_layer_whose_adapter_does_nothing_is_no_fault(settings: Any, tmp_path: pathlib.Path) -> None:
    """Nothing, or next to it: of an update far below float32's rounding of an answer no share can be asked."""
    model = support.add_lora(support.build_model(), **settings)
    attention = model.get_base_model().model.layers[0].self_attn
    with torch.no_grad():
        attention.q_proj.lora_B["default"].weight.zero_()
        attention.k_proj.lora_B["default"].weight.mul_(1e-8)
        for projection in (attention.q_proj, attention.k_proj) if settings else ():
            norm = torch.linalg.vector_norm(projection.base_layer.weight, dim=1)
            projection.lora_magnitude_vector["default"].weight.copy_(norm)
    assert FastModel.save_merged(model, None, tmp_path / "merged").layers_probed == 14


def test_a_float32_save_of_a_bfloat16_model_in_4_bits_passes(tmp_path: pathlib.Path) -> None:
    """Under autocast too, which must not make a float32 sum of a bfloat16 one: the files are the same."""
    model = support.add_lora(support.load_4bit(support.build_model(), tmp_path / "base", dtype=torch.bfloat16))
    fastft.patch(model)
    FastModel.save_merged(model, None, tmp_path / "plain", dtype="float32")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        FastModel.save_merged(model, None, tmp_path / "merged", dtype="float32")
    plain, found = (tmp_path / name / "model.safetensors" for name in ("plain", "merged"))
    assert filecmp.cmp(plain, found, shallow=False)


def test_a_float32_model_is_saved_under_autocast_as_without(tmp_path: pathlib.Path) -> None:
    """Its logits are rounded to bfloat16 there, the live ones and the file's; what is written is not."""
    model = support.add_lora(support.build_model())
    FastModel.save_merged(model, None, tmp_path / "plain")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        saved = FastModel.save_merged(model, None, tmp_path / "merged")
    assert 1e-4 < saved.difference < saved.allowed < 0.05
    plain, found = (tmp_path / name / "model.safetensors" for name in ("plain", "merged"))
    assert filecmp.cmp(plain, found, shallow=False)


def test_coarser_float32_products_are_allowed_for(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As TF32 makes them on a GPU, if torch is told so."""
    name = "model.layers.1.mlp.down_proj.weight"
    break_fold(monkeypatch, name, lambda base, update: (base + update) * 1.0005)
    model = support.add_lora(support.build_model())
    with pytest.raises(SaveCheckError, match="asked alone"):
        FastModel.save_merged(model, None, tmp_path / "merged")
    monkeypatch.setattr(probe, "_product_error", lambda _: 3e-4)
    monkeypatch.setattr(merged, "allowed_difference", lambda *_: 1e-2)
    FastModel.save_merged(model, None, tmp_path / "merged")
