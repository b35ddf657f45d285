"""Compiling ahead: every job runs the launchers with shapes they accept, and nothing happens where nothing compiles."""

from __future__ import annotations

import pathlib
import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest
import torch

import fastft
from fastft.autograd import products as autograd_products
from fastft.autograd.attention_half import Norm
from fastft.kernels.backend import interpreting
from fastft.kernels.join import join
from fastft.patching import decoder_layer, registry, warm
from fastft.patching.families import FAMILIES
from tests import support


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_jobs_run_on_the_shapes_of_a_layer(family: str) -> None:
    """On the CPU through the twins: a wrong shape or stride would raise here, where `start` only logs it."""
    dtype = torch.float16 if interpreting() else torch.bfloat16
    model = fastft.patch(support.add_lora(support.build_model(family).to(dtype)))
    layer: Any = model.get_base_model().model.layers[0]
    declared = FAMILIES[registry.site_of(layer).model_type]
    projections = decoder_layer.reader_of(layer, declared).projections(dtype, autocast=True)
    norm = Norm(layer.input_layernorm.weight, 1e-6, declared.norm_mode)
    with torch.no_grad():
        for job in warm._layer_jobs(projections, norm, layer.self_attn.head_dim, dtype, torch.device("cpu")):
            job()
        warm._loss(97, dtype, torch.device("cpu"), warm._TRAINER_OUTPUTS)


@pytest.mark.parametrize(("family", "quantized"), [("llama", False), ("llama", True), ("qwen3", False)])
def test_what_a_config_says_is_what_the_layer_is(
    family: str, quantized: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled while weights are read, and found when the model is there: each launch has the same key."""
    dtype, cpu = torch.float16 if interpreting() else torch.bfloat16, torch.device("cpu")
    model = support.build_model(family)
    model = support.load_4bit(model, tmp_path, dtype=dtype) if quantized else model.to(dtype)
    model = fastft.patch(support.add_lora(model, r=16))
    layer: Any = model.get_base_model().model.layers[0]
    declared = FAMILIES[registry.site_of(layer).model_type]
    projections = decoder_layer.reader_of(layer, declared).projections(dtype, autocast=True)
    norm = Norm(layer.input_layernorm.weight, layer.input_layernorm.variance_epsilon, declared.norm_mode)
    later = warm._layer_jobs(projections, norm, layer.self_attn.head_dim, dtype, cpu)
    before = warm._jobs_of_a_config(model.config, declared, dtype, cpu)
    seen: list[tuple[Any, ...]] = []
    for name in ("rms_norm", "rms_norm_backward", "rope", "swiglu", "swiglu_backward"):
        monkeypatch.setattr(warm, name, lambda *a, name=name, **o: seen.append((name, *described(a), *described(o))))
    runs = []
    for jobs in (before[: len(later)], later):
        for job in jobs:
            job()
        runs.append(list(seen))
        seen.clear()
    assert runs[0] == runs[1]
    assert len(runs[0]) == 11
    assert len(before) == len(later) + 2


def described(arguments: Any) -> list[Any]:
    """Arguments as a launch is found by: of tensors dtype, shape and whether strides divide by 16; or themselves."""
    items = arguments.values() if isinstance(arguments, dict) else arguments
    found: list[Any] = []
    for item in items:
        if isinstance(item, tuple):
            found += described(item)
        elif isinstance(item, torch.Tensor):
            found.append((item.dtype, tuple(item.shape), tuple((n == 1, n % 16 == 0) for n in item.stride())))
        else:
            found.append(item)
    return found


def test_the_first_step_waits_for_what_began_before_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what begins with the adapters waits for it too: two threads would compile the same kernel."""
    model, order, gate = support.build_model(), [], threading.Event()
    monkeypatch.setattr(warm, "hash_ahead", lambda: None)
    monkeypatch.setattr(warm, "_jobs_of_a_config", lambda *_: [lambda: (gate.wait(10), order.append("config"))])
    adopt = warm.begin(model.config, torch.bfloat16, torch.device("cpu"))
    assert adopt is not None
    adopt(model)
    begun = warm._running[model.model]
    warm._running[model.model] = [
        *begun,
        *warm._submit([lambda: order.append("adapters")], torch.device("cpu"), begun),
    ]
    time.sleep(0.1)  # in which nothing happens
    gate.set()
    warm.finish(model.model)
    assert order == ["config", "adapters"]
    assert model.model not in warm._running


def test_nothing_begins_for_a_model_that_is_not_ours() -> None:
    config, cpu = support.build_model().config, torch.device("cpu")
    assert warm.begin(config, torch.float32, cpu) is None
    config.model_type = "opt"
    assert warm.begin(config, torch.bfloat16, cpu) is None


def test_nothing_starts_without_a_gpu() -> None:
    model = fastft.patch(support.add_lora(support.build_model().to(torch.bfloat16)))
    before = threading.active_count()
    warm.start(model.get_base_model())
    warm.finish(model.get_base_model().model)
    assert threading.active_count() == before


def test_a_failing_job_is_logged_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    model = support.build_model().model
    failed: Future[None] = Future()
    failed.set_exception(RuntimeError("no compiler"))
    warm._running[model] = [failed]
    with caplog.at_level("DEBUG", logger="fastft.patching.warm"):
        warm.finish(model)
    assert "no compiler" in caplog.text
    assert model not in warm._running


def test_jobs_keep_the_tensors_they_began_with() -> None:
    """TRL casts the adapters to bfloat16 while kernels compile: a job that met the shorter tensor read beyond it."""
    model = fastft.patch(support.add_lora(support.build_model()))
    layer: Any = model.get_base_model().model.layers[0]
    family = FAMILIES[registry.site_of(layer).model_type]
    found = decoder_layer.reader_of(layer, family).projections(torch.float32, autocast=True)
    held = [warm._held(projection) for projection in found]
    addresses = [projection.lora_a.data_ptr() for projection in found]
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    for projection, address in zip(held, addresses, strict=True):
        assert projection.weight.dtype == projection.lora_a.dtype == projection.lora_b.dtype == torch.float32
        assert projection.lora_a.data_ptr() == address


@pytest.mark.parametrize(
    ("dtype", "adapters", "quantized", "jobs"),
    [
        (torch.bfloat16, torch.float32, True, 4),
        (torch.bfloat16, torch.bfloat16, True, 0),
        (torch.float16, torch.float32, True, 0),
        (torch.bfloat16, torch.float32, False, 0),
    ],
    ids=["QLoRA", "cast already", "float16", "nothing is joined"],
)
def test_matrices_are_joined_from_bfloat16_adapters_too_where_a_trainer_may_cast_them(
    dtype: torch.dtype, adapters: torch.dtype, quantized: bool, jobs: int, tmp_path: Any, monkeypatch: Any
) -> None:
    """TRL makes a 4-bit model's adapters bfloat16 after compiling ahead began, and the first step would compile."""
    model = support.build_model()
    model = support.add_lora(support.load_4bit(model, tmp_path, dtype=dtype) if quantized else model.to(dtype))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(adapters)
    layer: Any = fastft.patch(model).get_base_model().model.layers[0]
    family = FAMILIES[registry.site_of(layer).model_type]
    projections = decoder_layer.reader_of(layer, family).projections(dtype, autocast=True)
    joined: list[Any] = []
    monkeypatch.setattr(autograd_products, "join", lambda *a: joined.append(a) or join(*a))
    found = warm._jobs_after_a_cast(projections, dtype)
    assert len(found) == jobs
    for job in found:
        job()
    assert [len(weights) for weights, *_ in joined] == [3, 1, 2, 1][:jobs]
    seen = [(a.lora_a.dtype, a.lora_b.dtype, given) for _, group, given, _ in joined for a in group]
    assert set(seen) <= {(torch.bfloat16,) * 3}
    assert len(seen) == (7 if jobs else 0)
    assert all(p.lora_a.dtype == p.lora_b.dtype == adapters for p in projections), "the model's own are as before"
