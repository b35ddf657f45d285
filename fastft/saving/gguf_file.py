"""Saving as GGUF, for llama.cpp and what is built on it: a checked merged checkpoint, then the file made from it.

The container and the tensors' names are the `gguf` library's; the K-quants are ours (`quantizers/`), and so is the
choice of each tensor's type (`mixtures.py`, `dynamic.py`). Tensors go through some rows at a time, so memory holds
those and not the model. The file is written under a temporary name beside its place, read back, every tensor made dense
again and compared with the checkpoint's, and only then renamed. What can be refused is refused before anything is
merged: an unknown type, a tokenizer, a budget that is too small, a disk that is too full. If anything fails later the
16-bit checkpoint stays whole and no partial file is left.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from fastft.patching.plan import inner_model
from fastft.saving.check import SaveCheckError
from fastft.saving.dynamic import budget_bytes, choose_types
from fastft.saving.gguf_model import require_architecture
from fastft.saving.gguf_tensors import GgufTensors, gguf_names
from fastft.saving.gguf_write import metadata_bytes, metadata_writer, write_tensors
from fastft.saving.importance import Importance, measure_importance
from fastft.saving.layout import plan_layout
from fastft.saving.merged import SavedModel, dtype_named, save_merged
from fastft.saving.mixtures import file_type, mixture_types, resolve, tensor_bytes
from fastft.saving.modelfile import write_modelfile
from fastft.saving.original import OriginalCheckpoint
from fastft.saving.vocabulary import read_vocabulary
from fastft.saving.workers import in_order

__all__ = ["ALLOWED_ERRORS", "SaveCheckError", "SavedGguf", "save_gguf"]

logger = logging.getLogger(__name__)

# type → largest relative error (root mean square) a tensor may have when read back. The block types' are those of
# normally distributed weights with room to spare; a wrong layout or order of rows gives about 1.4.
ALLOWED_ERRORS = {
    "f32": 0.0,
    "f16": 2**-11,
    "bf16": 2**-8,
    "q8_0": 0.02,
    "q6_k": 0.05,
    "q5_k": 0.12,
    "q5_1": 0.12,
    "q5_0": 0.12,
    "q4_k": 0.2,
    "q4_1": 0.2,
    "q4_0": 0.25,
    "q3_k": 0.35,
    "q2_k": 0.6,
}


@dataclass(frozen=True)
class SavedGguf:
    """A GGUF save that passed its checks.

    Attributes:
        file: the GGUF.
        modelfile: for `ollama create`, beside it.
        merged: the 16-bit checkpoint it was made from.
        largest_error: of any tensor, relative to the checkpoint's.
        types: GGUF tensor name → type it is stored in.
    """

    file: Path
    modelfile: Path
    merged: SavedModel
    largest_error: float
    types: dict[str, str]


def save_gguf(
    model: Any,
    tokenizer: Any,
    folder: str | os.PathLike[str],
    *,
    quantization: str = "q8_0",
    size: int | str | None = None,
    calibration: Sequence[str] | Importance | None = None,
    **merge_options: Any,
) -> SavedGguf:
    """Save `model` merged into `folder`, and a GGUF file of it beside the checkpoint's files, with an Ollama Modelfile.

    Args:
        model: as `save_merged`; Llama, Mistral, Qwen2 and Qwen3.
        tokenizer: byte-level BPE or SentencePiece-like.
        folder: as `save_merged`.
        quantization: "f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", llama.cpp's mixtures "q2_k",
            "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m" and "q6_k", the presets
            "fast_quantized" (q8_0), "quantized" (q4_k_m) and "q2_k_l" (q2_k, embedding and output in q8_0), or
            "dynamic": each tensor's type by measured error, within `size`.
        size: for "dynamic", of the file: "80MiB", "1.5GB", a number of bytes, or bits per weight ("4.5bpw"). None: as
            large as q4_k_m.
        calibration: texts like those the model will see. What each layer is fed on them (on the model's device, with
            one backward pass through the activations) decides which errors matter: in every type but f32 to q8_0, and
            in the choice of types. Or what `measure_importance(model, tokenizer, texts)` returned, for several files.
        **merge_options: of `save_merged`. With "f32" the checkpoint is float32 too, unless `dtype` says otherwise.

    Returns:
        What was written.

    Raises:
        ImportError: the `gguf` package is not installed.
        ValueError: an unknown type, a `size` that cannot be had, a family, RoPE scaling, attention window or tokenizer
            that cannot be written, texts that hold nothing, and what `save_merged` raises. All of it before anything
            is merged or written.
        OSError: the disk: before merging if the free space is too little; later the merged checkpoint stays if it was
            whole.
        SaveCheckError: what was written is not what was merged; the GGUF was removed.
    """
    if find_spec("gguf") is None:
        raise ImportError("save_gguf needs the gguf package, and nothing was merged yet: pip install 'fastft[gguf]'")
    mixture = resolve(quantization)
    inner = inner_model(model)
    require_architecture(inner.config)
    vocabulary = read_vocabulary(tokenizer, inner.get_input_embeddings().weight.shape[0])
    if mixture == "f32":
        merge_options.setdefault("dtype", torch.float32)
    plan = _planned(inner, **merge_options)
    budget = _budget(mixture, size, plan, metadata_bytes(vocabulary, tokenizer, plan.shapes))
    _check_disk(folder, plan, mixture, budget)
    if calibration is None or isinstance(calibration, Importance):
        importance = calibration
    else:
        importance = measure_importance(model, tokenizer, calibration)
    merged = save_merged(model, tokenizer, folder, **merge_options)
    file = merged.folder / f"{merged.folder.name}-{mixture}.gguf"
    partial = file.with_name(f".{file.name}.partial")
    try:
        tensors = GgufTensors(OriginalCheckpoint(str(merged.folder)), _saved_config(merged.folder))
        if budget is None:
            types = mixture_types(mixture, tensors.shapes, tensors.config)
        else:
            types = choose_types(tensors, budget, importance)
        writer = metadata_writer(tensors.config, vocabulary, tokenizer, inner, merged.folder.name)
        writer.add_file_type(file_type(mixture, types, tensors.shapes))
        write_tensors(writer, partial, tensors, types, importance)
        largest = _compare(partial, tensors, types)
        os.rename(partial, file)
    except OSError as error:
        raise OSError(
            error.errno, f"writing {file} failed: {error}. The merged checkpoint beside it is whole"
        ) from error
    finally:
        partial.unlink(missing_ok=True)
    return SavedGguf(file, write_modelfile(file, tokenizer), merged, largest, types)


@dataclass(frozen=True)
class _Plan:
    """The checkpoint that merging will write: GGUF name → transformers name and shape, configuration, element size."""

    names: Mapping[str, str]
    shapes: dict[str, tuple[int, ...]]
    config: Any
    element: int


def _planned(inner: Any, dtype: str | torch.dtype | None = None, base: str = "dequantized", **_: Any) -> _Plan:
    saved = dtype_named(dtype, inner)
    layout = plan_layout(inner, saved, base)
    names = gguf_names(layout.tensors, layout.config)
    shapes = {target: tuple(layout.tensors[name].shape) for target, name in names.items()}
    return _Plan(names, shapes, layout.config, saved.itemsize)


def _saved_config(folder: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, local_files_only=True)


def _budget(mixture: str, size: int | str | None, plan: _Plan, around: int) -> int | None:
    """Bytes that the tensors of a dynamic file may take; None for the other mixtures.

    Raises:
        ValueError: a size for a mixture that has its own; one that cannot be read, or is too small.
    """
    if mixture != "dynamic":
        if size is not None:
            raise ValueError(f"size={size!r} goes with quantization='dynamic'; {mixture} has the size it has.")
        return None
    if size is None:
        return _mixture_bytes("q4_k_m", plan)
    return budget_bytes(size, plan.shapes, around)


def _mixture_bytes(mixture: str, plan: _Plan) -> int:
    types = mixture_types(mixture, plan.shapes, plan.config)
    return sum(tensor_bytes(kind, plan.shapes[name]) for name, kind in types.items())


def _check_disk(folder: str | os.PathLike[str], plan: _Plan, mixture: str, budget: int | None) -> None:
    """Refuse before merging what the disk cannot hold: the checkpoint and the GGUF beside it.

    Raises:
        OSError: too little space.
    """
    budget = _mixture_bytes(mixture, plan) if budget is None else budget
    checkpoint = sum(tensor_bytes("f32", shape) for shape in plan.shapes.values()) // 4 * plan.element
    place = Path(os.path.abspath(Path(folder).expanduser()))
    while not place.is_dir():
        place = place.parent
    free, needed = shutil.disk_usage(place).free, checkpoint + budget + 64 * 2**20
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"saving to {folder} needs {needed / 2**30:.2f} GiB ({checkpoint / 2**30:.2f} for the merged checkpoint, "
            f"{budget / 2**30:.2f} for the GGUF), and {free / 2**30:.2f} GiB are free. Nothing was merged or written; "
            "free some space or choose another disk",
        )


def _compare(file: Path, tensors: GgufTensors, types: Mapping[str, str]) -> float:
    """Largest relative error of a tensor read back from `file`.

    Raises:
        SaveCheckError: a tensor that is missing, of another type, or further from the checkpoint than it explains.
    """
    import gguf

    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    largest = 0.0
    for name in tensors.names:
        found = stored.get(name)
        if found is None or found.tensor_type.name.lower() != types[name]:
            raise SaveCheckError(f"{name} is missing in the written GGUF, or not {types[name]}; it was removed.")
        error = _relative_error(found, tensors.tensor(name))
        allowed = ALLOWED_ERRORS[types[name]]
        if not error <= allowed:
            raise SaveCheckError(
                f"{name} read back from the GGUF differs by {error:.3g} of its size; {types[name]} allows "
                f"{allowed:.3g}. The file was removed, the merged checkpoint is whole."
            )
        largest = max(largest, error)
    return largest


def _relative_error(found: Any, expected: Tensor) -> float:
    """Of a tensor in the file (a `gguf.ReaderTensor`), a few rows at a time on every core: numpy makes it dense."""
    import gguf

    rows = expected.reshape(-1, expected.shape[-1])
    data = found.data.reshape(len(rows), -1)
    step = max(1, 2**20 // rows.shape[1])

    def squares(start: int) -> tuple[float, float]:
        dense = numpy.array(gguf.dequantize(data[start : start + step], found.tensor_type), dtype=numpy.float32)
        part = rows[start : start + step].float()
        difference = torch.from_numpy(dense).reshape(part.shape).sub_(part)
        return float(difference.square().sum(dtype=torch.float64)), float(part.square().sum(dtype=torch.float64))

    sums = list(in_order(squares, range(0, len(rows), step)))
    of_difference, of_all = (math.fsum(part) for part in zip(*sums, strict=True))
    return math.sqrt(of_difference / max(of_all, 1e-60))
