"""Chat data sets in the shapes they are published in, as the `messages` that TRL and chat templates read.

Three shapes cover nearly all: lists of from/value (ShareGPT), lists of role/content under some other column name or
with other role names, and instruction/input/output (Alpaca). Anything else is refused with its columns named, and so
is a role nobody defined: a guess here would be trained on. What is converted leaves its old columns; every other
column stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from fastft.data.containers import column_names, each

CONVERSATIONS = ("messages", "conversations", "conversation", "dialog", "dialogue", "chat")
ANSWERS = ("output", "response")
SYSTEM = ("system", "system_prompt")
SPEAKERS = ("role", "from")  # the first that is not None counts: rows of both kinds in one file have all the keys
WORDS = ("content", "value")
ROWS_SEEN = 100  # to tell a dataset's shape by
ROLES = {
    "system": ("system", "developer"),
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "chatgpt", "bot", "model", "bing", "bard", "function_call"),
    "tool": ("tool", "function", "function_response", "observation", "ipython"),
}
_ROLE_OF = {variant: role for role, variants in ROLES.items() for variant in variants}


def standardize_chat(dataset: Any, *, num_proc: int | None = None) -> Any:
    """Convert ShareGPT, Alpaca and role/content variants to `messages`.

    Args:
        dataset: a `Dataset`, `IterableDataset` or dict of them.
        num_proc: processes for `Dataset.map`.

    Returns:
        A dataset of the same kind whose `messages` are lists of {"role", "content", …}, with roles system, user,
        assistant and tool. Further keys of a message (`tool_calls`, `name`) and further columns are kept. A `system`
        column, an Alpaca `history` and an Alpaca `input` become part of the conversation.

    Raises:
        ValueError: the shape is none of these, two columns hold conversations, or a message has no known role or no
            text.
    """
    return each(dataset, lambda name, rows: _standardized(name, rows, num_proc), "dataset")


def _standardized(name: str, dataset: Any, num_proc: int | None) -> Any:
    from datasets import Dataset

    columns = column_names(dataset)
    rows = list(islice(dataset, ROWS_SEEN))
    if not rows:
        raise ValueError(f"{name} has no rows; its columns are {columns}.")
    conversion = _conversion(name, columns, {column: _first_value(rows, column) for column in columns})
    removed = [column for column in conversion.columns if column != "messages"]
    options = {"num_proc": num_proc, "desc": f"Converting {name} to messages"} if isinstance(dataset, Dataset) else {}
    return dataset.map(conversion, with_indices=True, remove_columns=removed, **options)


def _first_value(rows: Iterable[Mapping[str, Any]], column: str) -> Any:
    """The first that says something of the column's shape: neither None nor an empty list, if there is one."""
    values = [row.get(column) for row in rows]
    return next((value for value in values if value), next((value for value in values if value is not None), None))


def _conversion(name: str, columns: list[str], first: Mapping[str, Any]) -> Conversion:
    """How rows become messages whose first values are `first`."""
    lists = [column for column in CONVERSATIONS if column in columns and _is_conversation(first[column])]
    if len(lists) > 1:
        raise ValueError(
            f"{name} has conversations in {' and '.join(lists)}, and there is no telling which to train on. "
            f"Remove one: dataset.remove_columns({lists[-1]!r})."
        )
    system = next((column for column in SYSTEM if column in columns), None)
    if lists:
        return Conversion(name, conversation=lists[0], system=system)
    answer = next((column for column in ANSWERS if column in columns), None)
    if "instruction" in columns and answer is not None:
        extra = {column: column for column in ("input", "history") if column in columns}
        return Conversion(name, answer=answer, system=system, **extra)
    raise ValueError(
        f"{name} is in no chat format known here; its columns are {columns}. Known are a list of messages with role "
        "(or from) and "
        f"content (or value) in one of {', '.join(CONVERSATIONS)}, and instruction, (input,) output. "
        "Rename columns with dataset.rename_column, or map the rows to messages yourself."
    )


def _is_conversation(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    return all(
        isinstance(message, dict) and message.keys() & set(SPEAKERS) and message.keys() & set(WORDS)
        for message in value
    )


def _first_of(message: Mapping[str, Any], keys: Iterable[str]) -> Any:
    return next((message[key] for key in keys if message.get(key) is not None), None)


@dataclass(frozen=True, slots=True)
class Conversion:
    """One row to its messages; module-level, so that `Dataset.map` may start processes however it likes.

    Args:
        name: of the dataset, for errors.
        conversation: column with the list of messages; None for Alpaca's columns.
        answer: Alpaca's column of answers.
        input: Alpaca's column of inputs, if there is one.
        history: Alpaca's column of earlier (question, answer) pairs, if there is one.
        system: column with a system prompt, if there is one.
    """

    name: str
    conversation: str | None = None
    answer: str | None = None
    input: str | None = None
    history: str | None = None
    system: str | None = None

    @property
    def columns(self) -> list[str]:
        """Columns that end up in the messages."""
        instruction = "instruction" if self.answer else None
        used = (self.conversation, instruction, self.answer, self.input, self.history, self.system)
        return [column for column in used if column is not None]

    def __call__(self, row: Mapping[str, Any], index: int) -> dict[str, list[dict[str, Any]]]:
        """`messages` of row number `index`."""
        if self.conversation is not None:
            messages = [self._message(message, index) for message in row[self.conversation] or []]
        else:
            messages = self._alpaca(row, index)
        system = row[self.system] if self.system else None
        if system:
            if messages and messages[0]["role"] == "system" and messages[0]["content"] != system:
                raise ValueError(
                    f"row {index} of {self.name} has a system turn and another text in its column {self.system!r}. "
                    f"Remove the column, or the turns."
                )
            if not messages or messages[0]["role"] != "system":
                messages = [{"role": "system", "content": system}, *messages]
        return {"messages": messages}

    def _message(self, message: Mapping[str, Any], index: int) -> dict[str, Any]:
        speaker, content = _first_of(message, SPEAKERS), _first_of(message, WORDS)
        role = _ROLE_OF.get(str(speaker).strip().lower())
        if role is None:
            raise ValueError(
                f"row {index} of {self.name} has a message by {speaker!r}; roles known here are "
                f"{', '.join(sorted(_ROLE_OF))}. Map it to one of those first."
            )
        if content is None and not message.get("tool_calls"):
            raise ValueError(f"row {index} of {self.name} has a message by {role} without text: {dict(message)!r}.")
        others = {key: value for key, value in message.items() if key not in (*SPEAKERS, *WORDS)}
        return {"role": role, "content": content, **others}

    def _alpaca(self, row: Mapping[str, Any], index: int) -> list[dict[str, Any]]:
        assert self.answer is not None
        given = row[self.input] if self.input else None
        question = f"{row['instruction']}\n\n{given}" if given else row["instruction"]
        turns = [*((row[self.history] or []) if self.history else []), (question, row[self.answer])]
        if any(text is None for turn in turns for text in turn) or row["instruction"] is None:
            raise ValueError(
                f"row {index} of {self.name} has a question or an answer without text (None), which a template would "
                f"spell out: {dict(row)!r}. Leave such rows out: dataset.filter(lambda row: row[{self.answer!r}] is "
                "not None)."
            )
        return [
            {"role": role, "content": text}
            for turn in turns
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
