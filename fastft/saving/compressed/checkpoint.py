"""A merged checkpoint on disk, compressed into another folder: the half that needs llm-compressor and no live model.

It can run by itself, in an environment that has the versions llm-compressor is tied to: `compress_checkpoint`, or
`fastft compress` on the command line.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastft.autograd.autocast import suspended_everywhere
from fastft.patching.registry import stock_only
from fastft.saving.check import SaveCheckError, ask, probe_tokens
from fastft.saving.compressed.check import Answers, Measured, check_compressed
from fastft.saving.compressed.environment import require_llmcompressor
from fastft.saving.compressed.plan import Plan, plan_compression
from fastft.saving.compressed.quantize import quantize_into
from fastft.saving.compressed.schemes import resolve_scheme
from fastft.saving.folder import check_target, replacing
from fastft.saving.merged import SavedModel

__all__ = ["SaveCheckError", "SavedCompressed", "compress_checkpoint", "result", "write_compressed"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedCompressed:
    """A compressed save that passed its check.

    Attributes:
        folder: where it is.
        scheme: llm-compressor's name of the format.
        algorithm: "rtn", "gptq" or "smoothquant+gptq".
        layers: how many are quantized.
        difference: of its logits to the merged model's, root mean square, relative to the merged logits'.
        allowed: what the format may make of `difference`.
        largest_error: relative error of the worst quantized weight.
        update_kept: share of the adapters' update in the quantized weights; None where there was no live model.
        calibration_rows: how many rows the recipe saw.
        bytes: of the weights' files.
        merged: the merged save it was made from, with its nearness to the live model; None where there was no live
            model. Its folder is there only if it was to be kept.
    """

    folder: Path
    scheme: str
    algorithm: str
    layers: int
    difference: float
    allowed: float
    largest_error: float
    update_kept: float | None
    calibration_rows: int
    bytes: int
    merged: SavedModel | None = None


def compress_checkpoint(
    checkpoint: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    scheme: str = "fp8_dynamic",
    calibration: Iterable[Any] | None = None,
    max_shard_size: int | str = "5GB",
    **options: Any,
) -> SavedCompressed:
    """Compress an unquantized checkpoint on this machine for serving, check it, and only then put it in its place.

    Args:
        checkpoint: a folder, as `save_merged` writes it.
        folder: where to; replaced as a whole if it holds an earlier save.
        scheme: as `save_compressed`.
        calibration: as `save_compressed`, with the tokenizer in `checkpoint`.
        max_shard_size: as in transformers.
        **options: `algorithm`, `group_size`, `smoothing_strength`, `ignore`, `max_calibration_samples` and
            `max_seq_length` of `save_compressed`.

    Raises:
        ImportError: llm-compressor is missing, or tied to other versions than those installed.
        FileNotFoundError: `checkpoint` holds no model.
        ValueError: it is quantized already; an unknown option; layers the format cannot take; data that is missing.
        OSError: no permission, no space, or a write failed. What was in `folder` is as before.
        RuntimeError: llm-compressor failed.
        SaveCheckError: what was written is not the checkpoint, rounded. It was removed.
    """
    require_llmcompressor(resolve_scheme(scheme).preset.lower())
    source = _unquantized(checkpoint)
    path = check_target(folder, str(source))
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(source, local_files_only=True)
    tokenizer = _tokenizer_in(source)
    dtype = config.dtype or torch.float32
    plan = plan_compression(
        AutoModelForCausalLM.from_config, config, tokenizer, dtype, scheme=scheme, calibration=calibration,
        **options,
    )  # fmt: skip
    with replacing(path, plan.bytes) as temporary:
        measured = write_compressed(source, temporary, tokenizer, plan, max_shard_size)
    return result(path, plan, measured)


def _unquantized(checkpoint: str | os.PathLike[str]) -> Path:
    source = Path(os.path.abspath(Path(checkpoint).expanduser()))
    if not (source / "config.json").is_file() or not list(source.glob("*.safetensors")):
        raise FileNotFoundError(
            f"{source} holds no config.json with *.safetensors beside it: give a folder that save_merged or "
            "save_pretrained wrote."
        )
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if "quantization_config" in config:
        raise ValueError(
            f"{source} is quantized already ({config['quantization_config'].get('quant_method', '?')}): compress the "
            "unquantized checkpoint, or save it merged first (FastModel.save_merged makes 4-bit weights dense)."
        )
    return source


def _tokenizer_in(source: Path) -> Any:
    if not (source / "tokenizer_config.json").is_file():
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(source, local_files_only=True)


@suspended_everywhere()  # rounding, GPTQ's sums and the check are in the checkpoint's own dtype
def write_compressed(
    merged: Path, folder: Path, tokenizer: Any, plan: Plan, max_shard_size: int | str,
    update: Callable[[str], Tensor | None] | None = None,
) -> Measured:  # fmt: skip
    """Compress the checkpoint in `merged` into `folder`, with its tokenizer, load it again and check it.

    Raises:
        ImportError, OSError, RuntimeError, SaveCheckError: as `compress_checkpoint`.
    """
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_pretrained(merged, dtype="auto", local_files_only=True).eval()
    config, dtype, tokens = model.config, model.dtype, probe_tokens(model)
    with torch.no_grad(), stock_only():
        plain = ask(model, tokens)
    quantized = quantize_into(model, tokenizer, folder, plan, tokens, max_shard_size)
    del model  # the check loads another
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return check_compressed(folder, merged, plan, Answers(tokens, plain, quantized), config, dtype, update)


def result(path: Path, plan: Plan, measured: Measured, merged: SavedModel | None = None) -> SavedCompressed:
    """The report on a save that is in its place."""
    algorithm = plan.algorithm if plan.smoothing is None else f"smoothquant+{plan.algorithm}"
    saved = SavedCompressed(
        folder=path, scheme=plan.scheme.preset, algorithm=algorithm, layers=len(plan.targets),
        difference=measured.difference, allowed=measured.allowed, largest_error=measured.largest_error,
        update_kept=measured.update_kept, calibration_rows=len(plan.rows),
        bytes=sum(file.stat().st_size for file in path.glob("*.safetensors")), merged=merged,
    )  # fmt: skip
    logger.info(
        "fastft: saved %s (%s, %s, %d layers, %.1f MiB): logits differ from the merged model's by %.2g of their size, "
        "the worst weight by %.2g",
        path, saved.scheme, algorithm, saved.layers, saved.bytes / 2**20, saved.difference, saved.largest_error,
    )  # fmt: skip
    return saved
