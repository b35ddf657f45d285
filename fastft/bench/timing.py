"""How long a call takes: on the device alone, and for the host that asks for it.

A *round* calls an operation once on each of several input sets, which together are larger than the L2 cache: one set
over and over would measure the cache. Before each round the inputs are restored, untimed, since some kernels write
over what they are given.

Device time is that of a CUDA graph of the round, replayed: no host time in it. What waits for the device cannot be
captured (a loss that looks at its labels does); its rounds are timed between two events, launch gaps included, and the
timer says so. On a CPU the wall clock has to do. Host time is how long the calls take to return, the device not waited
for, after an untimed one: the first since the device was idle wakes a thread of autograd's and finds cold caches, which
in training only a step's first operation pays.

Before each timed round the device reads a buffer larger than L2: that leaves the cache in one state, and while it
reads, the host has time to queue the round.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

__all__ = ["Timer", "capture", "host_times", "make_timer", "peak_bytes", "quantiles"]

Call = Callable[[], object]
_HOST_CALLS = 8  # however many input sets; the driver queues about a thousand launches, then the host would wait


class Timer(Protocol):
    """Times one round. `kind` is "graph", "events" or "cpu"; `note` says why not better."""

    kind: str
    note: str

    def sample(self, count: int) -> list[float]:
        """Milliseconds per call, of `count` rounds."""
        ...


class WallTimer:
    """The wall clock, where there is no device clock."""

    kind = "cpu"
    note = "wall clock"

    def __init__(self, calls: Sequence[Call], restore: Call) -> None:
        self._calls, self._restore = calls, restore

    def sample(self, count: int) -> list[float]:
        times = []
        for _ in range(count):
            self._restore()
            start = time.perf_counter()
            for call in self._calls:
                call()
            times.append((time.perf_counter() - start) * 1e3 / len(self._calls))
        return times


class EventTimer:
    """CUDA events around `round_`, which runs `calls` calls: a graph's replay, or the calls one by one."""

    def __init__(self, round_: Call, calls: int, restore: Call, *, kind: str, note: str, l2_bytes: int) -> None:
        self.kind, self.note = kind, note
        self._round, self._calls, self._restore = round_, calls, restore
        self._filler = torch.ones(max(4 * l2_bytes, 2**20) // 4, device="cuda")

    def sample(self, count: int) -> list[float]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times = []
        for _ in range(count):
            self._restore()
            self._filler.sum()  # read, not written: dirty lines would be flushed at the measured calls' expense
            start.record()
            self._round()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / self._calls)
        return times


def make_timer(calls: Sequence[Call], restore: Call, *, device: str, l2_bytes: int) -> Timer:
    """The best timer that `calls` allow. They must have run before: nothing may be compiled inside a capture."""
    if device == "cpu":
        return WallTimer(calls, restore)

    def one_by_one() -> None:
        for call in calls:
            call()

    graph, reason = capture(one_by_one, restore)
    if graph is None:
        return EventTimer(one_by_one, len(calls), restore, kind="events", note=reason, l2_bytes=l2_bytes)
    return EventTimer(graph.replay, len(calls), restore, kind="graph", note="", l2_bytes=l2_bytes)


def capture(round_: Call, restore: Call) -> tuple[torch.cuda.CUDAGraph | None, str]:
    """`round_` as a CUDA graph on the current stream, which must not be the default one; or None and why not.

    Calls that wait for the device are found by torch's sync debug mode first: a capture that fails half-way leaves
    torch's allocator and generators in a state nobody promises anything about.
    """
    restore()
    torch.cuda.set_sync_debug_mode("error")
    try:
        round_()
    except RuntimeError as error:
        return None, f"waits for the device: {_first_line(error)}"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    restore()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            round_()
    except RuntimeError as error:
        torch.cuda.synchronize()
        return None, f"cannot be captured: {_first_line(error)}"
    return graph, ""


def host_times(calls: Sequence[Call], restore: Call, count: int) -> list[float]:
    """Milliseconds until a call returns, the device not waited for, of `count` rounds of as many calls each.

    Sets are used again within a round where there are few of them: what a call leaves in its inputs changes no time.
    """
    timed = [calls[index % len(calls)] for index in range(_HOST_CALLS)]
    times = []
    for _ in range(count):
        restore()
        torch.cuda.synchronize()
        calls[0]()
        start = time.perf_counter()
        for call in timed:
            call()
        times.append((time.perf_counter() - start) * 1e3 / len(timed))
    torch.cuda.synchronize()
    return times


def peak_bytes(call: Call) -> int:
    """Bytes that one call adds at its peak to what was allocated on the device before, results included."""
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def quantiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """The 20 %, 50 % and 80 % quantiles, interpolated.

    Raises:
        ValueError: there are no samples.
    """
    if not samples:
        raise ValueError("quantiles: no samples were taken; ask for at least one.")
    if len(samples) == 1:
        return samples[0], samples[0], samples[0]
    tenths = statistics.quantiles(samples, n=10, method="inclusive")
    return tenths[1], tenths[4], tenths[7]


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]
