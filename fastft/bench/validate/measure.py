"""Steps 3 and 4: `fastft bench` on the kernel beside torch, what its figures say, and its plots.

Ours and torch's are compared mode by mode and length by length: device time (median) and the peak memory an operation
adds. A change under 3 % is called level. At least twice torch's time or memory is a catastrophe, and so is a result
that the benchmark found wrong, or none where torch has one.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fastft.bench.operations import OPERATIONS, find_operation
from fastft.bench.registry import find_model
from fastft.bench.validate.context import Context, StepError, printed, python_module

BENCH = "fastft.cli"
OURS, REFERENCE = "fastft", "torch"
LEVEL = 0.03
CATASTROPHE = 2.0
SMALL_MIB = 1.0  # below this a difference of memory is the allocator's rounding


@dataclass(frozen=True)
class Sizes:
    """What to measure at: a name of the benchmark's model registry, token counts, samples (None: its default)."""

    model: str
    tokens: tuple[int, ...]
    samples: int | None = None


ON_GPU = Sizes("Llama-3.1-8B", (2048, 8192))
ON_CPU = Sizes("tiny", (64,), 20)


@dataclass(frozen=True)
class Comparison:
    """Ours beside torch in one mode at one length. Milliseconds and MiB; None where it was not measured.

    Attributes:
        trouble: why there is no figure of ours where torch has one (a wrong result, an error, no memory), else empty.
        judged: False where the mode alone compares nothing (a loss may compute its gradient in the forward).
    """

    mode: str
    model: str
    tokens: str
    ours_ms: float | None = None
    torch_ms: float | None = None
    ours_mib: float | None = None
    torch_mib: float | None = None
    trouble: str = ""
    judged: bool = True

    @property
    def speed_up(self) -> float | None:
        """Torch's time over ours: above 1 we are faster."""
        return self.torch_ms / self.ours_ms if self.ours_ms and self.torch_ms is not None else None

    @property
    def memory_saved(self) -> float | None:
        """The share of torch's added memory that ours does without; negative where ours takes more."""
        if self.ours_mib is None or self.torch_mib is None:
            return None
        if abs(self.ours_mib - self.torch_mib) < SMALL_MIB:
            return 0.0
        return 1 - self.ours_mib / self.torch_mib if self.torch_mib else float("-inf")


@dataclass(frozen=True)
class Assessment:
    """A sentence that says which of speed and memory improved, and what is catastrophic (empty: nothing)."""

    sentence: str
    alarms: tuple[str, ...] = ()


def benchmark(context: Context, sizes: Sizes) -> tuple[list[Comparison], dict[str, str]]:
    """Run the benchmark of this kernel.

    Returns:
        The comparisons, and where they were measured: GPU, versions and commit as the benchmark names them.

    Raises:
        StepError: the benchmark failed or measured neither ours nor torch's.
    """
    path = bench_file(context)
    path.unlink(missing_ok=True)
    arguments = ["bench", "kernels", context.kernel.bench_name, "--csv", str(path), "--model", sizes.model]
    arguments += ["--provider", OURS, "--provider", REFERENCE]
    for count in sizes.tokens:
        arguments += ["--bt", str(count)]
    if sizes.samples:
        arguments += ["--samples", str(sizes.samples)]
    with context.console.status("Benchmark"):
        completed = python_module(context, BENCH, *arguments)
    (context.folder / "bench.log").write_text(printed(completed, lines=100_000), encoding="utf-8")
    if completed.returncode and context.kernel.bench_name not in OPERATIONS:
        raise StepError(
            f"the tests are green, and there is nothing to measure: {context.kernel.name} has no operation in "
            f"fastft/bench/operations ({', '.join(OPERATIONS)}). Write one beside these and enter it in OPERATIONS.\n"
            f"{printed(completed)}"
        )
    if completed.returncode or not path.is_file():
        raise StepError(f"`fastft {' '.join(arguments)}` failed:\n{printed(completed)}")
    rows = read_rows(path)
    comparisons = compare(rows, context.kernel.bench_name)
    if all(each.speed_up is None and not each.trouble for each in comparisons):
        said = "\n".join(f"{row['provider']} {row['mode']}: {row['status']} {row['note']}" for row in rows)
        raise StepError(f"the benchmark has no figures to compare {OURS} with {REFERENCE}:\n{said or 'no rows'}")
    place = {name: rows[0][name] for name in ("gpu", "torch", "triton", "commit") if rows[0].get(name)}
    return comparisons, place


def bench_file(context: Context) -> Path:
    return context.folder / "bench.csv"


def read_rows(path: Path) -> list[dict[str, str]]:
    """The benchmark's rows.

    Raises:
        StepError: columns are missing: this and `fastft bench` do not fit together.
    """
    needed = {"name", "mode", "provider", "model", "tokens", "ms_50", "extra_mib", "status", "note"}
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        missing = needed - set(reader.fieldnames or ())
        if missing:
            raise StepError(f"{path} lacks the columns {', '.join(sorted(missing))}: `fastft bench` writes others now.")
        return list(reader)


def compare(rows: Sequence[dict[str, str]], name: str) -> list[Comparison]:
    """Pair our rows of the operation `name` with torch's, in the order of the file."""
    found: dict[tuple[str, str, str], dict[str, dict[str, str]]] = {}
    for row in rows:
        key = (row["mode"], row["model"], row["tokens"])
        if row["provider"] in (OURS, REFERENCE):
            found.setdefault(key, {})[row["provider"]] = row
    comparisons = []
    for (mode, model, tokens), pair in found.items():
        ours, reference = pair.get(OURS, {}), pair.get(REFERENCE, {})
        comparisons.append(
            Comparison(
                mode,
                model,
                tokens,
                _number(ours.get("ms_50")),
                _number(reference.get("ms_50")),
                _number(ours.get("extra_mib")),
                _number(reference.get("extra_mib")),
                _trouble(ours, reference),
                judged=_has_a_cost(name, model, tokens, mode),
            )
        )
    return comparisons


def assess(comparisons: Sequence[Comparison], *, on_gpu: bool) -> Assessment:
    """What the figures say. Without a GPU only results count, not figures."""
    trouble = [f"{where(each)}: {each.trouble}" for each in comparisons if each.trouble]
    if not on_gpu:
        return Assessment("Measured without a GPU: these figures say nothing about the kernel.", tuple(trouble))
    speed = [(each, each.speed_up) for each in comparisons if each.judged and each.speed_up is not None]
    memory = [(each, each.memory_saved) for each in comparisons if each.judged and each.memory_saved is not None]
    verdicts = {
        "Speed": _verdict([speed_up - 1 for _, speed_up in speed]),
        "Memory": _verdict([saved for _, saved in memory]),
    }
    alarms = [
        f"{where(each)}: {1 / speed_up:.1f} × torch's time" for each, speed_up in speed if speed_up <= 1 / CATASTROPHE
    ]
    alarms += [
        f"{where(each)}: {each.ours_mib:,.0f} MiB where torch adds {each.torch_mib:,.0f} MiB"
        for each, saved in memory
        if saved <= 1 - CATASTROPHE
    ]
    sentence = ". ".join(f"{what} {verdict}" for what, verdict in verdicts.items()) + "."
    if len(set(verdicts.values())) == 1:
        sentence = f"Speed and memory {verdicts['Speed']}."
    return Assessment(sentence, (*trouble, *alarms))


def where(comparison: Comparison) -> str:
    """A comparison's mode and length, in words."""
    return f"{comparison.mode} at {comparison.tokens} tokens" if comparison.tokens else comparison.mode


def plot(context: Context) -> str:
    """Draw the benchmark's plots. Returns why there are none; empty if there are. Never blocks."""
    folder = context.folder / "plots"
    try:
        with context.console.status("Plots"):
            completed = python_module(
                context, BENCH, "bench", "plot", "--csv", str(bench_file(context)), "--out", str(folder)
            )
    except (StepError, OSError) as error:
        return str(error)
    if completed.returncode:
        return printed(completed, lines=5) or f"`fastft bench plot` ended with {completed.returncode}"
    return "" if list(folder.glob("*.png")) else "`fastft bench plot` wrote no picture"


def _verdict(changes: Sequence[float]) -> str:
    better, worse = any(change >= LEVEL for change in changes), any(change <= -LEVEL for change in changes)
    if not changes:
        return "was not measured"
    if better and worse:
        return "improved in some modes and got worse in others"
    return "improved" if better else "got worse" if worse else "stayed level"


def _trouble(ours: dict[str, str], reference: dict[str, str]) -> str:
    """Why ours failed where torch did not; too large for the memory there is ("skipped") is no failure."""
    if reference.get("status") != "ok" or ours.get("status") not in ("wrong", "error", "out of memory"):
        return ""
    return f"{ours['status']}: {ours['note']}"


def _has_a_cost(name: str, model: str, tokens: str, mode: str) -> bool:
    """Whether the benchmark says what the mode costs at least; if not, implementations may do different work in it."""
    if name not in OPERATIONS:
        return True
    return find_operation(name).cost(find_model(model), int(tokens or 0), 2, mode) is not None


def _number(text: str | None) -> float | None:
    return float(text) if text not in (None, "", "None", "nan") else None
