"""Reading a checkpoint: its configuration, how it is quantized, its tokenizer.

The configuration is read first, because what else must be done depends on it, and because it fails in a second where
loading weights would fail in a minute. RoPE is the checkpoint's own: the longest sequence a user means to train on
is no reason to edit it. The one thing mended is a request for another scaling that leaves theta out: transformers
fills in 10000 whatever the model was trained with, and here the checkpoint's own is kept.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

import torch

from fastft.loading.source import Source, describe_failure

__all__ = ["load_config", "load_tokenizer", "note_native_window", "quantization_for"]

logger = logging.getLogger(__name__)

_ROPE_REQUESTS = ("rope_parameters", "rope_scaling")


def load_config(source: Source, *, trust_remote_code: bool, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The configuration of `source` with the configuration's share of `options` applied, and the options left over.

    Raises:
        OSError: the hub does not give it; what was looked for, where, and what to try (the hub's error is the cause).
    """
    from transformers import AutoConfig

    options = dict(options)
    given = options.pop("config", None)
    if given is not None and not isinstance(given, str):
        return given, options
    requests = {name: options.pop(name) for name in _ROPE_REQUESTS if options.get(name) is not None}
    where = {"trust_remote_code": trust_remote_code, **source.hub}
    name = given or source.name
    try:
        config, unused = AutoConfig.from_pretrained(name, return_unused_kwargs=True, **where, **options)
    except OSError as error:
        if source.local:
            raise
        raise OSError(describe_failure(source.name, error)) from error
    if requests:
        trained = getattr(config, "rope_parameters", None) or {}
        requests = {name: _with_theta(request, trained) for name, request in requests.items()}
        config, unused = AutoConfig.from_pretrained(name, return_unused_kwargs=True, **where, **options, **requests)
    return config, unused


def _with_theta(request: Any, trained: dict[str, Any]) -> Any:
    if isinstance(request, dict) and "rope_theta" not in request and "rope_theta" in trained:
        return {**request, "rope_theta": trained["rope_theta"]}
    return request


def note_native_window(config: Any, max_seq_length: int | None) -> None:
    """Say once, at loading, that documents may be longer than any the model was trained on."""
    native = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if max_seq_length is not None and native is not None and max_seq_length > native:
        logger.warning(
            "fastft: max_seq_length=%d is above the model's own window of %d (config.max_position_embeddings). Longer "
            "documents are allowed, RoPE is left as it is; pass rope_parameters=... if you want another scaling.",
            max_seq_length, native,
        )  # fmt: skip


def quantization_for(config: Any, *, load_in_4bit: bool, requested: Any, dtype: torch.dtype) -> Any:
    """The quantization configuration to load with, or None: the user's, else the checkpoint's own, else NF4.

    A checkpoint that is already in bitsandbytes 4 bits stays as it is, except that it computes in `dtype`: what the
    machine it was made on computed in says nothing about this one. That is noted on `config`, in place.

    Raises:
        ImportError: 4-bit weights are needed and bitsandbytes is not installed.
    """
    if requested is not None:
        return requested
    own = _own_quantization(config)
    if own is not None:
        if own.get("load_in_4bit"):
            _require_bitsandbytes("this checkpoint is stored in 4 bits")
            own["bnb_4bit_compute_dtype"] = str(dtype).removeprefix("torch.")
        logger.info("fastft: the checkpoint is already quantized (%s): loaded as it is", own.get("quant_method"))
        return None
    if not load_in_4bit:
        return None
    _require_bitsandbytes("load_in_4bit=True")
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def _own_quantization(config: Any) -> dict[str, Any] | None:
    for owner in (config, config.get_text_config(decoder=True)):
        own = getattr(owner, "quantization_config", None)
        if own is None:
            continue
        if not isinstance(own, dict):
            own = owner.quantization_config = own.to_dict()
        return own
    return None


def _require_bitsandbytes(why: str) -> None:
    if find_spec("bitsandbytes") is None:
        raise ImportError(
            f"{why}, which needs bitsandbytes, and it is not installed: pip install bitsandbytes. "
            "For 16-bit weights pass load_in_4bit=False and a checkpoint that is not quantized."
        )


def load_tokenizer(source: Source, *, trust_remote_code: bool) -> Any:
    """The tokenizer of `source` exactly as AutoTokenizer makes it: padding side, tokens and template untouched.

    Raises:
        OSError: there is none beside the model.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source.name, trust_remote_code=trust_remote_code, **source.hub)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise OSError(
            f"No tokenizer could be read from {source.name!r}: {error}\nModel and tokenizer are loaded together. Save "
            "the tokenizer into the model's folder (tokenizer.save_pretrained(folder)), or load the model with "
            "AutoModelForCausalLM and hand it to fastft.patch(model)."
        ) from error
