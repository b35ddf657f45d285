"""What the terminal shows."""

from __future__ import annotations

import io
import json
from typing import Any

from rich.console import Console

from fastft.bench.tables import as_json, kernel_table, limit_table, training_table
from tests.bench.samples import kernel_row


def shown(table: Any) -> list[str]:
    console = Console(width=170, file=io.StringIO())
    with console.capture() as captured:
        console.print(table)
    return [" ".join(line.replace("│", " ").split()) for line in captured.get().splitlines()]


def test_kernels_beside_torch() -> None:
    rows = [
        kernel_row(ms_50=0.5, host_ms=0.123, extra_mib=64.0, gbps=3950.0, tflops=1.9, roofline_share=0.92),
        kernel_row(provider="torch", ms_50=2.0, timer="events", note="waits for the device"),
        kernel_row(provider="cce", status="wrong", ms_50=None, ms_20=None, ms_80=None, note="[x] relative error 0.5"),
        kernel_row(provider="liger", status="not installed", ms_50=None, note="no package liger_kernel"),
    ]
    lines = shown(kernel_table(rows))
    assert "forward fastft 0.5 0.9–1.2 0.123 64.0 3,950 GB/s 92% 0.25" in lines
    assert "forward torch 2 0.9–1.2 1.00 events: waits for the device" in lines
    assert "forward cce wrong [x] relative error 0.5" in lines
    assert "liger not installed: no package liger_kernel" in lines


def test_arithmetic_is_shown_as_such() -> None:
    lines = shown(kernel_table([kernel_row(gbps=100.0, tflops=710.0)]))
    assert any("710 TFLOP/s" in line for line in lines)


def test_training_beside_hugging_face() -> None:
    row = {"kind": "step", "name": "4-bit r16", "batch": 2, "length": 64, "tokens": 128, "timer": "step"}
    rows = [
        kernel_row(**row, mode="auto", ms_50=64.0, peak_gib=1.75, first_step_s=1.0, losses="6.1 6.2 6.3 6.4"),
        kernel_row(**row, mode="checkpointing", provider="hf", ms_50=128.0, peak_gib=3.5),
    ]
    lines = shown(training_table(rows))
    assert "fastft auto 64 0.9–1.2 2,000 1.75 0.50 1.0 6.1 6.2 6.3" in lines
    assert "hf checkpointing 128 0.9–1.2 1,000 3.50 1.00" in lines


def test_limits() -> None:
    lines = shown(limit_table([kernel_row(kind="limit", name="copy", dtype="", gbps=4300.0)]))
    assert "copy 1 0.9–1.2 4,300 GB/s" in lines


def test_json_has_every_column() -> None:
    (row,) = json.loads(as_json([kernel_row()]))
    assert row["ms_50"] == 1.0
    assert row["host_ms"] is None
