"""Calibration rows in every form a trainer takes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fastft.saving.compressed.calibration import calibration_rows
from tests import support

LIMITS = {"vocabulary": support.VOCABULARY, "max_samples": 512, "max_length": 2048}


def test_texts_and_rows_of_every_kind_become_token_ids(tokenizer: Any) -> None:
    user, assistant = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}
    talk = tokenizer.apply_chat_template([user, assistant], tokenize=True, return_dict=True)["input_ids"]
    forms: list[tuple[Any, list[int]]] = [
        ("some text", tokenizer("some text")["input_ids"]),
        ({"text": "some text", "label": 3}, tokenizer("some text")["input_ids"]),
        ({"input_ids": [5, 6, 7], "text": "not this"}, [5, 6, 7]),
        ({"prompt": "a", "completion": "b"}, tokenizer("ab")["input_ids"]),
        ({"messages": [user, assistant]}, talk),
        ({"prompt": [user], "completion": [assistant]}, talk),
    ]
    rows = calibration_rows([form for form, _ in forms], tokenizer, **LIMITS)
    assert [row.tolist() for row in rows] == [[ids] for _, ids in forms]
    assert len(talk) > 4


def test_a_data_set_and_a_stream_are_read_from_the_start_and_no_further(tokenizer: Any) -> None:
    from datasets import Dataset

    texts = [letter * 9 for letter in "abcdef"]
    limits = LIMITS | {"max_samples": 2, "max_length": 4}
    expected = [tokenizer(text)["input_ids"][:4] for text in texts[:2]]

    def stream() -> Iterator[str]:
        yield from texts[:2]
        pytest.fail("a third row was read")

    for source in (texts, Dataset.from_dict({"text": texts}), stream()):
        assert [row[0].tolist() for row in calibration_rows(source, tokenizer, **limits)] == expected


def test_what_cannot_be_read_is_named_by_its_row(tokenizer: Any) -> None:
    plain = support.build_tokenizer()
    plain.chat_template = None
    cases: list[tuple[Any, Any, dict[str, int], str]] = [
        ("one text", tokenizer, {}, "not str"),
        ({"train": ["a"]}, tokenizer, {}, "one split"),
        ([], tokenizer, {}, "no rows"),
        (["a", ""], tokenizer, {}, "row 1 has no tokens"),
        (["a", {"question": "b"}], tokenizer, {}, "row 1 is neither"),
        ([["a"]], tokenizer, {}, "row 0 is neither"),
        ([{"input_ids": [4, 128]}], tokenizer, {}, "token id 128, and the model knows 0 to 127"),
        (["a"], None, {}, "needs the model's tokenizer"),
        ([{"messages": [{"role": "user", "content": "a"}]}], plain, {}, "no chat template"),
        (["a"], tokenizer, {"max_samples": 0}, "max_calibration_samples=0"),
    ]
    for source, given, limits, message in cases:
        with pytest.raises(ValueError, match=message):
            calibration_rows(source, given, **(LIMITS | limits))
