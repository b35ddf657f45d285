"""The check of a compressed checkpoint, on a model rounded by hand: it runs without llm-compressor."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fastft.saving.check import SaveCheckError
from fastft.saving.compressed import check
from fastft.saving.compressed.plan import Plan
from fastft.saving.compressed.schemes import resolve_scheme, rounded
from tests import support
from tests.saving.compressed.harness import tiny
from tests.saving.tokenizers import VOCABULARY

TOKENS = support.random_batch(vocabulary=VOCABULARY)["input_ids"]
Q = "model.layers.0.self_attn.q_proj"
NORM = "model.layers.0.input_layernorm.weight"


def ask(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=TOKENS, use_cache=False).logits
    return logits


class Case:
    """A merged folder, a model rounded from it as `reload_model` would give it, and the plan behind it."""

    def __init__(self, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, scheme: str = "w4a16") -> None:
        self.merged, self.model, self.folder = tiny(), tiny(), folder
        self.merged.save_pretrained(folder)
        resolved = resolve_scheme(scheme)
        targets = {}
        for name, module in self.model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                module.weight.data = rounded(module.weight.data, resolved)
                module.quantization_scheme = True  # type: ignore[assignment]
                targets[name] = tuple(module.weight.shape)
        group = resolved.group if isinstance(resolved.group, int) else None
        self.plan = Plan(resolved, "rtn", group, None, ("lm_head",), targets)
        monkeypatch.setattr(check, "reload_model", lambda *_: self.model.eval())

    def run(self, update: Callable[[str], Any] | None = None, quantized: torch.Tensor | None = None) -> check.Measured:
        answers = check.Answers(TOKENS, ask(self.merged), ask(self.model) if quantized is None else quantized)
        return check.check_compressed(
            self.folder, self.folder, self.plan, answers, self.merged.config, torch.float32, update
        )

    def weight(self, name: str) -> torch.Tensor:
        return self.model.get_parameter(name).data


@pytest.fixture
def case(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    return Case(tmp_path, monkeypatch)


@pytest.mark.parametrize("scheme", ["fp8_dynamic", "int8", "w4a16", "nvfp4a16", "mxfp4a16"])
def test_what_was_rounded_by_the_definition_passes(
    scheme: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = Case(tmp_path, monkeypatch, scheme).run()
    assert 0 < measured.difference < measured.allowed
    assert 0 < measured.largest_error < 0.13
    assert measured.update_kept is None


def test_a_weight_further_off_than_its_format_makes_it_is_found(case: Case) -> None:
    case.weight(f"{Q}.weight")[0] += 0.03
    case.run()
    case.weight(f"{Q}.weight")[:, :32] += 0.03
    with pytest.raises(SaveCheckError, match=r"layers.0.self_attn.q_proj.weight made dense again is off by 0\.1[3-9]"):
        case.run()


def test_gptq_may_be_further_off_than_to_nearest_and_never_as_far_as_another_weight(case: Case) -> None:
    case.plan = dataclasses.replace(case.plan, algorithm="gptq")
    case.weight(f"{Q}.weight").add_(torch.randn(128, 128, generator=torch.Generator().manual_seed(0)), alpha=0.02)
    case.run()
    case.weight(f"{Q}.weight").copy_(case.weight(f"{Q}.weight").roll(1, 0))
    with pytest.raises(SaveCheckError, match=r"off by 1\.\d+ .* gptq may be off by 0.[89]"):
        case.run()


def test_other_layers_than_were_meant_are_found(case: Case) -> None:
    case.model.lm_head.quantization_scheme = True
    with pytest.raises(SaveCheckError, match=r"other layers .*'lm_head'"):
        case.run()
    del case.model.lm_head.quantization_scheme, case.model.get_submodule(Q).quantization_scheme
    with pytest.raises(SaveCheckError, match=r"other layers .*q_proj"):
        case.run()


def test_what_is_not_quantized_must_be_the_merged_one_bit_for_bit(case: Case) -> None:
    case.weight("lm_head.weight")[5, 5] += 1e-6
    with pytest.raises(SaveCheckError, match=r"lm_head.weight is not quantized, and yet"):
        case.run()


def test_a_file_that_answers_otherwise_than_the_model_in_memory_is_found(case: Case) -> None:
    quantized = ask(case.model)
    case.run(quantized=quantized * (1 + 1e-6))
    with pytest.raises(SaveCheckError, match="answers otherwise than before it was written"):
        case.run(quantized=quantized * 1.01)


def test_logits_that_the_format_does_not_explain_are_found(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    case = Case(tmp_path, monkeypatch, "int8")
    allowed = case.run().allowed
    assert 0.15 < allowed < 0.2  # 8 · √(0.0077² + 0.02²)
    case.merged.model.norm.weight.data *= 1 + 1.3 * allowed
    with pytest.raises(SaveCheckError, match=r"and W8A8 explains 0\.1"):
        case.run()


def _smoothed(case: Case, strength: float) -> None:
    """Scale q, k and v's columns against the norm before them, then round."""
    scale = torch.linspace(0.3, 3, 128) ** strength
    names = {f"model.layers.0.self_attn.{name}_proj.weight": NORM for name in "qkv"}
    for name in names:
        merged = case.merged.get_parameter(name).data
        case.weight(name).copy_(rounded(merged * scale, case.plan.scheme))
    case.weight(NORM).copy_(case.merged.get_parameter(NORM).data / scale)
    case.plan = dataclasses.replace(case.plan, smoothed=names, smoothing=0.8, algorithm="gptq")


def test_smoothed_weights_are_compared_in_the_scale_they_were_rounded_in(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tmp_path, monkeypatch, "int8")
    _smoothed(case, 1)
    assert case.run().largest_error < 0.012
    case.weight(NORM)[:64] *= 1.5
    with pytest.raises(SaveCheckError, match=r"[qkv]_proj.weight made dense again is off by 0\.[1-5]"):
        case.run()


def test_a_smoothed_layer_that_is_not_quantized_is_only_rescaled(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tmp_path, monkeypatch, "int8")
    _smoothed(case, 1)
    del case.plan.targets[Q], case.model.get_submodule(Q).quantization_scheme
    with pytest.raises(SaveCheckError, match=r"q_proj.weight is not quantized, only rescaled"):
        case.run()
    ratio = case.merged.get_parameter(NORM).data / case.weight(NORM)
    case.weight(f"{Q}.weight").copy_(case.merged.get_parameter(f"{Q}.weight").data * ratio)
    case.run()


@pytest.mark.parametrize("smoothing", [0, 1])
def test_the_share_of_the_update_is_one_or_none(
    smoothing: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update of a tenth of the rounding error: the merged model is base + Δ, and what was rounded has it or not."""
    case = Case(tmp_path, monkeypatch, "int8")
    generator = torch.Generator().manual_seed(0)
    deltas = {f"{Q}.weight": 1e-4 * torch.randn(128, 128, generator=generator)}
    if smoothing:
        _smoothed(case, 1)
    kept = case.run(update=deltas.get).update_kept
    assert kept == pytest.approx(1, abs=0.25)
    scale = case.merged.get_parameter(NORM).data / case.weight(NORM)
    base = case.merged.get_parameter(f"{Q}.weight").data - deltas[f"{Q}.weight"]
    case.weight(f"{Q}.weight").copy_(rounded(base * scale, case.plan.scheme))
    with pytest.raises(SaveCheckError, match="the adapters' change vanished"):
        case.run(update=deltas.get)


def test_an_update_that_the_grid_pulls_back_is_refused(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What QLoRA trained lies near a 4-bit grid, and rounding on another one can find the base again."""
    case = Case(tmp_path, monkeypatch)
    name = f"{Q}.weight"
    base = case.weight(name).clone()  # on the grid already
    delta = 1e-3 * torch.randn(128, 128, generator=torch.Generator().manual_seed(0))
    case.merged.get_parameter(name).data = base + delta
    case.merged.save_pretrained(tmp_path)
    case.weight(name).copy_(rounded(base + delta, case.plan.scheme))
    with pytest.raises(SaveCheckError, match=r"vanished: -?[0-3]?\d% of .* calibration with algorithm='gptq'"):
        case.run(update={name: delta}.get)
