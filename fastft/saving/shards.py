"""Writing a merged checkpoint, shard by shard and tensor by tensor: memory holds one weight, never a shard.

While a weight is written, it is also asked whether the adapter outlived the rounding. With W₀ the base, Δ the update in
float32 and R the rounding to the saved dtype, the share of the update that is in the file is

    ⟨R(W₀ + Δ) − W₀, Δ⟩ / ⟨Δ, Δ⟩

summed over all weights: 1 if it is all there, 0 if it was too small to move a bfloat16, or never folded in.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastft.saving.fold import fold, is_quantized
from fastft.saving.layout import Layout, owner
from fastft.saving.original import OriginalCheckpoint
from fastft.saving.safetensors_file import write_safetensors
from fastft.saving.workers import in_order

__all__ = ["Survival", "write_shards"]


@dataclass
class Survival:
    """How much of the adapters' update is in the written weights.

    Attributes:
        written: Σ ⟨R(W₀ + Δ) − W₀, Δ⟩.
        trained: Σ ⟨Δ, Δ⟩.
        shares: the share of each tensor that has an update, by name.
    """

    written: float = 0.0
    trained: float = 0.0
    shares: dict[str, float] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """1.0 if everything is there; 1.0 too if there was nothing."""
        return self.written / self.trained if self.trained else 1.0

    def add(self, name: str, base: Tensor, folded: Tensor, saved: Tensor) -> None:
        """Take one weight into account, some of it at a time; all of one shape, `base` and `folded` float32."""

        def sums(parts: tuple[Tensor, ...]) -> tuple[float, float]:
            some_base, some_folded, some_saved = parts
            update = some_folded - some_base
            return float(update @ update), float((some_saved.float() - some_base) @ update)

        found = list(in_order(sums, zip(*map(_parts, (base, folded, saved)), strict=True)))
        trained, written = (math.fsum(part) for part in zip(*found, strict=True))
        self.trained += trained
        self.written += written
        self.shares[name] = written / trained if trained else 1.0


def write_shards(
    inner: Any, layout: Layout, folder: Path, max_shard_size: int | str, original: OriginalCheckpoint | None
) -> Survival:
    """Write every tensor of `layout` to safetensors in `folder`, with an index if there are several.

    Raises:
        ValueError: a weight that cannot be folded, has another shape than its configuration says, or does not fit the
            dtype.
        OSError: writing failed.
    """
    from huggingface_hub import split_torch_state_dict_into_shards

    split = split_torch_state_dict_into_shards(layout.tensors, max_shard_size=max_shard_size)
    survival = Survival()
    for filename, names in split.filename_to_tensors.items():
        planned = {name: layout.tensors[name] for name in names}
        write_safetensors(
            folder / filename, planned, lambda name: _saved(inner, name, layout.tensors[name], original, survival)
        )
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    return survival


@torch.no_grad()
def _saved(inner: Any, name: str, planned: Tensor, original: OriginalCheckpoint | None, survival: Survival) -> Tensor:
    module, attribute = owner(inner, name)
    replacement = None
    if original is not None and attribute == "weight" and is_quantized(module):
        if getattr(module, "merged", False):
            raise ValueError(
                f"{name}: its adapter is merged into the 4-bit weight already, so it cannot go into the original. Call "
                "model.unmerge_adapter() first, or use base='dequantized'."
            )
        replacement = original.tensor(name, tuple(planned.shape)).to(next(module.parameters()).device)
    base, folded = fold(module, attribute, name, base=replacement)
    if folded.shape != planned.shape:
        raise ValueError(
            f"{name} is {tuple(folded.shape)} in the live model, but {tuple(planned.shape)} by its configuration. If "
            "embeddings were resized, use model.resize_token_embeddings, which keeps both alike."
        )
    saved = folded.to(planned.dtype).contiguous()
    if folded is not base:
        survival.add(name, base, folded, saved)
    if saved.is_floating_point() and not _is_finite(saved):
        reason = "holds inf or NaN" if not _is_finite(folded) else f"does not fit {planned.dtype}"
        raise ValueError(f"{name} {reason}: not saved. Use dtype='bfloat16' or 'float32', or look at the training run.")
    return saved


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """A tensor's elements, as many at a time as stay in a core's cache."""
    return tensor.reshape(-1).split(2**20)


def _is_finite(tensor: Tensor) -> bool:
    return all(in_order(lambda part: bool(torch.isfinite(part).all()), _parts(tensor)))
