"""What a memory budget may look like, and how many bytes it allows on a device."""

from __future__ import annotations

import re
from typing import Any

import psutil
import pytest
import torch

from fastft.memory.budget import DeviceMemory, allowed_bytes, device_memory, format_bytes, parse_budget

GIB, MIB = 2**30, 2**20
CPU = torch.device("cpu")
CUDA = torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ("20GiB", 20 * GIB),
        ("1.5gib", 3 * 2**29),
        (" .5 GiB ", 2**29),
        ("512MiB", 512 * MIB),
        ("2048 KiB", 2 * MIB),
        ("1TiB", 2**40),
        ("20 GB", 20 * 10**9),
        ("1.5gb", 1_500_000_000),
        ("300MB", 300 * 10**6),
        ("5000kb", 5 * 10**6),
        ("2TB", 2 * 10**12),
        ("2000000 B", 2_000_000),
        ("8000000000", 8 * 10**9),
        (MIB, MIB),
        (24 * GIB, 24 * GIB),
        (20e9, 20 * 10**9),
        (10**400, 10**400),
    ],
)
def test_a_size_becomes_bytes(given: Any, size: int) -> None:
    parsed = parse_budget(given)
    assert parsed == size
    assert type(parsed) is int


@pytest.mark.parametrize(("given", "share"), [(0.8, 0.8), (1.0, 1.0), ("80%", 0.8), ("12.5 %", 0.125), ("0.8", 0.8)])
def test_a_share_stays_a_share(given: Any, share: float) -> None:
    parsed = parse_budget(given)
    assert parsed == share
    assert type(parsed) is float


def test_no_budget_stays_none() -> None:
    assert parse_budget(None) is None


@pytest.mark.parametrize("given", [20, 20.0, "20"])
def test_a_forgotten_unit_is_guessed(given: Any) -> None:
    with pytest.raises(ValueError, match=rf"memory_budget={given!r} .*Did you mean '20GiB'\?"):
        parse_budget(given)


@pytest.mark.parametrize(
    "given",
    [True, False, -1, -20 * GIB, 0, 0.0, -0.5, 1.5, MIB - 1, float("nan"), float("inf"), 2.5e6 + 0.5, b"20GiB", [1]],
)
def test_a_number_that_is_no_budget_is_named_with_what_would_be(given: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"memory_budget={given!r}") + r".*Give a size \('20GiB'"):
        parse_budget(given)


@pytest.mark.parametrize("given", [True, False])
def test_a_flag_is_not_taken_for_a_number(given: bool) -> None:
    with pytest.raises(ValueError, match=f"memory_budget={given} is neither a size nor a share"):
        parse_budget(given)


@pytest.mark.parametrize(
    "given", ["", "lots", "GiB", "-3GiB", "20G", "20 GiB free", "0%", "101%", "5KiB", "1e9", "nan", "2..5GiB", "1,5GiB"]
)
def test_text_that_is_no_budget_is_named_with_what_would_be(given: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"memory_budget={given!r}") + r".*Give a size \('20GiB'"):
        parse_budget(given)


def test_the_cpu_is_read_from_the_system() -> None:
    memory = device_memory(CPU)
    assert memory.total == psutil.virtual_memory().total
    assert 0 < memory.limit <= memory.total
    assert memory.allocated == 0


def test_asking_about_the_cpu_initializes_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise AssertionError("CUDA was asked")

    for name in ("_lazy_init", "current_device", "mem_get_info", "memory_reserved", "get_per_process_memory_fraction"):
        monkeypatch.setattr(torch.cuda, name, fail)
    allowed_bytes(CPU, None)


def test_another_kind_of_device_is_refused() -> None:
    with pytest.raises(ValueError, match="meta: how much memory it has"):
        device_memory(torch.device("meta"))


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """An 80 GiB GPU 1: 10 GiB of another process, 20 reserved here of which 15 in tensors."""
    facts: dict[str, Any] = {"free": 50 * GIB, "total": 80 * GIB, "reserved": 20 * GIB, "fraction": 1.0}

    def for_gpu_1(read: Any) -> Any:
        def answer(index: int) -> Any:
            assert index == 1
            return read()

        return answer

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", for_gpu_1(lambda: (facts["free"], facts["total"])))
    monkeypatch.setattr(torch.cuda, "memory_reserved", for_gpu_1(lambda: facts["reserved"]))
    monkeypatch.setattr(torch.cuda, "memory_allocated", for_gpu_1(lambda: 15 * GIB))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", for_gpu_1(lambda: facts["fraction"]))
    return facts


@pytest.mark.parametrize("device", [CUDA, torch.device("cuda")])
@pytest.mark.usefixtures("fake_gpu")
def test_a_gpu_offers_what_is_free_and_what_torch_holds(device: torch.device) -> None:
    assert device_memory(device) == DeviceMemory(total=80 * GIB, limit=70 * GIB, allocated=15 * GIB)


def test_a_cap_on_the_process_limits_a_gpu(fake_gpu: dict[str, Any]) -> None:
    fake_gpu["fraction"] = 0.5
    assert device_memory(CUDA).limit == 40 * GIB
    assert allowed_bytes(CUDA, 60 * GIB) == 40 * GIB


@pytest.mark.parametrize(
    ("budget", "allowed"),
    [
        (24 * GIB, 24 * GIB),
        (0.5, 40 * GIB),  # of the whole device
        (1.0, 70 * GIB),  # at most what can be had, without a margin: it was asked for
        (200 * GIB, 70 * GIB),
        (None, 70 * GIB - int(70 * GIB * 0.06)),
    ],
)
@pytest.mark.usefixtures("fake_gpu")
def test_what_a_budget_allows_on_a_gpu(budget: int | float | None, allowed: int) -> None:
    assert allowed_bytes(CUDA, budget) == allowed


@pytest.mark.parametrize(("limit", "allowed"), [(4096 * MIB, 3584 * MIB), (300 * MIB, 0)])
def test_the_margin_of_a_small_gpu_is_512_mebibytes(fake_gpu: dict[str, Any], limit: int, allowed: int) -> None:
    fake_gpu.update(free=limit, reserved=0)
    assert allowed_bytes(CUDA, None) == allowed


def test_no_budget_is_half_of_what_the_cpu_has_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastft.memory.budget.device_memory", lambda device: DeviceMemory(32 * GIB, 10 * GIB, 0))
    assert allowed_bytes(CPU, None) == 5 * GIB
    assert allowed_bytes(CPU, 0.25) == 8 * GIB
    assert allowed_bytes(CPU, 11 * GIB) == 10 * GIB


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (int(8.45 * GIB), "8.45 GiB"),
        (512 * MIB, "512 MiB"),
        (GIB, "1.00 GiB"),
        (GIB - 1, "1.00 GiB"),
        (GIB - 20 * MIB, "1004 MiB"),
        (3 * 1024, "3 KiB"),
        (12, "12 B"),
        (0, "0 B"),
        (-512 * MIB, "-512 MiB"),
    ],
)
def test_bytes_for_people(size: int, text: str) -> None:
    assert format_bytes(size) == text
