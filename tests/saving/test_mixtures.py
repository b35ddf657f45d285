"""Which tensor gets which type: llama.cpp's choices, taken down from its own quantizer."""

from __future__ import annotations

import pytest

from fastft.saving.mixtures import MIXTURES, PRESETS, file_type, fitting, mixture_types, resolve, tensor_bytes
from tests import support

gguf = pytest.importorskip("gguf")

PARTS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
MORE = "66664464464464464464464464466666"
# mixture → usual type, and per part the types of 32 layers, by `llama_model_quantize` of llama-cpp-python 0.3.36 on a
# Llama with four query heads a key head; the output is q6_k in each.
LLAMA_CPP = {
    "q6_k": ("6", {}),
    "q5_k_m": ("5", {"attn_v": MORE.replace("4", "5"), "ffn_down": MORE.replace("4", "5")}),
    "q5_k_s": ("5", {}),
    "q4_k_m": ("4", {"attn_v": MORE, "ffn_down": MORE}),
    "q4_k_s": ("4", {"attn_v": "5555" + "4" * 28, "ffn_down": "5555" + "4" * 28}),
    "q3_k_l": ("3", {"attn_output": "5" * 32, "attn_v": "5" * 32, "ffn_down": "5" * 32}),
    "q3_k_m": ("3", {"attn_output": "4" * 32, "attn_v": "55" + "4" * 30, "ffn_down": "55" + "4" * 30}),
    "q3_k_s": ("3", {}),
    "q2_k": ("2", {"attn_output": "3" * 32, "attn_v": "4" * 32, "ffn_down": "3" * 32}),
}


def shapes(layers: int = 32, width: int = 256, *, tied: bool = False) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"output_norm.weight": (width,), "token_embd.weight": (320, width)}
    if not tied:
        found["output.weight"] = (320, width)
    for layer in range(layers):
        found |= {f"blk.{layer}.{part}.weight": (256, width) for part in PARTS}
        found[f"blk.{layer}.attn_norm.weight"] = (width,)
    return found


def config(family: str = "llama", layers: int = 32, heads: int = 8, groups: int = 4) -> object:
    return support.tiny_config(
        family, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads // groups
    )


@pytest.mark.parametrize("mixture", LLAMA_CPP)
def test_types_are_llama_cpps(mixture: str) -> None:
    usual, special = LLAMA_CPP[mixture]
    types = mixture_types(mixture, shapes(), config())
    for part in PARTS:
        found = "".join(types[f"blk.{layer}.{part}.weight"][1] for layer in range(32))
        assert found == special.get(part, usual * 32), part
    assert types["output.weight"] == "q6_k"
    assert types["token_embd.weight"] == f"q{usual}_k"
    assert types["blk.3.attn_norm.weight"] == "f32"


def test_tied_embeddings_have_the_outputs_type() -> None:
    assert mixture_types("q4_k_m", shapes(tied=True), config())["token_embd.weight"] == "q6_k"


def test_value_projections_get_more_where_they_are_few() -> None:
    """q2_k: by query heads a key head; a model of 80 layers with shared heads is llama.cpp's "70B"."""
    name = "blk.40.attn_v.weight"
    assert mixture_types("q2_k", shapes(), config(groups=2))["blk.0.attn_v.weight"] == "q3_k"
    assert mixture_types("q4_k_m", shapes(80), config(layers=80))[name] == "q5_k"
    assert mixture_types("q3_k_s", shapes(80), config(layers=80))[name] == "q5_k"
    assert mixture_types("q4_k_m", shapes(80), config(layers=80, groups=1))[name] == "q4_k"
    assert mixture_types("q4_k_m", shapes(80), config("qwen2", layers=80, groups=1))[name] == "q5_k"


def test_rows_that_are_no_super_blocks_fall_back_as_in_llama_cpp() -> None:
    """SmolLM2's rows are 576 wide."""
    names = {"q2_k": "q4_0", "q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
    assert {kind: fitting(kind, (8, 576)) for kind in names} == names
    assert fitting("q4_k", (8, 1536)) == "q4_k"
    assert fitting("q4_k", (8, 40)) == fitting("q8_0", (8, 40)) == "f16"
    assert fitting("q4_k", (256,)) == "f32"


def test_presets_name_mixtures() -> None:
    assert resolve("fast_quantized") == "q8_0"
    assert resolve("Quantized") == resolve("q4_k") == resolve("Q4_K_M") == "q4_k_m"
    assert resolve("dynamic") == "dynamic"
    assert set(PRESETS.values()) <= set(MIXTURES)
    with pytest.raises(ValueError, match="q4_k_m"):
        resolve("q4_k_xl")
    large, plain = (mixture_types(name, shapes(), config()) for name in ("q2_k_l", "q2_k"))
    assert {name: (plain[name], kind) for name, kind in large.items() if kind != plain[name]} == {
        "output.weight": ("q6_k", "q8_0"),
        "token_embd.weight": ("q2_k", "q8_0"),
    }


def test_the_file_says_its_type() -> None:
    kinds, sizes = {"a": "q4_k", "b": "q6_k"}, {"a": (3, 256), "b": (2, 256)}
    assert file_type("q4_k_s", kinds, sizes) == gguf.LlamaFileType.MOSTLY_Q4_K_S
    assert file_type("q2_k_l", kinds, sizes) == gguf.LlamaFileType.MOSTLY_Q2_K
    assert file_type("dynamic", kinds, sizes) == gguf.LlamaFileType.MOSTLY_Q4_K_M
    assert file_type("dynamic", kinds | {"a": "f32"}, sizes) == gguf.LlamaFileType.ALL_F32
    assert tensor_bytes("q4_k", (2, 512)) == 2 * 2 * 144
