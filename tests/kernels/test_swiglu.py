"""SwiGLU against transformers' activation and float64 references."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN

from fastft.kernels.swiglu import swiglu, swiglu_backward
from tests.kernels.reference import (
    assert_as_good_as_stock,
    assert_same,
    assert_same_values,
    dtypes,
    interpreted_only,
    sparse_rows,
    twins_only,
)

# One element, odd sizes, more rows than a tile, more columns than a block
shapes = pytest.mark.parametrize("shape", [(1, 1), (3, 5, 173), (70, 64), (2, 3, 1100)], ids=str)


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """grad, gate, up; the gates reach far into both tails."""
    grad, gate, up = (torch.randn(shape).to(dtype) for _ in range(3))
    return grad, gate * 4, up


def stock_swiglu(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Product and gradients through transformers' activation and autograd."""
    gate, up = gate.clone().requires_grad_(), up.clone().requires_grad_()
    product = ACT2FN["silu"](gate) * up
    return product.detach(), *torch.autograd.grad(product, (gate, up), grad)


@dtypes
@shapes
def test_product_and_gradients_are_as_good_as_stock(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    inputs = make_inputs(shape, dtype)
    stock = stock_swiglu(*inputs)
    exact = stock_swiglu(*(tensor.double() for tensor in inputs))
    backward = swiglu_backward(*inputs)
    assert_same(backward[0], swiglu(*inputs[1:]))
    for ours, theirs, reference in zip(backward, stock, exact, strict=True):
        assert_as_good_as_stock(ours, theirs, reference)


@twins_only
@dtypes
def test_rounds_as_stock_does(dtype: torch.dtype) -> None:
    inputs = make_inputs((3, 5, 173), dtype)
    for ours, theirs in zip(swiglu_backward(*inputs), stock_swiglu(*inputs), strict=True):
        assert_same(ours, theirs)


def test_backward_is_the_derivative_in_float64() -> None:
    inputs = make_inputs((4, 7), torch.float64)
    for ours, exact in zip(swiglu_backward(*inputs), stock_swiglu(*inputs), strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-13)


@dtypes
def test_in_place_equals_out_of_place(dtype: torch.dtype) -> None:
    inputs = make_inputs((3, 5, 173), dtype)
    grad, gate, up = inputs
    expected = swiglu(gate, up)
    for index in (0, 1):
        buffers = [gate.clone(), up.clone()]
        assert swiglu(*buffers, out=buffers[index]) is buffers[index]
        assert_same(buffers[index], expected)
    expected_backward = swiglu_backward(*inputs)
    ours = swiglu_backward(grad, gate, up, out=(grad, gate, up))
    for one, buffer, other in zip(ours, inputs, expected_backward, strict=True):
        assert one is buffer
        assert_same(one, other)


@dtypes
def test_halves_of_one_projection(dtype: torch.dtype) -> None:
    """gate and up side by side in one tensor, written over in place; a transposed batch."""
    fused = (torch.randn(2, 5, 2 * 40) * 3).to(dtype)
    gate, up = fused.chunk(2, dim=-1)
    grad = torch.randn(5, 2, 40).to(dtype).transpose(0, 1)
    dense = [tensor.contiguous() for tensor in (grad, gate, up)]
    expected = swiglu_backward(*dense)
    assert_same_values(swiglu(gate, up), swiglu(*dense[1:]))
    for one, other in zip(swiglu_backward(grad, gate, up, out=(grad, gate, up)), expected, strict=True):
        assert_same_values(one.contiguous(), other)
    assert_same_values(fused, torch.cat(expected[1:], dim=-1))


@pytest.mark.parametrize("given", [False, True], ids=["allocated", "out given"])
def test_product_left_out(given: bool) -> None:
    inputs = make_inputs((3, 5, 173), torch.float32)
    expected = swiglu_backward(*inputs)
    out = (None, torch.empty_like(inputs[1]), torch.empty_like(inputs[2])) if given else None
    product, grad_gate, grad_up = swiglu_backward(*inputs, out=out, needs_product=False)
    assert product is None
    assert_same(grad_gate, expected[1])
    assert_same(grad_up, expected[2])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's word for the interpreter's exp(1e4)
@dtypes
def test_far_tails_are_finite(dtype: torch.dtype) -> None:
    gate = torch.tensor([[-1e4, -200.0, -90.0, 0.0, 90.0, 200.0, 1e4]]).to(dtype)
    ones = torch.ones_like(gate)
    for ours, theirs in zip(swiglu_backward(ones, gate, ones), stock_swiglu(ones, gate, ones), strict=True):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, theirs, rtol=2.0**-7, atol=1e-30)


def test_no_rows() -> None:
    empty = torch.empty(0, 8)
    assert swiglu(empty, empty).shape == (0, 8)
    assert [tensor.shape for tensor in swiglu_backward(empty, empty, empty)] == [(0, 8)] * 3


@interpreted_only
def test_offsets_past_2_to_the_31_c17() -> None:
    """C17: a row that begins past 2**31 elements gives what it gives alone."""
    inputs = [sparse_rows(3, 40) for _ in range(3)]
    dense = [tensor.contiguous() for tensor in inputs]
    expected, expected_product = swiglu_backward(*dense), swiglu(*dense[1:])
    assert_same(swiglu(*inputs[1:], out=sparse_rows(3, 40)).contiguous(), expected_product)
    for ours, alone in zip(swiglu_backward(*inputs, out=tuple(inputs)), expected, strict=True):
        assert_same(ours.contiguous(), alone)
