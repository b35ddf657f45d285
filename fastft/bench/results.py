"""The results file: a CSV in which a measurement has one row, found again by its key.

The key is everything that says what was measured, on what, of which code: `KEY`. A measurement whose key is already
there is kept, and `fastft bench` does not repeat it unless told to overwrite. A key holds the commit, so that new code
adds rows beside the old ones. Rows of a dirty checkout, or of an unknown commit, stand for no code in particular and
are always replaced.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

__all__ = ["KEY", "ResultsError", "ResultsFile", "Row", "find", "latest", "merge", "read_rows", "write_rows"]

KEY = ("commit", "gpu", "kind", "name", "mode", "provider", "model", "batch", "length", "tokens", "dtype")


class ResultsError(ValueError):
    """The results file cannot be read or written."""


@dataclass(frozen=True)
class Row:
    """One measurement; the columns of the file, in its order. None where it was not, or cannot be, measured.

    Attributes:
        kind: kernels, step, sft or limit.
        name: of the operation; of a training run its bits and rank ("4-bit r16").
        mode: forward, backward or full; of a training run what is kept for the backward.
        tokens: in a batch; batch × length where these are known.
        ms_20: quantile of the device time of a call, of the wall time of a training step. Milliseconds.
        host_ms: median time until the call returns.
        extra_mib: peak of allocated memory less what was allocated before.
        tflops: the cost's floating-point operations over ms_50; `gbps` its bytes.
        roofline_share: the time the machine's ceilings allow over ms_50.
        status: ok, wrong, out of memory, skipped, not installed or error.
        timer: graph, events, cpu (wall clock) or step.
        first_step_s: seconds of the first training step; `import_s` and `load_s` of what comes before.
        losses: of the first steps, separated by blanks.
    """

    date: str = ""
    commit: str = ""
    gpu: str = ""
    torch: str = ""
    triton: str = ""
    transformers: str = ""
    peft: str = ""
    trl: str = ""
    liger: str = ""
    unsloth: str = ""
    kind: str = ""
    name: str = ""
    mode: str = ""
    provider: str = ""
    model: str = ""
    tokens: int | None = None
    batch: int | None = None
    length: int | None = None
    dtype: str = ""
    ms_20: float | None = None
    ms_50: float | None = None
    ms_80: float | None = None
    host_ms: float | None = None
    extra_mib: float | None = None
    peak_gib: float | None = None
    tflops: float | None = None
    gbps: float | None = None
    roofline_share: float | None = None
    status: str = "ok"
    note: str = ""
    timer: str = ""
    samples: int | None = None
    first_step_s: float | None = None
    import_s: float | None = None
    load_s: float | None = None
    losses: str = ""

    def key(self) -> tuple[Any, ...]:
        """What identifies the measurement."""
        return tuple(getattr(self, name) for name in KEY)

    @property
    def settled(self) -> bool:
        """Whether there is no point in measuring it again: it is there, and the code it was measured on is known."""
        return self.status == "ok" and self.commit != "unknown" and not self.commit.endswith("-dirty")


_COLUMNS = tuple(field.name for field in fields(Row))
_INTEGERS = {"tokens", "batch", "length", "samples"}
_TEXTS = {field.name for field in fields(Row) if field.type == "str"}


def read_rows(path: Path) -> list[Row]:
    """The file's rows; none where there is no file.

    Raises:
        ResultsError: it is not such a file.
    """
    if not path.exists():
        return []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = set(KEY) - set(reader.fieldnames or ())
            if missing:
                raise ResultsError(
                    f"{path} is no results file of `fastft bench`: it lacks the columns {', '.join(sorted(missing))}. "
                    "Give --csv another file."
                )
            return [_row(record) for record in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ResultsError(f"{path} cannot be read as CSV: {error}") from error
    except ValueError as error:
        if isinstance(error, ResultsError):
            raise
        raise ResultsError(f"{path} holds text where a number belongs: {error}. Mend or move the file.") from error


def _row(record: dict[str, str]) -> Row:
    values: dict[str, Any] = {}
    for name in _COLUMNS:
        text = record.get(name) or ""
        if name in _TEXTS:
            values[name] = text
        elif text:
            values[name] = int(text) if name in _INTEGERS else float(text)
    return Row(**values)


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Replace the file; whoever reads meanwhile sees the old one or the new one, whole.

    Raises:
        ResultsError: it cannot be written.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, _COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows({name: _text(getattr(row, name)) for name in _COLUMNS} for row in rows)
        temporary.replace(path)
    except OSError as error:
        raise ResultsError(f"{path} cannot be written: {error}") from error


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def merge(old: Iterable[Row], new: Iterable[Row], *, overwrite: bool) -> list[Row]:
    """Old and new rows, one a key: a settled old row stays unless `overwrite`, any other is replaced in its place."""
    merged = {row.key(): row for row in old}
    for row in new:
        known = merged.get(row.key())
        if known is None or overwrite or not known.settled:
            merged[row.key()] = row
    return list(merged.values())


def find(rows: Iterable[Row], wanted: Row) -> Row | None:
    """The settled row with the key of `wanted`."""
    return next((row for row in rows if row.key() == wanted.key() and row.settled), None)


def latest(rows: Iterable[Row]) -> list[Row]:
    """Of each measurement the newest row, whatever its commit."""
    newest: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = replace(row, commit="").key()
        if key not in newest or row.date >= newest[key].date:
            newest[key] = row
    return list(newest.values())


class ResultsFile:
    """The rows of a file, kept up to date on disk as they come; without a path, in memory only."""

    def __init__(self, path: Path | None, *, overwrite: bool) -> None:
        """Read what is there.

        Raises:
            ResultsError: the file is no results file.
        """
        self._path, self.overwrite = path, overwrite
        self.rows: list[Row] = read_rows(path) if path is not None else []

    def add(self, rows: Iterable[Row]) -> None:
        """Merge rows and write the file. Rows of what is not installed say nothing about anything and stay out."""
        told = [row for row in rows if row.status != "not installed"]
        self.rows = merge(self.rows, told, overwrite=self.overwrite)
        if self._path is not None:
            write_rows(self._path, self.rows)
