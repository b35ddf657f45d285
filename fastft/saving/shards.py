"""Writing a merged checkpoint, shard by shard: memory holds one shard and one weight in float32, never the model.

While a weight is written, it is also asked whether the adapter outlived the rounding. With W₀ the base, Δ the update in
float32 and R the rounding to the saved dtype, the share of the update that is in the file is

    ⟨R(W₀ + Δ) − W₀, Δ⟩ / ⟨Δ, Δ⟩

summed over all weights: 1 if it is all there, 0 if it was too small to move a bfloat16, or never folded in.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastft.saving.fold import fold, is_quantized
from fastft.saving.layout import Layout, owner
from fastft.saving.original import OriginalCheckpoint

__all__ = ["Survival", "write_shards"]


@dataclass
class Survival:
    """How much of the adapters' update is in the written weights.

    Attributes:
        written: Σ ⟨R(W₀ + Δ) − W₀, Δ⟩.
        trained: Σ ⟨Δ, Δ⟩.
    """

    written: float = 0.0
    trained: float = 0.0

    @property
    def share(self) -> float:
        """1.0 if everything is there; 1.0 too if there was nothing."""
        return self.written / self.trained if self.trained else 1.0

    def add(self, base: Tensor, folded: Tensor, saved: Tensor) -> None:
        """Take one weight into account; all of one shape, `base` and `folded` float32."""
        update = folded - base
        self.trained += float(update.square().sum(dtype=torch.float64))
        self.written += float((saved.float() - base).mul_(update).sum(dtype=torch.float64))


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
    from safetensors.torch import save_file

    split = split_torch_state_dict_into_shards(layout.tensors, max_shard_size=max_shard_size)
    survival = Survival()
    for filename, names in split.filename_to_tensors.items():
        shard = {name: _saved(inner, name, layout.tensors[name], original, survival) for name in names}
        save_file(shard, folder / filename, metadata={"format": "pt"})
        del shard
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
    saved = folded.to(planned.dtype)
    if folded is not base:
        survival.add(base, folded, saved)
    if saved.is_floating_point() and not bool(torch.isfinite(saved).all()):
        reason = "holds inf or NaN" if not bool(torch.isfinite(folded).all()) else f"does not fit {planned.dtype}"
        raise ValueError(f"{name} {reason}: not saved. Use dtype='bfloat16' or 'float32', or look at the training run.")
    # A copy also where nothing was rounded: the file must not be written from memory that training may change.
    return saved.contiguous().cpu().clone() if saved.data_ptr() == folded.data_ptr() else saved.contiguous().cpu()
