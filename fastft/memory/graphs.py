"""A decoder layer as two CUDA graphs, for models and batches so small that launching kernels takes longer than running.

A layer's forward and backward are some fifty launches. At a few thousand tokens of a 1B model they take the host longer
than the device; as a graph each pass is one launch. Layers are captured when their calls have been the same in three
steps: shape, dtypes, level, every weight's and adapter's address, scale and `requires_grad`, attention without a mask
or over packed documents (FlashAttention reads their boundaries on the device, from a buffer with room for more of
them). What a call looks like is compared before every replay, so an adapter switched off, another length or a moved
weight runs eagerly, and comes back to the graph when it is as before. Optimizer steps write the adapters in place:
their addresses stay.

Graphs read and write fixed buffers:

    one for each layer    x, the seed of its dropouts, and what its level keeps (the same bytes as without graphs, but
                          held between steps)
    one for the model     y, dy, dx, cos, sin, documents' boundaries, and the adapters' gradients, which are copied out
                          right after a replay

so graphs serve one forward at a time. A second forward before the backward (two losses, a reference pass with
gradients) runs eagerly, all of it: though only one layer waits, it reads the angles and boundaries of its own forward.

All captures of a model share one memory pool, where a capture takes what the ones before it have let go. What a layer
keeps must not lie where a replay that comes before its use writes. So a model is captured in the order of a step, all
of it in one forward: first the forwards, each as its layer is called, and with the last of them the backwards in
reverse. Then a forward's working memory can be only what later layers keep, which is written after it, and a
backward's working memory is nothing that any layer keeps. A change in one layer's call captures the whole model anew.

The numbers are the eager ones: the same kernels in the same order.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fastft.autograd import decoder_layer as node
from fastft.autograd import mlp_half
from fastft.autograd.attention_half import Attended
from fastft.autograd.autocast import suspended
from fastft.autograd.first_order import first_order
from fastft.autograd.layer_call import AttentionSaved, LayerCall
from fastft.kernels.backend import next_power_of_2
from fastft.kernels.document_attention import DocumentAttention, Documents, takes_varlen
from fastft.memory.captures import Angles, Boundaries, Tape, call_key, pays, weights_of, with_seed
from fastft.memory.row_lengths import RowLengths

__all__ = ["SHARED_STREAMS", "ModelGraphs"]

SHARED_STREAMS = 3  # buffers as large as the residual stream that a model's graphs share: y, dy, dx
_SAME_STEPS = 3  # alike before a capture: the first ones also compile kernels


class _Ticket:
    """Held by the autograd node of a replayed forward: while it lives, the layer's buffers are taken."""

    __slots__ = ("__weakref__",)


@dataclass(slots=True)
class _Shared:
    """Buffers that all layers of a model with equal shapes use one after another."""

    y: Tensor  # [batch, sequence, hidden]; so are grad and grad_x
    grad: Tensor
    grad_x: Tensor
    angles: Angles
    boundaries: Boundaries | None  # of packed documents
    leaf_grads: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)  # flat, per layout

    @property
    def nbytes(self) -> int:
        """Device bytes of all buffers."""
        tensors = (self.y, self.grad, self.grad_x, self.angles.cos, self.angles.sin, *self.leaf_grads.values())
        return sum(t.nbytes for t in tensors)


class _LayerGraph:
    """One layer, captured."""

    def __init__(self, key: tuple[Any, ...], call: LayerCall, x: Tensor, shared: _Shared, tape: Tape) -> None:
        self.key, self.shared = key, shared
        self.held_bytes = 0
        self._ticket: weakref.ref[_Ticket] | None = None
        leaves = call.leaves()
        self.needs_x = x.requires_grad
        self._needs = [leaf is not None and leaf.requires_grad for leaf in leaves]
        self._x = torch.empty_like(x, requires_grad=False)
        wanted = [leaf for leaf, needed in zip(leaves, self._needs, strict=True) if needed and leaf is not None]
        self._shapes = [leaf.shape for leaf in wanted]
        layout = tuple((leaf.dtype, leaf.numel()) for leaf in wanted)
        dtypes = {leaf.dtype for leaf in wanted}
        if len(dtypes) > 1:
            raise RuntimeError("the layer trains tensors of several dtypes")
        if wanted and layout not in shared.leaf_grads:
            total = sum(leaf.numel() for leaf in wanted)
            shared.leaf_grads[layout] = torch.empty(total, dtype=wanted[0].dtype, device=x.device)
        self._flat = shared.leaf_grads.get(layout)
        self._sizes = [leaf.numel() for leaf in wanted]
        self._saved: AttentionSaved | None = None
        self._mlp: mlp_half.Saved | None = None
        self._attended: Attended | None = None
        self._attention_graph: Any = None
        self._backward: torch.cuda.CUDAGraph | None = None
        call = call.with_leaves([None if leaf is None else leaf.detach() for leaf in leaves])
        if shared.boundaries is not None and isinstance(call.attention, DocumentAttention):
            call = replace(call, attention=replace(call.attention, documents=shared.boundaries.documents))
        self._seed = None if call.seed is None else torch.empty_like(call.seed)
        self._call = call if self._seed is None else with_seed(call, self._seed)
        self._capture_forward(self._call, tape)

    def _capture_forward(self, call: LayerCall, tape: Tape) -> None:
        """Record the forward; nothing runs."""
        shared, keeps = self.shared, call.level in ("keep", "lean")

        def run() -> None:
            _, self._saved, self._mlp, self._attended = node.forward(
                self._x, shared.angles.cos, shared.angles.sin, call, keeps, call.level == "keep", out=shared.y
            )
            if self._attended is not None:
                self._attended.retain = True  # what attention keeps stays where the forward's replays write it
                self._attention_graph = self._attended.graph

        with torch.no_grad():
            self._forward, _ = tape.record(run)

    def capture_backward(self, tape: Tape) -> None:
        """Record the backward, after the forwards of all layers."""
        with torch.no_grad(), suspended(self._x.device.type):
            self._backward, _ = tape.record(self._run_backward)

    def _run_backward(self) -> None:
        shared = self.shared
        if self._attended is not None:
            self._attended.graph = self._attention_graph
        grad_x, leaf_grads = node.backward(
            shared.grad,
            self._x,
            shared.angles.cos,
            shared.angles.sin,
            self._call,
            self._saved,
            self._mlp,
            self._attended,
            self.needs_x,
            self._needs,
            out=shared.grad_x,
        )
        if self._flat is not None:
            wanted = [g for g, needed in zip(leaf_grads, self._needs, strict=True) if needed]
            pieces = [p.view(s) for p, s in zip(self._flat.split(self._sizes), self._shapes, strict=True)]
            torch._foreach_copy_(pieces, wanted)  # type: ignore[arg-type]
        if grad_x is not None and grad_x.data_ptr() != shared.grad_x.data_ptr():
            shared.grad_x.copy_(grad_x)

    @property
    def busy(self) -> bool:
        """Whether a forward waits for its backward."""
        return self._ticket is not None and self._ticket() is not None

    def forward(self, call: LayerCall, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, _Ticket]:
        """y, and the ticket that keeps the buffers taken."""
        self._x.copy_(x)
        self.shared.angles.load(cos, sin)
        if self._seed is not None and call.seed is not None:
            self._seed.copy_(call.seed)
        documents = _documents_of(call)
        if documents is not None and self.shared.boundaries is not None:
            self.shared.boundaries.load(documents)
        self._forward.replay()
        ticket = _Ticket()
        self._ticket = weakref.ref(ticket)
        return self.shared.y.clone(), ticket

    def backward(self, grad: Tensor) -> tuple[Tensor | None, list[Tensor | None]]:
        """dx and the leaves' gradients, freshly allocated."""
        self.shared.grad.copy_(grad)
        if self._backward is not None:
            self._backward.replay()
        else:  # the model's capture ended half-way
            with suspended(grad.device.type):
                self._run_backward()
        grad_x = self.shared.grad_x.clone() if self.needs_x else None
        if self._flat is None:
            return grad_x, [None] * len(self._needs)
        pieces = iter(zip(self._flat.clone().split(self._sizes), self._shapes, strict=True))
        grads: list[Tensor | None] = []
        for needed in self._needs:
            if needed:
                piece, shape = next(pieces)
                grads.append(piece.view(shape))
            else:
                grads.append(None)
        return grad_x, grads


class _Replayed(torch.autograd.Function):
    """Autograd shell over a captured layer. The leaves are saved for autograd's check that nobody wrote to them."""

    @staticmethod
    def forward(
        ctx: Any,
        graph: _LayerGraph,
        call: LayerCall,
        cos: Tensor,
        sin: Tensor,
        x: Tensor,
        *leaves: Tensor | None,
    ) -> Tensor:
        y, ctx.ticket = graph.forward(call, x, cos, sin)
        ctx.graph = graph
        ctx.save_for_backward(*leaves)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        if ctx.graph._ticket is None or ctx.graph._ticket() is not ctx.ticket:
            raise RuntimeError(
                "fastft: this layer's buffers were used by a later forward. This is a bug in fastft's CUDA graphs; "
                "fastft.patch(model, cuda_graphs=False) runs without them."
            )
        grad_x, leaf_grads = ctx.graph.backward(grad)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.ticket = None
        return None, None, None, None, grad_x, *leaf_grads


_Step = list[tuple[int, tuple[Any, ...]]]  # the layers called in a forward, by id, and how


class ModelGraphs:
    """The graphs of one model's layers; lives beside the model, never in it."""

    def __init__(self) -> None:
        self._graphs: weakref.WeakKeyDictionary[nn.Module, _LayerGraph] = weakref.WeakKeyDictionary()
        self._shared: dict[tuple[Any, ...], _Shared] = {}
        self._tape: Tape | None = None
        self._step: _Step = []  # of the forward under way
        self._called: set[int] = set()  # the layers in it, by id
        self._last: _Step = []
        self._alike = 0  # steps that were like the last
        self._captured: _Step = []
        self._captured_tokens = 0  # of the batch that the graphs were made for
        self._capturing = False
        self._waiting = False  # when the forward under way began, one before it had layers without their backward
        self._failed = False
        self._room = (1, 1)  # for packed documents: how many, and tokens in the longest; grows to what has been seen
        self.rows = RowLengths()
        self.reason: str | None = None  # why the last layer that was not replayed was not
        self.replays = 0

    @property
    def captured(self) -> int:
        """How many layers have a graph."""
        return 0 if self._capturing else len(self._graphs)

    def serves(self, tokens: int) -> bool:
        """Whether the layers of a batch of so many tokens may be replayed."""
        return self.captured > 0 and self._captured_tokens == tokens

    @property
    def kept_bytes(self) -> int:
        """Device bytes of activations that stay allocated between steps, where eager layers would let go of them."""
        return sum(graph.held_bytes for graph in self._graphs.values())

    @property
    def held_bytes(self) -> int:
        """Device bytes that buffers and kept activations take between steps."""
        return self.kept_bytes + sum(shared.nbytes for shared in self._shared.values())

    def begin(self) -> None:
        """A training forward of the model begins."""
        if self._capturing:  # the last one ended half-way
            self._drop()
        if self._step:
            self._alike = self._alike + 1 if self._step == self._last else 1
            self._last = self._step
        self.rows.begin()
        self._step, self._called = [], set()
        self._waiting = any(graph.busy for graph in self._graphs.values())
        wanted = self._alike >= _SAME_STEPS and self._last != self._captured and not self._failed
        if wanted and not self._waiting:
            self._drop()
            self._capturing = True

    def run(self, layer: nn.Module, call: LayerCall, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor | None:
        """The layer's output by its graph, or None: then it runs eagerly, for `reason`.

        Args:
            layer: identifies the graph.
            call: the layer as it stands.
            x: `[batch, sequence, hidden]`, contiguous.
            cos: as in `apply_layer`.
            sin: as in `apply_layer`.
        """
        self.reason = self._refusal(call, x)
        if self.reason is not None:
            return None
        if id(layer) in self._called:
            self.reason = "called again without a training forward of the whole model"
            return None
        self._called.add(id(layer))
        documents = _documents_of(call)
        if documents is not None:
            seen = (len(documents.lengths), documents.longest)
            self._room = tuple(max(room, next_power_of_2(n)) for room, n in zip(self._room, seen, strict=True))
        key = (*call_key(call, x, cos, sin), None if documents is None else self._room)
        self._step.append((id(layer), key))
        if self._capturing:
            self._capture(layer, key, call, x, cos, sin, documents)
        graph = self._graphs.get(layer)
        if graph is None or graph.key != key:
            if not self._failed:
                self.reason = "shapes or adapters have not been the same for long enough"
            return None
        if self._waiting or graph.busy:
            self.reason = "another forward is waiting for its backward"
            return None
        self.replays += 1
        return _Replayed.apply(graph, call, cos, sin, x, *call.leaves())  # type: ignore[no-any-return]

    def release(self, reason: str | None = None) -> None:
        """Forget all graphs and give their memory back, for `reason`."""
        self._drop()
        self._shared.clear()
        self._step, self._last, self._alike, self._called = [], [], 0, set()
        self.rows.forget()
        self.replays, self._failed, self.reason = 0, False, reason

    def _drop(self) -> None:
        """Forget the graphs, and their pool with them: PyTorch ends a pool with its last graph."""
        self._graphs.clear()
        self._tape, self._captured, self._capturing = None, [], False

    def _refusal(self, call: LayerCall, x: Tensor) -> str | None:
        reason = self.reason if self._failed else self._bar(call, x)
        if reason is not None:
            self.rows.bar()
            return reason
        self.rows.weights = weights_of(call)
        if not pays(2.0 * x.shape[0] * x.shape[1] * self.rows.weights, x.device):
            return "the device is busy long enough for the host to keep up"
        return None

    def _bar(self, call: LayerCall, x: Tensor) -> str | None:
        """Why such a call cannot be replayed, of whatever length."""
        if not x.is_cuda:
            return "the model is not on a CUDA device"
        if not (x.requires_grad or any(leaf is not None and leaf.requires_grad for leaf in call.leaves())):
            return "no gradient is wanted"
        if call.attention_key is None:
            return "attention has a mask, or is not sdpa"
        if isinstance(call.attention, DocumentAttention):
            dtype = call.autocast.compute_dtype(x.dtype)
            if not takes_varlen(x.device, dtype, call.heads.dim, call.attention.dropout):
                return "attention over packed documents reads their lengths on the host here"
        if call.level == "offload":
            return "level offload"
        if torch.cuda.is_current_stream_capturing():
            return "the caller is capturing a graph of its own"
        return None

    def _capture(
        self,
        layer: nn.Module,
        key: tuple[Any, ...],
        call: LayerCall,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        documents: Documents | None,
    ) -> None:
        """Record this layer's forward and, if it is the last one, all backwards."""
        position = len(self._step) - 1
        if position >= len(self._last) or self._step[position] != self._last[position]:
            self._drop()  # another step than the last ones after all
            return
        try:
            with torch.cuda.device(x.device):
                shared = self._shared_for(x, cos, sin, documents)
                if self._tape is None:
                    self._tape = Tape(x.device)
                before = torch.cuda.memory_allocated(x.device)
                graph = self._graphs[layer] = _LayerGraph(key, call, x, shared, self._tape)
                graph.held_bytes = torch.cuda.memory_allocated(x.device) - before
                if position == len(self._last) - 1:
                    for graph in reversed(list(self._graphs.values())):
                        graph.capture_backward(self._tape)
                    self._captured, self._capturing = self._last, False
                    self._captured_tokens = x.shape[0] * x.shape[1]
        except (RuntimeError, ValueError) as error:  # torch.OutOfMemoryError is a RuntimeError
            self._drop()
            self._failed, self.reason = True, f"capture failed: {str(error).splitlines()[0]}"

    def _shared_for(self, x: Tensor, cos: Tensor, sin: Tensor, documents: Documents | None) -> _Shared:
        key = (x.shape, x.dtype, x.device, cos.shape, cos.dtype, None if documents is None else self._room)
        shared = self._shared.get(key)
        if shared is None:
            plain = x.detach()
            buffers = [torch.empty_like(plain) for _ in range(3)]
            boundaries = None if documents is None else Boundaries(documents, *self._room)
            shared = self._shared[key] = _Shared(*buffers, Angles.like(cos, sin), boundaries)
        return shared


def _documents_of(call: LayerCall) -> Documents | None:
    """The packed documents that a call's attention keeps apart."""
    return call.attention.documents if isinstance(call.attention, DocumentAttention) else None
