"""Every trainer: the planned model follows the stock one step by step, in every metric that either logs."""

from __future__ import annotations

import pathlib

import pytest

from tests.trainers.cases import CASES
from tests.trainers.harness import Case, compare


def parameter(case: Case) -> object:
    marks = [] if case.name.startswith(("trainer", "loop", "classification")) else [pytest.mark.trl]
    return pytest.param(case, marks=[*marks, *([pytest.mark.slow] if case.slow else [])], id=case.name)


@pytest.mark.parametrize("case", [parameter(case) for case in CASES])
def test_the_planned_model_follows_stock(case: Case, tmp_path: pathlib.Path) -> None:
    compare(case, tmp_path)
