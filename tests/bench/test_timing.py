"""Timers on the CPU, and quantiles."""

from __future__ import annotations

import time

import pytest
import torch

from fastft.bench.timing import host_times, make_timer, quantiles


def test_quantiles_of_known_numbers() -> None:
    assert quantiles([float(n) for n in range(101)]) == pytest.approx((20, 50, 80))
    assert quantiles([3.0, 1.0]) == pytest.approx((1.4, 2.0, 2.6))
    assert quantiles([7.0]) == (7.0, 7.0, 7.0)
    with pytest.raises(ValueError, match="no samples"):
        quantiles([])


def test_a_round_is_restored_first_and_its_time_is_per_call() -> None:
    events: list[str] = []

    def restore() -> None:
        events.append("restore")
        time.sleep(0.05)  # must not be counted

    def call() -> None:
        events.append("call")
        time.sleep(0.02)

    timer = make_timer([call, call], restore, device="cpu", l2_bytes=1)
    assert timer.kind == "cpu"
    samples = timer.sample(3)
    assert events == ["restore", "call", "call"] * 3
    assert len(samples) == 3
    assert 20.0 <= min(samples) < 36.0


@pytest.mark.parametrize("sets", [1, 3, 20])
def test_host_time_is_that_of_calls_after_the_first_however_many_sets(
    sets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call after a wait for the device is no measure of the others, nor may the number of sets be one."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("wait"))
    events: list[str] = []

    def call() -> None:
        time.sleep(0.05 if events[-1] == "wait" else 0.005)
        events.append("call")

    samples = host_times([call] * sets, lambda: events.append("restore"), 2)
    assert events == (["restore", "wait"] + ["call"] * 9) * 2 + ["wait"]
    assert len(samples) == 2
    assert 5.0 <= min(samples) < 9.0
