"""A folder that holds exactly one save: written beside its place, and moved there when it is whole and checked.

Whatever fails before the move (a full disk, a check, the user's Ctrl-C) leaves what was there before as it was, and no
half-made files. The move is two renames where a folder exists (old away, new in); if the second fails, the first is
taken back. Both are on one file system, because the temporary folder is made beside the target.

What is replaced is deleted, so a folder that looks like more than an earlier save is refused: one with folders in it
(a trainer's output and its checkpoints), with files no save writes, or one that holds the current directory.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["check_target", "replacing"]

logger = logging.getLogger(__name__)

_SAVED = (".safetensors", ".json", ".bin", ".model", ".txt", ".jinja", ".gguf", ".md", ".py", ".tiktoken")
_SAVED_NAMES = ("Modelfile", ".gitattributes", "LICENSE", "NOTICE", "recipe.yaml")
_MARGIN = 64 * 2**20  # bytes: tokenizer, configuration, what else the file system wants


def check_target(folder: str | os.PathLike[str], *sources: str | None) -> Path:
    """The absolute path of a folder that a save may replace.

    Args:
        folder: where the save shall be.
        *sources: folders that the save, or the live model, still needs.

    Raises:
        NotADirectoryError: a file has this name.
        ValueError: replacing it would lose more than an earlier save.
    """
    path = Path(os.path.abspath(Path(folder).expanduser()))
    if path.is_symlink():
        path = path.resolve()
    if not path.exists():
        return path
    if not path.is_dir():
        raise NotADirectoryError(f"{path} is a file: a save needs a folder's name.")
    for source in sources:
        if source and Path(source).is_dir() and Path(source).resolve() == path.resolve():
            raise ValueError(
                f"{path} is the folder that this model was loaded from. Saving there would replace it; choose "
                "another folder."
            )
    here = Path.cwd().resolve()
    if path.resolve() in (here, *here.parents):
        raise ValueError(f"{path} is or holds the current directory: a save replaces its folder; choose a new one.")
    foreign = sorted(
        entry.name for entry in path.iterdir()
        if entry.is_dir() or not (entry.name.endswith(_SAVED) or entry.name in _SAVED_NAMES)
    )  # fmt: skip
    if foreign:
        raise ValueError(
            f"{path} holds {', '.join(foreign[:5])}{' and more' if len(foreign) > 5 else ''}, which no save writes. A "
            "save replaces the whole folder, and these would be lost: choose another folder, or move them away."
        )
    return path


@contextmanager
def replacing(path: Path, needed_bytes: int) -> Iterator[Path]:
    """Give a temporary folder beside `path`; put it in `path`'s place if the block ends well, else remove it.

    Args:
        path: from `check_target`.
        needed_bytes: what will be written, for the check of free space.

    Raises:
        PermissionError: nothing can be written beside `path`.
        OSError: too little free space, or writing or moving failed; what was at `path` is as before.
    """
    temporary = _make_temporary(path)
    try:
        free = shutil.disk_usage(temporary).free
        if free < needed_bytes + _MARGIN:
            raise OSError(
                errno.ENOSPC,
                f"saving to {path} needs {(needed_bytes + _MARGIN) / 2**30:.2f} GiB beside what is there, and "
                f"{free / 2**30:.2f} GiB are free. Nothing was written; free some space or choose another disk",
            )
        try:
            yield temporary
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise OSError(
                errno.ENOSPC, f"the disk became full while saving to {path}; what was there before is as it was"
            ) from error
        _publish(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _make_temporary(path: Path) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}-", suffix=".saving", dir=path.parent))
    except OSError as error:
        raise PermissionError(
            error.errno,
            f"cannot write beside {path} (a save is made there and then moved into place): {error.strerror}. Choose a "
            "folder whose parent is yours",
        ) from error
    mask = os.umask(0)
    os.umask(mask)
    temporary.chmod(0o777 & ~mask)  # mkdtemp's 0700 is not what a shared model folder should have
    return temporary


def _publish(temporary: Path, path: Path) -> None:
    if not path.exists():
        os.rename(temporary, path)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{path.name}-", suffix=".old", dir=path.parent))
    try:
        os.rename(path, old / path.name)
        try:
            os.rename(temporary, path)
        except BaseException:
            os.rename(old / path.name, path)
            raise
    except BaseException:
        if not (old / path.name).exists():
            old.rmdir()
        raise
    shutil.rmtree(old, ignore_errors=True)
    if old.exists():
        logger.warning("fastft: the save before this one could not be removed completely: %s", old)
