"""Data sets of the user's own: what is read, what is held out, and that every complaint names the line."""

from __future__ import annotations

import json
import pathlib

import pytest

from fastft.demo.rows import DatasetError, read_rows, user_data

GOOD = json.dumps({"prompt": "q", "completion": "a"})
GOOD_MESSAGES = json.dumps({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]})


def write(folder: pathlib.Path, *lines: str) -> pathlib.Path:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_prompt_rows_go_to_the_trainer_as_they_are(tmp_path: pathlib.Path) -> None:
    (row,) = read_rows(write(tmp_path, GOOD))
    assert row.for_trainer() == {"prompt": "q", "completion": "a"}
    assert row.question == "q"


def test_message_rows_split_before_the_last_answer(tmp_path: pathlib.Path) -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
    ]
    (row,) = read_rows(write(tmp_path, json.dumps({"messages": messages})))
    assert row.for_trainer() == {"prompt": messages[:2], "completion": messages[2:]}
    assert row.question == "s\nq"


def test_blank_lines_count_for_line_numbers_and_line_separators_inside_text_do_not(tmp_path: pathlib.Path) -> None:
    inside = json.dumps({"prompt": "a\u2028b", "completion": "c"}, ensure_ascii=False)
    rows = read_rows(write(tmp_path, inside, "", GOOD, ""))
    assert [row.line for row in rows] == [1, 3]
    assert rows[0].prompt == "a\u2028b"


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + f"{GOOD}\r\n{GOOD}\r\n".encode())
    assert len(read_rows(path)) == 2


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{'prompt': 1}", "not JSON"),
        ("[1, 2]", "a JSON list, where an object is needed"),
        ('{"prompt": "q"}', "no 'completion'"),
        ('{"question": "q", "answer": "a"}', "no 'prompt' and no 'completion'"),
        ('{"prompt": "q", "completion": ""}', "'completion' must be text that is not empty"),
        ('{"prompt": 3, "completion": "a"}', "'prompt' must be text"),
        ('{"messages": "hello"}', "at least two messages"),
        ('{"messages": [{"role": "user", "content": "q"}]}', "at least two messages"),
        ('{"messages": [{"role": "user"}, {"role": "assistant", "content": "a"}]}', "message 0"),
        (
            '{"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "q"}]}',
            "last message must be the assistant's",
        ),
        (GOOD_MESSAGES, "mixes"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: pathlib.Path, line: str, complaint: str) -> None:
    path = write(tmp_path, GOOD, GOOD, line)
    with pytest.raises(DatasetError) as caught:
        read_rows(path)
    assert f"{path} line 3: " in str(caught.value)
    assert complaint in str(caught.value)


def test_files_that_cannot_be_read_say_why(tmp_path: pathlib.Path) -> None:
    with pytest.raises(DatasetError, match="no such file"):
        read_rows(tmp_path / "missing.jsonl")
    with pytest.raises(DatasetError, match="cannot be read"):
        read_rows(tmp_path)
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes('{"prompt": "é"}'.encode("latin-1"))
    with pytest.raises(DatasetError, match="not UTF-8"):
        read_rows(latin)
    with pytest.raises(DatasetError, match="no rows"):
        read_rows(write(tmp_path, "", "  "))


def test_a_tenth_is_held_out_and_always_the_same_tenth(tmp_path: pathlib.Path) -> None:
    lines = [json.dumps({"prompt": f"q{i}", "completion": f"a{i}"}) for i in range(50)]
    path = write(tmp_path, *lines)
    data, again = user_data(path), user_data(path)
    (held_out,) = data.held_out.values()
    assert len(held_out) == 5
    assert {row.line for row in held_out}.isdisjoint(row.line for row in data.train)
    assert len(data.train) == 45
    assert data == again


def test_no_more_than_64_rows_are_held_out_and_ten_are_the_least(tmp_path: pathlib.Path) -> None:
    (held_out,) = user_data(write(tmp_path, *[GOOD] * 1000)).held_out.values()
    assert len(held_out) == 64
    with pytest.raises(DatasetError, match="at least 10"):
        user_data(write(tmp_path, *[GOOD] * 9))
