"""The command line: real workers once, errors, and what is written where."""

from __future__ import annotations

import json
import pathlib
from dataclasses import dataclass

import click
import pytest
from typer.testing import CliRunner

from fastft.bench.operations import OPERATIONS
from fastft.bench.results import read_rows, write_rows
from fastft.cli import app
from tests.bench.samples import kernel_row

RUNNER = CliRunner()


@dataclass(frozen=True)
class Outcome:
    """Exit status, and what was printed on either stream in one line."""

    exit_code: int
    output: str
    stdout: str


def invoke(*arguments: object) -> Outcome:
    result = RUNNER.invoke(app, ["bench", *map(str, arguments)], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Outcome(result.exit_code, " ".join(click.unstyle(result.output).split()), result.stdout)


def test_kernels_and_plots_with_real_workers(tmp_path: pathlib.Path) -> None:
    """What `fastft validate` does, on a CPU: measure, keep, draw."""
    path = tmp_path / "results.csv"
    limits = [
        kernel_row(kind="limit", gpu="cpu", name="copy", dtype="", provider="machine", gbps=10.0),
        kernel_row(kind="limit", gpu="cpu", name="matmul", dtype="float32", provider="machine", tflops=0.1),
    ]
    write_rows(path, limits)
    measure = ["kernels", "rms_norm", "--model", "tiny", "--bt", 64, "--samples", 20, "--csv", path, "--json"]
    outcome = invoke(*measure, "-p", "fastft", "-p", "torch", "--commit", "abc1234", "--dtype", "float32")
    assert outcome.exit_code == 0, outcome.output
    rows = read_rows(path)
    assert rows[:2] == limits, "ceilings that are there are not measured again"
    kernels = [row for row in rows if row.kind == "kernels"]
    assert [(row.mode, row.provider) for row in kernels] == [
        (mode, provider) for mode in ("forward", "backward", "full") for provider in ("fastft", "torch")
    ]
    for row in kernels:
        assert row.status == "ok", row.note
        assert row.ms_50 is not None
        assert row.ms_50 > 0
        assert row.samples == 20
        assert (row.tokens, row.model, row.commit) == (64, "tiny", "abc1234")
        assert row.gbps is not None
        assert row.roofline_share == pytest.approx(row.gbps / 10.0, rel=1e-3)
    printed = json.loads(outcome.stdout)
    assert [row["ms_50"] for row in printed] == pytest.approx([row.ms_50 for row in kernels], rel=1e-4)
    assert "rms_norm forward, tiny, 64 tokens: fastft, torch" in outcome.output

    assert invoke("plot", "--csv", path, "--out", tmp_path / "plots").exit_code == 0
    assert (tmp_path / "plots" / "speed_rms_norm_tiny_float32.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kernels", "layer_norm"], "no operation layer_norm to benchmark; there are rms_norm"),
        (["kernels", "--model", "llama-9b"], "no model 'llama-9b'"),
        (["kernels", "rms_norm", "-p", "apex"], "no provider apex here; there are fastft"),
        (["step", "-p", "apex"], "no provider apex here; there are fastft"),
        (["step", "--bits", "8"], "8 bits; there are 4 (NF4) and 16."),
        (["kernels", "--samples", "3"], "Invalid value for '--samples'"),
    ],
)
def test_mistakes_are_told_before_anything_starts(arguments: list[str], message: str) -> None:
    outcome = invoke(*arguments)
    assert outcome.exit_code != 0
    assert message in outcome.output.replace("│ ", "").replace(" │", "")


def test_a_file_of_another_kind_is_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("a,b\n1,2\n")
    outcome = invoke("kernels", "rms_norm", "--csv", path)
    assert outcome.exit_code == 1
    assert "is no results file" in outcome.output
    assert path.read_text() == "a,b\n1,2\n"


def test_a_folder_that_does_not_fit_the_model(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastft.bench.session import Session

    monkeypatch.setattr(Session, "learn", lambda self: self.facts.update(device="cpu", gpu="cpu"))
    monkeypatch.setattr(Session, "ceilings", lambda self, dtype, samples: None)
    two = invoke("step", "--model", "tiny", "--model", "llama-1b", "--model-dir", tmp_path)
    assert "holds one model, 2 were named" in two.output
    empty = invoke("step", "--model-dir", tmp_path)
    assert "config.json cannot be read" in empty.output
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    other = invoke("step", "--model", "tiny", "--model-dir", tmp_path)
    assert "of other sizes than tiny" in other.output
    assert {each.exit_code for each in (two, empty, other)} == {1}


def test_plots_need_measured_rows(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "results.csv"
    write_rows(path, [kernel_row(status="error", ms_50=None)])
    outcome = invoke("plot", "--csv", path, "--out", tmp_path / "plots")
    assert outcome.exit_code == 1
    assert "no measured rows" in outcome.output


def test_the_commands_are_listed() -> None:
    outcome = invoke("--help")
    for command in ("kernels", "step", "sft", "limit", "plot"):
        assert command in outcome.output
    described = invoke("kernels", "--help").output
    assert all(name in described for name in OPERATIONS)
    assert "--memory-budget" in invoke("step", "--help").output
