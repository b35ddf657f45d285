"""`text_files`: documents, not lines, and apart from each other."""

from __future__ import annotations

import pathlib

import pytest

from fastft import text_files


def test_a_file_is_a_document_whatever_its_lines(tmp_path: pathlib.Path) -> None:
    texts = ["first line\n\nsecond ü\n", "alone"]
    for index, text in enumerate(texts):
        (tmp_path / f"{index}.txt").write_text(text, "utf-8")
    dataset = text_files(tmp_path, cache_dir=tmp_path / "cache")
    assert dataset.column_names == ["text"]
    assert [text.rstrip("\n") for text in dataset["text"]] == [text.rstrip("\n") for text in texts]


def test_a_separator_keeps_documents_apart_in_order(tmp_path: pathlib.Path) -> None:
    (tmp_path / "b.txt").write_text("one\n<|sep|>two\nlines<|sep|>\n \n<|sep|>", "utf-8")
    (tmp_path / "a.md").write_text("three", "utf-8")
    dataset = text_files([tmp_path / "b.txt", tmp_path / "a.md"], "<|sep|>", cache_dir=tmp_path / "cache")
    assert [text.strip() for text in dataset["text"]] == ["one", "two\nlines", "three"]


def test_what_is_not_there_is_said(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file or folder .*missing\.txt"):
        text_files(tmp_path / "missing.txt")
    with pytest.raises(FileNotFoundError, match=r"no \.txt or \.md file"):
        text_files(tmp_path)
    (tmp_path / "blank.txt").write_text(" \n", "utf-8")
    with pytest.raises(ValueError, match="there is no text"):
        text_files(tmp_path, cache_dir=tmp_path / "cache")
    with pytest.raises(ValueError, match="separates nothing"):
        text_files(tmp_path, "")
