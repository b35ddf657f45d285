"""`fastft compress`."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch
from typer.testing import CliRunner

from fastft.cli import app
from fastft.saving.compressed.command import read_rows
from tests.saving.compressed.harness import TEXTS, needs_llmcompressor, tiny
from tests.saving.tokenizers import byte_level


def test_rows_are_read_from_json_lines_and_paragraphs(tmp_path: pathlib.Path) -> None:
    lines, text = tmp_path / "rows.jsonl", tmp_path / "rows.txt"
    lines.write_text('{"text": "a"}\n\n{"text": "b"}\n')
    text.write_text("a\nb\n\n\n c\n")
    assert read_rows(lines) == [{"text": "a"}, {"text": "b"}]
    assert read_rows(text) == ["a\nb", "c"]
    lines.write_text('{"text": "a"}\n{"text":\n')
    with pytest.raises(ValueError, match="line 2 is no JSON"):
        read_rows(lines)


def test_a_refusal_is_one_message_and_status_1(tmp_path: pathlib.Path) -> None:
    result = CliRunner().invoke(app, ["compress", str(tmp_path), str(tmp_path / "out"), "--scheme", "fp9"])
    assert result.exit_code == 1
    assert "not compressed" in result.output
    assert "'fp9' is not known here" in " ".join(result.output.split())


@needs_llmcompressor
def test_a_merged_folder_is_compressed(tmp_path: pathlib.Path) -> None:
    tiny(dtype=torch.bfloat16).save_pretrained(tmp_path / "merged")
    byte_level().save_pretrained(tmp_path / "merged")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    result = CliRunner().invoke(
        app,
        ["compress", str(tmp_path / "merged"), str(tmp_path / "out"), "--scheme", "w4a16", "--calibration", str(rows),
         "--group-size", "32", "--ignore", "lm_head", "--ignore", "re:.*down_proj$", "--max-calibration-samples", "5"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "W4A16 (gptq, 5 calibration rows), 12 layers" in " ".join(result.output.split())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    (group,) = config["quantization_config"]["config_groups"].values()
    assert (group["weights"]["num_bits"], group["weights"]["group_size"]) == (4, 32)
