"""The tensors of a merged checkpoint as a GGUF has them: by its names, in its order, one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from fastft.saving.gguf_model import reordered, require_architecture
from fastft.saving.original import OriginalCheckpoint

__all__ = ["GgufTensors", "gguf_names"]


class GgufTensors:
    """A checkpoint's tensors by GGUF name, read from disk when they are asked for.

    Args:
        checkpoint: the merged one.
        config: its transformers configuration.

    Raises:
        ValueError: a tensor that has no name in GGUF.
    """

    def __init__(self, checkpoint: OriginalCheckpoint, config: Any) -> None:
        self.checkpoint = checkpoint
        self.config = config
        self.names = gguf_names(checkpoint.files, config)
        self.shapes = {target: checkpoint.shape(name) for target, name in self.names.items()}

    def tensor(self, target: str) -> Tensor:
        """The tensor of this GGUF name, rows in GGUF's order, on the CPU."""
        name = self.names[target]
        return reordered(name, self.checkpoint.tensor(name), self.config)


def gguf_names(names: Iterable[str], config: Any) -> Mapping[str, str]:
    """GGUF name → transformers name, in the order of a GGUF: layer by layer.

    Raises:
        ValueError: a tensor that has no name in GGUF.
    """
    import gguf

    architecture = require_architecture(config)
    index = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    known = gguf.get_tensor_name_map(index, config.num_hidden_layers)
    targets = {}
    for name in sorted(names, key=_layer_order):
        target = known.get_name(name, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise ValueError(
                f"{name} has no name in GGUF's {architecture!r}: this model is not a plain one of its family."
            )
        targets[target] = name
    return targets


def _layer_order(name: str) -> tuple[int, str]:
    number = next((part for part in name.split(".") if part.isdigit()), "-1")
    return int(number), name
