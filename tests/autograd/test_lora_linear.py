"""Projection groups: derivatives in float64, the error contract against PEFT, and what a backward must not touch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fastft.autograd.autocast import AutocastState
from fastft.autograd.lora_linear import apply_group, lora_linear
from fastft.autograd.projection import Projection, flatten_leaves, restore_leaves
from tests.autograd import pieces
from tests.autograd.pieces import draw, draw_projection
from tests.contract import Run, assert_contract

IN = 6

# Every way a group can look: name -> its projections, float64.
GROUPS: dict[str, Callable[[], list[Projection]]] = {
    "one": lambda: [draw_projection(4, IN)],
    "three of different widths and ranks": lambda: [
        draw_projection(5, IN, rank=3),
        draw_projection(2, IN, rank=1),
        draw_projection(3, IN, rank=2),
    ],
    "frozen biases": lambda: [draw_projection(4, IN, bias=True), draw_projection(3, IN, bias=True)],
    "trained biases": lambda: [draw_projection(4, IN, bias=True, trains="bias a b"), draw_projection(3, IN)],
    "trained base": lambda: [draw_projection(4, IN, bias=True, trains="weight bias a b"), draw_projection(3, IN)],
    "no adapters, trained base": lambda: [
        draw_projection(4, IN, rank=None, bias=True, trains="weight bias"),
        draw_projection(3, IN, rank=None, trains="weight"),
    ],
    "adapter on the first": lambda: [draw_projection(4, IN), draw_projection(3, IN, rank=None)],
    "adapters around a bare one": lambda: [
        draw_projection(4, IN, rank=1),
        draw_projection(3, IN, rank=None),
        draw_projection(2, IN, rank=3),
    ],
    "frozen A": lambda: [draw_projection(4, IN, trains="b"), draw_projection(3, IN)],
    "frozen B": lambda: [draw_projection(4, IN, trains="a"), draw_projection(3, IN)],
    "4 bits, nested": lambda: [draw_projection(4, IN, quantized="nested"), draw_projection(3, IN, quantized="nested")],
    "4 bits, flat, biases": lambda: [draw_projection(5, IN, quantized="flat", bias=True, trains="bias a b")],
    "4 bits, different ranks": lambda: [
        draw_projection(4, IN, rank=1, quantized="nested"),
        draw_projection(3, IN, rank=None, quantized="nested", bias=True),
        draw_projection(2, IN, rank=3, quantized="nested", trains="b"),
    ],
    "4 bits, no adapters": lambda: [draw_projection(4, IN, rank=None, quantized="flat")],
    "4 bits beside 16": lambda: [draw_projection(4, IN, quantized="nested"), draw_projection(3, IN)],
    "dropout": lambda: [draw_projection(4, IN, dropout=0.4), draw_projection(3, IN, rank=3, dropout=0.2)],
    "dropout on one, trained base": lambda: [
        draw_projection(4, IN, trains="weight bias a b", bias=True),
        draw_projection(3, IN, rank=None),
        draw_projection(2, IN, rank=1, dropout=0.4),
    ],
    "dropout, 4 bits": lambda: [
        draw_projection(4, IN, quantized="nested", dropout=0.4),
        draw_projection(3, IN, rank=None, quantized="nested"),
        draw_projection(2, IN, rank=3, quantized="nested", dropout=0.2, bias=True, trains="bias a b"),
    ],
    "dropout, 4 bits beside 16": lambda: [
        draw_projection(4, IN, quantized="nested", dropout=0.4),
        draw_projection(3, IN, dropout=0.4),
    ],
}


def formula(x: Tensor, projection: Projection) -> Tensor:
    """Y of one projection, as its definition reads."""
    y = x @ pieces.copy_projection(projection, x.dtype).weight.t()
    if projection.bias is not None:
        y = y + projection.bias
    if projection.lora_a is not None:
        dropped = x if projection.dropout is None else pieces.Masked(projection.dropout)(x)
        y = y + projection.scale * (dropped @ projection.lora_a.t() @ projection.lora_b.t())
    return y


def check_gradients(group: list[Projection], x: Tensor) -> None:
    """gradcheck over x and every leaf that trains."""
    leaves = flatten_leaves(group)

    def run(x: Tensor, *leaves: Tensor | None) -> tuple[Tensor, ...]:
        return apply_group(x, restore_leaves(group, leaves))

    assert torch.autograd.gradcheck(run, (x, *leaves), raise_exception=True)


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("name", GROUPS)
def test_gradients_are_the_derivatives(name: str, autocast: bool) -> None:
    """C41, C45: in float64, which autocast leaves alone."""
    x = draw(3, 2, IN, dtype=torch.float64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        check_gradients(GROUPS[name](), x)


@pytest.mark.parametrize(
    "name", ["one", "trained base", "adapters around a bare one", "4 bits, nested", "dropout", "dropout, 4 bits"]
)
def test_leaf_gradients_without_an_input_gradient(name: str) -> None:
    """The first layer's input: no dX is wanted, every leaf's gradient is."""
    check_gradients(GROUPS[name](), draw(4, IN, dtype=torch.float64))


@pytest.mark.parametrize("name", GROUPS)
def test_outputs_are_the_formula(name: str) -> None:
    group = GROUPS[name]()
    x = draw(3, 2, IN, dtype=torch.float64)
    for y, projection in zip(apply_group(x, group), group, strict=True):
        torch.testing.assert_close(y, formula(x, projection), rtol=1e-12, atol=1e-12)


def draw_case(
    dtype: torch.dtype, adapter_dtype: torch.dtype, quantized: str | None, dropout: float = 0.0
) -> tuple[list[Projection], Tensor, list[Tensor]]:
    """A group of three, its input and the incoming gradients."""
    settings: dict[str, Any] = {"dtype": dtype, "adapter_dtype": adapter_dtype, "quantized": quantized}
    trained = "weight bias a b" if quantized is None else "bias a b"
    group = [
        draw_projection(24, 32, rank=4, bias=True, trains=trained, dropout=dropout, **settings),
        draw_projection(16, 32, rank=3, dropout=dropout / 2, **settings),
        draw_projection(16, 32, rank=None, trains="weight" if quantized is None else "", **settings),
    ]
    grads = [draw(11, width, dtype=torch.float64) for width in (24, 16, 16)]
    return group, draw(11, 32, dtype=dtype, requires_grad=True), grads


def run_fast(group: Sequence[Projection], x: Tensor, grads: Sequence[Tensor], autocast: bool) -> dict[str, Tensor]:
    """Outputs and gradients of ours."""
    group, x = [pieces.copy_projection(p) for p in group], pieces.fresh(x)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outputs = apply_group(x, group)
    torch.autograd.backward(outputs, [g.to(y.dtype) for g, y in zip(grads, outputs, strict=True)])
    return {f"y{i}": y for i, y in enumerate(outputs)} | pieces.named_gradients(pieces.projection_leaves(group), x=x)


def run_stock(
    group: Sequence[Projection], x: Tensor, grads: Sequence[Tensor], autocast: bool, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Outputs and gradients of PEFT's modules, in `dtype` if given."""
    group, x = [pieces.copy_projection(p, dtype) for p in group], pieces.fresh(x, dtype)
    state = AutocastState("cpu", autocast, torch.bfloat16)
    linears = [pieces.stock_linear(p, state.compute_dtype(x.dtype)) for p in group]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outputs = [linear(x) for linear in linears]
    torch.autograd.backward(outputs, [g.to(y.dtype) for g, y in zip(grads, outputs, strict=True)])
    return {f"y{i}": y for i, y in enumerate(outputs)} | pieces.named_gradients(
        [pieces.stock_leaves(linear) for linear in linears], x=x
    )


@pytest.mark.parametrize("dropout", [0.0, 0.3], ids=["", "dropout"])
@pytest.mark.parametrize("quantized", [None, "nested"], ids=["dense", "4 bits"])
@pytest.mark.parametrize("mixture", pieces.PLAIN + pieces.MIXTURES, ids=pieces.name_of)
def test_contract_against_peft(
    mixture: tuple[torch.dtype, torch.dtype, bool], quantized: str | None, dropout: float
) -> None:
    """C45: outputs and every gradient, adapters of another dtype and autocast included."""
    dtype, adapter_dtype, autocast = mixture
    runs = []
    for seed in pieces.SEEDS:
        torch.manual_seed(seed)
        case = draw_case(dtype, adapter_dtype, quantized, dropout)
        runs.append(Run(run_fast(*case, autocast), run_stock(*case, autocast), run_stock(*case, False, torch.float64)))
    assert runs[0].fast["y0"].dtype == runs[0].stock["y0"].dtype
    assert_contract(runs, AutocastState("cpu", autocast, torch.bfloat16).compute_dtype(dtype))


@pytest.mark.parametrize("mixture", pieces.PLAIN + pieces.MIXTURES, ids=pieces.name_of)
def test_two_runs_are_bit_equal(mixture: tuple[torch.dtype, torch.dtype, bool]) -> None:
    dtype, adapter_dtype, autocast = mixture
    case = draw_case(dtype, adapter_dtype, "nested")
    first, second = run_fast(*case, autocast), run_fast(*case, autocast)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_backward_writes_to_nothing_it_was_given() -> None:
    """Neither to x and the leaves nor to the incoming gradients, which autograd may still hand to somebody else."""
    group, x, grads = draw_case(torch.float32, torch.float32, None)
    grads = [g.float() for g in grads]
    given = [x, *grads, *(leaf for leaf in flatten_leaves(group) if leaf is not None)]
    before = [t.detach().clone() for t in given]
    torch.autograd.backward(apply_group(x, group), grads)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


def test_an_unused_output_counts_as_zero() -> None:
    group = [draw_projection(4, IN), draw_projection(3, IN)]
    x = draw(5, IN, dtype=torch.float64, requires_grad=True)
    grad = draw(5, 3, dtype=torch.float64)
    apply_group(x, group)[1].backward(grad)
    alone, x_alone = pieces.copy_projection(group[1]), pieces.fresh(x)
    formula(x_alone, alone).backward(grad)
    torch.testing.assert_close(x.grad, x_alone.grad)
    torch.testing.assert_close(group[1].lora_a.grad, alone.lora_a.grad)
    torch.testing.assert_close(group[1].lora_b.grad, alone.lora_b.grad)
    assert group[0].lora_a.grad.count_nonzero() == group[0].lora_b.grad.count_nonzero() == 0


def test_frozen_leaves_get_no_gradient() -> None:
    group = [draw_projection(4, IN, bias=True, trains="b")]
    x = draw(5, IN, dtype=torch.float64, requires_grad=True)
    apply_group(x, group)[0].sum().backward()
    assert group[0].weight.grad is None
    assert group[0].bias.grad is None
    assert group[0].lora_a.grad is None
    assert group[0].lora_b.grad is not None


@pytest.mark.parametrize("leaf", ["lora_a", "lora_b"])
def test_an_adapter_changed_between_forward_and_backward_raises(leaf: str) -> None:
    """As in stock PyTorch: a silent backward through other numbers than the forward saw would be worse."""
    group = [draw_projection(4, IN)]
    y = apply_group(draw(5, IN, dtype=torch.float64), group)[0]
    with torch.no_grad():
        getattr(group[0], leaf).add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_double_backward_raises() -> None:
    x = draw(5, IN, dtype=torch.float64, requires_grad=True)
    y = apply_group(x, [draw_projection(4, IN)])[0]
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)


def test_a_second_backward_over_a_retained_graph_is_the_same() -> None:
    x = draw(5, IN, dtype=torch.float64, requires_grad=True)
    group = [draw_projection(4, IN), draw_projection(3, IN)]
    wanted = [x, *(leaf for leaf in flatten_leaves(group) if leaf is not None)]
    total = sum(y.square().sum() for y in apply_group(x, group))
    first = torch.autograd.grad(total, wanted, retain_graph=True)
    second = torch.autograd.grad(total, wanted)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("shape", [(IN,), (0, IN), (2, 3, IN), (2, 1, 2, IN)])
def test_any_leading_shape(shape: tuple[int, ...]) -> None:
    projection = draw_projection(4, IN, bias=True)
    x = draw(*shape, dtype=torch.float64, requires_grad=True)
    y = apply_group(x, [projection])[0]
    assert y.shape == (*shape[:-1], 4)
    torch.testing.assert_close(y, formula(x, projection))
    y.sum().backward()
    assert x.grad.shape == x.shape


def test_a_strided_input_and_strided_gradients() -> None:
    """Views as attention makes them: transposed input, and a gradient that is an expanded scalar."""
    group = [draw_projection(4, IN), draw_projection(3, IN)]
    base = draw(IN, 7, dtype=torch.float64, requires_grad=True)
    sum(y.sum() for y in apply_group(base.t(), group)).backward()
    plain = pieces.fresh(base)
    sum(formula(plain.t(), p).sum() for p in group).backward()
    torch.testing.assert_close(base.grad, plain.grad)


def test_lora_linear_is_the_formula_and_names_what_does_not_fit() -> None:
    x, p = draw(5, IN, dtype=torch.float64), draw_projection(4, IN, bias=True)
    y = lora_linear(x, p.weight, p.lora_a, p.lora_b, bias=p.bias, scale=p.scale)
    torch.testing.assert_close(y, formula(x, p))
    torch.testing.assert_close(lora_linear(x, p.weight), x @ p.weight.t())
    with pytest.raises(ValueError, match="come together"):
        lora_linear(x, p.weight, p.lora_a)
    with pytest.raises(ValueError, match="x has 5 features, the weight takes 6"):
        lora_linear(x[:, :5], p.weight)
    with pytest.raises(ValueError, match="do not fit a weight"):
        lora_linear(x, p.weight, p.lora_a, p.lora_b.t())


def test_autocast_casts_products_but_never_float64() -> None:
    """As torch's own autocast: a float64 tensor is left alone."""
    projection = draw_projection(4, IN, dtype=torch.float32)
    x = draw(5, IN, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert apply_group(x, [projection])[0].dtype == torch.bfloat16
        wide = pieces.copy_projection(projection, torch.float64)
        assert apply_group(x.double(), [wide])[0].dtype == torch.float64
    assert apply_group(x, [projection])[0].dtype == torch.float32
