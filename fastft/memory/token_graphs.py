"""A decoder layer's part in generating a token as two CUDA graphs, with attention between them as it is.

Over a cache a layer sees one token of each row. Its launches, some thirty, and what Python does between them take the
host several times as long as the device needs. What comes before attention (norm, Q, K and V, rotation) is one graph,
and what comes after (output projection, both sums, norm, MLP) another. Between them keys and values go into the cache
and attention runs, as without graphs: caches grow, masks and attention functions are of any kind, and nothing of that
is baked in.

A layer is captured at the second token whose call is like the one before (captures.py says what that means): the first
one has compiled its kernels. Every call is compared before a replay; one that differs runs eagerly. Graphs read and
write fixed buffers [batch, 1, hidden] that all layers share, since each is through with them when the next one
begins. For the same reason all captures share one memory pool: whatever lies in it was written by the same layer a
moment ago. What leaves a layer is a copy (the cache's keys and values, the output), so nobody holds memory that the
next token writes. While a layer is between its copies the buffers are one thread's, and all is on one stream: a second
thread that generates with the same model, and another stream, run eagerly.

The pool holds one layer's working memory, dense weights for the most part (0.36 GiB at 8B). A training forward gives
it back, and the next generation's second token captures anew.

The numbers are the eager ones: the same kernels in the same order.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastft.autograd import attention_half
from fastft.autograd import decoder_layer as node
from fastft.autograd.attention_half import SavedIn
from fastft.autograd.layer_call import LayerCall
from fastft.autograd.products import products
from fastft.memory.captures import Angles, Tape, call_key, pays, weights_of

__all__ = ["TokenGraphs"]


@dataclass(slots=True)
class _Shared:
    """Buffers that all layers with equal shapes use one after another."""

    x: Tensor  # [batch, 1, hidden]
    attended: Tensor  # [batch, heads · head_dim]
    y: Tensor  # [batch, 1, hidden]
    angles: Angles


class _LayerGraphs:
    """One layer, captured."""

    def __init__(self, key: tuple[Any, ...], call: LayerCall, shared: _Shared, tape: Tape) -> None:
        self.key, self.tape, self._shared = key, tape, shared
        x, angles = shared.x, shared.angles
        dtype = call.autocast.compute_dtype(x.dtype)

        def before() -> SavedIn:
            qkv = products(call.qkv, dtype)
            return attention_half.forward_in(
                x, call.input_norm, qkv, call.head_norms, call.heads, angles.cos, angles.sin
            )[0]

        def after() -> None:
            made = node.attention_out(x.view(-1, x.shape[-1]), shared.attended, call, dtype)
            node.mlp_out(made.h, made.normed_h, made.gate_up, call, dtype, keep=False, out=shared.y)

        self._before, self._into = tape.record(before)
        self._after, _ = tape.record(after)

    def run(self, call: LayerCall, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The layer's output `[batch, 1, hidden]`; `call` brings the cache."""
        shared = self._shared
        shared.x.copy_(x)
        shared.angles.load(cos, sin)
        self._before.replay()
        into = self._into._replace(key=self._into.key.clone(), value=self._into.value.clone())
        attended = attention_half.attend(into, call.attention, call.autocast, with_graph=False)
        shared.attended.copy_(attended.output)
        self._after.replay()
        return shared.y.clone()


class TokenGraphs:
    """The graphs of one model's layers; lives beside the model, never in it."""

    def __init__(self) -> None:
        self._graphs: weakref.WeakKeyDictionary[nn.Module, _LayerGraphs] = weakref.WeakKeyDictionary()
        self._last: weakref.WeakKeyDictionary[nn.Module, tuple[Any, ...]] = weakref.WeakKeyDictionary()
        self._shared: dict[tuple[Any, ...], _Shared] = {}
        self._failed: str | None = None
        self._stream: torch.cuda.Stream | None = None  # that replays are on
        self._taken = threading.Lock()
        self.reason: str | None = None  # why the last layer that was not replayed was not
        self.replays = 0

    @property
    def captured(self) -> int:
        """How many layers have graphs."""
        return len(self._graphs)

    def run(self, layer: nn.Module, call: LayerCall, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor | None:
        """The layer's output by its graphs, or None: then it runs eagerly, for `reason`.

        Args:
            layer: identifies the graphs.
            call: the layer as it stands, its attention over a cache.
            x: `[batch, sequence, hidden]`, contiguous; no gradient is wanted.
            cos: as in `apply_layer`.
            sin: as in `apply_layer`.
        """
        self.reason = self._refusal(call, x)
        if self.reason is not None:
            return None
        if not self._taken.acquire(blocking=False):
            self.reason = "another thread is between two copies"
            return None
        try:
            return self._run(layer, call, x, cos, sin)
        finally:
            self._taken.release()

    def _run(self, layer: nn.Module, call: LayerCall, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor | None:
        key = (*call_key(call, x, cos, sin), x.device, torch.is_inference_mode_enabled())
        graphs = self._graphs.get(layer)
        if graphs is None or graphs.key != key:
            self._graphs.pop(layer, None)
            known, self._last[layer] = self._last.get(layer), key
            if known != key:
                self.reason = "shapes or adapters are not those of the token before"
                return None
            graphs = self._capture(layer, key, call, x, cos, sin)
            if graphs is None:
                return None
        self.replays += 1
        return graphs.run(call, x, cos, sin)

    def release(self) -> None:
        """Forget all graphs and give their memory back."""
        self._graphs.clear()
        self._last.clear()
        self._shared.clear()
        self._failed = self._stream = self.reason = None

    def _refusal(self, call: LayerCall, x: Tensor) -> str | None:
        if self._failed is not None:
            return self._failed
        if not x.is_cuda:
            return "the model is not on a CUDA device"
        if x.shape[1] != 1:
            return "more than one token of a row"
        if any(projection.dropout is not None for projection in call.projections):
            return "lora_dropout draws a seed at every call"
        if torch.cuda.is_current_stream_capturing():
            return "the caller is capturing a graph of its own"
        if not pays(2.0 * x.shape[0] * weights_of(call), x.device):
            return "the device is busy long enough for the host to keep up"
        stream = torch.cuda.current_stream(x.device)
        if self._stream is None or not self._graphs:
            self._stream = stream
        if stream != self._stream:
            return "another stream than the graphs were made for"
        return None

    def _capture(
        self, layer: nn.Module, key: tuple[Any, ...], call: LayerCall, x: Tensor, cos: Tensor, sin: Tensor
    ) -> _LayerGraphs | None:
        """Record the layer, or remember that recording fails."""
        try:
            with torch.cuda.device(x.device):
                # A pool ends with its last graph: while there is one, the next capture goes on with it.
                tape = next((g.tape for g in self._graphs.values() if g.tape.device == x.device), None)
                shared = self._shared_for(call, x, cos, sin)
                graphs = self._graphs[layer] = _LayerGraphs(key, call, shared, tape or Tape(x.device))
        except (RuntimeError, ValueError) as error:  # torch.OutOfMemoryError is a RuntimeError
            self.release()
            self._failed = self.reason = f"capture failed: {str(error).splitlines()[0]}"
            return None
        return graphs

    def _shared_for(self, call: LayerCall, x: Tensor, cos: Tensor, sin: Tensor) -> _Shared:
        width, dtype = call.heads.query * call.heads.dim, call.autocast.compute_dtype(x.dtype)
        key = (x.shape, x.dtype, x.device, cos.shape, cos.dtype, width, dtype, torch.is_inference_mode_enabled())
        shared = self._shared.get(key)
        if shared is None:
            attended = x.new_empty((x.shape[0], width), dtype=dtype)
            shared = self._shared[key] = _Shared(
                torch.empty_like(x), attended, torch.empty_like(x), Angles.like(cos, sin)
            )
        return shared
