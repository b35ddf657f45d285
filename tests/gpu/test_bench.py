"""`fastft bench` on the GPU: every operation timed by graph replay where it can be, limits, one training run.

The kernel sessions run in this process and are asked by the real runner; each has the stream of its own that a capture
needs.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import pytest
import torch

from fastft.bench import checkpoint, limit
from fastft.bench.kernel_run import KernelRun, run_kernels
from fastft.bench.kernel_session import KernelSession
from fastft.bench.operations import OPERATIONS
from fastft.bench.processes import ProcessWorker, Worker
from fastft.bench.providers import Settings
from fastft.bench.registry import find_model
from fastft.bench.results import Row
from fastft.bench.roofline import Ceilings
from fastft.bench.timing import capture, host_times, make_timer, peak_bytes

SMOL = find_model("SmolLM2-135M")
SYNCHRONOUS = {"cross_entropy"}  # looks at its labels on the host: no graph


class LocalWorker:
    """A session in this process, asked as a worker is."""

    def __init__(self, provider: str) -> None:
        self._session = KernelSession(provider)

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return self._session.handle(request)

    def close(self) -> None:
        """Nothing to end."""


@pytest.fixture
def workers() -> dict[str, Worker]:
    made: dict[str, Worker] = {provider: LocalWorker(provider) for provider in ("fastft", "torch")}
    for worker in made.values():
        reply = worker.ask({"do": "open"})
        assert reply["status"] == "ok"
        assert reply["device"] == "cuda"
        assert reply["l2_bytes"] > 2**20
    return made


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_right_and_timed(name: str, workers: dict[str, Worker]) -> None:
    run = KernelRun(
        operations=[name],
        shapes=[SMOL],
        tokens=[2048],
        dtype="bfloat16",
        samples=20,
        workers=workers,
        unavailable={},
        blank=Row(),
        ceilings=Ceilings(gbps=1e6, tflops=1e6),
    )
    (rows,) = run_kernels(run)
    assert {row.provider for row in rows} == {"fastft", "torch"}
    for row in rows:
        assert row.status == "ok", f"{row.provider} {row.mode}: {row.note}"
        assert row.samples == 20
        assert row.ms_50 is not None
        assert row.host_ms is not None
        assert 0 < row.ms_50 < 1000
        assert 0 < row.host_ms < 1000
        assert row.extra_mib is not None
        assert row.timer == "graph" or name in SYNCHRONOUS, f"{row.provider} {row.mode}: {row.note}"
        if row.mode != "backward":
            assert row.extra_mib > 0  # its output, at least


def test_device_time_has_no_host_time_in_it() -> None:
    """Ten tiny launches: the graph's time is far below what the host needs to issue them."""
    x = torch.zeros(16, device="cuda")

    def call() -> None:
        for _ in range(10):
            x.add_(1)

    with torch.cuda.stream(torch.cuda.Stream()):
        call()
        timer = make_timer([call] * 4, lambda: None, device="cuda", l2_bytes=2**20)
        assert timer.kind == "graph"
        device_ms = sorted(timer.sample(20))[10]
        host_ms = sorted(host_times([call] * 4, lambda: None, 20))[10]
    assert device_ms < host_ms


def test_device_time_of_a_copy_is_its_bytes_over_a_believable_rate() -> None:
    source = torch.randn(2**26, device="cuda")  # 256 MiB
    target = torch.empty_like(source)
    with torch.cuda.stream(torch.cuda.Stream()):
        target.copy_(source)
        timer = make_timer([lambda: target.copy_(source)], lambda: None, device="cuda", l2_bytes=2**26)
        ms = sorted(timer.sample(20))[10]
    rate = 2 * source.nbytes / ms / 1e6
    assert 50 < rate < 20_000  # GB/s: any card there is


def test_what_waits_for_the_device_is_timed_by_events_and_leaves_the_device_usable() -> None:
    x = torch.randn(1024, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        graph, reason = capture(lambda: x.sum().item(), lambda: None)
        assert graph is None
        assert "waits for the device" in reason
        timer = make_timer([lambda: x.sum().item()], lambda: None, device="cuda", l2_bytes=2**20)
        assert timer.kind == "events"
        assert min(timer.sample(3)) > 0
    torch.randn(4, device="cuda")
    torch.cuda.synchronize()


def test_peak_counts_what_a_call_adds() -> None:
    x = torch.zeros(2**20, device="cuda")
    assert peak_bytes(lambda: x + 1) == 2**22
    assert peak_bytes(lambda: (x + 1) + 1) == 2**23


def test_limits_are_believable() -> None:
    limits = {each["name"]: each for each in limit.measure({"dtype": "bfloat16", "samples": 5})["limits"]}
    assert set(limits) == {"copy", "matmul", "launch", "h2d", "d2h"}
    rates = {name: each["bytes"] / min(each["samples_ms"]) / 1e6 for name, each in limits.items()}
    assert rates["copy"] > rates["h2d"] > 1  # GB/s
    assert rates["copy"] > rates["d2h"] > 1
    assert limits["matmul"]["flops"] / min(limits["matmul"]["samples_ms"]) / 1e9 > 1  # TFLOP/s
    assert max(limits["launch"]["samples_ms"]) < 1


def test_a_training_run_in_a_process_of_its_own(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "tiny"
    checkpoint.write({"shape": asdict(find_model("tiny")), "folder": str(folder), "dtype": "bfloat16"})
    losses = {}
    for provider in ("fastft", "hf"):
        settings = Settings(
            kind="step",
            batch=2,
            steps=2,
            warmup=1,
            bits=4,
            rank=8,
            checkpointing="auto",
            memory_budget="",
            dtype="bfloat16",
            provider=provider,
            folder=str(folder),
            length=64,
        )
        worker = ProcessWorker(provider)
        try:
            reply = worker.ask({"do": "train", "settings": asdict(settings)})
        finally:
            worker.close()
        assert reply["status"] == "ok"
        assert reply["peak_bytes"] > reply["base_bytes"] > 0
        assert min(reply["steps_ms"]) > 0
        losses[provider] = reply["losses"]
    assert losses["fastft"] == pytest.approx(losses["hf"], rel=2e-2)
