"""Greedy answers of a model to many prompts: batches sorted by length, no more tokens than the longest right answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fastft.demo.rows import Row

MOST_NEW_TOKENS = 256


def prompt_ids(tokenizer: Any, row: Row) -> list[int]:
    """Token ids of the row's prompt, as TRL makes them for training."""
    if isinstance(row.prompt, str):
        return tokenizer(row.prompt)["input_ids"]
    return tokenizer.apply_chat_template(row.prompt, add_generation_prompt=True, return_dict=True)["input_ids"]


def answer_length(tokenizer: Any, rows: Sequence[Row]) -> int:
    """How many tokens the longest right answer needs, with the end-of-text token, at most 256."""
    lengths = (len(tokenizer(row.completion, add_special_tokens=False)["input_ids"]) + 1 for row in rows)
    return min(max(lengths), MOST_NEW_TOKENS)


def answer(
    model: Any,
    tokenizer: Any,
    rows: Sequence[Row],
    *,
    max_new_tokens: int,
    batch_size: int,
    on_batch: Callable[[int], None] | None = None,
) -> list[str]:
    """The model's greedy answer to every row, in the rows' order.

    The model's training mode and `use_cache` are put back; the tokenizer is not touched (batches are padded on the
    left here, by hand). `on_batch` is called with the number of rows answered so far.
    """
    ids = [prompt_ids(tokenizer, row) for row in rows]
    order = sorted(range(len(rows)), key=lambda index: len(ids[index]))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    device = next(model.parameters()).device
    answers = [""] * len(rows)
    was_training = model.training
    model.eval()
    try:
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            width = max(len(ids[index]) for index in chosen)
            padding = [width - len(ids[index]) for index in chosen]
            tokens = torch.tensor([[pad] * n + ids[index] for n, index in zip(padding, chosen, strict=True)])
            mask = torch.tensor([[0] * n + [1] * (width - n) for n in padding])
            with torch.no_grad():
                output = model.generate(
                    input_ids=tokens.to(device),
                    attention_mask=mask.to(device),
                    max_new_tokens=max_new_tokens,
                    do_sample=False,
                    temperature=None,
                    top_p=None,
                    top_k=None,
                    use_cache=True,
                    pad_token_id=pad,
                )
            texts = tokenizer.batch_decode(output[:, width:], skip_special_tokens=True)
            for index, text in zip(chosen, texts, strict=True):
                answers[index] = text.strip()
            if on_batch is not None:
                on_batch(start + len(chosen))
    finally:
        model.train(was_training)
    return answers
