"""Where answers begin and end in a chat template's text, found by rendering conversations made of known words.

The prompt the model will be given ends where an answer begins, so what follows the last user word in a rendered
*prompt*, as far as a rendered *conversation* has it too, is the response marker. What stands behind an answer both
when a turn follows and when none does is the end of the turn. What stands before every user word is the instruction
marker; it ends an answer only in templates that have no end of turn (Alpaca's), or where it cannot be mistaken for
words (a special token).

Rendering rather than a table of known templates: a tokenizer's template is edited, versioned and mixed more often
than it is stock. Several conversations, because templates treat the first turn, the last turn, a system turn and a
tool's turn differently: thinking blocks are in the last answer or in the prompt only, a system turn may become part
of the first user turn, and after a tool the answer may begin behind another marker.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

USER, ANSWER = ("qprobeuserone", "qprobeusertwo"), ("qprobeanswerone", "qprobeanswertwo")
SYSTEM = "qprobesystem"
REASONING, TOOL_NAME, ARGUMENT, RESULT = "qprobereasoning", "qprobetool", "qprobeargument", "qproberesult"

# What a marker is cut at: special tokens in their usual spellings, words, and single characters.
_ATOM = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]|\w+|\s|.", re.DOTALL)


Render = Callable[..., str | None]


@dataclass(frozen=True, slots=True)
class Markers:
    """What delimits answers.

    Args:
        response: an answer begins behind any of these.
        end: an answer ends with any of these, included: it is what the model must learn to stop with.
        stop: an answer ends before any of these.
        instruction: what a user turn begins with; for messages, None where the template shows none.
        system_like_answers: the template sets a system turn off as it does an answer (or loses the answers behind one).
    """

    response: tuple[str, ...]
    end: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    instruction: str | None = None
    system_like_answers: bool = False

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Where the answers of `text` are, first character and the one past the last."""
        begins, stops = _any_of(self.response), _any_of((*self.stop, *self.response))
        ends = _any_of(self.end, whitespace_optional=True)
        question = _any_of((self.instruction,) if self.instruction else ())
        found = []
        begin = begins.search(text)
        while begin is not None:
            start, finish = begin.end(), len(text)
            if stop := stops.search(text, start):
                finish = max(start, len(text[: stop.start()].rstrip()))
            end = ends.search(text, start)
            if end and (stop is None or end.start() <= stop.start()):
                finish = end.end()
            elif self.end and stop and (asked := question.search(text, start, finish)):
                # A question without an answer, and the next question behind it.
                finish = max(start, len(text[: asked.start()].rstrip()))
            if finish > start:
                found.append((start, finish))
            begin = begins.search(text, finish)
        return found


def probe_markers(tokenizer: Any) -> Markers:
    """The markers of the tokenizer's own chat template.

    Raises:
        ValueError: there is no chat template, it does not render a plain conversation, it shows no marker, or the
            markers do not tell its answers from its questions.
    """
    from trl.chat_template_utils import supports_tool_calling

    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "the tokenizer has no chat template to find the markers with. Give instruction_part and response_part "
            "(e.g. '### Instruction:' and '### Response:'), or a template: tokenizer = "
            "fastft.data.get_chat_template(tokenizer, 'chatml')"
        )
    special = set(tokenizer.get_added_vocab()) | set(tokenizer.all_special_tokens)
    markers = _from_conversation(_renderer(tokenizer), special)
    if supports_tool_calling(tokenizer):
        markers = _with_tool_turns(markers, _renderer(tokenizer), special)
    return _tried(markers, _renderer(tokenizer))


def explicit_markers(tokenizer: Any, instruction_part: str | None, response_part: str) -> Markers:
    """Markers as the user names them, with the template's end of turn where it is the same response marker.

    Without one, an answer runs to the next instruction or the end of the row.
    """
    try:
        probed = probe_markers(tokenizer)
    except ValueError:  # no template, or none that can be read: the user's markers are all there is
        probed = None
    if probed is not None and response_part.strip() in {marker.strip() for marker in probed.response}:
        special = set(tokenizer.get_added_vocab())
        stop = (instruction_part,) if instruction_part and _has(instruction_part, special) else probed.stop
        return Markers((response_part, *probed.response[1:]), probed.end, stop, instruction_part)
    return Markers((response_part,), (), (instruction_part,) if instruction_part else (), instruction_part)


def _renderer(tokenizer: Any) -> Render:
    """Renders messages to text; None where the template refuses them."""
    from jinja2 import TemplateError

    def render(messages: list[dict[str, Any]], *, prompt: bool = False) -> str | None:
        try:
            text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        except (TemplateError, TypeError, ValueError, KeyError):
            return None
        return text

    return render


def _from_conversation(render: Render, special: set[str]) -> Markers:
    """Markers of user and assistant turns."""
    turns = [_user(0), _answer(0), _user(1), _answer(1)]
    whole, first, prompt = render(turns), render(turns[:1]), render(turns[:1], prompt=True)
    if whole is None or first is None or prompt is None or not all(word in whole for word in (*USER, *ANSWER)):
        raise ValueError(
            "the chat template does not render a conversation of user, assistant, user, assistant, so its markers "
            "cannot be found. Give instruction_part and response_part."
        )
    befores = [_between(whole, USER[turn], ANSWER[turn]) for turn in (0, 1)]
    befores += _before_reasoning(render)
    bare = _after(first, USER[0])
    response = _response_marker(bare, _after(prompt, USER[0]), befores)
    if not response:
        raise ValueError(
            "the chat template puts nothing between a question and its answer that could tell them apart "
            f"(a rendered conversation: {whole!r}). Give instruction_part and response_part."
        )
    middle, tail = _between(whole, ANSWER[0], USER[1]), _after(whole, ANSWER[1])
    instruction = _common_suffix(first.partition(USER[0])[0], middle).lstrip().rstrip(" ")
    ends = _turn_ends(middle, tail, bare, instruction, special)
    for end in ends:  # behind a default system turn, a user turn seems to begin with that turn's end
        instruction = instruction.removeprefix(end.strip()).lstrip()
    stop = (instruction,) if instruction and (not ends or _has(instruction, special)) else ()
    return Markers((response,), ends, stop, instruction or None)


def _tried(markers: Markers, render: Render) -> Markers:
    """`markers`, tried on the conversations that they were made of: they must find the answers and nothing else.

    Raises:
        ValueError: they find a question, or miss an answer: some templates set off all turns alike.
    """

    def finds_answers(text: str) -> bool:
        found = "".join(text[start:end] for start, end in markers.spans(text))
        return all(word in found for word in ANSWER) and not any(word in found for word in (*USER, SYSTEM))

    turns = [_user(0), _answer(0), _user(1), _answer(1)]
    whole, with_system = render(turns), render([{"role": "system", "content": SYSTEM}, *turns])
    if whole is None or not finds_answers(whole):
        raise ValueError(
            f"the chat template does not tell answers from questions: behind {' or '.join(map(repr, markers.response))}"
            f" there is more than answers (a rendered conversation: {whole!r}). Give instruction_part and "
            "response_part, or take another template."
        )
    return replace(markers, system_like_answers=with_system is not None and not finds_answers(with_system))


def _before_reasoning(render: Render) -> list[str]:
    """What stands before an answer's reasoning, where the template renders reasoning at all."""
    answer = _answer(0) | {"reasoning_content": REASONING}
    in_content = {"role": "assistant", "content": f"<think>\n{REASONING}\n</think>\n\n{ANSWER[0]}"}
    texts = [render([_user(0), message]) for message in (answer, in_content)]
    return [_between(text, USER[0], REASONING) for text in texts if text is not None and REASONING in text]


def _turn_ends(middle: str, tail: str, bare: str, instruction: str, special: set[str]) -> tuple[str, ...]:
    """What ends an answer.

    Args:
        middle: what stands between an answer and the next question.
        tail: what stands behind the last answer.
        bare: what stands behind a question that is the last turn.
        instruction: what a user turn begins with.
        special: the tokenizer's special and added tokens.
    """
    if end := _common_prefix(middle, tail).lstrip().rstrip(" "):  # a space may belong to the word behind it
        closing = tail.lstrip().rstrip(" ")  # the end of the last turn may be followed by the end of the text: Phi-3
        return (closing, end) if _ATOM.findall(closing.removeprefix(end))[:1] and _has(closing, special) else (end,)
    if bare.strip() and middle.startswith(bare.rstrip()):  # all turns end alike, but for the last: gpt-oss
        last = [atom for atom in _ATOM.findall(tail) if atom in special][:1]
        return (bare.strip(), *last)
    if end := middle.rstrip(" ").removesuffix(instruction).strip():  # the last turn is left open
        return (end,)
    # No end of turn: a model stops with the token the next turn begins with (GLM), if that is a token.
    begins = _ATOM.findall(instruction)[:1]
    return tuple(atom for atom in begins if atom in special)


def _with_tool_turns(markers: Markers, render: Render, special: set[str]) -> Markers:
    """`markers` and what calls of tools and answers to their results need beyond them."""
    call: dict[str, Any] = {"type": "function", "function": {"name": TOOL_NAME, "arguments": {ARGUMENT: "1"}}}
    turns = [
        _user(0),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": TOOL_NAME, "content": RESULT},
        _answer(1),
    ]
    if render(turns) is None:  # some templates want the arguments as JSON text
        call["function"]["arguments"] = f'{{"{ARGUMENT}": "1"}}'
    whole, called, result, prompt = (
        render(turns),
        render(turns[:2]),
        render(turns[:3]),
        render(turns[:3], prompt=True),
    )
    if whole is None or called is None or result is None or prompt is None:
        return markers
    if not all(word in whole for word in (ARGUMENT, RESULT, ANSWER[1])):
        return markers
    response, end, stop = markers.response, markers.end, markers.stop
    before = _between(whole, RESULT, ANSWER[1])
    if not any(marker in before for marker in response):
        behind_result = _response_marker(_after(result, RESULT), _after(prompt, RESULT), [before])
        response = (*response, behind_result) if behind_result else response
    tail, between = _after(called, ARGUMENT), _between(whole, ARGUMENT, RESULT)
    if not any(marker.strip() in between for marker in end):
        # A call ends in its own way ("<|eom_id|>"); without any end of turn, with the token of the tool's turn (GLM).
        closing = [atom for atom in _ATOM.findall(tail) if atom in special][-1:]
        opening = [atom for atom in _ATOM.findall(between[len(_common_prefix(between, tail)) :]) if atom in special][:1]
        end = (*end, *(closing if markers.instruction or _after(whole, ANSWER[1]).strip() else opening))
    return Markers(response, end, stop, markers.instruction)


def _response_marker(bare: str, prompted: str, befores: Sequence[str]) -> str:
    """The marker an answer begins behind.

    Args:
        bare: what follows the question where no answer is asked for.
        prompted: the same where one is: the generation prompt included.
        befores: what stands between question and answer in whole conversations.
    """
    header = prompted[len(_common_prefix(bare, prompted)) :]
    for begin in (header, prompted):  # without a generation prompt, all behind the question ("[/INST]")
        atoms = _ATOM.findall(begin.lstrip())
        for count in range(len(atoms), 0, -1):
            marker = "".join(atoms[:count]).rstrip(" ")
            if marker and all(marker in before for before in befores):
                return marker
    return ""


def _user(turn: int) -> dict[str, Any]:
    return {"role": "user", "content": USER[turn]}


def _answer(turn: int) -> dict[str, Any]:
    return {"role": "assistant", "content": ANSWER[turn]}


def _between(text: str, left: str, right: str) -> str:
    return text.partition(left)[2].partition(right)[0]


def _after(text: str, word: str) -> str:
    return text.rpartition(word)[2]


def _common_prefix(first: str, second: str) -> str:
    """Of whole atoms: "<|end|>" and "<|endoftext|>" have none in common."""
    return "".join(_shared(_ATOM.findall(first), _ATOM.findall(second)))


def _common_suffix(first: str, second: str) -> str:
    return "".join(reversed(_shared(_ATOM.findall(first)[::-1], _ATOM.findall(second)[::-1])))


def _shared(first: list[str], second: list[str]) -> list[str]:
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return [atom for atom, _ in pairs]


def _has(text: str, tokens: Iterable[str]) -> bool:
    return any(token in text for token in tokens)


def _any_of(markers: Sequence[str], *, whitespace_optional: bool = False) -> re.Pattern[str]:
    """Finds any of them, the longest first; on request also without the whitespace at its end (in a row that was cut).

    Never matches if there are none.
    """
    patterns = []
    for marker in sorted({marker for marker in markers if marker}, key=len, reverse=True):
        stem = marker.rstrip() if whitespace_optional else marker
        rest = re.escape(marker[len(stem) :])
        patterns.append(re.escape(stem) + (f"(?:{rest})?" if rest else ""))
    return re.compile("|".join(patterns) or r"(?!)")
