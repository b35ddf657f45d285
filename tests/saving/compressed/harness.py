"""Tiny models whose rows are whole groups of every format, and where llm-compressor is missing, why nothing runs."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests import support
from tests.saving.tokenizers import VOCABULARY

TEXTS = [f"the quick brown fox {'jumps ' * (i % 5 + 1)}over the lazy dog number {i}" for i in range(16)]

needs_llmcompressor = pytest.mark.skipif(
    importlib.util.find_spec("llmcompressor") is None,
    reason="llm-compressor is not installed (it has an environment of its own)",
)


def tiny(family: str = "llama", **overrides: Any) -> Any:
    """Rows of 128 and 256."""
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    return support.build_model(family, **(settings | overrides))
