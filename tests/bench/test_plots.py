"""The pictures: which are drawn, of what, with labels."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from fastft.bench.operations.base import Cost
from fastft.bench.plots import _kernel_pictures, _training_pictures, draw_all
from fastft.bench.results import ResultsError, Row
from fastft.bench.roofline import Ceilings, with_rates
from tests.bench.samples import PLACE, kernel_row

pytest.importorskip("matplotlib")
CEILINGS = Ceilings(gbps=4000.0, tflops=800.0)


def sweep(provider: str, factor: float = 1.0, **changes: Any) -> list[Row]:
    """Rows of one provider over three token counts and all modes."""
    rows = []
    for tokens in (1024, 2048, 4096):
        for mode in ("forward", "backward", "full"):
            ms = factor * tokens / 1024
            row = kernel_row(
                provider=provider, tokens=tokens, mode=mode, ms_20=0.9 * ms, ms_50=ms, ms_80=1.1 * ms, extra_mib=ms
            )
            rows.append(with_rates(Row(**{**row.__dict__, **changes}), Cost(tokens * 1e6, tokens * 1e6), CEILINGS))
    return rows


def step(provider: str, length: int, **changes: Any) -> Row:
    values = {"kind": "step", "name": "4-bit r16", "mode": "checkpointing", "batch": 2, "length": length}
    return kernel_row(provider=provider, tokens=2 * length, peak_gib=length / 1e3, **(values | changes))


def limit(name: str, **changes: Any) -> Row:
    return Row(**PLACE, kind="limit", name=name, provider="machine", ms_50=1.0, **changes)


def test_a_kernels_speed_and_memory_over_length() -> None:
    pictures = _kernel_pictures(sweep("fastft") + sweep("torch", 2.0))
    assert set(pictures) == {"speed_rms_norm_tiny_bfloat16", "memory_rms_norm_tiny_bfloat16"}
    axes = pictures["speed_rms_norm_tiny_bfloat16"].axes
    assert [each.get_title() for each in axes] == ["forward", "backward", "full"]
    lines = {line.get_label(): list(line.get_ydata()) for line in axes[0].get_lines()}
    assert lines["fastft"] == [1.0, 2.0, 4.0]
    assert lines["torch"] == [2.0, 4.0, 8.0]
    assert lines["limit"] == pytest.approx([0.256, 0.512, 1.024])
    assert axes[0].get_xlabel() == "tokens"
    assert "ms" in axes[0].get_ylabel()


def test_models_are_compared_where_there_are_several() -> None:
    pictures = _kernel_pictures(sweep("fastft") + sweep("fastft", model="Llama-3.1-8B"))
    assert "models_rms_norm_1024_bfloat16" in pictures
    ticks = pictures["models_rms_norm_1024_bfloat16"].axes[0].get_xticklabels()
    assert [tick.get_text() for tick in ticks] == ["tiny", "Llama-3.1-8B"]


def test_training_over_length_and_over_models() -> None:
    rows = [step(provider, length) for provider in ("fastft", "hf") for length in (1024, 2048)]
    rows += [step("fastft", 1024, mode="recompute"), step("fastft", 1024, model="Llama-3.1-8B")]
    pictures = _training_pictures(rows)
    time, memory = pictures["step_tiny_4-bit r16_2_rows_bfloat16"].axes
    assert [line.get_label() for line in time.get_lines()] == [
        "fastft, checkpointing",
        "fastft, recompute",
        "hf, checkpointing",
    ]
    assert memory.get_ylabel() == "peak, GiB"
    assert "models_step_4-bit r16_2x1024_bfloat16" in pictures


def test_files_of_the_newest_machine(tmp_path: pathlib.Path) -> None:
    rows = [*sweep("fastft"), limit("copy", gbps=4000.0), limit("matmul", tflops=800.0, dtype="bfloat16")]
    other = sweep("torch", gpu="Old GPU", date="2020-01-01", extra_mib=None)
    paths = draw_all([*rows, *other], tmp_path / "plots")
    assert {path.name for path in paths} == {
        "speed_rms_norm_tiny_bfloat16.png",
        "memory_rms_norm_tiny_bfloat16.png",
        "roofline_bfloat16.png",
    }
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    old = draw_all([*rows, *other], tmp_path / "old", gpu="Old GPU")
    assert {path.name for path in old} == {"speed_rms_norm_tiny_bfloat16.png"}


def test_nothing_to_draw_is_an_error(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ResultsError, match="no measured rows"):
        draw_all([kernel_row(status="wrong", ms_50=None)], tmp_path)
    assert list(tmp_path.iterdir()) == []
