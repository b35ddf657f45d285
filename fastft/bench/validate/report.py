"""Step 6: what is shown, and report.md. Tables are built once and rendered for the terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from fastft.bench.validate.context import Context
from fastft.bench.validate.measure import Assessment, Comparison
from fastft.bench.validate.profile import Profile
from fastft.bench.validate.state import ATTEMPTS, Failure, State, Verdict

UNKNOWN = "–"


@dataclass(frozen=True)
class Figures:
    """A titled table of text; the first column is left-aligned."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def rich(self) -> Table:
        table = Table(title=self.title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for index, heading in enumerate(self.headings):
            table.add_column(heading, justify="right" if index else "left")
        for row in self.rows:
            table.add_row(*map(escape, row))
        return table

    def markdown(self) -> str:
        rules = ("---", *("--:" for _ in self.headings[1:]))
        lines = ["| " + " | ".join(row) + " |" for row in (self.headings, rules, *self.rows)]
        return f"**{self.title}**\n\n" + "\n".join(lines)


@dataclass(frozen=True)
class Report:
    """Everything a run found after its tests were green.

    Attributes:
        mended: files ruff changed.
        verdict: of the tests.
        repeated: whether the verdict was recorded before.
        place: GPU, versions and commit of the benchmark.
        no_plots: why there are no plots; empty if there are.
        no_profiles: why there are no profiles; None: not asked for.
    """

    mended: Sequence[str]
    verdict: Verdict
    repeated: bool
    comparisons: Sequence[Comparison]
    place: dict[str, str]
    assessment: Assessment
    no_plots: str
    profiles: Sequence[Profile] = ()
    no_profiles: str | None = None


def speed_table(report: Report) -> Figures:
    """Mode × (ours, torch, speed-up, memory saved)."""
    headings = ("mode", "tokens", "ours ms", "torch ms", "speed-up", "ours MiB", "torch MiB", "saved")
    rows = [
        (
            each.mode,
            each.tokens or UNKNOWN,
            _text(each.ours_ms, "{:.3g}"),
            _text(each.torch_ms, "{:.3g}"),
            each.trouble.partition(":")[0].upper() or _text(each.speed_up, "{:.2f} ×"),
            _text(each.ours_mib, "{:,.0f}"),
            _text(each.torch_mib, "{:,.0f}"),
            _text(each.memory_saved, "{:.0%}"),
        )
        for each in report.comparisons
    ]
    where = ", ".join(f"{name} {value}" for name, value in report.place.items())
    model = report.comparisons[0].model if report.comparisons else ""
    return Figures(f"Benchmark: {model} ({where})", headings, tuple(rows))


def profile_table(report: Report) -> Figures:
    """Provider × (launches, time, occupancy, memory and compute throughput), then launch by launch."""
    headings = ("", "launches", "µs", "occupancy, %", "memory, % of peak", "compute, % of peak")
    rows = []
    for each in report.profiles:
        means = [_text(each.mean(metric), "{:.1f}") for metric in ("occupancy", "memory", "compute")]
        rows.append((each.provider, str(len(each.launches)), f"{each.microseconds:,.1f}", *means))
        for launch in each.launches:
            values = [_text(value, "{:.1f}") for value in (launch.occupancy, launch.memory, launch.compute)]
            rows.append((f"  {launch.kernel[:60]}", "", f"{launch.microseconds:,.1f}", *values))
    return Figures("Nsight Compute, means weighted by time", headings, tuple(rows))


def show_report(context: Context, report: Report) -> Path:
    """Print the report and write it to report.md. Returns that file."""
    console, name = context.console, context.kernel.name
    tables = [speed_table(report)] + ([profile_table(report)] if report.profiles else [])
    notes = _notes(context, report)
    for table in tables:
        console.print(table.rich())
    for note in notes:
        console.print(escape(note))
    console.print(f"[bold]{escape(report.assessment.sentence)}[/]")
    if report.assessment.alarms:
        console.print(
            Panel(escape("\n".join(report.assessment.alarms)), title="CATASTROPHICALLY WORSE", style="bold red")
        )
    path = context.folder / "report.md"
    alarms = [f"- **CATASTROPHICALLY WORSE**: {alarm}" for alarm in report.assessment.alarms]
    parts = [
        f"# {name}, {datetime.now(UTC).isoformat(timespec='seconds')}",
        f"**{report.assessment.sentence}**",
        "\n".join(alarms),
        *(table.markdown() for table in tables),
        "\n".join(f"- {note}" for note in notes),
        "\n".join(f"![]({file.relative_to(context.folder)})" for file in sorted(context.folder.glob("plots/*.png"))),
    ]
    path.write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")
    console.print(f"Report in {escape(str(path))}")
    return path


def show_failures(console: Console, failures: Sequence[Failure]) -> None:
    """Every failing test with its exact message."""
    for failure in failures:
        console.print(f"[bold red]{escape(failure.test)}[/] ({escape(failure.during)})", soft_wrap=True)
        console.print(failure.message, markup=False, highlight=False, soft_wrap=True)


def show_locked(console: Console, name: str, state: State, diff: str) -> None:
    """Why nothing runs: the last attempt's failures, what changed since the last green run, and the way out."""
    failed = [verdict for verdict in state.verdicts if not verdict.green]
    if failed:
        show_failures(console, failed[-1].failures)
    console.print("[bold]What changed since the last green run:[/]")
    console.print(diff or "nothing", markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"[bold red]{ATTEMPTS} versions of {name} failed since the last green run.[/] No test and no benchmark runs "
        f"until you say so: fastft validate {name} --reset"
    )


def attempts_left(state: State) -> str:
    """How many failed attempts are counted, in words."""
    return f"{len(state.failed)} of {ATTEMPTS} versions failed since the last green run; then nothing runs any more."


def _notes(context: Context, report: Report) -> list[str]:
    passed = ", ".join(f"{count} in {name}" for name, count in report.verdict.passed.items())
    since = f" (the verdict of {report.verdict.date} on this very code)" if report.repeated else ""
    notes = [f"Tests passed: {passed}{since}."]
    if not context.has_triton:
        notes.append("Triton is not installed: only the plain-torch twins were tested, not the kernel.")
    if report.mended:
        notes.append(f"ruff mended {', '.join(report.mended)}.")
    if any(not each.judged for each in report.comparisons):
        modes = sorted({each.mode for each in report.comparisons if not each.judged})
        notes.append(
            f"Not judged: {', '.join(modes)}. What is done there and what later is an implementation's choice."
        )
    if report.no_plots:
        notes.append(f"No plots: {report.no_plots}")
    if report.no_profiles:
        notes.append(f"No Nsight Compute figures: {report.no_profiles}")
    return notes


def _text(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else form.format(value)
