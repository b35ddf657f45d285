"""Saving merged: adapters folded into plain weights, a checkpoint that transformers loads without fastft or PEFT.

The order is what makes it safe. Everything that can be refused is refused before a byte is written; the checkpoint is
written beside its place; it is loaded again and compared with the live model; only then does it take its place. So a
save that returns is one that answers like the model that was trained, and one that raises has changed nothing on disk
and nothing in the model.

Two bases are possible. "dequantized" adds the update to the weights that training saw (4 bits made dense): the saved
model is the trained one up to rounding. "original" adds it to the 16-bit checkpoint the 4 bits were made from: the
quantization error is gone, and with it the error the adapter learned to live with. Trained weights other than adapters
(heads, embeddings, norms, biases) are the live model's in both.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from fastft.patching.plan import inner_model
from fastft.saving.check import (
    LiveAnswers,
    SaveCheckError,
    allowed_difference,
    live_answers,
    relative,
    reload_answers,
)
from fastft.saving.fold import adapter_changes, is_quantized
from fastft.saving.folder import check_target, replacing
from fastft.saving.layout import Layout, plan_layout
from fastft.saving.original import OriginalCheckpoint, original_folder
from fastft.saving.probe import probe_layers
from fastft.saving.shards import Survival, write_shards

__all__ = ["SaveCheckError", "SavedModel", "adapter_bases", "dtype_named", "save_merged"]

logger = logging.getLogger(__name__)

Base = Literal["dequantized", "original"]
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class SavedModel:
    """A merged save that passed its check.

    Attributes:
        folder: where it is.
        base: "dequantized" or "original".
        dtype: of its weights.
        difference: of its logits to the live model's, root mean square, relative to the live logits'.
        largest_difference: the largest single logit's, absolute.
        allowed: what rounding may make of `difference` (not a bound with base "original").
        adapter_effect: relative difference that the adapters make in the live model; None if there are none.
        update_kept: share of the adapters' update that is in the written weights.
        layers_probed: how many layers were asked alone; the tensors of all others were compared bit by bit.
    """

    folder: Path
    base: str
    dtype: torch.dtype
    difference: float
    largest_difference: float
    allowed: float
    adapter_effect: float | None
    update_kept: float
    layers_probed: int


def save_merged(
    model: Any,
    tokenizer: Any,
    folder: str | os.PathLike[str],
    *,
    base: Base = "dequantized",
    dtype: str | torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
) -> SavedModel:
    """Save `model` with its active adapters folded in, as a plain transformers checkpoint; the model is not changed.

    Args:
        model: a PeftModel or a transformers model, quantized or not.
        tokenizer: saved beside the weights; None: none.
        folder: replaced as a whole if it holds an earlier save. It must not be the folder the model was loaded from.
        base: what quantized weights are replaced by: "dequantized" (what training saw) or "original" (the 16-bit
            checkpoint they were made from, which must be on this machine).
        dtype: of the saved weights, a torch dtype or its name. None: what the model computes in.
        max_shard_size: as in transformers.

    Returns:
        What was saved, and how near it is to the live model.

    Raises:
        ValueError: an unknown argument; a folder that should not be replaced; adapters that change nothing, or that
            cannot be folded.
        FileNotFoundError: the original checkpoint is not on this machine.
        OSError: no permission, no space, or a write failed. What was in `folder` is as before.
        SaveCheckError: the written checkpoint is not the live model. It was removed.
    """
    inner = inner_model(model)
    saved_dtype = dtype_named(dtype, inner)
    if base not in ("dequantized", "original"):
        raise ValueError(f"base={base!r} is not known: 'dequantized' (what training saw) or 'original'.")
    source = original_folder(inner)
    path = check_target(folder, source, *adapter_bases(inner))
    changes = adapter_changes(inner)
    if changes is False:
        raise ValueError(
            "The adapters change nothing: they are disabled, or not trained (B is zero). Saved merged, this would be "
            "the base model. Train or load them, set_adapter the right one, or save the base: model.unload()."
        )
    original = OriginalCheckpoint(source) if base == "original" else None
    if original is not None and path.exists() and path.resolve() == original.folder.resolve():
        raise ValueError(f"{path} is the original checkpoint itself; choose another folder.")
    layout = plan_layout(inner, saved_dtype, base)
    live = live_answers(inner, has_adapter=bool(changes))
    with replacing(path, layout.bytes()) as temporary:
        survival = write_shards(inner, layout, temporary, max_shard_size, original)
        _write_rest(inner, tokenizer, layout, temporary)
        saved = _checked(inner, layout, live, survival, temporary, path, saved_dtype, original)
    logger.info(
        "fastft: saved %s (%s base, %s): logits differ from the live model's by %.2g of their size (allowed %.2g), at "
        "most %.3g; the adapters' own effect is %s",
        path, base, saved_dtype, saved.difference, saved.allowed, saved.largest_difference, saved.adapter_effect,
    )  # fmt: skip
    return saved


def dtype_named(dtype: str | torch.dtype | None, inner: Any) -> torch.dtype:
    """The dtype that a save's `dtype` means; None: that of most of the model's weights.

    Raises:
        ValueError: not one that is saved.
    """
    if dtype is None:
        dtype = _own_dtype(inner)
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if found not in _DTYPES:
        raise ValueError(f"dtype={dtype!r} cannot be saved; float32, bfloat16 and float16 can.")
    return found


def _own_dtype(inner: Any) -> torch.dtype:
    """The dtype of most of the model's plain weights: adapters, and what is trained beside them, are often float32."""
    sizes: Counter[torch.dtype] = Counter()
    for name, parameter in inner.named_parameters():
        if parameter.is_floating_point() and not any(part in name for part in ("lora_", "modules_to_save", "_delta")):
            sizes[parameter.dtype] += parameter.numel()
    return sizes.most_common(1)[0][0] if sizes else inner.dtype


def adapter_bases(inner: Any) -> list[str | None]:
    """What the adapters' own files name as their base: folders, if anything, that a save must not replace."""
    configs = getattr(inner, "peft_config", None) or {}
    return [getattr(config, "base_model_name_or_path", None) for config in configs.values()]


def _write_rest(inner: Any, tokenizer: Any, layout: Layout, folder: Path) -> None:
    layout.config.save_pretrained(folder)
    generation = getattr(inner, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _checked(
    inner: Any, layout: Layout, live: LiveAnswers, survival: Survival, written: Path, path: Path,
    dtype: torch.dtype, original: OriginalCheckpoint | None,
) -> SavedModel:  # fmt: skip
    """Compare what was written with the live model.

    Raises:
        SaveCheckError: they differ by more than rounding explains, or the adapters' change is gone.
    """
    if survival.share < 0.5:
        raise SaveCheckError(
            f"the adapters' change vanished: {survival.share:.0%} of the update is left after rounding to {dtype}. "
            f"Nothing was saved to {path}. Save with dtype='float32', or keep the adapter beside its base "
            "(model.save_pretrained)."
        )
    probed = probe_layers(inner, layout, OriginalCheckpoint(str(written)), survival.shares, original)
    logits = reload_answers(written, layout.model_class, inner.config, dtype, live.tokens)
    difference = relative(logits - live.logits, live.logits)
    allowed = allowed_difference(layout.config, live.eps, torch.finfo(dtype).eps)
    effect = None if live.without is None else relative(live.logits - live.without, live.logits)
    exact = original is None or not any(is_quantized(module) for module in inner.modules())
    if exact and not difference <= allowed:
        raise SaveCheckError(
            f"the written checkpoint is not the live model: its logits differ by {difference:.3g} of their size, and "
            f"rounding to {dtype} allows {allowed:.3g} (the adapters' own effect is {effect}). Nothing was saved to "
            f"{path}. Please report this with fastft.report(model); until then save the adapter alone."
        )
    if not exact and original is not None and live.without is not None and effect is not None and effect > allowed:
        plain = reload_answers(original.folder, layout.model_class, inner.config, dtype, live.tokens)
        _check_effect(logits - plain, live.logits - live.without, path)
    largest = float((logits - live.logits).abs().max())
    base = "dequantized" if original is None else "original"
    return SavedModel(path, base, dtype, difference, largest, allowed, effect, survival.share, probed)


def _check_effect(moved: torch.Tensor, expected: torch.Tensor, path: Path) -> None:
    """The adapters must move the original checkpoint's logits about as they move the live model's."""
    alike = float(torch.nn.functional.cosine_similarity(moved.flatten().double(), expected.flatten().double(), dim=0))
    size = relative(moved, expected)
    if not (alike > 0.5 and 0.5 < size < 2.0):
        raise SaveCheckError(
            f"merged into the original checkpoint, the adapters do something else than in the live model: direction "
            f"{alike:.2f} alike (1 is the same), {size:.2f} times as large. Nothing was saved to {path}. Use "
            "base='dequantized', which is what training saw."
        )
