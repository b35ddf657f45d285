"""How the work runs on the device: no host sync inside a layer, the caller's stream, cuDNN attention, equal bits."""

from __future__ import annotations

import contextlib
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fastft
from fastft.kernels import nf4
from fastft.kernels.cross_entropy import cross_entropy
from fastft.kernels.rms_norm import rms_norm, rms_norm_backward
from fastft.kernels.rope import rope
from fastft.kernels.swiglu import swiglu, swiglu_backward
from fastft.memory.planner import LEVELS
from fastft.patching import levels, registry
from tests import support
from tests.gpu import models


@contextlib.contextmanager
def syncs_forbidden() -> Iterator[None]:
    """Any synchronizing call of PyTorch raises inside."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def planned_layer(folder: pathlib.Path, level: str) -> Callable[[Tensor], Tensor]:
    """The second decoder layer of a planned middle-size QLoRA model, called as its model calls it.

    It fails where the layer does not run fast.
    """
    model = fastft.patch(
        models.load_qlora(folder, torch.bfloat16, **models.MIDDLE), memory_levels=level, cuda_graphs=False
    )
    backbone = model.get_base_model().model
    levels.assign(backbone, registry.site_of(backbone), (2, 256))  # as the backbone's own forward does
    layer, positions = backbone.layers[1], torch.arange(256, device="cuda").unsqueeze(0)
    angles = backbone.rotary_emb(draw_rows(), positions)

    def run(x: Tensor) -> Tensor:
        length = x.shape[1]
        y = layer(
            x,
            attention_mask=None,
            position_ids=positions[:, :length],
            position_embeddings=tuple(angle[:, :length] for angle in angles),
        )
        site = registry.site_of(layer)
        assert levels.level_of(site) == level
        assert site.stock_runs == 0, site.last_reason
        return y

    return run


def draw_rows() -> Tensor:
    """The residual stream [2, 256, 512]."""
    return torch.randn(2, 256, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)


@pytest.mark.parametrize("level", LEVELS)
def test_no_host_sync_inside_a_layer(level: str, tmp_path: pathlib.Path) -> None:
    layer = planned_layer(tmp_path, level)
    x, grad = draw_rows(), torch.randn(2, 256, 512, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):  # compiles, plans and autotunes what does so once
        layer(x).backward(grad)
    torch.cuda.synchronize()
    with syncs_forbidden():
        layer(x).backward(grad)
    torch.cuda.synchronize()


def test_the_sync_check_can_fail() -> None:
    with syncs_forbidden(), pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones(3, device="cuda").sum().item()


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="a choice made on Hopper"
)
@pytest.mark.parametrize("level", ["keep", "recompute"])
def test_attention_is_cudnns_on_hopper(level: str, tmp_path: pathlib.Path) -> None:
    """From the second time a shape is seen; forward and backward."""
    layer = planned_layer(tmp_path, level)
    x, grad = draw_rows(), torch.randn(2, 256, 512, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):
        layer(x).backward(grad)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layer(x).backward(grad)
    operators = {event.key for event in profile.key_averages()}
    assert "aten::_scaled_dot_product_cudnn_attention" in operators
    assert "aten::_scaled_dot_product_cudnn_attention_backward" in operators


@pytest.mark.parametrize("level", ["keep", "recompute"])
def test_a_ragged_length_builds_no_plan_of_cudnns(level: str, tmp_path: pathlib.Path) -> None:
    """PyTorch may put cuDNN first for every length: 70 ms and more for each new one, twice."""
    layer = planned_layer(tmp_path, level)
    x, grad = draw_rows()[:, :250].contiguous(), torch.randn(2, 250, 512, device="cuda", dtype=torch.bfloat16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layer(x).backward(grad)
    operators = " ".join(event.key for event in profile.key_averages())
    assert "attention" in operators
    assert "cudnn_attention" not in operators


_FIRST_IN_A_PROCESS = """
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
from fastft.patching.attention import _backends

def chosen(length, ours):
    q = torch.randn(1, 4, length, 64, device="cuda", dtype=torch.bfloat16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        if ours:
            with torch.nn.attention.sdpa_kernel(_backends(q), set_priority=True):
                sdpa(q, q, q, is_causal=True)
        else:
            sdpa(q, q, q, is_causal=True)
    run = " ".join(event.key for event in profile.key_averages())
    return [name for name in ("flash", "cudnn") if f"product_{name}_attention" in run]

first = chosen(250, True)
order = torch._C._get_sdp_priority_order()
chosen(250, False)
print(first, order == torch._C._get_sdp_priority_order())
"""


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="a choice made on Hopper"
)
def test_the_first_attention_of_a_process_is_in_our_order_and_leaves_pytorchs() -> None:
    """PyTorch sets its order at its first choice: ours must neither be lost to it nor keep it from being set."""
    done = subprocess.run([sys.executable, "-c", _FIRST_IN_A_PROCESS], capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n")[-2] == "['flash'] True", done.stdout + done.stderr


def quantized(packed: Tensor) -> nf4.QuantizedWeight:
    """A 4-bit weight [64, 4096] over `packed`."""
    return nf4.QuantizedWeight(
        packed=packed,
        absmax=torch.ones(4096, device="cuda"),
        code=torch.linspace(-1, 1, 16, device="cuda"),
        blocksize=64,
        shape=(64, 4096),
        dtype=torch.bfloat16,
    )


KERNELS: dict[str, Callable[[Tensor], Any]] = {
    "rms_norm": lambda x: rms_norm(x, torch.ones_like(x[0]), 1e-5)[0],
    "rms_norm_backward": lambda x: rms_norm_backward(
        x, x, torch.ones_like(x[0]), torch.ones(64, device="cuda"), needs_weight_grad=True
    ),
    "rope": lambda x: rope(x.view(1, 64, 32, 128), None, x[:, :128].unsqueeze(0), x[:, 128:256].unsqueeze(0))[0],
    "swiglu": lambda x: swiglu(x, x),
    "swiglu_backward": lambda x: swiglu_backward(x, x, x),
    "cross_entropy": lambda x: cross_entropy(x.clone(), torch.zeros(64, device="cuda", dtype=torch.int64)).loss,
    "dequantize": lambda x: nf4.dequantize(quantized(x.flatten()[: 64 * 2048].float().abs().mul(50).to(torch.uint8))),
}


def flat(value: Any) -> list[Tensor]:
    """The tensors of a result."""
    return [value] if isinstance(value, Tensor) else [t for t in value if isinstance(t, Tensor)]


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_run_on_the_callers_stream(name: str) -> None:
    """The input is written late on a side stream; a kernel on any other stream would read what was there before."""
    kernel, fresh = KERNELS[name], torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
    expected = flat(kernel(fresh))
    x = torch.zeros_like(fresh)
    kernel(x)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # some 50 ms
        x.copy_(fresh)
        results = flat(kernel(x))
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_a_layer_runs_on_the_callers_stream(tmp_path: pathlib.Path) -> None:
    layer = planned_layer(tmp_path, "recompute")
    fresh, x = draw_rows().detach(), torch.zeros(2, 256, 512, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        layer(fresh)
        expected = layer(fresh)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
            x.copy_(fresh)
            y = layer(x)
        stream.synchronize()
    torch.testing.assert_close(y, expected, rtol=0, atol=0)


@contextlib.contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """What PyTorch can do deterministically it does; uninitialized memory is filled with NaN on the way."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def gradients_twice(model: Any, batch: dict[str, Tensor]) -> list[str]:
    """Names of gradients that differ between two runs."""
    first, second = (models.loss_and_gradients(model, batch) for _ in range(2))
    return [name for name in first if not torch.equal(first[name], second[name])]


@pytest.mark.parametrize("level", LEVELS)
def test_two_runs_are_bit_equal(level: str, tmp_path: pathlib.Path) -> None:
    """Everything that is ours, with attention that is deterministic by itself (eager)."""
    model = models.load_qlora(tmp_path, torch.bfloat16, **models.MIDDLE)
    model.get_base_model().set_attn_implementation("eager")
    fastft.patch(model, memory_levels=level)
    batch = models.on_gpu(support.random_batch(length=256, vocabulary=2048))
    assert gradients_twice(model, batch) == []
    models.assert_ran_fast(model)


@pytest.mark.parametrize("level", ["keep", "recompute"])
def test_two_runs_are_bit_equal_with_deterministic_algorithms(level: str, tmp_path: pathlib.Path) -> None:
    """Fused attention's backward adds in any order unless told not to; told so, the whole model repeats itself."""
    model = fastft.patch(models.load_qlora(tmp_path, torch.bfloat16, **models.MIDDLE), memory_levels=level)
    batch = models.on_gpu(support.random_batch(length=256, vocabulary=2048))
    with deterministic_algorithms():
        assert gradients_twice(model, batch) == []
    models.assert_ran_fast(model)


def test_levels_agree_to_the_bit(tmp_path: pathlib.Path) -> None:
    """C46: recomputing, and keeping x elsewhere, change when things are computed, not what."""
    model = models.load_qlora(tmp_path, torch.bfloat16, **models.MIDDLE)
    model.get_base_model().set_attn_implementation("eager")
    batch = models.on_gpu(support.random_batch(length=256, vocabulary=2048))
    found = {}
    for level in ("keep", "recompute", "offload"):
        fastft.patch(model, memory_levels=level)
        found[level] = models.loss_and_gradients(model, batch)
    for level in ("recompute", "offload"):
        assert [name for name, g in found["keep"].items() if not torch.equal(g, found[level][name])] == [], level
    models.assert_ran_fast(model)


@pytest.mark.parametrize("cast", [False, True], ids=["as they were", "cast by a trainer"])
def test_kernels_compiled_ahead_are_the_first_step_s(cast: bool, tmp_path: pathlib.Path) -> None:
    """The step's own launches find every kernel that does not depend on the trainer's call already compiled."""
    from fastft.kernels import backend
    from fastft.patching import warm

    model = fastft.patch(models.load_qlora(tmp_path, torch.bfloat16, **models.MIDDLE))
    model.gradient_checkpointing_enable()
    backend._compiled.clear()
    warm.start(model.get_base_model())
    for parameter in model.parameters() if cast else ():  # as TRL's trainers do to a quantized model
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)
    warm.finish(model.get_base_model().model)
    ahead = set(backend._compiled)
    models.loss_and_gradients(model, models.on_gpu(support.random_batch(length=256, vocabulary=2048)))
    late = [(key[0].kernel.__name__, key[0].options, *key[1:]) for key in backend._compiled if key not in ahead]
    assert late == []
