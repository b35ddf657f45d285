"""Raw text files as a dataset with a row for each document.

`load_dataset("text")` makes a row of each *line* unless told otherwise, and a corpus joined into one string has
documents that run into each other: packed, one would be read as the other's beginning. Here a document is a row: a
whole file, or what stands between separators. SFTTrainer ends each with EOS, and its packing (bfd) keeps rows apart
from each other.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any


def text_files(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    separator: str | None = None,
    *,
    encoding: str = "utf-8",
    num_proc: int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Any:
    """Read text files into a `Dataset` with the column `text`, a document a row.

    Args:
        paths: files, or folders whose .txt and .md files are read (folders below them too), in order of their names.
        separator: text between documents of one file, e.g. "<|endoftext|>" or "\\n\\n\\n"; it is not kept. None: a
            file is a document.
        encoding: of the files.
        num_proc: processes for splitting.
        cache_dir: as in `datasets`; None is its own default.

    Returns:
        The dataset. Documents of white space alone are left out; all others are as they stand in the file.

    Raises:
        FileNotFoundError: a path does not exist, or a folder has no text file.
        ValueError: the separator is empty, or there is no document in any of the files.
    """
    from datasets import Dataset

    if separator == "":
        raise ValueError("separator is empty, which separates nothing. None makes each file one document.")
    files = _files([paths] if isinstance(paths, str | os.PathLike) else paths)
    dataset = Dataset.from_text(files, cache_dir=cache_dir, sample_by="document", encoding=encoding)
    documents = dataset.map(
        _split,
        batched=True,
        batch_size=16,
        num_proc=num_proc,
        fn_kwargs={"separator": separator},
        desc="Splitting documents",
    )
    if len(documents) == 0:
        raise ValueError(f"there is no text in {', '.join(files[:5])}{' …' if len(files) > 5 else ''}.")
    return documents


def _files(paths: Iterable[str | os.PathLike[str]]) -> list[str]:
    """Every file named, in the order given; a folder's sorted."""
    files: list[str] = []
    for path in map(pathlib.Path, paths):
        if path.is_dir():
            found = sorted(file for file in path.rglob("*") if file.suffix in (".txt", ".md") and file.is_file())
            if not found:
                raise FileNotFoundError(f"the folder {path} has no .txt or .md file. Name the files themselves.")
            files += map(str, found)
        elif path.is_file():
            files.append(str(path))
        else:
            raise FileNotFoundError(f"there is no file or folder {path} (looked for from {pathlib.Path.cwd()}).")
    if not files:
        raise ValueError("paths names no file.")
    return files


def _split(batch: Mapping[str, list[str]], separator: str | None) -> dict[str, list[str]]:
    documents = [part for text in batch["text"] for part in (text.split(separator) if separator else [text])]
    return {"text": [document for document in documents if document.strip()]}
