"""The shapes of real models: what the benchmark draws its inputs, and random-weight checkpoints, from.

The numbers are those of the published configurations on the hub.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MODELS", "ModelShape", "find_model", "shape_of_folder"]


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only model; `family` is transformers' `model_type`."""

    name: str
    family: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool  # whether the head is the embedding
    rope_theta: float = 500_000.0

    @property
    def layer_weights(self) -> int:
        """Elements of one layer's seven projections."""
        attention = (2 * self.heads + 2 * self.kv_heads) * self.head_dim * self.hidden
        return attention + 3 * self.intermediate * self.hidden

    @property
    def adapter_widths(self) -> int:
        """Sum over one layer's seven projections of inputs + outputs: times the rank, its LoRA parameters."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return 2 * (self.hidden + query) + 2 * (self.hidden + key) + 3 * (self.hidden + self.intermediate)


_ALL = (
    ModelShape("Llama-3.2-1B", "llama", 2048, 8192, 16, 32, 8, 64, 128256, True),
    ModelShape("Llama-3.2-3B", "llama", 3072, 8192, 28, 24, 8, 128, 128256, True),
    ModelShape("Llama-3.1-8B", "llama", 4096, 14336, 32, 32, 8, 128, 128256, False),
    ModelShape("Llama-3.1-70B", "llama", 8192, 28672, 80, 64, 8, 128, 128256, False),
    ModelShape("Qwen2.5-0.5B", "qwen2", 896, 4864, 24, 14, 2, 64, 151936, True, 1_000_000.0),
    ModelShape("Qwen2.5-7B", "qwen2", 3584, 18944, 28, 28, 4, 128, 152064, False, 1_000_000.0),
    ModelShape("Qwen3-0.6B", "qwen3", 1024, 3072, 28, 16, 8, 128, 151936, True, 1_000_000.0),
    ModelShape("Qwen3-8B", "qwen3", 4096, 12288, 36, 32, 8, 128, 151936, False, 1_000_000.0),
    ModelShape("Mistral-7B", "mistral", 4096, 14336, 32, 32, 8, 128, 32768, False, 1_000_000.0),
    ModelShape("SmolLM2-135M", "llama", 576, 1536, 30, 9, 3, 64, 49152, True, 100_000.0),
    # No real model: small enough for a CPU.
    ModelShape("tiny", "llama", 64, 128, 2, 4, 2, 16, 512, True),
)
MODELS = {shape.name: shape for shape in _ALL}

_SHORT_NAMES = {
    "llama-1b": "Llama-3.2-1B",
    "llama-3b": "Llama-3.2-3B",
    "llama-8b": "Llama-3.1-8B",
    "llama-70b": "Llama-3.1-70B",
    "mistral": "Mistral-7B",
    "smollm2": "SmolLM2-135M",
}


def find_model(name: str) -> ModelShape:
    """The shape of that name, whatever its case; `llama-1b`, `llama-3b`, `llama-8b`, `llama-70b` are short for Llama's.

    Raises:
        ValueError: no such name; the message has those there are.
    """
    by_lower_name = {known.lower(): shape for known, shape in MODELS.items()}
    name = _SHORT_NAMES.get(name.lower(), name)
    if name.lower() not in by_lower_name:
        raise ValueError(f"no model {name!r} in the benchmark's registry; it has {', '.join(MODELS)}.")
    return by_lower_name[name.lower()]


def shape_of_folder(folder: Path) -> ModelShape:
    """The shape of a checkpoint, read from its config.json; its name is the folder's.

    Raises:
        ValueError: there is no config.json, or it lacks a size of a decoder-only model.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); give the folder of a transformers checkpoint.") from error
    try:
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        return ModelShape(
            name=folder.resolve().name,
            family=config["model_type"],
            hidden=hidden,
            intermediate=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            vocabulary=config["vocab_size"],
            tied=config.get("tie_word_embeddings", True),
        )
    except KeyError as error:
        raise ValueError(
            f"{path} has no {error}; only decoder-only models with these sizes are benchmarked."
        ) from error
