"""What a merged checkpoint holds: the plain model's tensors by name, shape and size, and which of them are one.

The names are those of the same class built again from the configuration, without quantization and without memory (on
the meta device), so nothing of PEFT's or bitsandbytes' own naming can leak into a file. Tied weights stay tied as long
as they are equal after folding. An adapter (or full training) on one of the two makes them differ: then both are
written, and `tie_word_embeddings` becomes false.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastft.saving.fold import base_module, fold

__all__ = ["Layout", "plan_layout"]


@dataclass(frozen=True)
class Layout:
    """A merged checkpoint before it is written.

    Attributes:
        config: of the plain model, as it is saved.
        tensors: name → meta tensor of the saved shape and dtype.
        model_class: of the plain model.
    """

    config: Any
    tensors: dict[str, Tensor]
    model_class: type

    def bytes(self) -> int:
        """Size of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def owner(inner: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The live module and the attribute that stand where the plain model has tensor `name`.

    Raises:
        ValueError: the live model has nothing there.
    """
    path, _, attribute = name.rpartition(".")
    try:
        return inner.get_submodule(path), attribute
    except AttributeError as error:
        raise ValueError(
            f"{name}: the live model has no module {path!r}, so it is not the model its configuration describes; "
            "it cannot be saved merged. Save the adapter (model.save_pretrained) instead."
        ) from error


def plan_layout(inner: Any, dtype: torch.dtype, base: str) -> Layout:
    """Names, shapes and dtypes of the plain model of `inner`; no weight is copied (tied adapted ones are compared).

    Args:
        inner: the transformers model under any PEFT wrapper.
        dtype: of every floating-point tensor.
        base: "dequantized" or "original", recorded in the configuration.
    """
    config = copy.deepcopy(inner.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    for attribute in ("_pre_quantization_dtype",):
        config.__dict__.pop(attribute, None)
    tied = _is_tied(inner)
    if getattr(config, "tie_word_embeddings", False) and not tied:
        config.tie_word_embeddings = False
    with torch.device("meta"):
        plain = type(inner)(copy.deepcopy(config))
    if tied:
        plain.tie_weights()
    tensors: dict[str, Tensor] = {}
    head = _name_of(plain, plain.get_output_embeddings()) if tied else None
    for name, tensor in plain.state_dict().items():
        if name != head:
            kind = dtype if tensor.is_floating_point() else tensor.dtype
            tensors[name] = torch.empty(tensor.shape, dtype=kind, device="meta")
    config.architectures = [type(inner).__name__]
    config.dtype = dtype
    config.fastft_merge = {"base": base}
    return Layout(config, tensors, type(inner))


def _name_of(model: nn.Module, module: nn.Module | None) -> str | None:
    return next((f"{name}.weight" for name, found in model.named_modules() if found is module), None)


def _is_tied(inner: Any) -> bool:
    """Whether the head's weight is the embedding's, also after folding."""
    if not getattr(inner.config, "tie_word_embeddings", False):
        return False
    embedding, head = inner.get_input_embeddings(), inner.get_output_embeddings()
    if embedding is None or head is None:
        return False
    first, second = base_module(embedding), base_module(head)
    if first is embedding and second is head:
        return getattr(first, "weight", None) is getattr(second, "weight", None)
    one = fold(embedding, "weight", "the input embedding")[1]
    other = fold(head, "weight", "the output embedding")[1]
    return one.shape == other.shape and bool(torch.equal(one.float(), other.float().to(one.device)))
