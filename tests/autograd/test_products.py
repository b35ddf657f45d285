"""A group's products, bare: room for the adapters, which way a group takes, sums over tiles."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fastft.autograd.products import FoldedProducts, JoinedProducts, SeparateProducts, add_leaf_grads, products
from fastft.autograd.projection import LEAVES, Projection
from tests.autograd.pieces import draw, draw_projection


@torch.no_grad()
def run_products(
    group: list[Projection], x: Tensor, grad: Tensor, *, room: bool, dtype: torch.dtype | None = None
) -> list[Tensor | None]:
    """Y, dX and the leaves' gradients by the bare products, with or without room for the adapters' columns."""
    made, tokens = products(group, dtype or x.dtype), x.shape[0]
    if room:
        wide, wide_grad = made.input_room(tokens), made.grad_room(tokens)
        wide.fill_(float("nan"))[:, : x.shape[1]] = x
        wide_grad.fill_(float("nan"))[:, : grad.shape[1]] = grad
        x, grad = wide, wide_grad
    y, low_rank = made.forward(x)
    grad_x, grad_low_rank = made.input_grad(grad)
    return [y, grad_x, *made.leaf_grads(grad, grad_low_rank, x, low_rank, [True] * (LEAVES * len(group)))]


@pytest.mark.parametrize("quantized", [None, "nested"], ids=["separate", "joined"])
@pytest.mark.parametrize("ranks", [(3, None, 2), (1, 2, 16), (None, None, None)], ids=str)
def test_room_for_the_adapters_changes_no_value(quantized: str | None, ranks: tuple[int | None, ...]) -> None:
    """Whoever owns X and dY gives them room, so that the adapter rides along. What lies there before is not read."""
    group = [
        draw_projection(width, 16, rank=rank, quantized=quantized, bias=True, trains="bias a b")
        for width, rank in zip((6, 4, 5), ranks, strict=True)
    ]
    x, grad = draw(7, 16, dtype=torch.float64), draw(7, 15, dtype=torch.float64)
    with_room, without = run_products(group, x, grad, room=True), run_products(group, x, grad, room=False)
    for ours, theirs in zip(with_room, without, strict=True):
        assert ours is theirs is None or torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def test_four_bit_groups_are_joined_and_dense_weights_are_not_copied() -> None:
    quantized = [draw_projection(16, 32, dtype=torch.float32, quantized="nested") for _ in range(2)]
    assert isinstance(products(quantized, torch.float32), JoinedProducts)
    dense = draw_projection(16, 32, dtype=torch.float32)
    made = products([dense], torch.float32)
    assert isinstance(made, SeparateProducts)
    assert made._weights[0] is dense.weight
    assert isinstance(products([quantized[0], dense], torch.float32), SeparateProducts)


@torch.no_grad()
def test_the_products_of_a_forward_serve_its_backward() -> None:
    """A recomputation's matrix is its backward's too: the low-rank input, left out, is made again to the same bits."""
    group = [draw_projection(16, 32, dtype=torch.float32, quantized="nested") for _ in range(2)]
    x, grad = draw(5, 32, dtype=torch.float32), draw(5, 32, dtype=torch.float32)
    made = products(group, x.dtype)
    _, low_rank = made.forward(x)
    _, grad_low_rank = made.input_grad(grad)
    needs = [True] * (2 * LEAVES)
    given = made.leaf_grads(grad, grad_low_rank, x, low_rank, needs)
    again = products(group, x.dtype).leaf_grads(grad, grad_low_rank, x, None, needs)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(given, again, strict=True))


def test_leaf_gradients_of_tiles_add_up_in_float32() -> None:
    parts = [[draw(4, 3, dtype=torch.bfloat16), None, draw(2, dtype=torch.float32)] for _ in range(5)]
    expected = [sum(p[0].float() for p in parts), sum(p[2] for p in parts)]
    total: list[Tensor | None] = [None, None, None]
    for part in parts:
        add_leaf_grads(total, part)
    assert total[0].dtype == torch.float32
    assert total[1] is None
    torch.testing.assert_close(total[0], expected[0])
    torch.testing.assert_close(total[2], expected[1])


@pytest.mark.parametrize("room", [False, True])
@pytest.mark.parametrize("ranks", [(3, None, 2), (1, 2, 16)], ids=str)
def test_folded_adapters_are_the_joined_ones(ranks: tuple[int | None, ...], room: bool) -> None:
    """In float64 the order of the sums makes no difference: Y, dX, and the gradient of every leaf."""
    joined = [
        draw_projection(width, 16, rank=rank, quantized="nested", bias=True, trains="bias a b")
        for width, rank in zip((6, 4, 5), ranks, strict=True)
    ]
    folded = [replace(projection, fold=True) for projection in joined]
    assert isinstance(products(folded, torch.float64), FoldedProducts)
    x, grad = draw(7, 16, dtype=torch.float64), draw(7, 15, dtype=torch.float64)
    ours, theirs = run_products(folded, x, grad, room=room), run_products(joined, x, grad, room=room)
    for one, other in zip(ours, theirs, strict=True):
        assert one is other is None or torch.allclose(one, other, rtol=1e-12, atol=1e-12)


def test_without_adapters_there_is_nothing_to_fold() -> None:
    bare = draw_projection(16, 32, dtype=torch.float32, quantized="nested", rank=None)
    assert not isinstance(products([replace(bare, fold=True)], torch.float32), FoldedProducts)
    dense = replace(draw_projection(16, 32, dtype=torch.float32), fold=True)
    assert isinstance(products([dense], torch.float32), SeparateProducts)
