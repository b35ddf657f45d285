"""The results file: what it keeps, what it replaces, and what it refuses."""

from __future__ import annotations

import csv
import pathlib
from dataclasses import replace

import pytest

from fastft.bench.results import ResultsError, ResultsFile, Row, find, latest, merge, read_rows, write_rows
from tests.bench.samples import kernel_row

EARLIER_COLUMNS = (
    "date commit gpu torch triton transformers peft trl liger unsloth kind name mode provider model tokens batch "
    "length dtype ms_20 ms_50 ms_80 host_ms extra_mib peak_gib tflops gbps roofline_share status note"
).split()


def test_rows_come_back_as_they_were_written(tmp_path: pathlib.Path) -> None:
    rows = [kernel_row(note='a "quoted", note\nof two lines', host_ms=0.125), kernel_row(tokens=None, ms_50=None)]
    path = tmp_path / "new" / "results.csv"
    write_rows(path, rows)
    assert read_rows(path) == rows
    assert list(path.parent.iterdir()) == [path]  # no temporary file is left


def test_the_columns_others_read_are_there(tmp_path: pathlib.Path) -> None:
    write_rows(tmp_path / "results.csv", [kernel_row()])
    with (tmp_path / "results.csv").open(newline="") as file:
        header = next(csv.reader(file))
    assert header[: len(EARLIER_COLUMNS)] == EARLIER_COLUMNS


@pytest.mark.parametrize(
    ("old", "new", "overwrite", "kept"),
    [
        ({}, {"ms_50": 2.0}, False, [1.0]),
        ({}, {"ms_50": 2.0}, True, [2.0]),
        ({}, {"ms_50": 2.0, "commit": "def5678"}, False, [1.0, 2.0]),
        ({}, {"ms_50": 2.0, "tokens": 128}, False, [1.0, 2.0]),
        ({"commit": "abc1234-dirty"}, {"ms_50": 2.0, "commit": "abc1234-dirty"}, False, [2.0]),
        ({"commit": "unknown"}, {"ms_50": 2.0, "commit": "unknown"}, False, [2.0]),
        ({"status": "error", "ms_50": None}, {"ms_50": 2.0}, False, [2.0]),
    ],
    ids=["same key", "overwrite", "other commit", "other size", "dirty", "unknown code", "failed before"],
)
def test_merging(old: dict[str, object], new: dict[str, object], overwrite: bool, kept: list[float]) -> None:
    merged = merge([kernel_row(**old)], [kernel_row(**new)], overwrite=overwrite)
    assert [row.ms_50 for row in merged] == kept


def test_only_settled_rows_are_found() -> None:
    wanted = kernel_row(ms_50=None)
    assert find([kernel_row()], wanted) == kernel_row()
    assert find([kernel_row(status="wrong")], wanted) is None
    assert find([kernel_row(mode="full")], wanted) is None


def test_the_newest_row_of_a_measurement_whatever_its_commit() -> None:
    newer = kernel_row(commit="def5678", date="2026-02-01T00:00:00+00:00")
    assert latest([newer, kernel_row()]) == [newer]
    assert latest([kernel_row(), newer]) == [newer]
    assert len(latest([kernel_row(), replace(newer, provider="torch")])) == 2


def test_a_file_is_kept_up_to_date(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "results.csv"
    ResultsFile(path, overwrite=False).add([kernel_row(), kernel_row(provider="liger", status="not installed")])
    again = ResultsFile(path, overwrite=False)
    assert again.rows == [kernel_row()]
    again.add([kernel_row(provider="torch")])
    assert [row.provider for row in read_rows(path)] == ["fastft", "torch"]


def test_without_a_path_rows_stay_in_memory() -> None:
    results = ResultsFile(None, overwrite=False)
    results.add([kernel_row()])
    assert results.rows == [kernel_row()]


def test_files_of_another_kind_are_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "results.csv"
    path.write_text("peer,step_s\nhf,1.0\n")
    with pytest.raises(ResultsError, match="lacks the columns"):
        read_rows(path)
    write_rows(path, [kernel_row()])
    path.write_text(path.read_text().replace(",1.2,", ",fast,"))
    with pytest.raises(ResultsError, match="text where a number belongs"):
        read_rows(path)
    with pytest.raises(ResultsError, match="cannot be written"):
        write_rows(path / "below a file", [Row()])
