"""Attention's emptied graph: its own gradients, nothing held, and no graph where attention saves too much else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import scaled_dot_product_attention

from fastft.autograd import emptied_graph
from fastft.autograd.emptied_graph import EmptiedGraph
from fastft.kernels.document_attention import DocumentAttention, Documents
from tests.autograd import pieces

BATCH, SEQUENCE, HEADS, KEY_HEADS, DIM = 2, 48, 4, 2, 16
Heads = tuple[Tensor, ...]


@pytest.fixture(autouse=True)
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a random state: else tensors of these sizes would all stay with the graph."""
    monkeypatch.setattr(emptied_graph, "_SMALL", 64)


def draw(dtype: torch.dtype = torch.float32) -> Tensor:
    """Q, K and V side by side, as one product writes them `[tokens, Σ heads · dim]`."""
    return torch.randn(BATCH * SEQUENCE, (HEADS + 2 * KEY_HEADS) * DIM).to(dtype)


def cut(side_by_side: Tensor) -> Heads:
    """Q, K and V `[batch, heads, sequence, dim]`, views."""
    rows = side_by_side.view(BATCH, SEQUENCE, -1, DIM)
    return tuple(part.transpose(1, 2) for part in rows.split([HEADS, KEY_HEADS, KEY_HEADS], dim=2))


def fused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    output = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return output.transpose(1, 2).contiguous()


class Flash(torch.autograd.Function):
    """As packages of flash kernels do it: rows in their own order, O and statistics saved, values by the formula."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = pieces.causal_attention(query, key, value)
        statistics = torch.full(query.shape[:3], 7.0)
        ctx.save_for_backward(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), output, statistics)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        *heads, output, statistics = ctx.saved_tensors
        leaves = [t.transpose(1, 2).detach().requires_grad_() for t in heads]
        with torch.enable_grad():
            again = pieces.causal_attention(*leaves)
        assert torch.equal(again, output)
        assert (statistics == 7).all()
        return torch.autograd.grad(again, leaves, grad)


def dropping(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One whose output is not what it saved: a copy."""
    return fused(query, key, value) * 2


ATTENTIONS: dict[str, Callable[..., Tensor]] = {"fused": fused, "a function of its own": Flash.apply}


def whole(attention: Callable[..., Tensor], heads: Heads, grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients by the whole graph."""
    leaves = [t.detach().requires_grad_() for t in heads]
    output = attention(*leaves)
    return torch.autograd.grad(output, leaves, grad.view(output.shape).to(output.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_gradients_are_attention_s_own_to_the_bit_however_often_it_is_refilled(name: str, dtype: torch.dtype) -> None:
    attention, side_by_side = ATTENTIONS[name], draw(dtype)
    output, graph = EmptiedGraph.record(attention, *cut(side_by_side))
    assert graph is not None
    assert not output.requires_grad
    assert torch.equal(output.view(BATCH, SEQUENCE, HEADS, DIM), attention(*cut(side_by_side)))
    kept = [t.clone() for t in graph.take()]
    again, grad = side_by_side.clone(), torch.randn_like(output)
    side_by_side.fill_(float("nan"))  # what a buffer's next owner writes
    output.fill_(float("nan"))
    expected = whole(attention, cut(again), grad)
    for retain in (True, True, False):
        refilled = graph.refill(*cut(again), kept)
        for ours, theirs in zip(refilled.backward(grad, retain), expected, strict=True):
            assert torch.equal(ours, theirs)


def test_two_backwards_may_be_under_way_at_once() -> None:
    """In two threads, over a graph that both retain: neither takes what the other was given."""
    side_by_side, found = draw(), {}
    inside, done = threading.Event(), threading.Event()

    class Slow(Flash):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
            if threading.current_thread() is other:
                inside.set()
                done.wait(1)
            else:
                other.start()
                inside.wait(0.2)
            return Flash.backward(ctx, grad)

    output, graph = EmptiedGraph.record(Slow.apply, *cut(side_by_side))
    assert graph is not None
    kept, grad = graph.take(), torch.randn_like(output)
    refilled = [graph.refill(*cut(side_by_side), kept) for _ in range(2)]

    def run(which: int) -> None:
        found[which] = refilled[which].backward(grad, True)

    other = threading.Thread(target=run, args=(1,))
    run(0)
    done.set()
    other.join()
    expected = whole(Flash.apply, cut(side_by_side), grad)
    for which in range(2):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found[which], expected, strict=True))


def test_a_backward_inside_another_leaves_it_what_it_was_given() -> None:
    side_by_side, inner = draw(), []

    class Nested(Flash):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
            if not inner:
                inner.append(())
                inner[0] = graph.refill(*cut(side_by_side), kept).backward(grad, True)
            return Flash.backward(ctx, grad)

    output, graph = EmptiedGraph.record(Nested.apply, *cut(side_by_side))
    assert graph is not None
    kept = graph.take()
    grad = torch.randn_like(output)
    outer = graph.refill(*cut(side_by_side), kept).backward(grad, True)
    for ours, within, theirs in zip(outer, inner[0], whole(Flash.apply, cut(side_by_side), grad), strict=True):
        assert torch.equal(ours, theirs)
        assert torch.equal(within, theirs)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_nothing_large_is_held_before_and_after_a_backward(name: str) -> None:
    side_by_side = draw()
    again = side_by_side.clone()
    output, graph = EmptiedGraph.record(ATTENTIONS[name], *cut(side_by_side))
    assert graph is not None
    first, *statistics = graph.take()
    assert first.data_ptr() == output.data_ptr()
    assert sum(t.nbytes for t in statistics) == 4 * BATCH * HEADS * SEQUENCE
    held = [StorageWeakRef(t.untyped_storage()) for t in (side_by_side, first, *statistics)]
    kept = [t.clone() for t in (first, *statistics)]
    del side_by_side, first, statistics
    grad = torch.randn_like(output)
    del output
    assert all(storage.expired() for storage in held)
    held = [StorageWeakRef(t.untyped_storage()) for t in (again, *kept)]
    graph.refill(*cut(again), kept).backward(grad, True)
    del again, kept
    assert all(storage.expired() for storage in held)


def test_a_graph_whose_backward_never_runs_goes_with_its_owner() -> None:
    """A cycle through autograd's C++ nodes would stay for good."""
    states = [torch.zeros(4)]
    alive = StorageWeakRef(states[0].untyped_storage())

    class WithState(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, state: Tensor) -> Tensor:
            ctx.save_for_backward(state)
            return pieces.causal_attention(query, key, value)

    output, graph = EmptiedGraph.record(lambda q, k, v: WithState.apply(q, k, v, states.pop()), *cut(draw()))
    assert graph is not None
    assert not alive.expired(), "a small tensor stays with the graph"
    del graph, output
    assert alive.expired()


@pytest.mark.parametrize("name", ATTENTIONS)
def test_an_output_so_small_that_it_stays_goes_with_its_owner(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What attention saves of its own output knows the node that saves it: held as it is, it is a cycle."""
    monkeypatch.setattr(emptied_graph, "_SMALL", 1 << 16)
    output, graph = EmptiedGraph.record(ATTENTIONS[name], *cut(draw()))
    assert graph is not None
    alive = StorageWeakRef(output.untyped_storage())
    del graph, output
    assert alive.expired()


def in_pieces(count: int, gathered: bool) -> Callable[..., Tensor]:
    """Saves so many tokens' queries, as copies or as views."""

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        picked = [query[:1, :, token] for token in range(count)]
        picked = [token.clone() for token in picked] if gathered else picked
        total = sum(token.pow(2).sum() for token in picked)
        return query.transpose(1, 2) + total + 0 * (key.sum() + value.sum())

    return attention


def test_many_small_tensors_are_as_much_as_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emptied_graph, "_SMALL", 4 * 3 * HEADS * DIM)  # three tokens
    assert EmptiedGraph.record(in_pieces(3, True), *cut(draw()))[1] is not None
    assert EmptiedGraph.record(in_pieces(SEQUENCE, True), *cut(draw()))[1] is None


def test_a_small_view_does_not_hold_the_large_tensor_it_is_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emptied_graph, "_SMALL", 4 * 3 * HEADS * DIM)
    side_by_side = draw()
    again, alive = side_by_side.clone(), StorageWeakRef(side_by_side.untyped_storage())
    output, graph = EmptiedGraph.record(in_pieces(2, False), *cut(side_by_side))
    assert graph is not None
    kept = [t.clone() for t in graph.take()]
    grad = torch.randn_like(output)
    del side_by_side
    assert alive.expired()
    expected = whole(in_pieces(2, False), cut(again), grad)
    ours = graph.refill(*cut(again), kept).backward(grad, False)
    assert all(torch.equal(one, other) for one, other in zip(ours, expected, strict=True))


def test_an_output_with_gaps_between_its_rows_is_kept_without_them() -> None:
    """Host memory takes no other."""

    class Wide(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            ctx.save_for_backward(query, key, value)
            output = pieces.causal_attention(query, key, value)
            wide = output.new_empty(BATCH, SEQUENCE, 2 * HEADS * DIM)
            return wide[..., : HEADS * DIM].view(output.shape).copy_(output)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
            return whole(pieces.causal_attention, ctx.saved_tensors, grad)

    output, graph = EmptiedGraph.record(Wide.apply, *cut(draw()))
    assert graph is not None
    (kept,) = graph.take()
    assert kept.is_contiguous()
    assert torch.equal(kept, output)


@pytest.mark.parametrize("attention", [pieces.causal_attention, dropping], ids=["scores saved", "output copied"])
def test_there_is_no_graph_where_attention_saves_more_than_its_output(attention: Callable[..., Tensor]) -> None:
    side_by_side = draw()
    output, graph = EmptiedGraph.record(attention, *cut(side_by_side))
    assert graph is None
    assert torch.equal(output.view(BATCH, SEQUENCE, HEADS, DIM), attention(*cut(side_by_side)))


@pytest.mark.parametrize(
    "other", [torch.eye(99).to_sparse(), torch.empty(99, device="meta")], ids=["sparse", "elsewhere"]
)
def test_there_is_no_graph_where_attention_saves_what_host_memory_does_not_take(other: Tensor) -> None:
    class With(Flash):
        @staticmethod
        def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            ctx.save_for_backward(query, key, value, other)
            return pieces.causal_attention(query, key, value)

    assert EmptiedGraph.record(With.apply, *cut(draw()))[1] is None


def test_scores_are_not_held_until_attention_returns() -> None:
    """No more than one softmax's worth, as without a graph."""
    seen: list[StorageWeakRef] = []

    def eager(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
        output = value
        for _ in range(3):
            weights = (query @ key.transpose(2, 3)).softmax(-1)
            seen.append(StorageWeakRef(weights.untyped_storage()))
            output = weights @ output
            del weights
            assert seen[-1].expired()
        return output.transpose(1, 2).contiguous()

    assert EmptiedGraph.record(eager, *cut(draw()))[1] is None


def test_documents_in_buckets_run_again() -> None:
    """Their rows are gathered: copies of Q, K and V."""
    attention = DocumentAttention(Documents(BATCH, SEQUENCE, (30, 18, 48), torch.device("cpu")), None, None, 0.0)
    assert EmptiedGraph.record(attention, *cut(draw()))[1] is None


def test_attention_that_saves_the_caller_s_mask_runs_again() -> None:
    """Which is all rows' and all layers', and need not be copied for each."""
    mask = torch.ones(BATCH, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).tril()
    bias = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))

    def masked(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, key, value, bias, enable_gqa=True).transpose(1, 2).contiguous()

    assert EmptiedGraph.record(masked, *cut(draw()))[1] is None
