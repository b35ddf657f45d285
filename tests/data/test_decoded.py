"""Ids spelled as text, with each token's characters: for each kind of tokenizer, and for rows nobody tokenized."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import pytest

from fastft.data.decoded import Speller
from tests.data.builders import byte_tokenizer, metaspace_tokenizer

TEXT = "<|im_start|>user\nüber 你好 Paris is 42\n\n<|im_end|>"


@pytest.fixture(scope="module", params=[byte_tokenizer, metaspace_tokenizer])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return request.param()


def test_text_is_what_was_tokenized_and_every_token_has_its_place(tokenizer: Any) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    text, offsets = Speller(tokenizer)(ids)
    assert text.replace(" ", "") == TEXT.replace(" ", "")
    assert len(offsets) == len(ids)
    assert offsets[0][0] == 0
    assert offsets[-1][1] == len(text)
    for before, after in itertools.pairwise(offsets):
        assert after in (before, (before[1], after[1])), "a gap, or an overlap that is not one character"


def test_bytes_of_one_character_share_its_place() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("a你b", add_special_tokens=False)
    assert len(ids) == 5
    assert Speller(tokenizer)(ids) == ("a你b", [(0, 1), (1, 2), (1, 2), (1, 2), (2, 3)])


def test_a_row_cut_inside_a_character_keeps_all_its_tokens() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("你 is 好", add_special_tokens=False)[1:-1]
    text, offsets = Speller(tokenizer)(ids)
    assert " is " in text
    assert len(offsets) == len(ids)
    assert offsets[-1][1] == len(text)


def test_the_first_word_of_a_row_keeps_the_space_it_has_elsewhere() -> None:
    tokenizer = metaspace_tokenizer()
    ids = tokenizer.encode("Paris Paris", add_special_tokens=False)
    assert Speller(tokenizer)(ids)[0] == " Paris Paris"


def test_pickling_leaves_the_cache_behind() -> None:
    """So that `datasets` sees the same function, used or not, and its cache is found again."""
    speller = Speller(byte_tokenizer())
    unused = pickle.dumps(speller.__getstate__()["_pieces"])
    speller(speller.tokenizer.encode(TEXT))
    assert pickle.dumps(speller.__getstate__()["_pieces"]) == unused
