"""Rows as tables on the terminal, or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.markup import escape
from rich.table import Table

from fastft.bench.results import Row

__all__ = ["as_json", "kernel_table", "limit_table", "training_table"]

_FLOPS_A_BYTE = 50  # above: bound by arithmetic, on any card there is
_REFERENCE = {"kernels": "torch", "step": "hf", "sft": "hf"}


def as_json(rows: Sequence[Row]) -> str:
    """A list of objects, a field a column."""
    return json.dumps([asdict(row) for row in rows], indent=1)


def kernel_table(rows: Sequence[Row]) -> Table:
    """One operation at one size: a block for each mode, a line for each provider; who is not installed comes last."""
    first = rows[0]
    size = first.model if first.tokens is None else f"{first.model}, {first.tokens:,} tokens"
    table = _table(f"{first.name}: {size}, {first.dtype}, {first.gpu}", "mode", "provider")
    for heading in ("ms", "20–80 %", "host ms", "+MiB", "rate", "of limit", "× torch"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("note", overflow="fold")
    mode = first.mode
    for row in rows:
        if row.status == "not installed":
            continue
        if row.mode != mode:
            table.add_section()
            mode = row.mode
        table.add_row(
            row.mode,
            row.provider,
            _median(row),
            _spread(row),
            _number(row.host_ms, 3),
            _number(row.extra_mib, 1),
            _rate(row),
            _percent(row.roofline_share),
            _ratio(row, rows),
            _note(row),
        )
    table.add_section()
    for row in {row.provider: row for row in rows if row.status == "not installed"}.values():
        table.add_row("", row.provider, *[""] * 7, f"not installed: {escape(row.note)}")
    return table


def training_table(rows: Sequence[Row]) -> Table:
    """One configuration: a line for each provider."""
    first = rows[0]
    table = _table(
        f"{first.kind}: {first.model}, {first.batch} × {first.length} tokens, {first.name}, {first.dtype}, {first.gpu}",
        "provider",
        "keeps",
    )
    for heading in ("ms a step", "20–80 %", "tokens/s", "peak GiB", "of limit", "× hf", "first s", "import s"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("first losses", no_wrap=True)
    table.add_column("note", overflow="fold")
    for row in rows:
        table.add_row(
            row.provider,
            row.mode,
            _median(row),
            _spread(row),
            _number(row.tokens / row.ms_50 * 1e3 if row.tokens and row.ms_50 else None, 0),
            _number(row.peak_gib, 2),
            _percent(row.roofline_share),
            _ratio(row, rows),
            _number(row.first_step_s, 1),
            _number(row.import_s, 1),
            " ".join(row.losses.split()[:3]),
            _note(row),
        )
    return table


def limit_table(rows: Sequence[Row]) -> Table:
    """The machine's ceilings."""
    table = _table(f"limits of {rows[0].gpu}", "what", "dtype")
    for heading in ("ms", "20–80 %", "rate"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(row.name, row.dtype, _median(row), _spread(row), _rate(row))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=escape(title), title_justify="left")
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def _median(row: Row) -> str:
    """The median in ms, or why there is none."""
    if row.ms_50 is not None:
        return f"{row.ms_50:.4g}"
    return f"[bold red]{escape(row.status)}[/]" if row.status in ("wrong", "error") else escape(row.status)


def _spread(row: Row) -> str:
    return "" if row.ms_20 is None or row.ms_80 is None else f"{row.ms_20:.4g}–{row.ms_80:.4g}"


def _rate(row: Row) -> str:
    """What the operation is made of: TFLOP/s if it is arithmetic, GB/s if it is bytes."""
    if row.tflops and (not row.gbps or 1e3 * row.tflops / row.gbps > _FLOPS_A_BYTE):
        return f"{row.tflops:.4g} TFLOP/s"
    return f"{row.gbps:,.4g} GB/s" if row.gbps else ""


def _note(row: Row) -> str:
    """How it was timed, where that is not by graph or step, and what else there is to say."""
    timer = f"{row.timer}:" if row.timer in ("events", "cpu") else ""
    return escape(" ".join(part for part in (timer, row.note) if part))


def _ratio(row: Row, rows: Sequence[Row]) -> str:
    """The row's time over the reference's in the same mode (a training run has one for all)."""
    reference = _REFERENCE[row.kind]
    times = [
        other.ms_50
        for other in rows
        if other.provider == reference and other.ms_50 and (row.kind != "kernels" or other.mode == row.mode)
    ]
    return f"{row.ms_50 / times[0]:.2f}" if times and row.ms_50 else ""


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"
