"""Where a model goes, and what is said when the place does not exist."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastft.loading.device import mapped_devices, resolve_device_map


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.delenv("LOCAL_RANK", raising=False)


@pytest.mark.usefixtures("no_gpu")
def test_the_default_without_a_gpu_is_the_cpu() -> None:
    assert resolve_device_map(None) == {"": torch.device("cpu")}


@pytest.mark.usefixtures("two_gpus")
def test_the_default_is_the_current_gpu() -> None:
    assert resolve_device_map(None) == {"": torch.device("cuda", 1)}


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("local_rank", "index"),
    [("0", 0), ("1", 1), ("5", 1)],  # rank 5 of a launcher that shows each process its own GPU
)
def test_under_torchrun_the_default_is_the_local_rank(
    monkeypatch: pytest.MonkeyPatch, local_rank: str, index: int
) -> None:
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert resolve_device_map(None) == {"": torch.device("cuda", index)}


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("given", ["auto", "cuda:1", 0, {"": 0}, {"model": "cuda:0", "lm_head": "cpu"}])
def test_a_given_map_is_passed_on_as_it_is(given: Any) -> None:
    assert resolve_device_map(given) is given


@pytest.mark.usefixtures("two_gpus")
def test_the_devices_of_a_map() -> None:
    first, second, cpu = torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cpu")
    assert mapped_devices("auto") == [first, second]
    assert mapped_devices({"a": 0, "b": "cuda:1", "c": 0, "d": "cpu", "e": "disk"}) == [first, second, cpu]
    assert mapped_devices(torch.device("cpu")) == [cpu]


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("asked", ["cuda", "cuda:0", 0, {"": 0}, {"": "cuda:0"}, torch.device("cuda")])
def test_a_cpu_build_is_not_called_a_missing_gpu(monkeypatch: pytest.MonkeyPatch, asked: Any) -> None:
    """C54, and pain 20: "torch is a CPU build" and "no GPU visible" need different cures."""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(RuntimeError, match="is a CPU build"):
        resolve_device_map(asked)


@pytest.mark.usefixtures("no_gpu")
def test_a_cuda_build_without_a_gpu_names_what_hides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(RuntimeError, match=r"sees no GPU.*CUDA_VISIBLE_DEVICES is ''"):
        resolve_device_map("cuda")


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_beyond_the_visible_ones() -> None:
    with pytest.raises(RuntimeError, match=r"cuda:3, but only 2 GPU\(s\) are visible"):
        resolve_device_map("cuda:3")


def test_a_map_with_no_device_in_it_says_what_one_looks_like() -> None:
    with pytest.raises(ValueError, match="'gpu' is not a device"):
        resolve_device_map("gpu")
