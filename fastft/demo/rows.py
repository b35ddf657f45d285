"""Rows the demo trains on: reading a JSONL file, checking it before any model is loaded, and holding some of it out.

A row is {"prompt": text, "completion": text}, or {"messages": [{"role", "content"}, ...]} with the assistant's words
last. One file holds one kind. Every complaint names the file and the line.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA_FOLDER = Path(__file__).with_name("data")
TRAINING_FILE = "train.jsonl"
HELD_OUT_FILES = {"unseen values": "heldout_values.jsonl", "unseen wording": "heldout_templates.jsonl"}
FEWEST_ROWS = 10
MOST_HELD_OUT = 64


class DatasetError(ValueError):
    """A data set the demo cannot use; the message says which line, what is wrong, what is right."""


@dataclass(frozen=True)
class Row:
    """One question with its right answer. `prompt` is text, or the conversation so far for rows of messages."""

    prompt: str | list[dict[str, str]]
    completion: str
    line: int

    @property
    def question(self) -> str:
        """The words asked, as one string: what the baseline compares and the samples show."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n".join(message["content"] for message in self.prompt)

    def for_trainer(self) -> dict[str, Any]:
        """The row in TRL's prompt/completion format (both text, or both messages)."""
        if isinstance(self.prompt, str):
            return {"prompt": self.prompt, "completion": self.completion}
        return {"prompt": self.prompt, "completion": [{"role": "assistant", "content": self.completion}]}


@dataclass(frozen=True)
class TaskData:
    """Training rows, the held-out sets by name, and how often training passes over the rows by default."""

    train: list[Row]
    held_out: dict[str, list[Row]]
    passes: int


def builtin_data() -> TaskData:
    """The data set that travels with the package."""
    held_out = {name: read_rows(DATA_FOLDER / file) for name, file in HELD_OUT_FILES.items()}
    return TaskData(read_rows(DATA_FOLDER / TRAINING_FILE), held_out, passes=1)


def user_data(path: Path, *, seed: int = 3407) -> TaskData:
    """Rows of the user's file, a tenth of them (at most 64, drawn by `seed`) held out.

    Raises:
        DatasetError: the file is missing, is not JSONL, holds a malformed row, mixes two kinds of row, or is too short.
    """
    rows = read_rows(path)
    if len(rows) < FEWEST_ROWS:
        raise DatasetError(f"{path}: {len(rows)} rows; at least {FEWEST_ROWS} are needed, since a tenth is held out")
    count = min(max(len(rows) // 10, 1), MOST_HELD_OUT)
    chosen = set(random.Random(seed).sample(range(len(rows)), count))
    train = [row for index, row in enumerate(rows) if index not in chosen]
    return TaskData(train, {"held-out rows": [rows[index] for index in sorted(chosen)]}, passes=3)


def read_rows(path: Path) -> list[Row]:
    """Every row of a JSONL file, checked. Blank lines are skipped.

    Raises:
        DatasetError: see `user_data`.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise DatasetError(f"{path}: no such file") from error
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    rows: list[Row] = []
    # Not splitlines(): JSON strings may hold characters such as U+2028, which it would split at.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        row = _parse_row(line, number, where)
        if rows and isinstance(row.prompt, str) != isinstance(rows[0].prompt, str):
            raise DatasetError(f"{where}: the file mixes prompt/completion rows and messages rows; use one kind")
        rows.append(row)
    if not rows:
        raise DatasetError(f"{path}: no rows; each line should be " + '{"prompt": "...", "completion": "..."}')
    return rows


def _parse_row(line: str, number: int, where: str) -> Row:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise DatasetError(f"{where}: not JSON ({error.msg} at column {error.colno}); a row is one line") from error
    if not isinstance(fields, dict):
        raise DatasetError(f"{where}: a JSON {type(fields).__name__}, where an object is needed")
    if "messages" in fields:
        return _parse_messages(fields["messages"], number, where)
    missing = [key for key in ("prompt", "completion") if key not in fields]
    if missing:
        raise DatasetError(
            f"{where}: no {' and no '.join(map(repr, missing))}; a row has 'prompt' and 'completion', or 'messages' "
            f"(found: {', '.join(map(repr, fields)) or 'nothing'})"
        )
    for key in ("prompt", "completion"):
        if not isinstance(fields[key], str) or not fields[key].strip():
            raise DatasetError(f"{where}: {key!r} must be text that is not empty, got {fields[key]!r:.60}")
    return Row(fields["prompt"], fields["completion"], number)


def _parse_messages(messages: Any, number: int, where: str) -> Row:
    if not isinstance(messages, list) or len(messages) < 2:
        raise DatasetError(f"{where}: 'messages' must be a list of at least two messages")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise DatasetError(f"{where}: message {index} must be an object with text under 'role' and 'content'")
    *conversation, last = ({"role": message["role"], "content": message["content"]} for message in messages)
    if last["role"] != "assistant" or not last["content"].strip():
        raise DatasetError(f"{where}: the last message must be the assistant's and not empty (it is what is learned)")
    return Row(conversation, last["content"], number)
