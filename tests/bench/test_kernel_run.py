"""The runner, with workers that answer by table: who is asked when, and what becomes of who fails."""

from __future__ import annotations

from typing import Any

import pytest

from fastft.bench.kernel_run import KernelRun, Point, measure_point, run_kernels
from fastft.bench.processes import Worker, WorkerError
from fastft.bench.registry import find_model
from fastft.bench.results import Row
from fastft.bench.roofline import Ceilings
from tests.bench.samples import DEFAULTS, PLACE, FakeWorker, kernel_row

TINY = find_model("tiny")
POINT = Point("rms_norm", TINY, 64, "bfloat16", "full")


def fakes(**answers: dict[str, Any]) -> tuple[dict[str, Worker], list[tuple[str, str]]]:
    """Workers by provider (underscores stand for dots), and the log they share."""
    log: list[tuple[str, str]] = []
    names = {name.replace("torch_compile", "torch.compile"): table for name, table in answers.items()}
    return {name: FakeWorker(name, log, table) for name, table in names.items()}, log


def run_with(workers: dict[str, Worker], **changes: Any) -> list[list[Row]]:
    settings: dict[str, Any] = {
        "operations": ["rms_norm"],
        "shapes": [TINY],
        "tokens": [64],
        "dtype": "bfloat16",
        "samples": 20,
        "workers": workers,
        "unavailable": {},
        "blank": Row(**PLACE),
        "ceilings": Ceilings(gbps=4000.0, tflops=800.0),
    }
    return list(run_kernels(KernelRun(**(settings | changes))))


def test_providers_take_turns_and_the_order_rotates() -> None:
    workers, log = fakes(fastft={}, torch={}, liger={})
    outcomes = measure_point(workers, ["fastft", "torch", "liger"], POINT, 22)
    assert [entry for entry in log if entry[1] == "prepare"] == log[:3], "all are ready before any is timed"
    sampled = [name for name, do in log if do == "sample"]
    assert sampled[:9] == ["fastft", "torch", "liger", "torch", "liger", "fastft", "liger", "fastft", "torch"]
    assert len(sampled) == 15
    assert {name: len(outcome.device_ms) for name, outcome in outcomes.items()} == dict.fromkeys(outcomes, 22)
    assert log[-3:] == [("fastft", "release"), ("torch", "release"), ("liger", "release")]


def test_a_wrong_provider_is_reported_and_not_timed() -> None:
    workers, log = fakes(fastft={"prepare": {"status": "wrong", "note": "output 0: relative error 0.5"}}, torch={})
    rows = run_with(workers)[0]
    ours = [row for row in rows if row.provider == "fastft"]
    assert [(row.status, row.ms_50, row.note) for row in ours] == [("wrong", None, "output 0: relative error 0.5")] * 3
    assert ("fastft", "sample") not in log
    assert all(row.ms_50 == 1.0 for row in rows if row.provider == "torch")


def test_figures_of_a_row() -> None:
    def sample(request: Any) -> dict[str, Any]:
        return {"status": "ok", "device_ms": [0.001 * n for n in range(1, request["count"] + 1)], "host_ms": [0.25]}

    workers, _ = fakes(fastft={"sample": sample, "prepare": {**DEFAULTS["prepare"], "extra_bytes": 3 * 2**20}})
    forward = run_with(workers)[0][0]
    assert (forward.kind, forward.name, forward.mode, forward.provider) == ("kernels", "rms_norm", "forward", "fastft")
    assert (forward.model, forward.tokens, forward.dtype, forward.commit) == ("tiny", 64, "bfloat16", "abc1234")
    assert forward.ms_50 == pytest.approx(0.0025)
    assert forward.ms_20 < forward.ms_50 < forward.ms_80
    assert forward.samples == 20
    assert forward.extra_mib == 3.0
    assert forward.host_ms == 0.25
    assert forward.gbps == pytest.approx(2 * 64 * 64 * 2 / 0.0025e-3 / 1e9)
    assert forward.roofline_share == pytest.approx(forward.gbps / 4000.0)


def test_who_found_no_room_beside_the_others_is_measured_alone() -> None:
    tries = []

    def crowded(request: Any) -> dict[str, Any]:
        tries.append(request["mode"])
        return {"status": "out of memory", "note": "2 GiB"} if len(tries) == 1 else dict(DEFAULTS["prepare"])

    workers, log = fakes(fastft={}, torch={"prepare": crowded})
    outcomes = measure_point(workers, ["fastft", "torch"], POINT, 20)
    assert outcomes["torch"].status == "ok"
    assert outcomes["torch"].note.startswith("measured alone")
    assert len(outcomes["torch"].device_ms) == 20
    first_release = log.index(("fastft", "release"))
    assert log.index(("torch", "sample")) > first_release, "the others must be gone"


def test_too_large_for_the_device_is_said_and_larger_sizes_are_skipped() -> None:
    workers, log = fakes(torch={"prepare": {"status": "out of memory", "note": "2 GiB"}})
    groups = run_with(workers, tokens=[64, 128])
    assert {row.status for row in groups[0]} == {"out of memory"}
    assert {(row.status, row.note) for row in groups[1]} == {("skipped", "out of memory at 64 tokens already")}
    assert len([entry for entry in log if entry[1] == "prepare"]) == 3


def test_a_sweep_stops_where_the_probe_says() -> None:
    prepare = {**DEFAULTS["prepare"], "footprint_bytes": 6 * 10**9}
    workers, _ = fakes(torch={"prepare": prepare}, fastft={})
    groups = run_with(workers, tokens=[64, 128])
    statuses = {row.provider: row.status for row in groups[1]}
    assert statuses == {"torch": "skipped", "fastft": "ok"}


def test_a_worker_that_ends_is_replaced() -> None:
    log: list[tuple[str, str]] = []
    broken = FakeWorker("fastft", log, {"sample": WorkerError("fastft: the process ended (exit status -11)")})
    fresh = FakeWorker("fastft", log)
    workers: dict[str, Worker] = {"fastft": broken, "torch": FakeWorker("torch", log)}
    outcomes = measure_point(workers, ["fastft", "torch"], POINT, 20, restart=lambda provider: fresh)
    assert (outcomes["fastft"].status, "exit status -11" in outcomes["fastft"].note) == ("error", True)
    assert outcomes["torch"].status == "ok"
    assert broken.closed
    assert workers["fastft"] is fresh


def test_a_worker_that_cannot_be_replaced_is_left_out() -> None:
    def restart(provider: str) -> Worker:
        raise WorkerError("no such device")

    workers, _ = fakes(fastft={"prepare": WorkerError("gone")}, torch={})
    groups = run_with(workers, restart=restart)
    ours = [row for row in groups[0] if row.provider == "fastft"]
    assert "no such device" in ours[0].note
    assert {row.provider for row in groups[0] if row.status == "ok"} == {"torch"}


def test_known_rows_are_reused_unless_overwritten() -> None:
    known = [kernel_row(mode=mode, ms_50=5.0) for mode in ("forward", "backward", "full")]
    workers, log = fakes(fastft={}, torch={})
    rows = run_with(workers, known=known)[0]
    assert {row.provider: row.ms_50 for row in rows} == {"fastft": 5.0, "torch": 1.0}
    assert ("fastft", "sample") not in log
    rows = run_with(workers, known=known, overwrite=True)[0]
    assert {row.provider: row.ms_50 for row in rows} == {"fastft": 1.0, "torch": 1.0}


def test_who_is_not_installed_has_a_row() -> None:
    workers, _ = fakes(fastft={})
    rows = run_with(workers, unavailable={"liger": ("not installed", "no package liger_kernel")})[0]
    assert [(row.status, row.note) for row in rows if row.provider == "liger"] == [
        ("not installed", "no package liger_kernel")
    ] * 3


def test_what_no_token_count_changes_is_measured_once() -> None:
    workers, _ = fakes(fastft={})
    groups = run_with(workers, operations=["dequantize"], tokens=[64, 128])
    assert [(row.mode, row.tokens) for group in groups for row in group] == [("forward", None)]
