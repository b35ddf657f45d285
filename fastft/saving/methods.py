"""`model.save_pretrained_merged(...)` and its kin, on the one model and not on its class.

Each is a `functools.partial` in the instance's `__dict__`: unlike a bound method it can be pickled with a model whose
class does not have it, and a deep copy's is bound to the copy.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

__all__ = ["bind"]


def bind(model: Any) -> Any:
    """Give `model` its saving methods; returns it."""
    for function in (
        save_pretrained_merged, push_to_hub_merged, save_pretrained_gguf, save_pretrained_gguf_adapter,
        save_pretrained_compressed, push_to_hub_compressed,
    ):  # fmt: skip
        model.__dict__[function.__name__] = partial(function, model)
    return model


def save_pretrained_merged(
    model: Any, save_directory: str | os.PathLike[str], tokenizer: Any = None, **options: Any
) -> Any:
    """`fastft.saving.merged.save_merged(model, tokenizer, save_directory, **options)`."""
    from fastft.saving.merged import save_merged

    return save_merged(model, tokenizer, save_directory, **options)


def push_to_hub_merged(model: Any, repo_id: str, tokenizer: Any = None, **options: Any) -> Any:
    """`fastft.saving.hub.push_merged(model, tokenizer, repo_id, **options)`."""
    from fastft.saving.hub import push_merged

    return push_merged(model, tokenizer, repo_id, **options)


def save_pretrained_gguf(
    model: Any, save_directory: str | os.PathLike[str], tokenizer: Any, quantization: str = "q8_0", **options: Any
) -> Any:
    """`fastft.saving.gguf_file.save_gguf(model, tokenizer, save_directory, quantization=quantization, **options)`."""
    from fastft.saving.gguf_file import save_gguf

    return save_gguf(model, tokenizer, save_directory, quantization=quantization, **options)


def save_pretrained_gguf_adapter(model: Any, save_directory: str | os.PathLike[str], **options: Any) -> Any:
    """`fastft.saving.gguf_lora.save_gguf_adapter(model, save_directory, **options)`."""
    from fastft.saving.gguf_lora import save_gguf_adapter

    return save_gguf_adapter(model, save_directory, **options)


def save_pretrained_compressed(
    model: Any, save_directory: str | os.PathLike[str], tokenizer: Any, scheme: str = "fp8_dynamic", **options: Any
) -> Any:
    """`fastft.saving.compressed.live.save_compressed(model, tokenizer, save_directory, scheme=scheme, **options)`."""
    from fastft.saving.compressed.live import save_compressed

    return save_compressed(model, tokenizer, save_directory, scheme=scheme, **options)


def push_to_hub_compressed(
    model: Any, repo_id: str, tokenizer: Any, scheme: str = "fp8_dynamic", **options: Any
) -> Any:
    """`fastft.saving.hub.push_compressed(model, tokenizer, repo_id, scheme=scheme, **options)`."""
    from fastft.saving.hub import push_compressed

    return push_compressed(model, tokenizer, repo_id, scheme=scheme, **options)
