"""The gated MLP: derivatives in float64, the error contract against PEFT, whose buffers a backward may write over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastft.autograd import mlp_half as pair
from fastft.autograd.autocast import AutocastState
from fastft.autograd.mlp_half import apply_mlp
from fastft.autograd.products import products
from fastft.autograd.projection import LEAVES, Projection, flatten_leaves, restore_leaves
from tests.autograd import pieces
from tests.autograd.pieces import draw, draw_projection
from tests.contract import Run, assert_contract

HIDDEN, INTERMEDIATE = 4, 5


def draw_mlp(hidden: int, intermediate: int, **settings: Any) -> list[Projection]:
    """gate, up and down."""
    return [
        draw_projection(intermediate, hidden, **settings),
        draw_projection(intermediate, hidden, **settings),
        draw_projection(hidden, intermediate, **settings),
    ]


def with_ranks(*ranks: int | None) -> list[Projection]:
    """gate, up and down with these ranks."""
    sizes = [(INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)]
    return [draw_projection(*size, rank=rank) for size, rank in zip(sizes, ranks, strict=True)]


MLPS: dict[str, Callable[[], list[Projection]]] = {
    "adapters": lambda: draw_mlp(HIDDEN, INTERMEDIATE),
    "different ranks": lambda: with_ranks(1, 3, 2),
    "no adapter on gate": lambda: with_ranks(None, 2, 2),
    "no adapter on down": lambda: with_ranks(2, 2, None),
    "frozen biases": lambda: draw_mlp(HIDDEN, INTERMEDIATE, bias=True),
    "everything trains": lambda: draw_mlp(HIDDEN, INTERMEDIATE, bias=True, trains="weight bias a b"),
    "trained base alone": lambda: draw_mlp(HIDDEN, INTERMEDIATE, bias=True, rank=None, trains="weight bias"),
    "frozen A": lambda: draw_mlp(HIDDEN, INTERMEDIATE, trains="b"),
    "frozen B": lambda: draw_mlp(HIDDEN, INTERMEDIATE, trains="a"),
    "4 bits, nested": lambda: draw_mlp(HIDDEN, INTERMEDIATE, quantized="nested"),
    "4 bits, different ranks": lambda: [
        draw_projection(INTERMEDIATE, HIDDEN, rank=None, quantized="nested"),
        draw_projection(INTERMEDIATE, HIDDEN, rank=3, quantized="nested"),
        draw_projection(HIDDEN, INTERMEDIATE, rank=1, quantized="nested"),
    ],
    "dropout": lambda: draw_mlp(HIDDEN, INTERMEDIATE, dropout=0.3),
    "dropout, 4 bits": lambda: draw_mlp(HIDDEN, INTERMEDIATE, quantized="nested", dropout=0.3),
    "4 bits, flat": lambda: draw_mlp(HIDDEN, INTERMEDIATE, quantized="flat", bias=True, trains="bias a b"),
}


def formula(x: Tensor, projections: list[Projection]) -> Tensor:
    """The MLP over `apply_group`'s own formula, by autograd."""

    def linear(p: Projection) -> Callable[[Tensor], Tensor]:
        dense = p.weight if isinstance(p.weight, Tensor) else pieces.copy_projection(p, x.dtype).weight

        def run(x: Tensor) -> Tensor:
            y = x @ dense.t() if p.bias is None else x @ dense.t() + p.bias
            if p.lora_a is None:
                return y
            dropped = x if p.dropout is None else pieces.Masked(p.dropout)(x)
            return y + p.scale * (dropped @ p.lora_a.t() @ p.lora_b.t())

        return run

    return pieces.plain_mlp(x, *(linear(p) for p in projections))


def check_gradients(projections: list[Projection], x: Tensor) -> None:
    """gradcheck over x and every leaf that trains."""

    def run(x: Tensor, *leaves: Tensor | None) -> Tensor:
        gate, up, down = restore_leaves(projections, leaves)
        return apply_mlp(x, (gate, up), down)

    assert torch.autograd.gradcheck(run, (x, *flatten_leaves(projections)), raise_exception=True)


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("name", MLPS)
def test_gradients_are_the_derivatives(name: str, autocast: bool) -> None:
    x = draw(2, 2, HIDDEN, dtype=torch.float64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        check_gradients(MLPS[name](), x)


@pytest.mark.parametrize("name", ["adapters", "no adapter on down", "4 bits, nested"])
def test_leaf_gradients_without_an_input_gradient(name: str) -> None:
    check_gradients(MLPS[name](), draw(3, HIDDEN, dtype=torch.float64))


@pytest.mark.parametrize("name", MLPS)
def test_output_is_the_formula(name: str) -> None:
    projections = MLPS[name]()
    x = draw(2, 3, HIDDEN, dtype=torch.float64)
    y = apply_mlp(x, projections[:2], projections[2])
    assert y.shape == x.shape
    torch.testing.assert_close(y, formula(x, projections), rtol=1e-12, atol=1e-12)


def draw_case(
    dtype: torch.dtype, adapter_dtype: torch.dtype, quantized: str | None
) -> tuple[list[Projection], Tensor, Tensor]:
    """An MLP of 32 by 48, its input and the incoming gradient."""
    trains = "weight bias a b" if quantized is None else "bias a b"
    settings: dict[str, Any] = {"dtype": dtype, "adapter_dtype": adapter_dtype, "quantized": quantized}
    projections = draw_mlp(32, 48, rank=4, bias=True, trains=trains, **settings)
    return projections, draw(11, 32, dtype=dtype, requires_grad=True), draw(11, 32, dtype=torch.float64)


def run_fast(projections: list[Projection], x: Tensor, grad: Tensor, autocast: bool) -> dict[str, Tensor]:
    """Output and gradients of ours."""
    projections, x = [pieces.copy_projection(p) for p in projections], pieces.fresh(x)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = apply_mlp(x, projections[:2], projections[2])
    y.backward(grad.to(y.dtype))
    return {"y": y} | pieces.named_gradients(pieces.projection_leaves(projections), x=x)


def run_stock(
    projections: list[Projection], x: Tensor, grad: Tensor, autocast: bool, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Output and gradients of PEFT's modules, in `dtype` if given."""
    projections, x = [pieces.copy_projection(p, dtype) for p in projections], pieces.fresh(x, dtype)
    compute_dtype = AutocastState("cpu", autocast, torch.bfloat16).compute_dtype(x.dtype)
    linears = [pieces.stock_linear(p, compute_dtype) for p in projections]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = pieces.plain_mlp(x, *linears)
    y.backward(grad.to(y.dtype))
    return {"y": y} | pieces.named_gradients([pieces.stock_leaves(linear) for linear in linears], x=x)


@pytest.mark.parametrize("quantized", [None, "nested"], ids=["dense", "4 bits"])
@pytest.mark.parametrize("mixture", pieces.PLAIN + pieces.MIXTURES, ids=pieces.name_of)
def test_contract_against_peft(mixture: tuple[torch.dtype, torch.dtype, bool], quantized: str | None) -> None:
    dtype, adapter_dtype, autocast = mixture
    runs = []
    for seed in pieces.SEEDS:
        torch.manual_seed(seed)
        case = draw_case(dtype, adapter_dtype, quantized)
        runs.append(Run(run_fast(*case, autocast), run_stock(*case, autocast), run_stock(*case, False, torch.float64)))
    assert runs[0].fast["y"].dtype == runs[0].stock["y"].dtype
    assert_contract(runs, AutocastState("cpu", autocast, torch.bfloat16).compute_dtype(dtype))


@pytest.mark.parametrize("mixture", pieces.PLAIN + pieces.MIXTURES, ids=pieces.name_of)
def test_two_runs_are_bit_equal(mixture: tuple[torch.dtype, torch.dtype, bool]) -> None:
    dtype, adapter_dtype, autocast = mixture
    case = draw_case(dtype, adapter_dtype, "nested")
    first, second = run_fast(*case, autocast), run_fast(*case, autocast)
    assert all(torch.equal(first[name], second[name]) for name in first)


@torch.no_grad()
def run_pair(
    case: tuple[list[Projection], Tensor, Tensor], *, keep: bool = True
) -> tuple[list[Tensor | None], pair.Saved | None]:
    """Output, gradients of x and of the leaves by the bare pair, and what its forward saved."""
    (gate, up, down), x, grad = case
    made = products((gate, up), x.dtype), products([down], x.dtype)
    output, saved = pair.forward(x, *made, down.out_features, gate.out_features, keep)
    assert (saved is not None) == keep
    grad_x, leaf_grads = pair.backward(grad, x, *made, gate.out_features, saved, [True] * (3 * LEAVES))
    return [output, grad_x, *leaf_grads], saved


def draw_pair_case(dtype: torch.dtype = torch.float32) -> tuple[list[Projection], Tensor, Tensor]:
    """Projections, x and the incoming gradient."""
    x, grad = draw(13, 32, dtype=dtype), draw(13, 32, dtype=dtype)
    return draw_mlp(32, 48, dtype=dtype, quantized="nested", bias=True), x, grad


def assert_same_bits(ours: list[Tensor | None], theirs: list[Tensor | None]) -> None:
    """Equal tensors, None where None."""
    for a, b in zip(ours, theirs, strict=True):
        assert a is b or torch.equal(a, b)


@torch.no_grad()
def test_what_a_forward_saved_survives_its_backward() -> None:
    """With retain_graph a second backward reads it; x and the incoming gradient are the caller's."""
    case = draw_pair_case()
    (gate, up, down), x, grad = case
    given = [x.clone(), grad.clone()]
    made = products((gate, up), x.dtype), products([down], x.dtype)
    _, saved = pair.forward(x, *made, down.out_features, gate.out_features, True)
    before = [t.clone() for t in saved]
    for _ in range(2):
        pair.backward(grad, x, *made, gate.out_features, saved, [True] * (3 * LEAVES))
    assert all(torch.equal(a, b) for a, b in zip([*saved, x, grad], [*before, *given], strict=True))


def test_gate_and_up_made_again_change_no_bit() -> None:
    case = draw_pair_case()
    assert_same_bits(run_pair(case, keep=False)[0], run_pair(case)[0])


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("rows", [5, 12])
def test_tiles_add_up(keep: bool, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A last tile of fewer rows included; in float64, so that only a wrong row can make a difference."""
    case = draw_pair_case(torch.float64)
    expected, _ = run_pair(case)
    monkeypatch.setattr(pair, "tile_rows", lambda tokens, intermediate, itemsize, compact: rows)
    for ours, theirs in zip(run_pair(case, keep=keep)[0], expected, strict=True):
        assert ours is theirs is None or torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def test_tiles_are_even_and_never_longer_than_the_tokens() -> None:
    assert pair.tile_rows(100, 14336, 2) == 100
    assert pair.tile_rows(8192, 14336, 2) == 4096
    assert pair.tile_rows(4682, 14336, 2) == 2432
    assert pair.tile_rows(4096, 8192, 2) == 4096
    assert pair.tile_rows(4096, 8192, 2, compact=2048) == 2048
    rows = pair.tile_rows(78_475, 14336, 2)
    assert rows * 3 * 14336 * 2 <= pair.TILE_BYTES + 128 * 3 * 14336 * 2
    assert rows % 128 == 0


def test_a_second_backward_over_a_retained_graph_is_the_same() -> None:
    projections = draw_mlp(HIDDEN, INTERMEDIATE)
    x = draw(3, HIDDEN, dtype=torch.float64, requires_grad=True)
    wanted = [x, *(leaf for leaf in flatten_leaves(projections) if leaf is not None)]
    total = apply_mlp(x, projections[:2], projections[2]).square().sum()
    first = torch.autograd.grad(total, wanted, retain_graph=True)
    second = torch.autograd.grad(total, wanted)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_double_backward_raises() -> None:
    x = draw(3, HIDDEN, dtype=torch.float64, requires_grad=True)
    gate, up, down = draw_mlp(HIDDEN, INTERMEDIATE)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(apply_mlp(x, (gate, up), down).square().sum(), x, create_graph=True)
