"""A random-weight checkpoint of a real size, so that every provider loads the same files. Runs in a worker.

Weights are transformers' own initialization; the tokenizer is byte-level, with the special tokens a trainer wants.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastft.bench.registry import ModelShape

__all__ = ["write"]

_SPECIAL = ("<|begin|>", "<|end|>", "<|pad|>")  # at the bytes' end: 256, 257, 258
_SHARD_SIZE = "4GB"


def write(request: Mapping[str, Any]) -> dict[str, Any]:
    """Write the checkpoint.

    Args:
        request: `shape` (a ModelShape's fields), `folder`, `dtype`.

    Returns:
        `parameters`, their number.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape, folder = ModelShape(**request["shape"]), Path(request["folder"])
    config = AutoConfig.for_model(shape.family, **_settings(shape))
    with torch.random.fork_rng(), torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, request["dtype"]))
    model.save_pretrained(folder, max_shard_size=_SHARD_SIZE)
    _byte_tokenizer().save_pretrained(folder)
    return {"status": "ok", "parameters": sum(parameter.numel() for parameter in model.parameters())}


def _settings(shape: ModelShape) -> dict[str, Any]:
    first_special = len(_byte_alphabet())
    return {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "sliding_window": None,
        "bos_token_id": first_special,
        "eos_token_id": first_special + 1,
        "pad_token_id": first_special + 2,
    }


def _byte_alphabet() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def _byte_tokenizer() -> Any:
    """A token a byte and the special ones; ids below 259, whatever the model's vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((*_byte_alphabet(), *_SPECIAL))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    begin, end, pad = _SPECIAL
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=begin, eos_token=end, pad_token=pad)
    fast.chat_template = (
        "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + eos_token }}{% endfor %}"
    )
    return fast
