"""The command: its errors before a model is loaded, and whole runs on a tiny random model."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import click
import pytest
import torch
from typer.testing import CliRunner

from fastft.cli import app
from fastft.demo import run
from tests import support

RUNNER = CliRunner()


@dataclass(frozen=True)
class Outcome:
    """Exit status and everything printed, without colours, frames and line breaks."""

    exit_code: int
    output: str


def invoke(*arguments: Any) -> Outcome:
    result = RUNNER.invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Outcome(result.exit_code, " ".join(click.unstyle(result.output).replace("│", " ").split()))


@pytest.fixture
def no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors in arguments must come before anything is loaded."""
    monkeypatch.setattr(run, "run_demo", lambda *args, **kwargs: pytest.fail("the run was started"))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> pathlib.Path:
    """A random two-layer Llama with its tokenizer, as a folder."""
    folder = tmp_path_factory.mktemp("tiny")
    support.build_model("llama").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_rows(path: pathlib.Path, *, messages: bool) -> pathlib.Path:
    rows = []
    for index in range(20):
        question, answer = f"double {index}", json.dumps({"n": 2 * index})
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append({"messages": turns} if messages else {"prompt": question, "completion": answer})
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


@pytest.mark.usefixtures("no_run")
def test_a_missing_data_set_is_named(tmp_path: pathlib.Path) -> None:
    result = invoke("demo", "--dataset", tmp_path / "none.jsonl")
    assert result.exit_code == 2
    assert "--dataset" in result.output
    assert "no such file" in result.output


@pytest.mark.usefixtures("no_run")
def test_a_bad_row_is_named_by_its_line(tmp_path: pathlib.Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", messages=False)
    path.write_text(path.read_text() + '\n{"prompt": "no answer"}\n')
    result = invoke("demo", "--dataset", path)
    assert result.exit_code == 2
    assert "line 21" in result.output
    assert "no 'completion'" in result.output


@pytest.mark.usefixtures("no_run")
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [(["--model", "missing.gguf"], "no such GGUF file"), (["--steps", "0"], "--steps"), (["--steps", "x"], "--steps")],
)
def test_wrong_options_end_with_status_two(arguments: list[str], complaint: str) -> None:
    result = invoke("demo", *arguments)
    assert result.exit_code == 2
    assert complaint in result.output


@pytest.mark.usefixtures("no_run")
def test_an_output_that_is_a_file_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "taken").touch()
    result = invoke("demo", "--output", tmp_path / "taken")
    assert result.exit_code == 2
    assert "a folder is needed" in result.output


def test_an_unknown_model_is_an_error_in_words(tmp_path: pathlib.Path) -> None:
    result = invoke("demo", "--model", tmp_path / "nothing-here", "--output", tmp_path / "out")
    assert result.exit_code == 1
    assert "Error" in result.output
    assert "nothing-here" in result.output.replace(" ", "")  # a long temporary path is wrapped anywhere


def test_messages_need_a_chat_template(tmp_path: pathlib.Path, tiny_folder: pathlib.Path) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(tiny_folder, plain)
    (plain / "chat_template.jinja").unlink()
    dataset = write_rows(tmp_path / "rows.jsonl", messages=True)
    result = invoke("demo", "--model", plain, "--dataset", dataset, "--output", tmp_path / "out")
    assert result.exit_code == 1
    assert "no chat template" in result.output


def test_an_output_that_cannot_be_made_is_an_error_in_words(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    result = invoke("demo", "--output", tmp_path / "file" / "inside")
    assert result.exit_code == 1
    assert "cannot make the output folder" in result.output


def test_version_and_help() -> None:
    assert invoke("--version").output.startswith("fastft ")
    assert "demo" in invoke("--help").output


def test_the_command_line_loads_no_heavy_library() -> None:
    """These wait for a command that needs them, so that `fastft --help` costs no more than `import fastft`."""
    heavy = {"peft", "trl", "bitsandbytes", "datasets", "matplotlib"}
    script = f"import sys, fastft.cli; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("messages", [False, True], ids=["prompt rows", "messages"])
def test_a_run_writes_adapter_metrics_and_plot(
    tmp_path: pathlib.Path, tiny_folder: pathlib.Path, messages: bool
) -> None:
    dataset = write_rows(tmp_path / "rows.jsonl", messages=messages)
    output = tmp_path / "out"
    result = invoke("demo", "--model", tiny_folder, "--dataset", dataset, "--steps", 2, "--output", output)
    assert result.exit_code == 0, result.output

    metrics = json.loads((output / "metrics.json").read_text())
    assert metrics["steps"] == 2
    assert [step for step, _ in metrics["losses"]] == [1, 2]
    assert metrics["training_rows"] == 18
    assert metrics["sets"]["held-out rows"]["after"]["count"] == 2
    assert metrics["tokens"] > 0
    assert metrics["tokens_per_second"] > 0
    assert len(metrics["samples"]) == 2
    if sys.platform != "win32":
        assert metrics["peak_memory"] > 0
    pytest.importorskip("matplotlib")
    assert (output / "loss.png").read_bytes().startswith(b"\x89PNG")
    for words in ("nearest neighbour", "tokens/s", "Peak memory", "asked", "loss"):
        assert words in result.output


def test_the_adapter_loads_in_plain_peft(tmp_path: pathlib.Path, tiny_folder: pathlib.Path) -> None:
    from peft import PeftModel

    dataset = write_rows(tmp_path / "rows.jsonl", messages=False)
    result = invoke("demo", "--model", tiny_folder, "--dataset", dataset, "--steps", 1, "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    loaded = PeftModel.from_pretrained(support.build_model("llama"), tmp_path / "out" / "adapter")
    halves = [p for name, p in loaded.named_parameters() if "lora_B" in name]
    assert len(halves) == 14
    assert any(torch.count_nonzero(half) for half in halves), "one step leaves every B at zero: nothing was trained"


def test_a_failed_plot_costs_the_plot_only(
    tmp_path: pathlib.Path, tiny_folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastft.demo import plot

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no fonts")

    monkeypatch.setattr(plot, "plot_losses", fail)
    dataset = write_rows(tmp_path / "rows.jsonl", messages=False)
    output = tmp_path / "out"
    result = invoke("demo", "--model", tiny_folder, "--dataset", dataset, "--steps", 1, "--output", output)
    assert result.exit_code == 0, result.output
    assert "no fonts" in result.output
    assert (output / "metrics.json").is_file()
    assert (output / "adapter" / "adapter_model.safetensors").is_file()


def test_what_fails_after_training_finds_the_adapter_saved(
    tmp_path: pathlib.Path, tiny_folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fastft

    def fail(model: Any) -> None:
        raise RuntimeError("report broke")

    monkeypatch.setattr(fastft, "report", fail)
    dataset = write_rows(tmp_path / "rows.jsonl", messages=False)
    output = tmp_path / "out"
    with pytest.raises(RuntimeError, match="report broke"):
        invoke("demo", "--model", tiny_folder, "--dataset", dataset, "--steps", 1, "--output", output)
    assert (output / "adapter" / "adapter_model.safetensors").is_file()
