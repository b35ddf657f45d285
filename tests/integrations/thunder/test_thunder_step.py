"""benchmarks/thunder_step.py: a row that hangs costs itself its result, and no other row."""

from __future__ import annotations

import argparse
import importlib.util
import json
import pathlib
import sys
from types import ModuleType

import pytest

SCRIPT = pathlib.Path(__file__).parents[3] / "benchmarks" / "thunder_step.py"
ROW = """
import sys, time
row = sys.argv[1]
if row == "hangs at once":
    time.sleep(60)
for turn in range(2):
    print("ready for my turn", flush=True)
    sys.stdin.readline()
    if row == "hangs in a turn":
        time.sleep(60)
if row == "dies":
    sys.exit("of this")
print('{"row": "%s", "ms": 1}' % row, flush=True)
"""


@pytest.fixture
def script(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark, whose rows are processes that measure nothing."""
    specification = importlib.util.spec_from_file_location("thunder_step", SCRIPT)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    stand_in = tmp_path / "row.py"
    stand_in.write_text(ROW)
    monkeypatch.setattr(module, "__file__", str(stand_in))
    monkeypatch.setattr(sys, "argv", ["thunder_step.py"])
    return module


@pytest.mark.parametrize(
    ("bad", "why"),
    [("hangs at once", "killed after 3 s"), ("hangs in a turn", "killed after 3 s"), ("dies", "of this")],
)
def test_a_bad_row_is_named_and_the_others_are_measured(script: ModuleType, bad: str, why: str) -> None:
    options = argparse.Namespace(timeout=3)
    first, second = map(json.loads, script.run_together((bad, "works"), options))
    assert why in first["error"]
    assert second == {"row": "works", "ms": 1}
