"""Attention-in and attention: derivatives in float64 through a small shell, layouts, and graphs given back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fastft.autograd import attention_half as pair
from fastft.autograd.attention_half import Heads, Norm
from fastft.autograd.autocast import AutocastState
from fastft.autograd.products import products
from fastft.autograd.projection import Projection, flatten_leaves, restore_leaves
from tests.autograd import pieces
from tests.autograd.pieces import draw, draw_angles, draw_norm, draw_projection

BATCH, SEQUENCE, HIDDEN = 2, 3, 4
HEADS = Heads(query=2, key_value=1, dim=4)
OFF = AutocastState("cpu", False, torch.bfloat16)


class InCase(NamedTuple):
    """What attention-in reads besides x."""

    norm: Norm
    qkv: list[Projection]
    head_norms: tuple[Norm, Norm] | None
    cos: Tensor
    sin: Tensor

    def leaves(self) -> list[Tensor | None]:
        """Norm weights that train, then the projections' leaves."""
        norms = [self.norm, *(self.head_norms or ())]
        return [n.weight if n.weight.requires_grad else None for n in norms] + flatten_leaves(self.qkv)


def draw_in(
    *,
    head_norms: bool = False,
    trains_norms: bool = False,
    rotary: int = 4,
    angle_rows: int = 1,
    ranks: tuple[int | None, ...] = (2, 2, 2),
    **settings: Any,
) -> InCase:
    """Attention-in over HEADS."""
    widths = [HEADS.query * HEADS.dim, HEADS.key_value * HEADS.dim, HEADS.key_value * HEADS.dim]
    qkv = [draw_projection(width, HIDDEN, rank=rank, **settings) for width, rank in zip(widths, ranks, strict=True)]
    both = (
        (draw_norm(HEADS.dim, trains=trains_norms), draw_norm(HEADS.dim, trains=trains_norms)) if head_norms else None
    )
    return InCase(draw_norm(HIDDEN, trains=trains_norms), qkv, both, *draw_angles(angle_rows, SEQUENCE, rotary))


def run_in(case: InCase, x: Tensor) -> tuple[pair.SavedIn, Tensor]:
    """The pair's forward."""
    with torch.no_grad():  # as in a Function's forward
        made = products(case.qkv, x.dtype)
        saved, normed = pair.forward_in(x, case.norm, made, case.head_norms, HEADS, case.cos, case.sin)
    return saved, normed[:, : x.shape[-1]]


IN_CASES: dict[str, Callable[[], InCase]] = {
    "adapters": lambda: draw_in(),
    "an angle row per batch row": lambda: draw_in(angle_rows=BATCH),
    "partial rotary": lambda: draw_in(rotary=2),
    "different ranks, none on k": lambda: draw_in(ranks=(3, None, 1)),
    "Qwen2's biases, trained": lambda: draw_in(bias=True, trains="bias a b"),
    "Qwen3's head norms": lambda: draw_in(head_norms=True),
    "trained norms": lambda: draw_in(head_norms=True, trains_norms=True),
    "trained base": lambda: draw_in(trains="weight a b"),
    "4 bits": lambda: draw_in(quantized="nested"),
}


class _AttentionIn(torch.autograd.Function):
    """A shell around the pair; its fourth output is x itself, so that a gradient flows past the half."""

    @staticmethod
    def forward(ctx: Any, case: InCase, x: Tensor, *leaves: Tensor | None) -> tuple[Tensor, ...]:
        saved, _ = run_in(case, x)
        ctx.case, ctx.saved = case, saved
        ctx.save_for_backward(x)
        return saved.query, saved.key, saved.value, x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        case, (x,) = ctx.case, ctx.saved_tensors
        needs = list(ctx.needs_input_grad)
        n_norms = 1 if case.head_norms is None else 3
        needs_norms = (*needs[2 : 2 + n_norms], False, False)[:3]
        given = [g.clone() for g in grads]
        residual = grads[3].reshape(-1, HIDDEN)
        grad_x, leaf_grads, norm_grads = pair.backward_in(
            grads[:3],
            x,
            case.norm,
            products(case.qkv, x.dtype),
            case.head_norms,
            HEADS,
            case.cos,
            case.sin,
            ctx.saved,
            None,
            residual,
            needs[2 + n_norms :],
            needs_norms,
            needs[1],
        )
        assert all(torch.equal(a, b) for a, b in zip(grads, given, strict=True)), "they are the caller's"
        assert (grad_x is not None) == needs[1]
        return None, None if grad_x is None else grad_x.view(x.shape), *norm_grads[:n_norms], *leaf_grads


def check_in(case: InCase, x: Tensor) -> None:
    """gradcheck of attention-in over x and every leaf."""

    def run(x: Tensor, *leaves: Tensor | None) -> tuple[Tensor, ...]:
        return _AttentionIn.apply(with_leaves(case, leaves), x, *leaves)

    assert torch.autograd.gradcheck(run, (x, *case.leaves()), raise_exception=True)


def with_leaves(case: InCase, leaves: tuple[Tensor | None, ...]) -> InCase:
    """The case over other leaves."""
    n_norms = 1 if case.head_norms is None else 3
    norms = [
        n if w is None else Norm(w, n.epsilon, n.mode)
        for n, w in zip([case.norm, *(case.head_norms or ())], leaves[:n_norms], strict=True)
    ]
    head_norms = None if case.head_norms is None else (norms[1], norms[2])
    return InCase(norms[0], restore_leaves(case.qkv, leaves[n_norms:]), head_norms, case.cos, case.sin)


@pytest.mark.parametrize("name", IN_CASES)
def test_attention_in_gradients_are_the_derivatives(name: str) -> None:
    check_in(IN_CASES[name](), draw(BATCH, SEQUENCE, HIDDEN, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("name", ["adapters", "trained norms", "4 bits"])
def test_attention_in_leaf_gradients_without_an_input_gradient(name: str) -> None:
    check_in(IN_CASES[name](), draw(BATCH, SEQUENCE, HIDDEN, dtype=torch.float64))


@pytest.mark.parametrize("name", IN_CASES)
def test_attention_in_is_norm_projections_and_rotation(name: str) -> None:
    case = IN_CASES[name]()
    x = draw(BATCH, SEQUENCE, HIDDEN, dtype=torch.float64)
    saved, returned = run_in(case, x)
    normed = pieces.plain_norm(x, case.norm)
    torch.testing.assert_close(returned.view_as(normed), normed)
    outputs = []
    for p in case.qkv:
        y = normed @ pieces.copy_projection(p, x.dtype).weight.t()
        y = y if p.bias is None else y + p.bias
        y = y if p.lora_a is None else y + p.scale * (normed @ p.lora_a.t() @ p.lora_b.t())
        outputs.append(y.unflatten(-1, (-1, HEADS.dim)))
    query, key, value = outputs
    if case.head_norms is not None:
        query, key = pieces.plain_norm(query, case.head_norms[0]), pieces.plain_norm(key, case.head_norms[1])
    torch.testing.assert_close(saved.query, pieces.plain_rope(query, case.cos, case.sin))
    torch.testing.assert_close(saved.key, pieces.plain_rope(key, case.cos, case.sin))
    torch.testing.assert_close(saved.value, value)


@pytest.mark.parametrize("quantized", [None, "nested"])
def test_attention_in_keeps_the_projections_layout(quantized: str | None) -> None:
    """Q, K and V stay where the projections wrote them, side by side in one buffer: nothing is copied."""
    case, x = draw_in(quantized=quantized), draw(BATCH, SEQUENCE, HIDDEN, dtype=torch.float64)
    saved, _ = run_in(case, x)
    assert saved.query.shape == (BATCH, SEQUENCE, 2, 4)
    assert saved.key.shape == saved.value.shape == (BATCH, SEQUENCE, 1, 4)
    pointers = {t.untyped_storage().data_ptr() for t in (saved.query, saved.key, saved.value)}
    assert len(pointers) == 1
    assert saved.query.untyped_storage().nbytes() == BATCH * SEQUENCE * 4 * HEADS.dim * x.element_size()


@pytest.mark.parametrize("head_norms", [False, True])
def test_normalized_rows_are_not_kept(head_norms: bool) -> None:
    """They cost one read and one write to make again; only a head norm's input, which nothing else has, stays."""
    case, x = draw_in(head_norms=head_norms), draw(BATCH, SEQUENCE, HIDDEN, dtype=torch.float64)
    saved, _ = run_in(case, x)
    kept = {name for name, value in saved._asdict().items() if value is not None}
    always = {"inverse_rms", "query", "key", "value", "low_rank"}
    raw = {"query_raw", "key_raw", "query_inverse_rms", "key_inverse_rms"}
    assert kept == (always | raw if head_norms else always)


def draw_saved(dtype: torch.dtype = torch.float64) -> pair.SavedIn:
    """As after attention-in: random heads."""
    query, key, value = (draw(BATCH, SEQUENCE, heads, HEADS.dim, dtype=dtype) for heads in (2, 1, 1))
    return pair.SavedIn(draw(BATCH * SEQUENCE, dtype=dtype), query, key, value, *[None] * 5)


def test_attention_backward_is_autograds() -> None:
    saved = draw_saved()
    attended = pair.attend(saved, pieces.causal_attention, OFF, with_graph=True)
    grad = draw(BATCH * SEQUENCE, HEADS.query * HEADS.dim, dtype=torch.float64)
    grads = pair.attend_backward(grad, attended)
    leaves = [t.detach().clone().requires_grad_() for t in (saved.query, saved.key, saved.value)]
    output = pieces.causal_attention(*(t.transpose(1, 2) for t in leaves))
    expected = torch.autograd.grad(output, leaves, grad.view(output.shape))
    torch.testing.assert_close(attended.output, output.reshape(grad.shape))
    for ours, theirs, leaf in zip(grads, expected, leaves, strict=True):
        torch.testing.assert_close(ours, theirs)
        assert ours.shape == leaf.shape


def test_attention_without_a_graph_gives_the_same_output() -> None:
    saved = draw_saved()
    with_graph = pair.attend(saved, pieces.causal_attention, OFF, with_graph=True)
    without = pair.attend(saved, pieces.causal_attention, OFF, with_graph=False)
    assert torch.equal(with_graph.output, without.output)
    assert without.graph is None
    assert not with_graph.output.requires_grad


def test_the_attention_graph_is_freed_by_its_backward() -> None:
    attended = pair.attend(draw_saved(), pieces.causal_attention, OFF, with_graph=True)
    assert attended.graph is not None
    pair.attend_backward(torch.ones_like(attended.output), attended)
    assert attended.graph is None


def test_attention_runs_under_the_autocast_of_the_call() -> None:
    """transformers' attention was written to run under it; our own arithmetic around it was not."""
    seen = []

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        seen.append(torch.is_autocast_enabled("cpu"))
        return pieces.causal_attention(query, key, value)

    saved = draw_saved(torch.float32)
    attended = pair.attend(saved, attention, AutocastState("cpu", True, torch.bfloat16), with_graph=True)
    pair.attend(saved, attention, OFF, with_graph=False)
    assert seen == [True, False]
    assert attended.output.dtype == torch.float32, "back in the dtype of Q"
