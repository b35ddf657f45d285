"""The memory probe: what it predicts and what it skips."""

from __future__ import annotations

import pytest

from fastft.bench.probe import MemoryProbe, predicted_bytes

GIB = 2**30


@pytest.mark.parametrize(
    ("footprints", "tokens", "expected"),
    [
        ([], 4096, None),
        ([(1024, 100)], 4096, 400),
        ([(1024, 100), (2048, 150)], 4096, 250),  # 50 of it are fixed
        ([(1024, 100), (2048, 90)], 4096, 90),  # never less than what was seen
        ([(512, 1), (1024, 100), (2048, 150)], 8192, 450),  # the last two decide
    ],
)
def test_prediction(footprints: list[tuple[int, int]], tokens: int, expected: float | None) -> None:
    assert predicted_bytes(footprints, tokens) == expected


def test_what_will_not_fit_is_skipped_with_figures() -> None:
    probe = MemoryProbe()
    probe.saw("torch", "full", 8192, 10 * GIB)
    assert probe.reason_to_skip("torch", "full", 16384, 40 * GIB) == ""
    assert probe.reason_to_skip("torch", "full", 16384, 21 * GIB) == "needs about 20.0 GiB; 21.0 GiB are free"
    assert probe.reason_to_skip("torch", "forward", 16384, 21 * GIB) == ""
    assert probe.reason_to_skip("fastft", "full", 16384, 21 * GIB) == ""
    assert probe.reason_to_skip("torch", "full", 16384, None) == ""


def test_after_running_out_of_memory_larger_sizes_are_not_tried() -> None:
    probe = MemoryProbe()
    probe.failed("torch", "full", 8192)
    probe.failed("torch", "full", 16384)
    assert probe.reason_to_skip("torch", "full", 16384, 80 * GIB) == "out of memory at 8192 tokens already"
    assert probe.reason_to_skip("torch", "full", 8192, 80 * GIB) == "out of memory at 8192 tokens already"
    assert probe.reason_to_skip("torch", "full", 4096, 80 * GIB) == ""


def test_a_device_that_nobody_counts_predicts_nothing() -> None:
    probe = MemoryProbe()
    probe.saw("torch", "full", 1024, 0)
    assert probe.reason_to_skip("torch", "full", 1 << 30, 1) == ""
