"""Writing a safetensors file one tensor at a time.

The library's `save_file` wants all tensors of a file at once: with shards of 5 GB that is 5 GB beside the live model.
The format asks for less (huggingface.co/docs/safetensors: the header's length in 8 bytes, the header in JSON, the data
end to end): shapes and types are known before the first weight is, so the header can be written first, and each tensor
when it is made. The files are, byte by byte, the library's (test_safetensors_file.py); reading stays the library's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["write_safetensors"]

# In the order that the library lays tensors out in: so each starts at a multiple of its element's size.
_NAMES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_safetensors(
    file: str | os.PathLike[str], planned: Mapping[str, Tensor], make: Callable[[str], Tensor]
) -> None:
    """Write a file of the tensors that `make` makes; one of them is in memory at a time.

    Args:
        file: is created or replaced.
        planned: name → tensor of the shape and dtype it will have (on the meta device, say).
        make: name → the tensor, on any device; asked once for each, in the file's order.

    Raises:
        ValueError: a dtype that safetensors has no name for, or a tensor that is not as planned.
        OSError: writing failed.
    """
    names = sorted(planned, key=lambda name: (_rank(name, planned[name].dtype), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        start, end = end, end + planned[name].numel() * planned[name].element_size()
        shape = list(planned[name].shape)
        header[name] = {"dtype": _NAMES[planned[name].dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with Path(file).open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            tensor = make(name)
            if tensor.shape != planned[name].shape or tensor.dtype != planned[name].dtype:
                raise ValueError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)}, and {planned[name].dtype} "
                    f"{tuple(planned[name].shape)} was announced in {file}."
                )
            out.write(_bytes(tensor))
            del tensor


def _rank(name: str, dtype: torch.dtype) -> int:
    if dtype not in _NAMES:
        raise ValueError(f"{name} is {dtype}, which cannot be written to safetensors here.")
    return list(_NAMES).index(dtype)


def _bytes(tensor: Tensor) -> memoryview:
    """The tensor's elements as they lie in memory (little-endian on every machine that torch runs on)."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    data: memoryview = flat.view(torch.uint8).numpy().data
    return data
