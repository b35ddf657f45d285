"""Markers found by rendering: judged by the masks of templates that mark their answers themselves."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import pytest
import transformers
from datasets import Dataset
from packaging.version import Version

import fastft
from fastft.data import CHAT_TEMPLATES, get_chat_template
from fastft.data.markers import Markers, explicit_markers, probe_markers
from fastft.data.responses import Labeller
from tests.data.builders import CHATML, CONVERSATION, SPECIAL, byte_tokenizer, metaspace_tokenizer

# What TRL's training templates spell special tokens like, so that the test's tokenizer has them.
TOKENS = re.compile(
    r"<[|｜][^<>|｜\s'\"{}]{1,40}[|｜]>|</?s>|<(?:start|end)_of_turn>|</?think>|</?tool_call>|<\|turn>|<turn\|>"
    r"|<tool_call\||<\|tool_response>"
)
TRL_TEMPLATES = (
    "cohere cohere2 deepseek_r1_distill deepseekv3 gemma gemma3 glm4moe gptoss lfm2 llama3 phi3 qwen2_5 qwen3 "
    "qwen3_instruct_2507 qwen3_5_think qwen3_5_nothink"
).split()
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL_CONVERSATION = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "content": "2"},
    {"role": "assistant", "content": "It is 2."},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "Welcome"},
]


def labels_and_truth(tokenizer: Any, messages: Any) -> tuple[list[bool], list[bool], Labeller, list[int]]:
    """Which tokens we train from the ids alone, and which the template's `{% generation %}` blocks say."""
    truth = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    labeller = Labeller(tokenizer, probe_markers(tokenizer), last_response_only=False)
    row = labeller({"input_ids": truth["input_ids"]})
    return (
        [label != -100 for label in row["labels"]],
        [bool(b) for b in truth["assistant_masks"]],
        labeller,
        row["input_ids"],
    )


@pytest.mark.parametrize("tokenizer_kind", [byte_tokenizer, metaspace_tokenizer])
@pytest.mark.parametrize("turns", [slice(0, None), slice(1, None), slice(0, 3)], ids=["all", "no system", "one answer"])
@pytest.mark.parametrize("name", CHAT_TEMPLATES)
@pytest.mark.filterwarnings("ignore:fastft")
def test_named_templates_train_exactly_what_they_mark(name: str, turns: slice, tokenizer_kind: Any) -> None:
    if tokenizer_kind is metaspace_tokenizer and Version(transformers.__version__) < Version("5.24"):
        pytest.skip("transformers 5.17 marks only the first token of a character that takes several")
    tokenizer = get_chat_template(tokenizer_kind(None), name)
    ours, truth, _, _ = labels_and_truth(tokenizer, CONVERSATION[turns])
    assert any(truth)
    assert ours == truth


@pytest.mark.parametrize("name", TRL_TEMPLATES)
def test_trls_training_templates_train_what_trl_trains(name: str) -> None:
    """Ground truth of 16 published formats.

    Some of TRL's blocks take in (a part of) the generation prompt as well, which no model has to produce: those tokens,
    inside the response marker, are all that may differ.
    """
    import trl

    template = (pathlib.Path(trl.__file__).parent / "chat_templates" / f"{name}_training.jinja").read_text("utf-8")
    tokenizer = byte_tokenizer(template, sorted({*TOKENS.findall(template), "<s>", "</s>"}))
    from trl.chat_template_utils import supports_tool_calling

    conversations = [CONVERSATION[1:], CONVERSATION[1:3]]
    conversations += [] if name == "gemma" else [CONVERSATION[:3]]
    conversations += [TOOL_CONVERSATION] if supports_tool_calling(tokenizer) else []
    for messages in conversations:
        ours, truth, labeller, ids = labels_and_truth(tokenizer, messages)
        text, offsets = labeller.speller(ids)
        prompt = [
            (found.start(), found.end())
            for marker in labeller.markers.response
            for found in re.finditer(re.escape(marker), text)
        ]
        expected = [
            trained and not any(start >= low and end <= high for low, high in prompt)
            for trained, (start, end) in zip(truth, offsets, strict=True)
        ]
        assert any(expected)
        assert ours == expected


def test_the_response_marker_leaves_thinking_to_the_answer() -> None:
    """The prompt opens a thinking block, past answers have none and the last may have one: all must be found."""
    template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
        "{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
        "{% else %}<think>\n{% endif %}{% endif %}"
    )
    assert probe_markers(byte_tokenizer(template)).response == ("<|im_start|>assistant\n",)


def test_an_answers_reasoning_is_part_of_it() -> None:
    """Every answer has a thinking block, an empty one unless it was given: what all have in common is the marker."""
    template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{% if message.role == 'assistant' %}<think>\n{{ message.reasoning_content or '' }}\n</think>\n\n{% endif %}"
        "{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
    )
    markers = probe_markers(byte_tokenizer(template))
    assert markers.response == ("<|im_start|>assistant\n<think>\n",)
    text = "<|im_start|>assistant\n<think>\nwhy\n</think>\n\nyes<|im_end|>\n"
    assert [text[start:end] for start, end in markers.spans(text)] == ["why\n</think>\n\nyes<|im_end|>\n"]


def test_without_an_end_of_turn_the_next_instruction_ends_an_answer() -> None:
    template = (
        "{% for message in messages %}{% if message.role == 'user' %}Q: {{ message.content }}\n"
        "{% else %}A: {{ message.content }}\n\n{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
    )
    markers = probe_markers(byte_tokenizer(template))
    text = "Q: one?\nA: 1\n\nQ: two?\nA: 2\n\n"
    assert [text[start:end].strip() for start, end in markers.spans(text)] == ["1", "2"]


def test_words_of_an_instruction_inside_an_answer_do_not_end_it() -> None:
    """Vicuna's "USER:" is plain text, and its answers end with EOS: a mention of it must not cut one."""
    template = (
        "{% for message in messages %}{% if message.role == 'user' %}USER: {{ message.content }} "
        "{% else %}ASSISTANT: {{ message.content }}</s>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
    )
    markers = probe_markers(byte_tokenizer(template))
    text = "USER: hi ASSISTANT: he said USER: no</s>USER: ok"
    assert [text[start:end] for start, end in markers.spans(text)] == [" he said USER: no</s>"]


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
@pytest.mark.filterwarnings("ignore:fastft")
def test_a_question_without_an_answer_is_not_trained(name: str) -> None:
    """Where a question ends with the marker of an answer ("[/INST]"), the next question is no answer to it."""
    user, answer = CONVERSATION[1:3]
    tokenizer = get_chat_template(byte_tokenizer(None), name)
    ours, truth, _, _ = labels_and_truth(tokenizer, [user, user, answer, user, user, answer])
    assert any(truth)
    assert ours == truth


ALIKE = "{% for message in messages %}<turn>{{ message.content }}</turn>{% endfor %}"
SLOPPY = (
    "{% for message in messages %}{% if message.role == 'user' %}Human: {{ message.content }}\n"
    "{% else %}Assistant: {{ message.content }}</s>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


@pytest.mark.parametrize("template", [ALIKE, SLOPPY], ids=["alike", "sloppy"])
def test_a_system_turn_that_looks_like_an_answer_is_warned_of(template: str) -> None:
    """With three turns that look alike, every second one is an answer only if no system turn stands before them."""
    tokenizer = byte_tokenizer(template)
    assert probe_markers(tokenizer).system_like_answers
    assert not probe_markers(byte_tokenizer()).system_like_answers
    row = {"text": tokenizer.apply_chat_template(CONVERSATION[1:], tokenize=False)}
    with pytest.warns(UserWarning, match="system turn off as it does an answer"):
        fastft.train_on_responses_only(Dataset.from_list([row]), tokenizer=tokenizer)


def test_a_template_whose_questions_would_be_trained_is_refused() -> None:
    """Here every turn begins and ends alike, and questions are said once more behind the answer."""
    template = (
        "{% for message in messages %}[{{ message.content }}]"
        "{% if message.role == 'assistant' %}[{{ messages[loop.index0 - 1].content }}]{% endif %}{% endfor %}"
    )
    with pytest.raises(ValueError, match="does not tell answers from questions"):
        probe_markers(byte_tokenizer(template))


def test_explicit_markers_take_the_templates_end_of_turn() -> None:
    tokenizer = byte_tokenizer(CHATML)
    assert explicit_markers(tokenizer, "<|im_start|>user\n", "<|im_start|>assistant\n").end == ("<|im_end|>\n",)


def test_explicit_markers_need_no_template() -> None:
    markers = explicit_markers(byte_tokenizer(None), "### Instruction:", "### Response:")
    text = "### Instruction:\nQ\n\n### Response:\nA\n\n### Instruction:\nQ\n\n### Response:\nB</s>"
    assert [text[start:end] for start, end in markers.spans(text)] == ["\nA", "\nB</s>"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('no') }}", "does not render"),
        ("{% for message in messages %}{{ message.content }} {% endfor %}", "could tell them apart"),
    ],
)
def test_a_template_without_markers_is_refused(template: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        probe_markers(byte_tokenizer(template))


def test_an_end_with_its_whitespace_cut_off_is_still_an_end() -> None:
    markers = Markers(("<A>",), ("<E>\n",))
    assert markers.spans("<A>x<E>") == [(3, 7)]
    assert markers.spans("<A>x<E>\n<U>") == [(3, 8)]


def test_special_tokens_of_the_test_are_tokens() -> None:
    assert all(len(byte_tokenizer().encode(token, add_special_tokens=False)) == 1 for token in SPECIAL)
