"""Named chat templates: whole conversations come back out of them, and nothing of the tokenizer changes unasked."""

from __future__ import annotations

import pytest

from fastft import get_chat_template
from fastft.data import CHAT_TEMPLATES
from tests.data.builders import CHATML, CONVERSATION, SPECIAL, byte_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:fastft")


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_round_trip(name: str) -> None:
    """Every message is in the text, in order; an answer's prompt is what precedes it; the ids spell the text."""
    tokenizer = get_chat_template(byte_tokenizer(None), name)
    text = tokenizer.apply_chat_template(CONVERSATION, tokenize=False)
    position = 0
    for message in CONVERSATION:
        position = text.index(message["content"], position) + len(message["content"])
    for turn in (2, 4):
        prompt = tokenizer.apply_chat_template(CONVERSATION[:turn], tokenize=False, add_generation_prompt=True)
        assert text.startswith(prompt)
        assert text[len(prompt) :].lstrip(" ").startswith(CONVERSATION[turn]["content"])
    ids = tokenizer.apply_chat_template(CONVERSATION, tokenize=True, return_dict=True)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert text.count("<s>") <= (2 if name == "llama-2" else 1)


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_trl_finds_the_end_of_a_turn_trained(name: str) -> None:
    from trl.chat_template_utils import has_generation_markers, is_chat_template_stop_token_trained

    tokenizer = get_chat_template(byte_tokenizer(None), name)
    assert has_generation_markers(tokenizer.chat_template)
    assert is_chat_template_stop_token_trained(tokenizer)


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_a_template_changes_the_copys_template_and_nothing_else(name: str) -> None:
    tokenizer = byte_tokenizer(CHATML)
    result = get_chat_template(tokenizer, name)
    assert tokenizer.chat_template == CHATML
    assert result is not tokenizer
    assert result.get_vocab() == tokenizer.get_vocab()
    assert result.special_tokens_map == tokenizer.special_tokens_map


def test_another_end_of_turn_than_eos_is_said_and_left() -> None:
    with pytest.warns(UserWarning, match=r"'<\|im_end\|>'; the tokenizer's EOS is '</s>' and was left so"):
        result = get_chat_template(byte_tokenizer(None), "chatml")
    assert result.eos_token == "</s>"


def test_eos_is_set_when_asked() -> None:
    tokenizer = byte_tokenizer(None)
    assert get_chat_template(tokenizer, "chatml", set_eos_token=True).eos_token == "<|im_end|>"
    assert tokenizer.eos_token == "</s>"


def test_markers_that_are_no_tokens_are_said() -> None:
    few = byte_tokenizer(None, ["<pad>", "<s>", "</s>"])
    with pytest.warns(UserWarning, match=r"'<\|im_start\|>', '<\|im_end\|>', which this vocabulary spells in pieces"):
        get_chat_template(few, "chatml")
    with pytest.raises(ValueError, match="cannot become EOS"):
        get_chat_template(few, "chatml", set_eos_token=True)


def test_without_a_name_the_tokenizers_own_is_kept() -> None:
    assert get_chat_template(byte_tokenizer(CHATML)).chat_template == CHATML
    with pytest.raises(ValueError, match="Name one of alpaca, chatml"):
        get_chat_template(byte_tokenizer(None))


def test_unknown_names_and_a_missing_eos_are_refused() -> None:
    with pytest.raises(ValueError, match="no chat template is called 'chat-ml'"):
        get_chat_template(byte_tokenizer(None), "chat-ml")
    with pytest.raises(ValueError, match="no eos_token"):
        get_chat_template(byte_tokenizer(None, [token for token in SPECIAL if token != "</s>"]), "mistral")
