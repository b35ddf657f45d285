"""A save takes its place whole or not at all: faults planted in the writer, the disk and the renames."""

from __future__ import annotations

import errno
import os
import pathlib
import shutil
from collections import namedtuple
from typing import Any

import pytest

from fastft import FastModel
from fastft.saving import shards
from fastft.saving.folder import check_target, replacing
from tests import support


def tree(folder: pathlib.Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def earlier(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder that holds an earlier save, of more shards than the next."""
    folder = tmp_path / "saves" / "merged"
    FastModel.save_merged(support.add_lora(support.build_model(seed=5)), None, folder, max_shard_size="60KB")
    return folder


def test_the_folder_holds_exactly_this_save(earlier: pathlib.Path, tokenizer: Any) -> None:
    (earlier / "stale.txt").write_text("left behind")
    FastModel.save_merged(support.add_lora(support.build_model()), tokenizer, earlier)
    names = {path.name for path in earlier.iterdir()}
    assert [name for name in names if name.endswith(".safetensors")] == ["model.safetensors"]
    assert not names & {"stale.txt", "model.safetensors.index.json"}
    assert [path.name for path in earlier.parent.iterdir()] == ["merged"]


def break_second_shard(monkeypatch: pytest.MonkeyPatch, number: int = errno.EIO) -> None:
    stock, calls = shards.write_safetensors, []

    def write(file: Any, *args: Any) -> None:
        calls.append(file)
        if len(calls) == 2:
            pathlib.Path(file).write_bytes(b"half")
            raise OSError(number, os.strerror(number))
        stock(file, *args)

    monkeypatch.setattr(shards, "write_safetensors", write)


def break_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a tensor is made, with its file open and half written."""
    stock = shards.fold

    def fold(module: Any, attribute: str, name: str, **options: Any) -> Any:
        if name == "model.layers.1.mlp.up_proj.weight":
            raise KeyboardInterrupt
        return stock(module, attribute, name, **options)

    monkeypatch.setattr(shards, "fold", fold)


def break_rename(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    stock, calls = os.rename, []

    def rename(source: Any, target: Any) -> None:
        calls.append(source)
        if len(calls) == number:
            raise OSError(errno.EIO, "no rename today")
        stock(source, target)

    monkeypatch.setattr(os, "rename", rename)


def break_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100, 99, 1))


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (break_second_shard, OSError, "Input/output"),
        (lambda m: break_second_shard(m, errno.ENOSPC), OSError, "what was there before is as it was"),
        (break_interrupt, KeyboardInterrupt, "^$"),
        (lambda m: break_rename(m, 1), OSError, "no rename"),
        (lambda m: break_rename(m, 2), OSError, "no rename"),
        (break_disk, OSError, "GiB are free"),
    ],
    ids=["writer", "disk_full", "interrupt", "first_rename", "second_rename", "preflight"],
)
def test_a_failed_save_loses_nothing(
    fault: Any, error: type[BaseException], message: str, earlier: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tree(earlier.parent)
    model = support.add_lora(support.build_model())
    with monkeypatch.context() as patch:
        fault(patch)
        with pytest.raises(error, match=message):
            FastModel.save_merged(model, None, earlier, max_shard_size="60KB")
    assert tree(earlier.parent) == before
    assert [path.name for path in earlier.parent.iterdir()] == ["merged"]
    FastModel.save_merged(model, None, earlier)


def test_no_permission_is_said_before_anything_is_computed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tempfile

    def refuse(**_: Any) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(PermissionError, match="cannot write beside"), replacing(tmp_path / "merged", 0):
        pytest.fail("the block ran")


def test_folders_that_a_save_must_not_replace(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "output"
    (output / "checkpoint-10").mkdir(parents=True)
    with pytest.raises(ValueError, match="checkpoint-10"):
        check_target(output)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("{}")
    with pytest.raises(ValueError, match=r"train\.jsonl"):
        check_target(tmp_path / "data")
    with pytest.raises(NotADirectoryError):
        check_target(tmp_path / "data" / "train.jsonl")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ValueError, match="current directory"):
        check_target(".")


def test_the_base_checkpoint_is_never_replaced(tmp_path: pathlib.Path) -> None:
    model = support.add_lora(support.load_4bit(support.build_model(), tmp_path / "base"))
    before = tree(tmp_path / "base")
    with pytest.raises(ValueError, match="loaded from"):
        FastModel.save_merged(model, None, tmp_path / "base")
    assert tree(tmp_path / "base") == before
