"""Batched greedy answers equal answers asked one by one, and nothing is left changed."""

from __future__ import annotations

from typing import Any

import torch

from fastft.demo.answering import answer, answer_length, prompt_ids
from fastft.demo.rows import Row

ROWS = [Row("the end", "x", 1), Row("a", "yes", 2), Row("this is a much longer question", "no", 3), Row("bb", "z", 4)]


def test_batching_and_padding_do_not_change_the_answers(tiny_llama: Any, tokenizer: Any) -> None:
    together = answer(tiny_llama, tokenizer, ROWS, max_new_tokens=8, batch_size=4)
    alone = [answer(tiny_llama, tokenizer, [row], max_new_tokens=8, batch_size=1)[0] for row in ROWS]
    assert together == alone
    assert len(set(together)) > 1, "a model that says the same to everything proves nothing"
    # and one by one is plain greedy decoding
    ids = torch.tensor([prompt_ids(tokenizer, ROWS[0])])
    with torch.no_grad():
        for _ in range(8):
            ids = torch.cat([ids, tiny_llama.eval()(ids).logits[:, -1:].argmax(-1)], dim=1)
            if ids[0, -1] == tokenizer.eos_token_id:
                break
    assert tokenizer.decode(ids[0, len(prompt_ids(tokenizer, ROWS[0])) :], skip_special_tokens=True).strip() == alone[0]


def test_mode_and_tokenizer_are_left_as_they_were(tiny_llama: Any, tokenizer: Any) -> None:
    side = tokenizer.padding_side
    seen = []
    answer(tiny_llama.train(), tokenizer, ROWS, max_new_tokens=2, batch_size=3, on_batch=seen.append)
    assert tiny_llama.training
    assert tokenizer.padding_side == side
    assert seen == [3, 4]
    answer(tiny_llama.eval(), tokenizer, ROWS, max_new_tokens=2, batch_size=3)
    assert not tiny_llama.training


def test_messages_are_written_with_the_chat_template(tokenizer: Any) -> None:
    row = Row([{"role": "user", "content": "hello"}], "hi", 1)
    assert tokenizer.decode(prompt_ids(tokenizer, row)) == "<bos><|user|>hello<|assistant|>"


def test_answer_length_is_the_longest_answer_with_its_end(tokenizer: Any) -> None:
    assert answer_length(tokenizer, ROWS) == len(tokenizer("yes")["input_ids"]) + 1
    assert answer_length(tokenizer, [Row("q", "qz" * 400, 1)]) == 256
