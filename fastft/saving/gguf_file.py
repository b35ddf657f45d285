"""Saving as GGUF, for llama.cpp and what is built on it: a checked merged checkpoint, then the file made from it.

The container, the tensors' names and the quantizers of the block formats are the `gguf` library's. Tensors go through
one at a time, so memory holds one of them and not the model. The file is written under a temporary name beside its
place, read back, every tensor made dense again and compared with the checkpoint's, and only then renamed. If anything
fails the 16-bit checkpoint stays whole and no partial file is left.

Vectors (norms, biases) stay float32. A matrix whose rows are not whole blocks is stored in f16. In the 4- and 5-bit
types the output matrix, which costs quality most, is q8_0 (and so is the embedding where the two are one).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from fastft.patching.plan import inner_model
from fastft.saving.check import SaveCheckError
from fastft.saving.gguf_model import add_metadata, frequency_divisors, reordered, require_architecture
from fastft.saving.merged import SavedModel, save_merged
from fastft.saving.modelfile import write_modelfile
from fastft.saving.original import OriginalCheckpoint
from fastft.saving.vocabulary import Vocabulary, read_vocabulary

__all__ = ["QUANTIZATIONS", "SavedGguf", "save_gguf"]

logger = logging.getLogger(__name__)

# name → largest relative error (root mean square) a tensor may have when read back. The block formats' are those of
# normally distributed weights with room to spare; a wrong layout or order of rows gives about 1.4.
QUANTIZATIONS = {
    "f32": 0.0,
    "f16": 2**-11,
    "bf16": 2**-8,
    "q8_0": 0.02,
    "q5_1": 0.12,
    "q5_0": 0.12,
    "q4_1": 0.2,
    "q4_0": 0.2,
}


@dataclass(frozen=True)
class SavedGguf:
    """A GGUF save that passed its checks.

    Attributes:
        file: the GGUF.
        modelfile: for `ollama create`, beside it.
        merged: the 16-bit checkpoint it was made from.
        largest_error: of any tensor, relative to the checkpoint's.
    """

    file: Path
    modelfile: Path
    merged: SavedModel
    largest_error: float


def save_gguf(
    model: Any, tokenizer: Any, folder: str | os.PathLike[str], *, quantization: str = "q8_0", **merge_options: Any
) -> SavedGguf:
    """Save `model` merged into `folder`, and a GGUF file of it beside the checkpoint's files, with an Ollama Modelfile.

    Args:
        model: as `save_merged`; Llama, Mistral, Qwen2 and Qwen3.
        tokenizer: byte-level BPE or SentencePiece-like.
        folder: as `save_merged`.
        quantization: "f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1" or "q4_0".
        **merge_options: of `save_merged`. With "f32" the checkpoint is float32 too, unless `dtype` says otherwise.

    Returns:
        What was written.

    Raises:
        ImportError: the `gguf` package is not installed.
        ValueError: an unknown type, a family, RoPE scaling or tokenizer that cannot be written, and what `save_merged`
            raises. All of it before anything is merged or written.
        OSError: the disk; the merged checkpoint stays if it was whole.
        SaveCheckError: what was written is not what was merged; the GGUF was removed.
    """
    if find_spec("gguf") is None:
        raise ImportError("save_gguf needs the gguf package, and nothing was merged yet: pip install 'fastft[gguf]'")
    kind = quantization.lower()
    if kind not in QUANTIZATIONS:
        raise ValueError(f"quantization={quantization!r} is not known here: {', '.join(QUANTIZATIONS)}.")
    inner = inner_model(model)
    require_architecture(inner.config)
    vocabulary = read_vocabulary(tokenizer, inner.get_input_embeddings().weight.shape[0])
    if kind == "f32":
        merge_options.setdefault("dtype", torch.float32)
    merged = save_merged(model, tokenizer, folder, **merge_options)
    file = merged.folder / f"{merged.folder.name}-{kind}.gguf"
    partial = file.with_name(f".{file.name}.partial")
    try:
        checkpoint = OriginalCheckpoint(str(merged.folder))
        config = _saved_config(merged.folder)
        _write(partial, checkpoint, config, vocabulary, tokenizer, inner, kind)
        largest = _compare(partial, checkpoint, config)
        os.rename(partial, file)
    except OSError as error:
        raise OSError(
            error.errno, f"writing {file} failed: {error}. The merged checkpoint beside it is whole"
        ) from error
    finally:
        partial.unlink(missing_ok=True)
    return SavedGguf(file, write_modelfile(file, tokenizer), merged, largest)


def _saved_config(folder: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, local_files_only=True)


def _tensors(checkpoint: OriginalCheckpoint, config: Any) -> Iterator[tuple[str, Tensor]]:
    """GGUF's name and the tensor in GGUF's order, one at a time."""
    import gguf

    architecture = require_architecture(config)
    index = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(index, config.num_hidden_layers)
    for name in sorted(checkpoint.files, key=_layer_order):
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise ValueError(
                f"{name} has no name in GGUF's {architecture!r}: this model is not a plain one of its family."
            )
        yield target, reordered(name, checkpoint.tensor(name), config)


def _layer_order(name: str) -> tuple[int, str]:
    number = next((part for part in name.split(".") if part.isdigit()), "-1")
    return int(number), name


def _kind_of(name: str, shape: tuple[int, ...], kind: str, tied: bool) -> Any:
    """The gguf.GGMLQuantizationType that a tensor is stored in."""
    import gguf

    kinds = gguf.GGMLQuantizationType
    if len(shape) < 2:
        return kinds.F32
    if kind[:2] in ("q4", "q5") and name == ("token_embd.weight" if tied else "output.weight"):
        kind = "q8_0"
    chosen = kinds[kind.upper()]
    return kinds.F16 if shape[-1] % gguf.GGML_QUANT_SIZES[chosen][0] else chosen


def _write(
    file: Path,
    checkpoint: OriginalCheckpoint,
    config: Any,
    vocabulary: Vocabulary,
    tokenizer: Any,
    inner: Any,
    kind: str,
) -> None:
    import gguf

    writer = gguf.GGUFWriter(file, require_architecture(config))
    try:
        writer.add_type(gguf.GGUFType.MODEL)
        writer.add_name(file.name.lstrip(".").removesuffix(f"-{kind}.gguf.partial"))
        writer.add_file_type(_file_type(kind))
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        add_metadata(writer, config)
        _add_vocabulary(writer, vocabulary, tokenizer, inner)
        _add_tensors(writer, checkpoint, config, kind)
    finally:
        writer.close()


def _file_type(kind: str) -> Any:
    import gguf

    name = {"f32": "ALL_F32", "q8_0": "MOSTLY_Q8_0"}.get(kind, f"MOSTLY_{kind.upper()}")
    return gguf.LlamaFileType[name]


def _add_vocabulary(writer: Any, vocabulary: Vocabulary, tokenizer: Any, inner: Any) -> None:
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.kinds)
    if vocabulary.merges:
        writer.add_token_merges(vocabulary.merges)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
        writer.add_add_space_prefix(vocabulary.add_space_prefix)
    for kind, index in vocabulary.special.items():
        getattr(writer, f"add_{kind}_token_id")(index)
    writer.add_add_bos_token(vocabulary.add_bos)
    writer.add_add_eos_token(vocabulary.add_eos)
    ends = getattr(getattr(inner, "generation_config", None), "eos_token_id", None)
    others = [end for end in ends if end != vocabulary.special.get("eos")] if isinstance(ends, list) else []
    if others:
        writer.add_eot_token_id(others[0])
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _add_tensors(writer: Any, checkpoint: OriginalCheckpoint, config: Any, kind: str) -> None:
    """First where everything lies, then the data, one tensor at a time."""
    import gguf

    tied = bool(config.tie_word_embeddings)
    divisors = frequency_divisors(config)
    if divisors is not None:
        writer.add_tensor_info("rope_freqs.weight", divisors.shape, divisors.dtype, divisors.nbytes)
    for name, tensor in _tensors(checkpoint, config):
        shape = tuple(tensor.shape)
        stored = _kind_of(name, shape, kind, tied)
        packed = gguf.quant_shape_to_byte_shape(shape, stored)
        is_float = stored in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16)
        element = numpy.dtype({0: "float32", 1: "float16"}[int(stored)]) if is_float else numpy.dtype("uint8")
        size = int(numpy.prod(packed))
        writer.add_tensor_info(name, shape if is_float else packed, element, size, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if divisors is not None:
        writer.write_tensor_data(divisors)
    for name, tensor in _tensors(checkpoint, config):
        stored = _kind_of(name, tuple(tensor.shape), kind, tied)
        writer.write_tensor_data(gguf.quantize(tensor.float().contiguous().numpy(), stored))


def _compare(file: Path, checkpoint: OriginalCheckpoint, config: Any) -> float:
    """Largest relative error of a tensor read back from `file`.

    Raises:
        SaveCheckError: a tensor that is missing, or further from the checkpoint than its type explains.
    """
    import gguf

    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    largest = 0.0
    for name, tensor in _tensors(checkpoint, config):
        found = stored.pop(name, None)
        if found is None:
            raise SaveCheckError(f"{name} is missing in the written GGUF; it was removed.")
        dense = torch.from_numpy(numpy.array(gguf.dequantize(found.data, found.tensor_type))).reshape(tensor.shape)
        expected = tensor.float()
        error = float((dense - expected).norm() / expected.norm().clamp_min(1e-30))
        allowed = QUANTIZATIONS[found.tensor_type.name.lower()]
        if not error <= allowed:
            raise SaveCheckError(
                f"{name} read back from the GGUF differs by {error:.3g} of its size; {found.tensor_type.name} allows "
                f"{allowed:.3g}. The file was removed, the merged checkpoint is whole."
            )
        largest = max(largest, error)
    return largest
