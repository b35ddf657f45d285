"""Compiling a model's Triton kernels in threads while its weights are read and its user builds a trainer.

A kernel compiles in about a second, most of it outside of Python's lock, so a dozen of them in threads are done about
when the slowest is; one after another in the first step they would be most of that step. Each job launches the real
kernels, through the real launchers, over a few rows: shapes decide what is compiled, the number of rows does not.

`begin` knows a model by its config alone, before there are weights: norms, rotation, activation and loss, over
stand-ins of the projections' shapes. `start` has the model with its adapters, and does all of it: what `begin` compiled
is found, and what goes by the adapters (the joined 4-bit matrices, a rank that is no multiple of 16) is compiled then.

Meanwhile the model is its user's, and a trainer may exchange what a parameter holds: TRL casts the adapters of a
quantized model to bfloat16 (`parameter.data = …`). A job that had seen the float32 tensor would then launch the float32
kernel over half the bytes. So jobs get aliases of the tensors as they were (`_held`), never the parameters. And since
that cast comes between here and the first step, the joined matrices are compiled for both dtypes.

A job that fails says so to the debug log and nothing more: the step itself will meet the same error and raise it.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastft.autograd.attention_half import Heads, Norm
from fastft.autograd.products import products
from fastft.autograd.projection import Projection
from fastft.kernels.backend import hash_ahead
from fastft.kernels.cross_entropy import cross_entropy
from fastft.kernels.nf4 import QuantizedWeight
from fastft.kernels.rms_norm import rms_norm, rms_norm_backward
from fastft.kernels.rope import rope
from fastft.kernels.swiglu import swiglu, swiglu_backward
from fastft.patching import decoder_layer, registry
from fastft.patching.families import FAMILIES, Family

__all__ = ["begin", "finish", "start"]

_ROWS = 32
_TRAINER_OUTPUTS = ("entropy", "is_top1")  # what TRL's trainers log
_MOST_THREADS = 8
_running: weakref.WeakKeyDictionary[nn.Module, list[Future[None]]] = weakref.WeakKeyDictionary()
_log = logging.getLogger(__name__)


def begin(config: Any, dtype: torch.dtype, device: torch.device) -> Callable[[Any], None] | None:
    """Begin compiling for a model of which there is only the config; returns at once.

    Args:
        config: of a transformers model.
        dtype: that it will be loaded in.
        device: a CUDA device that it will be loaded to.

    Returns:
        To be called with the transformers model, whose first step then waits for what has begun; None where nothing
        has, because no layer of such a model would be ours.
    """
    family = FAMILIES.get(config.model_type)
    if family is None or dtype not in (torch.bfloat16, torch.float16):
        return None
    hash_ahead()
    futures = _submit(_jobs_of_a_config(config, family, dtype, device), device)

    def adopt(model: Any) -> None:
        _running[_backbone_of(model)] = futures

    return adopt


def start(model: Any) -> None:
    """Begin compiling for a planned model on a CUDA device; returns at once.

    Args:
        model: the transformers model inside the PEFT wrapper.
    """
    backbone = _backbone_of(model)
    layers = [m for m in backbone.modules() if (s := registry.site_of(m)) is not None and s.part == "decoder layer"]
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    if not layers or dtype not in (torch.bfloat16, torch.float16):
        return
    layer: Any = layers[0]
    device = layer.input_layernorm.weight.device
    family = FAMILIES[registry.site_of(layer).model_type]  # type: ignore[union-attr]
    projections = decoder_layer.reader_of(layer, family).projections(dtype, autocast=True)
    if device.type != "cuda" or isinstance(projections, str):
        return
    projections = [_held(projection) for projection in projections]
    norm = Norm(layer.input_layernorm.weight.detach(), layer.input_layernorm.variance_epsilon, family.norm_mode)
    vocabulary = int(model.config.vocab_size)
    jobs = [
        *_layer_jobs(projections, norm, layer.self_attn.head_dim, dtype, device),
        *(partial(_loss, vocabulary, dtype, device, outputs) for outputs in ((), _TRAINER_OUTPUTS)),
        *_jobs_after_a_cast(projections, dtype),
    ]
    hash_ahead()
    begun = _running.get(backbone, [])
    _running[backbone] = [*begun, *_submit(jobs, device, begun)]


def _backbone_of(model: Any) -> Any:
    return getattr(model, getattr(model, "base_model_prefix", ""), model)


def _submit(
    jobs: Sequence[Callable[[], None]], device: torch.device, after: Sequence[Future[None]] = ()
) -> list[Future[None]]:
    """The jobs in threads of their own, once Triton has its hash and `after` is done: two would compile the same."""

    def run(job: Callable[[], None]) -> None:
        hashing = hash_ahead()
        if hashing is not None:
            hashing.join()
        wait(after)
        _run(job, device)

    pool = ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), thread_name_prefix="fastft-compile")
    futures = [pool.submit(run, job) for job in jobs]
    pool.shutdown(wait=False)
    return futures


def finish(backbone: nn.Module) -> None:
    """Wait for what `start` began; compiling the same kernel twice would take longer."""
    for future in _running.pop(backbone, ()):
        error = future.exception()
        if error is not None:  # whatever it is, the first step meets it in the open
            _log.debug("compiling ahead failed: %s", error)


def _held(projection: Projection) -> Projection:
    """The projection over tensors of its own: the same storage, kept alive, whatever becomes of the parameters."""

    def alias(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.detach()

    weight = projection.weight  # a 4-bit one is plain data already (kernels/nf4.py)
    return dataclasses.replace(
        projection,
        weight=weight.detach() if isinstance(weight, Tensor) else weight,
        bias=alias(projection.bias),
        lora_a=alias(projection.lora_a),
        lora_b=alias(projection.lora_b),
    )


def _run(job: Callable[[], None], device: torch.device) -> None:
    with torch.no_grad(), torch.cuda.device(device if device.type == "cuda" else -1):
        job()


def _jobs_of_a_config(
    config: Any, family: Family, dtype: torch.dtype, device: torch.device
) -> list[Callable[[], None]]:
    """What can be compiled before there are weights: `[out, in]` of a layer's projections is known."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    query, key = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    shapes = [(query, hidden), (key, hidden), (key, hidden), (hidden, query)]
    shapes += [(intermediate, hidden), (intermediate, hidden), (hidden, intermediate)]
    one = torch.empty(1, 1, dtype=dtype, device=device)  # no product is made: a weight is a shape here
    norm = Norm(torch.ones(hidden, dtype=dtype, device=device), config.rms_norm_eps, family.norm_mode)
    return [
        *_layer_jobs([Projection(one.expand(shape)) for shape in shapes], norm, head_dim, dtype, device),
        *(partial(_loss, config.vocab_size, dtype, device, outputs) for outputs in ((), _TRAINER_OUTPUTS)),
    ]


def _layer_jobs(
    projections: Sequence[Projection], norm: Norm, head_dim: int, dtype: torch.dtype, device: torch.device
) -> list[Callable[[], None]]:
    """One job for each kernel variant of a decoder layer (autograd/decoder_layer.py)."""
    q, k, v, o, gate, up, down = projections
    hidden, intermediate = o.out_features, gate.out_features
    heads = Heads(q.out_features // head_dim, k.out_features // head_dim, head_dim)

    def rows(width: int) -> Tensor:
        return torch.zeros(_ROWS, width, dtype=dtype, device=device)

    def first_norm() -> None:
        room = products((q, k, v), dtype).input_room(_ROWS)
        rms_norm(rows(hidden), norm.weight, norm.epsilon, mode=norm.mode, out=room[:, :hidden])

    def second_norm() -> None:
        room, x = products((gate, up), dtype).input_room(_ROWS), rows(hidden)
        rms_norm(
            x, norm.weight, norm.epsilon, mode=norm.mode, residual=rows(hidden), out=room[:, :hidden], summed_out=x
        )

    def last_norm() -> None:
        rms_norm(rows(hidden), norm.weight, norm.epsilon, mode=norm.mode)

    def norm_backwards() -> None:
        room, scale = products([o], dtype).grad_room(_ROWS), torch.ones(_ROWS, device=device)
        target = room[:, :hidden]
        x, grad = rows(hidden), rows(hidden)
        rms_norm_backward(x, x, norm.weight, scale, mode=norm.mode, residual_grad=grad, out=target)
        rms_norm_backward(x, x, norm.weight, scale, mode=norm.mode, residual_grad=target)
        rms_norm_backward(x, x, norm.weight, scale, mode=norm.mode)

    def rotations() -> None:
        side_by_side = rows(q.out_features + 2 * k.out_features)
        query, key, _ = heads.cut(side_by_side, 1, _ROWS)
        angles = torch.zeros(1, _ROWS, head_dim, dtype=dtype, device=device)
        rope(query, key, angles, angles, out=(query, key))
        grad_query, grad_key, _ = heads.cut(products((q, k, v), dtype).grad_room(_ROWS), 1, _ROWS)
        contiguous = query.contiguous(), key.contiguous()
        rope(*contiguous, angles, angles, inverse=True, out=(grad_query, grad_key))

    def activation() -> None:
        room = products([down], dtype).input_room(_ROWS)
        both = rows(2 * intermediate)
        swiglu(both[:, :intermediate], both[:, intermediate:], out=room[:, :intermediate])

    def activation_backward() -> None:
        room, grad = products((gate, up), dtype).grad_room(_ROWS).zero_(), rows(intermediate)
        own, kept = room[:, :intermediate], rows(2 * intermediate)
        up_part = room[:, intermediate : 2 * intermediate]
        swiglu_backward(grad, own, up_part, out=(grad, own, up_part))
        swiglu_backward(grad, kept[:, :intermediate], kept[:, intermediate:], out=(grad, own, up_part))

    return [first_norm, second_norm, last_norm, norm_backwards, rotations, activation, activation_backward]


def _jobs_after_a_cast(projections: Sequence[Projection], dtype: torch.dtype) -> list[Callable[[], None]]:
    """One job for each joined matrix that another kernel will make if a trainer makes float32 adapters bfloat16."""
    q, k, v, o, gate, up, down = projections
    return [
        partial(_join_in_bfloat16, group)
        for group in ((q, k, v), (o,), (gate, up), (down,))
        if dtype == torch.bfloat16 and any(_is_joined_from_float32(projection) for projection in group)
    ]


def _is_joined_from_float32(projection: Projection) -> bool:
    a = projection.lora_a
    return isinstance(projection.weight, QuantizedWeight) and a is not None and a.dtype == torch.float32


def _join_in_bfloat16(group: Sequence[Projection]) -> None:
    def cast(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(torch.bfloat16)

    products([dataclasses.replace(p, lora_a=cast(p.lora_a), lora_b=cast(p.lora_b)) for p in group], torch.bfloat16)


def _loss(vocabulary: int, dtype: torch.dtype, device: torch.device, outputs: tuple[str, ...]) -> None:
    stride = -(-vocabulary // 64) * 64
    logits = torch.zeros(_ROWS, stride, dtype=dtype, device=device)[:, :vocabulary]
    cross_entropy(logits, torch.zeros(_ROWS, dtype=torch.int64, device=device), outputs=outputs)
