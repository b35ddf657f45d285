"""Fast against stock, family by family: loss and every trainable gradient, at both levels, over each kind of base.

In float32 the bound is 1e-5 relative. In 16 bits two right answers differ by more, so both are measured against
float64: per tensor the fast error may be 1.5 times stock's, or two units in the last place (median of three seeds).
"""

from __future__ import annotations

import contextlib
import copy
import pathlib
from typing import Any

import pytest
import torch

import fastft
from tests import support
from tests.patching.helpers import (
    ALL_LEVELS,
    LEVELS,
    assert_ran_fast,
    assert_same_step,
    relative_error,
    set_level,
    step,
    twins,
)

QUANTIZATIONS = {
    "nf4 nested": {"quant_type": "nf4", "nested": True},
    "nf4": {"quant_type": "nf4", "nested": False},
    "fp4": {"quant_type": "fp4", "nested": True},
}
# Biases that a configuration of the family can ask for; Mistral has none, Qwen2's q, k and v have them by nature.
BIASES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {},
    "qwen3": {"attention_bias": True},
}


def assert_parity(model: Any, level: str, batch: dict[str, torch.Tensor]) -> None:
    stock, fast = twins(model)
    set_level(level, stock, fast)
    assert_same_step(step(stock, batch), step(fast, batch))
    assert_ran_fast(fast)


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("level", ALL_LEVELS)
def test_lora_over_dense_weights(family: str, level: str, padded: bool) -> None:
    assert_parity(support.add_lora(support.build_model(family)), level, support.random_batch(padded=padded))


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_lora_over_4bit_weights(family: str, level: str, quantization: str, tmp_path: pathlib.Path) -> None:
    base = support.load_4bit(support.build_model(family), tmp_path, **QUANTIZATIONS[quantization])
    assert_parity(support.add_lora(base), level, support.random_batch(padded=True))


def test_full_fine_tuning(family: str, level: str) -> None:
    """C09, C12: every parameter trains, norms, embeddings and head among them."""
    assert_parity(support.build_model(family), level, support.random_batch(padded=True))


def test_full_fine_tuning_with_tied_embeddings(family: str, level: str) -> None:
    model = support.build_model(family, tie_word_embeddings=True)
    assert "lm_head.weight" not in dict(model.named_parameters())
    assert_parity(model, level, support.random_batch())


@pytest.mark.parametrize(
    "targets", [("q_proj", "v_proj"), ("o_proj", "down_proj"), ("k_proj", "gate_proj")], ids="-".join
)
def test_lora_on_some_projections(family: str, level: str, targets: tuple[str, ...]) -> None:
    model = support.add_lora(support.build_model(family), target_modules=targets)
    assert_parity(model, level, support.random_batch(padded=True))


def test_lora_on_some_layers(family: str, level: str) -> None:
    """A layer without adapters passes a gradient on; the layers below the lowest adapter need none."""
    model = support.add_lora(support.build_model(family, num_hidden_layers=3), layers_to_transform=[1])
    assert_parity(model, level, support.random_batch())


@pytest.mark.parametrize("quantized", [False, True], ids=["dense", "nf4"])
@pytest.mark.parametrize("biased", BIASES)
def test_biases_in_the_base(biased: str, level: str, quantized: bool, tmp_path: pathlib.Path) -> None:
    """C38: biases are part of the fast path, over dense and over 4-bit weights."""
    model = support.build_model(biased, **BIASES[biased])
    biases = {name for name, _ in model.named_parameters() if name.endswith(".bias")}
    assert biases, f"{biased} was meant to have biases"
    if quantized:
        model = support.load_4bit(model, tmp_path)
    assert_parity(support.add_lora(model), level, support.random_batch(padded=True))


def test_trained_biases(level: str) -> None:
    """C41: bias="all" trains the base's biases beside the adapters."""
    model = support.add_lora(support.build_model("qwen2"), bias="all")
    assert any(name.endswith(".bias") and p.requires_grad for name, p in model.named_parameters())
    assert_parity(model, level, support.random_batch())


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_implementations(family: str, level: str, implementation: str) -> None:
    model = support.add_lora(support.build_model(family, attn_implementation=implementation))
    assert_parity(model, level, support.random_batch(padded=True))


@pytest.mark.parametrize("windowed", ["mistral", "qwen2", "qwen3"])
def test_sliding_windows(windowed: str, level: str) -> None:
    """A window shorter than the row; without it the result differs, so the test cannot pass by ignoring it."""
    settings = {"sliding_window": 4}
    if windowed != "mistral":
        settings |= {"use_sliding_window": True, "max_window_layers": 0, "layer_types": ["sliding_attention"] * 2}
    model = support.add_lora(support.build_model(windowed, **settings))
    batch = support.random_batch()
    unwindowed = support.add_lora(support.build_model(windowed))
    assert relative_error(unwindowed(**batch).loss.detach(), model(**batch).loss.detach()) > 1e-4
    assert_parity(model, level, batch)


def test_a_training_run_follows_stock(family: str, level: str) -> None:
    """C09: ten SGD steps of full fine-tuning; same loss and gradient norm at every step."""
    stock, fast = twins(support.build_model(family))
    set_level(level, stock, fast)
    curves = []
    for model in (stock, fast):
        optimizer, curve = torch.optim.SGD(model.parameters(), lr=0.05), []
        for seed in range(10):
            model.zero_grad(set_to_none=True)
            loss = model(**support.random_batch(seed)).loss
            loss.backward()
            curve.append((loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()))
            optimizer.step()
        curves.append(torch.tensor(curve, dtype=torch.float64))
    torch.testing.assert_close(curves[1], curves[0], rtol=1e-4, atol=0)
    assert_ran_fast(fast, forwards=10)


def _errors(model: Any, level: str, batch: dict[str, torch.Tensor], autocast: bool) -> dict[str, tuple[float, float]]:
    """Per trainable tensor: (stock's error, fast's error) against the same model in float64; "loss" among them."""
    reference = step(dense_double(model), batch)
    stock, fast = twins(model)
    set_level(level, stock, fast)
    steps = []
    for candidate in (stock, fast):
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            candidate.zero_grad(set_to_none=True)
            loss = candidate(**batch).loss
        loss.backward()
        steps.append({"loss": loss.detach()} | support.trainable_gradients(candidate))
    assert_ran_fast(fast)
    references = {"loss": reference.loss} | reference.gradients
    return {n: tuple(relative_error(s[n], references[n]) for s in steps) for n in references}  # type: ignore[misc]


def dense_double(model: Any) -> Any:
    """A float64 copy of `model`, 4-bit weights dequantized by bitsandbytes."""
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    model = copy.deepcopy(model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Linear4bit):
                dense = torch.nn.Linear(child.in_features, child.out_features, bias=child.bias is not None)
                dense.weight = torch.nn.Parameter(
                    dequantize_4bit(child.weight.data, child.weight.quant_state).float(), requires_grad=False
                )
                if child.bias is not None:
                    dense.bias = child.bias
                setattr(parent, name, dense)
    return model.double()


SIXTEEN_BITS = (
    "bf16 base, fp32 adapters",
    "bf16 base, bf16 adapters",
    "autocast over fp32",
    "autocast over nf4",
    "bf16, all trained",
)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", SIXTEEN_BITS)
def test_16_bit_training_is_as_near_to_float64_as_stock(
    family: str, level: str, kind: str, tmp_path: pathlib.Path
) -> None:
    ulp = 2.0**-8
    found: dict[str, list[tuple[float, float]]] = {}
    for seed in range(3):
        model = support.build_model(family, seed, torch.bfloat16 if kind.startswith("bf16") else torch.float32)
        if kind == "autocast over nf4":
            model = support.load_4bit(model, tmp_path / str(seed))
        if kind != "bf16, all trained":
            model = support.add_lora(model, seed=seed)
            if kind == "bf16 base, bf16 adapters":
                model = model.to(torch.bfloat16)
            adapters = {p.dtype for p in model.parameters() if p.requires_grad}
            assert adapters == {torch.bfloat16 if kind.endswith("bf16 adapters") else torch.float32}
        batch = support.random_batch(seed, rows=3, length=17)
        for name, errors in _errors(model, level, batch, autocast=kind.startswith("autocast")).items():
            found.setdefault(name, []).append(errors)
    medians = {
        name: [torch.tensor(e).median().item() for e in zip(*values, strict=True)] for name, values in found.items()
    }
    wrong = {name: pair for name, pair in medians.items() if not pair[1] <= max(1.5 * pair[0], 2 * ulp)}
    assert not wrong, wrong


def test_widths_that_bitsandbytes_dequantizes_wrongly_on_cpu(level: str, tmp_path: pathlib.Path) -> None:
    """in_features a multiple of 16, not of 64: fast and stock run on our dequantization, and the report says so."""
    from fastft.patching import bitsandbytes

    model = support.build_model(hidden_size=80, intermediate_size=144, num_key_value_heads=1, num_attention_heads=5)
    fast = fastft.patch(support.add_lora(support.load_4bit(model, tmp_path)))
    dense = copy.deepcopy(fast)
    fastft.unpatch(dense)
    for parent in list(dense.modules()):
        for name, child in list(parent.named_children()):
            if bitsandbytes.is_linear4bit(child):
                linear = torch.nn.Linear(child.in_features, child.out_features, bias=False)
                weight = bitsandbytes.dense_weight(child, torch.float32)
                linear.weight = torch.nn.Parameter(weight, requires_grad=False)
                setattr(parent, name, linear)
    set_level(level, dense, fast)
    batch = support.random_batch()
    expected = step(dense, batch)
    assert_same_step(expected, step(fast, batch))
    assert_ran_fast(fast)
    with fastft.stock_only():
        assert_same_step(expected, step(fast, batch))
    assert any("4-bit layers run on fastft's dequantization" in note for note in fastft.report(fast).notes)


def test_a_family_is_known_by_its_declaration() -> None:
    """The four families of these tests are all there are."""
    from fastft.patching.families import FAMILIES

    assert set(FAMILIES) == set(support.FAMILIES)
    assert fastft.patched()
