"""Environment, seeds and fixtures shared by every test; the builders themselves are in tests/support.py."""

from __future__ import annotations

import functools
import gc
import os
import pathlib

# Before torch is imported anywhere: one thread a process, no hub, no tokenizer threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import random
from importlib import metadata
from typing import Any

import numpy
import pytest
import torch
from packaging.version import Version

from tests import support

GPU_TESTS = pathlib.Path(__file__).parent / "gpu"
KERNEL_TESTS = pathlib.Path(__file__).parent / "kernels"


@pytest.hookimpl(tryfirst=True)  # before -m chooses by the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under tests/gpu all are `gpu` tests, under tests/kernels `kernel` tests; `gpu` and `trl` are skipped if need be.

    TRL 1.15 launches its loss as a Triton kernel on the CPU too, and has no other: it trains there in Triton's
    interpreter only (`TRITON_INTERPRET=1`), stock models included. 1.16 has a torch path.
    """
    no_cuda = pytest.mark.skip(reason="needs a CUDA device")
    no_trl = pytest.mark.skip(reason="trl 1.15 trains on a CPU only with TRITON_INTERPRET=1")
    has_cuda = torch.cuda.is_available()
    trl_version = Version(metadata.version("trl"))
    trl_trains = has_cuda or os.environ.get("TRITON_INTERPRET") == "1" or trl_version >= Version("1.16")
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)
        if KERNEL_TESTS in item.path.parents:
            item.add_marker(pytest.mark.kernel)
        if not has_cuda and item.get_closest_marker("gpu"):
            item.add_marker(no_cuda)
        if not trl_trains and item.get_closest_marker("trl"):
            item.add_marker(no_trl)


def pytest_collection_finish() -> None:
    """What was imported is there to stay: the garbage collector need not walk it again and again.

    It is half a million objects and a third of a second each time, a tenth of all the time the tests take.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Every test starts from the same random state, whatever ran before it."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(params=support.FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Runs the test once for each supported family."""
    return request.param


@pytest.fixture
def tiny_llama() -> Any:
    return support.build_model("llama")


@pytest.fixture
def tiny_model(family: str) -> Any:
    """A tiny model of each family in turn."""
    return support.build_model(family)


@pytest.fixture
def tiny_lora(tiny_llama: Any) -> Any:
    """The tiny Llama with random adapters on all seven projections."""
    return support.add_lora(tiny_llama)


@pytest.fixture
def tiny_qlora(tiny_llama: Any, tmp_path: pathlib.Path) -> Any:
    """The tiny Llama in nested NF4 with random adapters on all seven projections."""
    return support.add_lora(support.load_4bit(tiny_llama, tmp_path / "base"))


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    return support.random_batch()


@pytest.fixture
def one_gguf_name_map(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers works out the same map of a GGUF's tensor names anew for every submodule: 5 s for 30 layers."""
    gguf = pytest.importorskip("gguf")
    monkeypatch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return support.build_tokenizer()
