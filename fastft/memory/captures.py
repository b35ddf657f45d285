"""What every CUDA graph of a decoder layer needs: where it is recorded, its angles, and what it bakes in.

A capture bakes in every address that its kernels read and every number that was a Python value. `call_key` is all of
that for a layer: a replay stands for a call as long as the keys are equal. What lies behind an address may change
(optimizer steps write adapters in place), and the replay sees it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from fastft.autograd.layer_call import LayerCall
from fastft.autograd.projection import Projection
from fastft.kernels.document_attention import Documents
from fastft.kernels.nf4 import QuantizedWeight

__all__ = [
    "CUBLAS_WORKSPACE",
    "Angles",
    "Boundaries",
    "Tape",
    "call_key",
    "fills",
    "pays",
    "weights_of",
    "with_seed",
]

CUBLAS_WORKSPACE = 32 << 20  # on Hopper, for the stream that captures; older devices take 8 MiB
_PAYS_BELOW = 2.5e-3  # seconds of device time of a layer's forward; above, the host keeps up
_FILLS_BELOW = 1e-3  # as long as a fast host takes for an eager layer's forward: both passes are some 2.5 ms
# 16-bit matrix products, operations a second and multiprocessor, sustained (H200: 600e12 on 132); GeForce and the like
# add in float32 at half their rate
_RATES = {(8, 0): 2.2e12, (9, 0): 4.5e12, (10, 0): 9e12, (10, 3): 9e12}
_OTHER_RATE = 1.2e12
_Result = TypeVar("_Result")


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all captures on a device. cuBLAS keeps a workspace (32 MiB on Hopper) for every stream it has seen.

    It is seen here first, so that the workspace lies outside of every graph's pool.
    """
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        one = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
        torch.mm(one, one)
    return stream


class Tape:
    """Where captures happen that may take each other's memory: one pool, one stream.

    One stream, because freed memory is reused on its own stream only.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _capture_stream(device)

    def record(self, run: Callable[[], _Result]) -> tuple[torch.cuda.CUDAGraph, _Result]:
        """`run` as a graph, and its result: tensors that each replay writes. Nothing has run.

        Not by `torch.cuda.graph`, which synchronizes, collects garbage and empties the cache.
        """
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            # thread_local: data-loading threads may pin memory meanwhile
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = run()
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return graph, result


@dataclass(slots=True)
class Angles:
    """Rotary cosines and sines where the graphs of all layers read them."""

    cos: Tensor  # [1 or batch, sequence, rotary_dim]
    sin: Tensor
    # what they were copied from: the two tensors and their versions
    _loaded: tuple[tuple[int, int], weakref.ref[Tensor], weakref.ref[Tensor]] | None = None

    @classmethod
    def like(cls, cos: Tensor, sin: Tensor) -> Angles:
        """Buffers for such as these."""
        return cls(torch.empty_like(cos), torch.empty_like(sin))

    def load(self, cos: Tensor, sin: Tensor) -> None:
        """Copy them, once a forward: all its layers are given the same two tensors.

        Tensors of inference mode, which count no versions, are copied for each layer.
        """
        counted = not (cos.is_inference() or sin.is_inference())
        versions = (cos._version, sin._version) if counted else None
        known, of_cos, of_sin = self._loaded or (None, None, None)
        if known is not None and known == versions and of_cos() is cos and of_sin() is sin:  # type: ignore[misc]
            return
        self.cos.copy_(cos)
        self.sin.copy_(sin)
        self._loaded = None if versions is None else (versions, weakref.ref(cos), weakref.ref(sin))


class Boundaries:
    """Where packed documents begin, where the graphs of all layers read it.

    A graph serves as many documents as its buffer has room for, none longer than it was captured for: the room that is
    left is for documents of no tokens, at the end.

    Args:
        like: documents of such a batch.
        count: the most documents.
        longest: the most tokens in one.
    """

    def __init__(self, like: Documents, count: int, longest: int) -> None:
        buffer = torch.empty(count + 1, dtype=torch.int32, device=like.device)
        self.documents = Documents(like.rows, like.length, (longest,), like.device, buffer)  # what a capture bakes in
        # the same memory without its version: what attention saved of it in a capture stays good for the backward
        self._buffer = buffer.data
        self._loaded: Documents | None = None
        self.load(like)

    def load(self, documents: Documents) -> None:
        """Copy them, once a forward: all its layers are given the same ones."""
        if self._loaded is documents:
            return
        count = len(documents.lengths) + 1
        self._buffer[:count].copy_(documents.boundaries)
        self._buffer[count:].fill_(documents.rows * documents.length)
        self._loaded = documents


def pays(operations: float, device: torch.device) -> bool:
    """Whether the host, not the device, would be what a step waits for.

    Args:
        operations: floating-point operations of a layer's forward products.
        device: a CUDA device.
    """
    return operations / _rate(device) < _PAYS_BELOW


def fills(operations: float, device: torch.device) -> bool:
    """Whether a replay takes the device less time than the host needs for an eager layer, of however few tokens.

    Args:
        operations: floating-point operations of a layer's forward products, in the replay.
        device: a CUDA device.
    """
    return operations / _rate(device) < _FILLS_BELOW


@functools.cache
def _rate(device: torch.device) -> float:
    facts = torch.cuda.get_device_properties(device)
    return _RATES.get((facts.major, facts.minor), _OTHER_RATE) * facts.multi_processor_count


def weights_of(call: LayerCall) -> int:
    """Elements of a layer's seven weights."""
    return sum(p.weight.shape[0] * p.weight.shape[1] for p in call.projections)


def call_key(call: LayerCall, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Any, ...]:
    """Everything a capture bakes in."""
    return (
        x.shape,
        x.dtype,
        x.requires_grad,
        cos.shape,
        cos.dtype,
        sin.shape,
        call.level,
        call.compact,
        call.attention_key,
        call.autocast.enabled,
        call.autocast.dtype,
        *[None if n is None else (*_leaf_key(n.weight), n.epsilon, n.mode) for n in call.norms],  # type: ignore[misc]
        *map(_projection_key, call.projections),
    )


def with_seed(call: LayerCall, seed: Tensor) -> LayerCall:
    """The same call, its dropouts by the seed that will be in `seed`."""

    def projection(old: Projection) -> Projection:
        return old if old.dropout is None else replace(old, dropout=replace(old.dropout, seed=seed))

    q, k, v, output, gate, up, down = map(projection, call.projections)
    return replace(call, qkv=(q, k, v), output=output, gate_up=(gate, up), down=down)


def _projection_key(projection: Projection) -> tuple[Any, ...]:
    weight = projection.weight
    if isinstance(weight, QuantizedWeight):  # one state has one scale of scales, one code, one offset
        base = (weight.packed.data_ptr(), weight.absmax.data_ptr(), projection.fold)
    else:
        base = (weight.data_ptr(), weight.dtype)
    drops = None if projection.dropout is None else (projection.dropout.p, projection.dropout.stream)
    return (*base, drops, projection.scale, *map(_leaf_key, projection.leaves()), _leaf_key(projection.bias))


def _leaf_key(leaf: Tensor | None) -> tuple[Any, ...] | None:
    return None if leaf is None else (leaf.data_ptr(), leaf.shape, leaf.dtype, leaf.requires_grad)
