"""`standardize_chat`: every known shape to `messages`, nothing lost on the way, everything else refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from fastft import standardize_chat

MESSAGES = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
        {"conversations": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]},
        {"messages": [{"role": "Human", "content": "Q"}, {"role": "model", "content": "A"}]},
        {"chat": [{"from": "prompter", "value": "Q"}, {"from": "bot", "value": "A"}]},
        {"instruction": "Q", "output": "A"},
        {"instruction": "Q", "input": "", "response": "A"},
    ],
    ids=["sharegpt", "other column", "other roles", "both", "alpaca", "alpaca with empty input"],
)
def test_known_shapes_become_messages_and_other_columns_stay(row: dict[str, Any]) -> None:
    result = standardize_chat(Dataset.from_list([row | {"source": "here", "id": 7}]))
    assert result[0]["messages"] == MESSAGES
    assert (result[0]["source"], result[0]["id"]) == ("here", 7)
    assert set(result.column_names) == {"messages", "source", "id"}


def test_system_input_and_history_of_alpaca_are_in_the_conversation() -> None:
    row = {"instruction": "Add", "input": "1 1", "output": "2", "system": "Count.", "history": [["Hi", "Hello"]]}
    assert standardize_chat(Dataset.from_list([row])).to_list() == [
        {
            "messages": [
                {"role": "system", "content": "Count."},
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Hello"},
                {"role": "user", "content": "Add\n\n1 1"},
                {"role": "assistant", "content": "2"},
            ]
        }
    ]


def test_a_system_column_is_put_first_once() -> None:
    turns = [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Q"}]
    rows = [
        {"conversations": turns, "system": "Be brief."},
        {"conversations": turns[1:], "system": "Be brief."},
        {"conversations": turns[1:], "system": None},
    ]
    result = standardize_chat(Dataset.from_list(rows))
    assert [[message["role"] for message in row["messages"]] for row in result] == [["system", "user"]] * 2 + [["user"]]
    with pytest.raises(ValueError, match=r"row 0 .* another text"):
        standardize_chat(Dataset.from_list([{"conversations": turns, "system": "Be long."}]))


def test_tool_turns_and_further_keys_are_kept() -> None:
    turns = [
        {"from": "human", "value": "1+1?", "weight": 0},
        {"from": "function_call", "value": '{"name": "add"}', "weight": 1},
        {"from": "observation", "value": "2", "weight": 0},
    ]
    messages = standardize_chat(Dataset.from_list([{"conversations": turns}]))[0]["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert [message["weight"] for message in messages] == [0, 1, 0]


def test_a_call_of_a_tool_needs_no_text() -> None:
    call = [{"type": "function", "function": {"name": "add"}}]
    turns = [{"role": "assistant", "content": None, "tool_calls": call}]
    assert standardize_chat(Dataset.from_list([{"messages": turns}]))[0]["messages"][0]["tool_calls"] == call


def test_streams_and_dicts_stay_what_they_are() -> None:
    rows = [{"instruction": "Q", "output": "A"}]
    stream = standardize_chat(IterableDataset.from_generator(lambda: iter(rows)))
    assert isinstance(stream, IterableDataset)
    assert next(iter(stream)) == {"messages": MESSAGES}
    both = standardize_chat(DatasetDict(train=Dataset.from_list(rows), test=Dataset.from_list(rows)))
    assert isinstance(both, DatasetDict)
    assert both["test"][0] == {"messages": MESSAGES}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"question": "Q", "answer": "A"}], r"columns are \['question', 'answer'\]"),
        ([{"messages": MESSAGES, "conversations": MESSAGES}], "messages and conversations"),
        ([{"messages": MESSAGES}, {"messages": [{"role": "narrator", "content": "x"}]}], r"row 1 .*'narrator'"),
        ([{"messages": [{"role": "user", "content": None}]}], r"row 0 .*without text"),
        ([{"messages": ["Q", "A"]}], r"columns are \['messages'\]"),
        ([{"instruction": "Q", "output": "A"}, {"instruction": "Q", "output": None}], r"row 1 .*without text"),
        ([{"instruction": "Q", "output": "A", "history": [["q", None]]}], r"row 0 .*without text"),
    ],
)
def test_anything_else_is_refused_with_its_name(rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        standardize_chat(Dataset.from_list(rows))


def test_a_first_row_that_says_nothing_decides_nothing() -> None:
    """None and [] are rows like others; their neighbours tell the shape."""
    turns = [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]
    done = standardize_chat(Dataset.from_list([{"conversations": rows} for rows in (None, [], turns)]))
    expected = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    assert done["messages"] == [[], [], expected]


def test_rows_of_both_kinds_in_one_file_and_mixed_keys() -> None:
    """Arrow gives each message all keys of all messages, None where it had none."""
    sharegpt, mixed = [{"from": "human", "value": "Q"}], [{"from": "human", "content": "Q"}]
    role = [{"role": "user", "content": "Q"}]
    expected = [{"role": "user", "content": "Q"}]
    done = standardize_chat(Dataset.from_list([{"conversations": rows} for rows in (role, sharegpt)]))
    assert done["messages"] == [expected, expected]
    assert standardize_chat(Dataset.from_list([{"conversations": mixed}]))["messages"] == [expected]
