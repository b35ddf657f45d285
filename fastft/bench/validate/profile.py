"""Step 5, on request: what Nsight Compute counts while ours and torch's run once.

`ncu` profiles fastft/bench/validate/target.py, which runs the operation outside the profiled range first. `--page raw`
prints a launch a line, a metric a column, with the units in a line of their own below the header.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fastft.bench.validate.context import Context, StepError, printed
from fastft.bench.validate.measure import OURS, REFERENCE, Sizes

TARGET = "fastft.bench.validate.target"
DURATION = "gpu__time_duration.sum"
OCCUPANCY = "sm__warps_active.avg.pct_of_peak_sustained_active"
MEMORY = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
COMPUTE = "sm__throughput.avg.pct_of_peak_sustained_elapsed"
MICROSECONDS = {"n": 1e-3, "u": 1.0, "m": 1e3, "s": 1e6}  # by a unit's first letter: ns or nsecond, by version


@dataclass(frozen=True)
class Launch:
    """One kernel launch: microseconds, and percent of the device's peak; None where ncu printed no number."""

    kernel: str
    microseconds: float
    occupancy: float | None
    memory: float | None
    compute: float | None


@dataclass(frozen=True)
class Profile:
    """The launches of one provider's operation."""

    provider: str
    launches: tuple[Launch, ...]

    @property
    def microseconds(self) -> float:
        return sum(launch.microseconds for launch in self.launches)

    def mean(self, metric: str) -> float | None:
        """`occupancy`, `memory` or `compute` over all launches, weighted by their time; None if none has it."""
        known = [(launch.microseconds, getattr(launch, metric)) for launch in self.launches]
        known = [(time, value) for time, value in known if value is not None]
        total = sum(time for time, _ in known)
        return sum(time * value for time, value in known) / total if total else None


def profile(context: Context, sizes: Sizes) -> tuple[list[Profile], str]:
    """Profile ours and torch's at the largest size. Never blocks.

    Returns:
        The profiles, and why there are none (empty if there are).
    """
    if not context.on_gpu:
        return [], "no CUDA device: there is nothing for Nsight Compute to look at"
    ncu = context.find_program("ncu")
    if ncu is None:
        return [], "ncu is not on PATH: install Nsight Compute, or load the module that has it"
    try:
        with context.console.status("Nsight Compute"):
            return [_profile_one(context, ncu, provider, sizes) for provider in (OURS, REFERENCE)], ""
    except (StepError, OSError) as error:
        return [], str(error)


def _profile_one(context: Context, ncu: str, provider: str, sizes: Sizes) -> Profile:
    log = context.folder / f"ncu-{provider}.csv"
    log.unlink(missing_ok=True)
    metrics = ",".join((DURATION, OCCUPANCY, MEMORY, COMPUTE))
    command = [
        ncu,
        "--csv",
        "--page",
        "raw",
        "--metrics",
        metrics,
        "--profile-from-start",
        "off",
        "--log-file",
        str(log),
    ]
    target = [sys.executable, "-m", TARGET, context.kernel.bench_name, provider, sizes.model, str(max(sizes.tokens))]
    completed = context.run([*command, *target], environment={"LC_ALL": "C"})  # a decimal point, not a comma
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    if "ERR_NVGPUCTRPERM" in text + completed.stdout + completed.stderr:
        raise StepError(
            "this user may not read the GPU's performance counters (ERR_NVGPUCTRPERM): "
            "https://developer.nvidia.com/ERR_NVGPUCTRPERM says how an administrator allows it"
        )
    if completed.returncode:
        raise StepError(
            f"ncu ended with {completed.returncode} for {provider}:\n{printed(completed, lines=10)}\n{text[-2000:]}"
        )
    return Profile(provider, tuple(parse_raw_page(text, log)))


def parse_raw_page(text: str, source: Path) -> list[Launch]:
    """The launches in what `ncu --csv --page raw` printed; its own `==PROF==` lines are passed over.

    Args:
        text: the output.
        source: where it came from, for the message.

    Raises:
        StepError: there is no table in it, a metric is missing, or nothing was launched.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows: Sequence[dict[str, str]] = list(csv.DictReader(lines))
    if len(rows) < 2:  # units, and at least one launch
        raise StepError(f"ncu saw no kernel; what it printed is in {source}:\n{text[-2000:]}")
    units = rows[0]
    missing = [name for name in ("Kernel Name", DURATION, OCCUPANCY, MEMORY, COMPUTE) if name not in units]
    if missing:
        raise StepError(
            f"ncu printed no {', '.join(missing)}: this GPU or version may call it otherwise; see {source}."
        )
    scale = MICROSECONDS.get(units[DURATION][:1])
    if scale is None:
        raise StepError(f"ncu gives times in {units[DURATION]!r}, which is not known here; see {source}.")
    return [
        Launch(
            row["Kernel Name"],
            (_number(row[DURATION]) or 0.0) * scale,
            _number(row[OCCUPANCY]),
            _number(row[MEMORY]),
            _number(row[COMPUTE]),
        )
        for row in rows[1:]
    ]


def _number(text: str) -> float | None:
    """A value as ncu prints it, with separators between thousands; None for n/a."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None
