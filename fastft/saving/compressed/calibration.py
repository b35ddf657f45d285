"""Calibration data as rows of token ids, in the order they were given.

Taken are texts, and the rows a trainer takes: token ids, conversations (through the chat template), prompt and
completion, text. Each row is a batch of its own, as in llm-compressor's examples: no padding that would be measured as
if it were text, and no truncation to a neighbour's length.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor

__all__ = ["calibration_rows"]


def calibration_rows(
    calibration: Iterable[Any], tokenizer: Any, *, vocabulary: int, max_samples: int, max_length: int
) -> list[Tensor]:
    """The first rows of `calibration`, tokenized.

    Args:
        calibration: strings, or mappings with "input_ids", "messages", "prompt" and "completion", or "text": a list, a
            `datasets.Dataset`, a stream.
        tokenizer: for everything but "input_ids".
        vocabulary: ids that the model knows.
        max_samples: rows that are read.
        max_length: tokens of a row that are kept.

    Returns:
        Token ids, each [1, length], int64.

    Raises:
        ValueError: a form that is not known, a row without tokens or with ids the model does not know, or no rows.
    """
    if isinstance(calibration, str | bytes | Mapping):
        raise ValueError(
            f"calibration is a list of texts, or a data set's rows, not {type(calibration).__name__}: give one split "
            "of a data set, or [text] for a single text."
        )
    if max_samples < 1 or max_length < 1:
        raise ValueError(f"max_calibration_samples={max_samples} and max_seq_length={max_length} must be at least 1.")
    rows = []
    for index, row in enumerate(islice(calibration, max_samples)):
        ids = torch.as_tensor(_ids(row, tokenizer, index), dtype=torch.long).reshape(1, -1)[:, :max_length]
        if not ids.numel():
            raise ValueError(f"calibration row {index} has no tokens: leave empty rows out.")
        if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
            raise ValueError(
                f"calibration row {index} holds token id {int(ids.max())}, and the model knows 0 to {vocabulary - 1}: "
                "it was made with another tokenizer."
            )
        rows.append(ids)
    if not rows:
        raise ValueError("calibration holds no rows.")
    return rows


def _ids(row: Any, tokenizer: Any, index: int) -> Any:
    if isinstance(row, Mapping) and row.get("input_ids") is not None:
        return row["input_ids"]
    if tokenizer is None:
        raise ValueError("calibration on texts needs the model's tokenizer; pass it, or rows with 'input_ids'.")
    if isinstance(row, Mapping):
        messages, prompt, completion = row.get("messages"), row.get("prompt"), row.get("completion")
        if messages is None and isinstance(prompt, list) and isinstance(completion, list):
            messages = [*prompt, *completion]
        if messages is not None:
            return _conversation(messages, tokenizer, index)
        if isinstance(prompt, str) and isinstance(completion, str):
            row = prompt + completion
        else:
            row = row.get("text")
    if not isinstance(row, str):
        raise ValueError(
            f"calibration row {index} is neither a text nor a row with 'input_ids', 'messages', 'prompt' and "
            "'completion', or 'text'."
        )
    return tokenizer(row)["input_ids"]


def _conversation(messages: Any, tokenizer: Any, index: int) -> Any:
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"calibration row {index} is a conversation, and the tokenizer has no chat template: see "
            "fastft.get_chat_template, or give texts."
        )
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
