"""Writing a GGUF: what it says about the model, then its tensors, some rows in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy

from fastft.saving.gguf_model import add_metadata, frequency_divisors, require_architecture
from fastft.saving.gguf_tensors import GgufTensors
from fastft.saving.importance import Importance
from fastft.saving.mixtures import tensor_bytes
from fastft.saving.quantizers import quantized_pieces
from fastft.saving.vocabulary import Vocabulary

__all__ = ["add_tensor_info", "metadata_bytes", "metadata_writer", "write_tensors"]


def metadata_writer(config: Any, vocabulary: Vocabulary, tokenizer: Any, inner: Any, name: str) -> Any:
    """A `gguf.GGUFWriter` that knows all about the model but its tensors and its file type; no file is open yet."""
    import gguf

    writer = gguf.GGUFWriter(None, require_architecture(config))
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_metadata(writer, config)
    _add_vocabulary(writer, vocabulary, tokenizer, inner)
    return writer


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


def metadata_bytes(vocabulary: Vocabulary, tokenizer: Any, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Bytes of a file beside its tensors' data, a little more than it will be.

    Strings have a length of 8 bytes before them, numbers and kinds 4; a tensor's entry is its name and some 60 bytes,
    and its data are padded to 32.
    """
    strings = [*vocabulary.tokens, *vocabulary.merges, str(tokenizer.chat_template or "")]
    text = sum(8 + len(string.encode()) for string in strings)
    return text + 8 * len(vocabulary.tokens) + sum(len(name) + 92 for name in shapes) + 8192


def write_tensors(
    writer: Any, file: Path, tensors: GgufTensors, types: Mapping[str, str], importance: Importance | None
) -> None:
    """Write the whole file: where everything lies, then the data. The writer is closed afterwards.

    Args:
        writer: from `metadata_writer`.
        file: where.
        tensors: what.
        types: each tensor's, by its name.
        importance: of the columns, if it was measured.

    Raises:
        ValueError: a tensor that its type cannot hold.
        OSError: writing failed.
    """
    divisors = frequency_divisors(tensors.config)
    try:
        if divisors is not None:
            add_tensor_info(writer, "rope_freqs.weight", divisors.shape, "f32")
        for name, shape in tensors.shapes.items():
            add_tensor_info(writer, name, shape, types[name])
        writer.write_header_to_file(file)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if divisors is not None:
            writer.write_tensor_data(divisors)
        for name in tensors.names:
            columns = None if importance is None else importance.columns(name)
            try:
                pieces = quantized_pieces(tensors.tensor(name), types[name], columns)
                writer.write_tensor_data(_Pieces(pieces, tensor_bytes(types[name], tensors.shapes[name])))
            except ValueError as error:
                raise ValueError(f"{name}: {error} The merged checkpoint is whole.") from error
    finally:
        writer.close()


class _Pieces:
    """What `write_tensor_data` asks of an array, of one that is made while it is written."""

    def __init__(self, pieces: Iterator[numpy.ndarray], nbytes: int) -> None:
        self.pieces, self.nbytes = pieces, nbytes

    def tofile(self, file: BinaryIO) -> None:
        """Write all pieces."""
        written = 0
        for piece in self.pieces:
            written += file.write(piece.data)
        if written != self.nbytes:
            raise ValueError(f"{written} bytes were written, and {self.nbytes} announced.")


def add_tensor_info(writer: Any, name: str, shape: tuple[int, ...], kind: str) -> None:
    """Announce a tensor of `shape` in type `kind`, whose data will be written in the order of these calls."""
    import gguf

    stored = gguf.GGMLQuantizationType[kind.upper()]
    packed = gguf.quant_shape_to_byte_shape(shape, stored)
    floats = {"f32": numpy.dtype("float32"), "f16": numpy.dtype("float16")}
    element = floats.get(kind, numpy.dtype("uint8"))
    announced = shape if kind in floats else packed
    writer.add_tensor_info(name, announced, element, int(numpy.prod(packed)), raw_dtype=stored)
