"""Tensors of the 16-bit checkpoint that a quantized model was made from, read one at a time, never over the network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

__all__ = ["OriginalCheckpoint", "original_folder"]


def original_folder(inner: Any) -> str | None:
    """The folder or hub name that `inner` was loaded from, as transformers remembers it."""
    return getattr(inner, "name_or_path", None) or getattr(inner.config, "_name_or_path", None) or None


class OriginalCheckpoint:
    """A checkpoint's safetensors by tensor name.

    Args:
        name: a folder, or a hub name that is in this machine's cache.

    Raises:
        FileNotFoundError: it is not on this machine, or holds no safetensors.
        ValueError: it is quantized itself.
    """

    def __init__(self, name: str | None) -> None:
        self.folder = _local(name)
        config = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        if "quantization_config" in config:
            method = config["quantization_config"].get("quant_method", "?")
            raise ValueError(
                f"base='original': {self.folder} is quantized itself ({method}), so there is no 16-bit original to "
                "merge into. Use base='dequantized', which is also what training saw."
            )
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            self.files: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        elif (self.folder / "model.safetensors").is_file():
            from safetensors import safe_open

            with safe_open(self.folder / "model.safetensors", framework="pt") as file:
                self.files = dict.fromkeys(file.keys(), "model.safetensors")
        else:
            raise FileNotFoundError(
                f"base='original': {self.folder} holds no model.safetensors. Use base='dequantized'."
            )

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor that is there, without reading it."""
        from safetensors import safe_open

        with safe_open(self.folder / self.files[name], framework="pt") as file:
            return tuple(file.get_slice(name).get_shape())

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """One tensor, on the CPU.

        Raises:
            ValueError: it is not there, or of another shape.
        """
        from safetensors import safe_open

        if name not in self.files:
            raise ValueError(f"base='original': {self.folder} has no tensor {name!r}. Use base='dequantized'.")
        with safe_open(self.folder / self.files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        if shape is not None and tuple(tensor.shape) != shape:
            raise ValueError(
                f"base='original': {name} is {tuple(tensor.shape)} in {self.folder}, and {shape} in the live model: it "
                "is not the checkpoint this model came from. Use base='dequantized'."
            )
        return tensor


def _local(name: str | None) -> Path:
    if not name:
        raise FileNotFoundError("base='original': the model does not say where it was loaded from; use 'dequantized'.")
    if (Path(name) / "config.json").is_file():
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True, allow_patterns=["*.json", "*.safetensors"]))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise FileNotFoundError(
            f"base='original': {name!r}, which this model was loaded from, is neither a folder here nor in the hub's "
            "cache, and saving does not use the network. Download it first, or use base='dequantized'."
        ) from error
