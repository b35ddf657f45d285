"""Clock and counters of one run: real tokens, batches without labels, time spent training.

Counting must not make the step wait for the device, so what is on the device is added up there and fetched when a
trainer logs (it waits for its own loss then). What the host knows (a batch without padding, or one whose padding was
left out) is added up on the host.

Evaluation and saving happen between a step's end and the next event of the trainer's; that time is no part of
tokens per second. Neither is the first step, in which kernels are compiled and memory is planned.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

IGNORE_INDEX = -100

__all__ = ["IGNORE_INDEX", "Meter"]


class Meter:
    """Counts one run of one process.

    Args:
        now: when the run began, by `time.perf_counter`.
    """

    def __init__(self, now: float) -> None:
        self.began = now
        self.steps = 0
        self.batches = 0  # that came with labels
        self.first_step_seconds: float | None = None
        self.paused = 0.0
        self._tokens = 0
        self._on_device: dict[torch.device, Tensor] = {}  # int64 [2]: tokens, batches without a counted label
        self._pause_began: float | None = None
        self._first = (0, 0.0)  # tokens and active seconds when the first step had ended
        self._last = (0, 0.0)  # the same at the last reading
        self._read = (0, 0)

    def count_tokens(self, count: int, mask: Tensor | None) -> None:
        """A training forward over `count` tokens, less those that `mask` `[rows, length]` leaves out."""
        if mask is None:
            self._tokens += count
        else:
            self._add(torch.stack((mask.count_nonzero(), mask.new_zeros((), dtype=torch.long))))

    def count_labels(self, labels: Tensor) -> None:
        """A training batch's labels `[rows, length]`; the first of a row is never a target."""
        self.batches += 1
        without = (labels[..., 1:] == IGNORE_INDEX).all()
        self._add(torch.stack((torch.zeros_like(without, dtype=torch.long), without.long())))

    def _add(self, counts: Tensor) -> None:
        before = self._on_device.get(counts.device)
        self._on_device[counts.device] = counts if before is None else before + counts

    def read(self) -> tuple[int, int]:
        """(tokens, batches without a counted label) until now; waits for the device."""
        totals = [counts.tolist() for counts in self._on_device.values()]
        self._read = (self._tokens + sum(t for t, _ in totals), sum(b for _, b in totals))
        return self._read

    def step_ended(self, device: torch.device) -> None:
        """An optimizer step is over; what the trainer does until its next event is a pause (`pause_ended`)."""
        self.steps += 1
        if self.steps == 1:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # once a run
            self.first_step_seconds = time.perf_counter() - self.began - self.paused
            self._first = self._last = (self.read()[0], self.first_step_seconds)
        self.pause_begins()

    def pause_begins(self) -> None:
        """The trainer may log, evaluate and save from here on."""
        self._pause_began = time.perf_counter()

    def pause_continues(self) -> None:
        """It has logged, evaluated or saved, and may do another of them."""
        if self._pause_began is not None:
            now = time.perf_counter()
            self.paused += now - self._pause_began
            self._pause_began = now

    def pause_ended(self) -> None:
        """The next step begins: fetching its batch was training time."""
        self._pause_began = None

    @property
    def seconds(self) -> float:
        """Since the run began, pauses included."""
        return time.perf_counter() - self.began

    @property
    def _active(self) -> float:
        return (time.perf_counter() if self._pause_began is None else self._pause_began) - self.began - self.paused

    def recent_rate(self) -> float | None:
        """Tokens a second since the last reading; waits for the device. None right after the first step."""
        tokens, active = self.read()[0], self._active
        before, then = self._last
        if active - then <= 0 or tokens == before:
            return None
        self._last = (tokens, active)
        return (tokens - before) / (active - then)

    def mean_rate(self) -> float | None:
        """Tokens a second over the whole run, without its first step where there were more; waits for the device."""
        tokens, active = self.read()[0], self._active
        first_tokens, first_seconds = self._first if self.steps > 1 else (0, 0.0)
        if active <= first_seconds or tokens == first_tokens:
            return None
        return (tokens - first_tokens) / (active - first_seconds)
