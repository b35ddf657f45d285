"""Saving a live model compressed: merged as `save_merged` does it, checks and all, then compressed from the files.

The merged checkpoint lies in a temporary folder beside the target, or where `keep_merged` says; there it stays whole
whatever happens afterwards. Between the two halves only files pass, so the live model, its patches and its adapters
never meet llm-compressor.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastft.patching.plan import inner_model
from fastft.saving.compressed.checkpoint import SavedCompressed, result, write_compressed
from fastft.saving.compressed.environment import require_llmcompressor
from fastft.saving.compressed.plan import Algorithm, plan_compression
from fastft.saving.compressed.schemes import resolve_scheme
from fastft.saving.fold import fold
from fastft.saving.folder import check_target, replacing
from fastft.saving.layout import owner, plan_layout
from fastft.saving.merged import Base, adapter_bases, dtype_named, save_merged
from fastft.saving.original import original_folder

__all__ = ["save_compressed"]


def save_compressed(
    model: Any,
    tokenizer: Any,
    folder: str | os.PathLike[str],
    *,
    scheme: str = "fp8_dynamic",
    calibration: Iterable[Any] | None = None,
    algorithm: Algorithm | None = None,
    group_size: int | None = None,
    smoothing_strength: float | None = 0.8,
    ignore: Sequence[str] = ("lm_head",),
    max_calibration_samples: int = 512,
    max_seq_length: int = 2048,
    keep_merged: str | os.PathLike[str] | None = None,
    base: Base = "dequantized",
    dtype: str | torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
) -> SavedCompressed:
    """Save `model` merged and compressed, as a compressed-tensors checkpoint for vLLM and transformers.

    Args:
        model: as `save_merged`; it is not changed.
        tokenizer: saved beside the weights, and used on calibration texts.
        folder: replaced as a whole if it holds an earlier save.
        scheme: "fp8_dynamic", "fp8", "int8" (or "w8a8"), "w4a16", "nvfp4", "nvfp4a16", "mxfp4", "mxfp4a16".
        calibration: texts, or rows of a data set with "messages", "text", "prompt" and "completion", or "input_ids",
            like those the model will see. "fp8" and "nvfp4" need it; "int8" and "w4a16" are better for it; on the rest
            it has no effect unless `algorithm` is "gptq".
        algorithm: "rtn" rounds weights to nearest, "gptq" by what they do to the calibration data. None: "gptq" for
            "int8" and "w4a16" with data, else "rtn".
        group_size: for "w4a16": 128, 64 or 32 weights share a scale. None: 128.
        smoothing_strength: of SmoothQuant before GPTQ in "int8", for families whose norms allow it. None: without.
        ignore: modules that stay as they are: names, class names, or "re:" and a regular expression.
        max_calibration_samples: rows of `calibration` that are used, from its start.
        max_seq_length: tokens of a row that are used.
        keep_merged: a folder for the merged checkpoint. None: it is removed afterwards.
        base: as `save_merged`.
        dtype: as `save_merged`; also of what stays uncompressed. NVFP4 and MXFP4 are bfloat16 alone.
        max_shard_size: as `save_merged`.

    Returns:
        What was saved, how near it is to the merged model, and how near that is to the live one.

    Raises:
        ImportError: llm-compressor is missing, or tied to other versions than those installed.
        ValueError: an unknown option; layers the format cannot take; data that is missing; what `save_merged` raises.
            All of it before anything is merged or written.
        OSError: no permission, no space, or a write failed. What was in `folder` is as before.
        RuntimeError: llm-compressor failed.
        SaveCheckError: what was written is not the model, merged and rounded. It was removed.
    """
    resolved = resolve_scheme(scheme)
    require_llmcompressor(resolved.preset.lower())
    inner = inner_model(model)
    if dtype is None and resolved.only_bfloat16:
        dtype = torch.bfloat16
    saved_dtype = dtype_named(dtype, inner)
    needed_still = (original_folder(inner), *adapter_bases(inner))
    path = check_target(folder, *needed_still)
    kept = None if keep_merged is None else check_target(keep_merged, *needed_still)
    if kept is not None and (kept == path or kept in path.parents or path in kept.parents):
        raise ValueError(f"keep_merged={kept} and {path} must be two folders, neither within the other.")
    layout = plan_layout(inner, saved_dtype, base)
    plan = plan_compression(
        layout.model_class, layout.config, tokenizer, saved_dtype, scheme=scheme, calibration=calibration,
        algorithm=algorithm, group_size=group_size, smoothing_strength=smoothing_strength, ignore=ignore,
        max_calibration_samples=max_calibration_samples, max_seq_length=max_seq_length,
    )  # fmt: skip
    needed = plan.bytes + (layout.bytes() if kept is None else 0)
    with replacing(path, needed) as temporary, _place_for_merged(path, kept) as place:
        merged = save_merged(model, tokenizer, place, base=base, dtype=saved_dtype, max_shard_size=max_shard_size)
        try:
            measured = write_compressed(merged.folder, temporary, tokenizer, plan, max_shard_size, _updates(inner))
        except Exception as error:
            if kept is not None:
                error.add_note(f"The merged checkpoint in {kept} is whole, and was checked.")
            raise
    return result(path, plan, measured, merged)


@contextmanager
def _place_for_merged(path: Path, kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", suffix=".merged", dir=path.parent) as root:
        yield Path(root) / "merged"


def _updates(inner: Any) -> Callable[[str], Tensor | None]:
    """Tensor name → what the live adapters add to it, float32 on the CPU; None where nothing."""

    def update(name: str) -> Tensor | None:
        base, folded = fold(*owner(inner, name), name)
        return None if folded is base else (folded - base).cpu()

    return torch.no_grad()(update)
