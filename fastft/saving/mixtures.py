"""Which type each tensor of a GGUF is stored in: llama.cpp's mixtures, and what stands in for it.

A mixture is named after its usual type and stores a few kinds of matrices in more bits: the output (with tied weights
the embedding, which is the output then), the value projections, the down projections, in _m only of the first and last
eighth of the layers and every third between. The rules are those of llama.cpp's `llama_tensor_get_type` for the
families supported here, so a file has the sizes people know.

The K-quants come in super-blocks of 256 weights of a row. A matrix whose rows are no multiple of it is stored in the
next plain type (blocks of 32), as in llama.cpp: q2_k, q3_k → q4_0, q4_k → q5_0, q5_k → q5_1, q6_k → q8_0; and where
that does not fit either, in f16. Vectors (norms, biases) stay f32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["MIXTURES", "PRESETS", "file_type", "fitting", "mixture_types", "resolve", "tensor_bytes"]

PRESETS = {"fast_quantized": "q8_0", "quantized": "q4_k_m", "q3_k": "q3_k_m", "q4_k": "q4_k_m", "q5_k": "q5_k_m"}
# name → type of most matrices, and gguf.LlamaFileType
MIXTURES = {
    "f32": ("f32", "ALL_F32"),
    "f16": ("f16", "MOSTLY_F16"),
    "bf16": ("bf16", "MOSTLY_BF16"),
    "q8_0": ("q8_0", "MOSTLY_Q8_0"),
    "q6_k": ("q6_k", "MOSTLY_Q6_K"),
    "q5_k_m": ("q5_k", "MOSTLY_Q5_K_M"),
    "q5_k_s": ("q5_k", "MOSTLY_Q5_K_S"),
    "q5_1": ("q5_1", "MOSTLY_Q5_1"),
    "q5_0": ("q5_0", "MOSTLY_Q5_0"),
    "q4_k_m": ("q4_k", "MOSTLY_Q4_K_M"),
    "q4_k_s": ("q4_k", "MOSTLY_Q4_K_S"),
    "q4_1": ("q4_1", "MOSTLY_Q4_1"),
    "q4_0": ("q4_0", "MOSTLY_Q4_0"),
    "q3_k_l": ("q3_k", "MOSTLY_Q3_K_L"),
    "q3_k_m": ("q3_k", "MOSTLY_Q3_K_M"),
    "q3_k_s": ("q3_k", "MOSTLY_Q3_K_S"),
    "q2_k_l": ("q2_k", "MOSTLY_Q2_K"),
    "q2_k": ("q2_k", "MOSTLY_Q2_K"),
}
_FALLBACK = {"q2_k": "q4_0", "q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
_ENDS = ("output.weight", "token_embd.weight")


@dataclass(frozen=True)
class _Model:
    """What the rules ask about a model."""

    layers: int
    queries_per_key: int
    large: bool  # what llama.cpp calls a 70B, whose value projections are small
    tied: bool


def resolve(quantization: str) -> str:
    """The mixture's name (or "dynamic") that a user's `quantization` means.

    Raises:
        ValueError: not known.
    """
    name = quantization.lower()
    name = PRESETS.get(name, name)
    if name != "dynamic" and name not in MIXTURES:
        raise ValueError(
            f"quantization={quantization!r} is not known here: dynamic, {', '.join((*PRESETS, *MIXTURES))}."
        )
    return name


def mixture_types(mixture: str, shapes: Mapping[str, tuple[int, ...]], config: Any) -> dict[str, str]:
    """GGUF tensor name → type, in the order of `shapes`.

    Args:
        mixture: a key of `MIXTURES`.
        shapes: by GGUF tensor name.
        config: the transformers configuration.
    """
    groups = config.num_attention_heads // config.num_key_value_heads
    large = config.num_hidden_layers == 80 and (groups > 1 or config.model_type == "qwen2")
    model = _Model(config.num_hidden_layers, groups, large, "output.weight" not in shapes)
    return {name: fitting(_wanted(mixture, name, model), shape) for name, shape in shapes.items()}


def fitting(kind: str, shape: tuple[int, ...]) -> str:
    """`kind`, or what takes its place for a tensor of this shape."""
    import gguf

    if len(shape) < 2:
        return "f32"
    for candidate in (kind, _FALLBACK.get(kind, "f16")):
        if shape[-1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[candidate.upper()]][0] == 0:
            return candidate
    return "f16"


def _wanted(mixture: str, name: str, model: _Model) -> str:
    """The type that the mixture gives a matrix, whatever its rows."""
    usual = MIXTURES[mixture][0]
    if mixture == "q2_k_l" and name in _ENDS:
        return "q8_0"
    if name == ("token_embd.weight" if model.tied else "output.weight"):
        if usual.endswith("_k"):
            return "q6_k"
        return "q8_0" if usual[:2] in ("q4", "q5") else usual
    part = name.split(".")
    layer = int(part[1]) if part[0] == "blk" else -1
    rule = {"attn_v": _value, "ffn_down": _down, "attn_output": _attention_output}.get(part[-2])
    return usual if rule is None or layer < 0 else rule(mixture, layer, model) or usual


def _value(mixture: str, layer: int, model: _Model) -> str | None:
    kinds = {
        "q2_k": "q4_k" if model.queries_per_key >= 4 else "q3_k",
        "q2_k_l": "q4_k" if model.queries_per_key >= 4 else "q3_k",
        "q3_k_m": "q5_k" if layer < 2 else "q4_k",
        "q3_k_l": "q5_k",
        "q4_k_s": "q5_k" if layer < 4 else None,
        "q4_k_m": "q6_k" if _more_bits(layer, model.layers) else None,
        "q5_k_m": "q6_k" if _more_bits(layer, model.layers) else None,
    }
    kind = kinds.get(mixture)
    if model.large and (kind or MIXTURES[mixture][0]) in ("q3_k", "q4_k"):
        return "q5_k"
    return kind


def _down(mixture: str, layer: int, model: _Model) -> str | None:
    kinds = {
        "q2_k": "q3_k",
        "q2_k_l": "q3_k",
        "q3_k_m": "q5_k" if layer < model.layers // 16 else "q4_k",
        "q3_k_l": "q5_k",
        "q4_k_s": "q5_k" if layer < model.layers // 8 else None,
        "q4_k_m": "q6_k" if _more_bits(layer, model.layers) else None,
        "q5_k_m": "q6_k" if _more_bits(layer, model.layers) else None,
    }
    return kinds.get(mixture)


def _attention_output(mixture: str, layer: int, model: _Model) -> str | None:
    return {"q2_k": "q3_k", "q2_k_l": "q3_k", "q3_k_m": "q4_k", "q3_k_l": "q5_k"}.get(mixture)


def _more_bits(layer: int, layers: int) -> bool:
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def tensor_bytes(kind: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor in a GGUF, without padding."""
    import gguf

    size, packed = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]]
    count = 1
    for width in shape:
        count *= width
    return count // size * packed


def file_type(mixture: str, types: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> Any:
    """gguf.LlamaFileType for `general.file_type`; of a dynamic choice, that of the type which most weights have."""
    import gguf

    if mixture != "dynamic":
        return gguf.LlamaFileType[MIXTURES[mixture][1]]
    weights: dict[str, int] = {}
    for name, kind in types.items():
        weights[kind] = weights.get(kind, 0) + tensor_bytes("f32", shapes[name])
    most = max(weights, key=lambda kind: weights[kind])
    return gguf.LlamaFileType[MIXTURES[PRESETS.get(most, most)][1]]
