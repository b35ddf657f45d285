"""What a finished run was like: printed at its end, kept as `fastft.report(model).run`."""

from __future__ import annotations

from dataclasses import dataclass

from fastft.memory.budget import format_bytes


@dataclass(frozen=True, slots=True)
class RunReport:
    """One `train()` call, as this process saw it; `print(run)` shows it.

    Args:
        steps: optimizer steps of this call (a resumed run counts its own).
        seconds: from the first training forward (from the call, where the trainer had the callback already) to the end.
        paused_seconds: of those, logging, evaluating and saving.
        first_step_seconds: the first step, kernels compiled and memory planned in it; None before it ended.
        tokens: real tokens that went through the model in training, padding left out.
        tokens_per_second: the same over time, without pauses and without the first step where there were more.
        peak_bytes: the most device memory allocated at once; None on a CPU.
        peak_is_bound: whether that peak may be from before the run: the run then stayed below it.
        batches: micro-batches that came with labels.
        batches_without_labels: of those, the ones whose every label is ignored (-100): they train on nothing.
        processes: how many trained together; all the figures are this one's.
        interrupted: whether Ctrl-C ended it.
    """

    steps: int
    seconds: float
    paused_seconds: float
    first_step_seconds: float | None
    tokens: int
    tokens_per_second: float | None
    peak_bytes: int | None
    peak_is_bound: bool
    batches: int
    batches_without_labels: int
    processes: int = 1
    interrupted: bool = False

    def __str__(self) -> str:
        noun = "step" if self.steps == 1 else "steps"
        first = "" if self.first_step_seconds is None else f"; the first took {_duration(self.first_step_seconds)}"
        ended = "interrupted after" if self.interrupted else "trained"
        lines = [f"{ended} {self.steps:,} {noun} in {_duration(self.seconds)}{first}"]
        if self.paused_seconds >= 0.05 * self.seconds:
            lines.append(f"of that, {_duration(self.paused_seconds)} logging, evaluating and saving")
        rate = "" if self.tokens_per_second is None else f", {self.tokens_per_second:,.0f} a second"
        without = " (the first step left out)" if rate and self.steps > 1 else ""
        mine = "" if self.processes == 1 else f" in this process, one of {self.processes}"
        lines.append(f"{self.tokens:,} tokens, padding not counted{mine}{rate}{without}")
        if self.peak_bytes is not None:
            lines.append(f"peak memory {'at most ' if self.peak_is_bound else ''}{format_bytes(self.peak_bytes)}")
        if self.batches_without_labels:
            lines.append(
                f"{self.batches_without_labels:,} of {self.batches:,} batches had no label to train on: "
                "fastft.check_dataset(trainer) shows why"
            )
        return "fastft: " + "\n        ".join(lines)


def _duration(seconds: float) -> str:
    """`3 h 05 min`, `2 min 07 s`, `4.21 s`."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
