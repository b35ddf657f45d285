"""The fixture every test here works with."""

from __future__ import annotations

import pathlib

import pytest

from tests.bench.validate.bed import Bed


@pytest.fixture
def bed(tmp_path: pathlib.Path) -> Bed:
    """A checkout of one kernel on a machine with GPU and Triton; its tests pass, it is faster than torch."""
    return Bed(tmp_path)
