"""What a run of the demo measured, and how it is shown."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fastft.demo.rows import TaskData
from fastft.demo.scoring import NearestNeighbour, Score, is_right, score

SAMPLES = 3


@dataclass(frozen=True)
class SetResult:
    """Scores of one held-out set."""

    before: Score
    after: Score
    baseline: Score


@dataclass(frozen=True)
class Sample:
    """One question of a held-out set with what the model said."""

    question: str
    before: str
    after: str
    expected: str
    right: bool


@dataclass(frozen=True)
class DemoResult:
    """What a run measured; `metrics.json` is this."""

    model: str
    device: str
    dtype: str
    steps: int
    rows_per_step: int
    training_rows: int
    trainable_parameters: int
    losses: list[tuple[int, float]]
    held_out_loss: tuple[float, float]
    sets: dict[str, SetResult]
    samples: list[Sample]
    tokens: int
    tokens_per_second: float
    peak_memory: int | None
    peak_memory_kind: str
    seconds: dict[str, float]
    versions: dict[str, str]


def score_sets(data: TaskData, before: dict[str, list[str]], after: dict[str, list[str]]) -> dict[str, SetResult]:
    baseline = NearestNeighbour([row.question for row in data.train], [row.completion for row in data.train])
    results = {}
    for name, rows in data.held_out.items():
        expected = [row.completion for row in rows]
        looked_up = [baseline.answer(row.question) for row in rows]
        results[name] = SetResult(
            score(before[name], expected), score(after[name], expected), score(looked_up, expected)
        )
    return results


def pick_samples(data: TaskData, before: dict[str, list[str]], after: dict[str, list[str]]) -> list[Sample]:
    """The first three questions of the last set (the hardest of the built-in ones), right or wrong as they come."""
    name, rows = list(data.held_out.items())[-1]
    picked = zip(rows[:SAMPLES], before[name], after[name], strict=False)
    return [
        Sample(row.question.strip(), old, new, row.completion, is_right(new, row.completion))
        for row, old, new in picked
    ]


def show_result(result: DemoResult, console: Console) -> None:
    """Print the figures and the sample answers of a run."""
    table = Table(title="Held-out questions answered right", title_justify="left")
    for heading in ("set", "questions", "before", "after", "nearest neighbour"):
        table.add_column(heading, justify="left" if heading == "set" else "right")
    for name, scores in result.sets.items():
        table.add_row(name, str(scores.after.count), *map(_cell, (scores.before, scores.after, scores.baseline)))
    console.print(table)
    if any(scores.after.fields is not None for scores in result.sets.values()):
        console.print("[dim]In brackets: share of the expected JSON fields that are right.[/]")
    for sample in result.samples:
        console.print()
        console.print(Text("asked   ", style="bold") + Text(sample.question))
        console.print(Text("before  ", style="dim") + Text(_one_line(sample.before), style="dim"))
        console.print(Text("after   ") + Text(_one_line(sample.after), style="green" if sample.right else "red"))
        if not sample.right:
            console.print(Text("wanted  ", style="dim") + Text(_one_line(sample.expected), style="dim"))
    console.print()
    first, last = (result.losses[0][1], result.losses[-1][1]) if result.losses else (math.nan, math.nan)
    held_out = result.held_out_loss
    console.print(f"Loss: {first:.3f} → {last:.3f} in training, {held_out[0]:.3f} → {held_out[1]:.3f} held out")
    console.print(
        f"{result.tokens_per_second:,.0f} tokens/s in training on {result.device}, {result.dtype}; "
        f"{result.trainable_parameters:,} parameters trained"
    )
    if result.peak_memory is not None:
        console.print(f"Peak memory: {result.peak_memory / 2**20:,.0f} MiB ({result.peak_memory_kind})")
    seconds = dict(result.seconds)
    total = seconds.pop("total")
    console.print(f"Time: {total:.0f} s (" + ", ".join(f"{what} {s:.0f} s" for what, s in seconds.items()) + ")")


def _cell(value: Score) -> str:
    fields = "" if value.fields is None else f" ({value.fields:.0%})"
    return f"{value.right:.0%}{fields}"


def _one_line(text: str) -> str:
    return " ".join(text.split()) or "(nothing)"
