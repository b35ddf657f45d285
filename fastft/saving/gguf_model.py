"""What a GGUF says about a model of a supported family, and how its tensors lie there.

Names come from the `gguf` library's own map. Two things are not in it. llama.cpp's "llama" architecture (Llama,
Mistral) rotates neighbouring pairs where Hugging Face rotates halves, so the rows of q and k are reordered head by
head. And Llama 3's RoPE scaling is not a rule in GGUF but a tensor, `rope_freqs.weight`: by how much each frequency is
divided.
"""

from __future__ import annotations

import math
from typing import Any

import numpy
import torch
from torch import Tensor

__all__ = ["ARCHITECTURES", "add_metadata", "frequency_divisors", "reordered", "require_architecture"]

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


def require_architecture(config: Any) -> str:
    """GGUF's name of the architecture.

    Raises:
        ValueError: a family, a RoPE scaling or an attention window that is not supported.
    """
    name = ARCHITECTURES.get(config.model_type)
    if name is None:
        raise ValueError(
            f"model_type {config.model_type!r} cannot be written as GGUF here (known: {', '.join(ARCHITECTURES)}). "
            "Save merged, and convert with llama.cpp."
        )
    kind = _rope(config).get("rope_type", "default")
    if kind not in ("default", "linear", "yarn", "llama3"):
        raise ValueError(
            f"RoPE scaling {kind!r} cannot be written as GGUF here (default, linear, yarn and llama3 can)."
        )
    if getattr(config, "mlp_bias", False) and name == "llama":
        raise ValueError("biases in the MLP (mlp_bias=True) cannot be written as GGUF here. Save merged instead.")
    _refuse_window(config)
    return name


def _refuse_window(config: Any) -> None:
    """llama.cpp attends to everything in these architectures: none of them has a key for a window."""
    window = getattr(config, "sliding_window", None)
    slides = config.model_type == "mistral" or "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if slides and window is not None and window < config.max_position_embeddings:
        raise ValueError(
            f"this model attends to the last {window} tokens only (sliding_window), and GGUF's architecture "
            f"{ARCHITECTURES[config.model_type]!r} has no key for that: llama.cpp would answer differently after "
            f"{window} tokens. Up to there nothing differs: set model.config.max_position_embeddings = {window}, which "
            "becomes the file's context length, and save again."
        )


def _rope(config: Any) -> dict[str, Any]:
    return getattr(config, "rope_parameters", None) or {}


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def add_metadata(writer: Any, config: Any) -> None:
    """Write the hyperparameters of `config` to a `gguf.GGUFWriter`."""
    import gguf

    rope, width = _rope(config), _head_dim(config)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
    writer.add_rope_dimension_count(width)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_vocab_size(config.vocab_size)
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))
    if kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(float(rope["factor"]))
        trained = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        writer.add_rope_scaling_orig_ctx_len(int(trained))


def reordered(name: str, tensor: Tensor, config: Any) -> Tensor:
    """`tensor` (of Hugging Face's `name`) with its rows in GGUF's order.

    Args:
        name: "model.layers.0.self_attn.q_proj.weight" and so on.
        tensor: [out, in] or [out].
    """
    if ARCHITECTURES[config.model_type] != "llama":
        return tensor
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])  # [heads, 2, width / 2, …]
    return halves.transpose(1, 2).reshape(tensor.shape)


def frequency_divisors(config: Any) -> numpy.ndarray | None:
    """Llama 3's RoPE scaling as GGUF has it, float32 [head_dim / 2]; None for other scalings."""
    rope, width = _rope(config), _head_dim(config)
    if rope.get("rope_type", "default") != "llama3":
        return None
    factor, low, high = float(rope["factor"]), float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    trained = rope["original_max_position_embeddings"]
    frequencies = float(rope["rope_theta"]) ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    turns = trained * frequencies / (2 * math.pi)  # rotations over the trained window
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    scaled: numpy.ndarray = (1 / ((1 - smooth) / factor + smooth)).float().numpy()
    return scaled
