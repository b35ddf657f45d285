"""RMSNorm against transformers' own modules and float64 references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from fastft.kernels import rms_norm as module
from fastft.kernels.rms_norm import rms_norm, rms_norm_backward
from tests.kernels.reference import (
    INTERPRETED,
    assert_as_good_as_stock,
    assert_same,
    assert_same_values,
    dtypes,
    interpreted_only,
    relative_error,
    sparse_rows,
    twins_only,
)

EPS = 1e-5
STOCK = {"llama": LlamaRMSNorm, "fp32": Olmo2RMSNorm, "gemma": GemmaRMSNorm}
modes = pytest.mark.parametrize("mode", list(STOCK))
# One row, odd widths, several programs, several blocks a program (300 rows), a row of several tiles' width.
shapes = pytest.mark.parametrize("shape", [(1, 64), (3, 5, 97), (300, 33), (2, 4500)], ids=str)


def stock_norm(mode: str, weight: torch.Tensor) -> torch.nn.Module:
    norm = STOCK[mode](weight.shape[0], eps=EPS)
    norm.weight = torch.nn.Parameter(weight.clone())
    return norm


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype, weight_dtype: torch.dtype | None = None) -> dict[str, Any]:
    x, residual, grad, residual_grad = (torch.randn(shape).to(dtype) for _ in range(4))
    weight = (1 + 0.3 * torch.randn(shape[-1])).to(weight_dtype or dtype)
    return {"x": x, "residual": residual, "grad": grad, "residual_grad": residual_grad, "weight": weight}


def reference(inputs: dict[str, Any], mode: str, fused: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, grad_x, grad_weight in float64; the sum with the residual as it is rounded, like the input of any layer."""
    summed = inputs["x"] + inputs["residual"] if fused else inputs["x"]
    x = summed.double().requires_grad_()
    weight = inputs["weight"].double().requires_grad_()
    scale = 1 + weight if mode == "gemma" else weight
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * scale
    loss = (y * inputs["grad"].double()).sum()
    if fused:
        loss = loss + (x * inputs["residual_grad"].double()).sum()
    return y.detach(), *torch.autograd.grad(loss, (x, weight))


def through_stock(inputs: dict[str, Any], mode: str, fused: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    norm = stock_norm(mode, inputs["weight"])
    x = inputs["x"].clone().requires_grad_()
    summed = x + inputs["residual"] if fused else x * 1
    y = norm(summed)
    grads = (inputs["grad"].to(y.dtype), inputs["residual_grad"]) if fused else (inputs["grad"].to(y.dtype),)
    grad_x, grad_weight = torch.autograd.grad((y, summed)[: len(grads)], (x, norm.weight), grads)
    return y.detach(), grad_x, grad_weight


def through_fastft(inputs: dict[str, Any], mode: str, fused: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    residual, residual_grad = (inputs["residual"], inputs["residual_grad"]) if fused else (None, None)
    y, inverse_rms, summed = rms_norm(inputs["x"], inputs["weight"], EPS, mode=mode, residual=residual)
    grad_x, grad_weight = rms_norm_backward(
        inputs["grad"].to(y.dtype),
        summed,
        inputs["weight"],
        inverse_rms,
        mode=mode,
        residual_grad=residual_grad,
        needs_weight_grad=True,
    )
    return y, grad_x, grad_weight


@modes
@dtypes
@shapes
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "residual"])
def test_output_and_gradients_are_as_good_as_stock(
    mode: str, dtype: torch.dtype, shape: tuple[int, ...], fused: bool
) -> None:
    inputs = make_inputs(shape, dtype)
    actual, stock = through_fastft(inputs, mode, fused), through_stock(inputs, mode, fused)
    for ours, theirs, exact in zip(actual, stock, reference(inputs, mode, fused), strict=True):
        assert_as_good_as_stock(ours, theirs, exact)


@twins_only
@modes
@dtypes
def test_forward_rounds_as_stock_does(mode: str, dtype: torch.dtype) -> None:
    inputs = make_inputs((3, 5, 97), dtype)
    assert_same(through_fastft(inputs, mode, True)[0], through_stock(inputs, mode, True)[0])


@twins_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_backward_rounds_as_stock_does(dtype: torch.dtype) -> None:
    """Autograd sums in another order, so not bit-equal, yet nearly all elements are; without the rounding, 3 of 4."""
    inputs = make_inputs((30, 97), dtype)
    ours, stock = through_fastft(inputs, "llama", False)[1], through_stock(inputs, "llama", False)[1]
    assert (ours == stock).double().mean() > 0.99


@modes
@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.float16),
    ],
    ids=str,
)
def test_mixed_dtypes_give_stocks_dtype_c18(mode: str, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    """C18: bf16 input with an fp32 weight gives fp32 in llama mode, and stock's values."""
    inputs = make_inputs((4, 33), dtype, weight_dtype)
    actual, stock = through_fastft(inputs, mode, False), through_stock(inputs, mode, False)
    if mode == "llama" and weight_dtype == torch.float32:
        assert actual[0].dtype == torch.float32
    for ours, theirs, exact in zip(actual, stock, reference(inputs, mode, False), strict=True):
        assert ours.dtype == theirs.dtype
        # What passes through the interpreter's truncated bf16 is judged as bf16, whatever dtype it arrives in.
        if INTERPRETED and torch.bfloat16 in (dtype, weight_dtype):
            assert relative_error(ours, exact) <= max(2.0**-7, 1.5 * relative_error(theirs, exact))
        else:
            assert_as_good_as_stock(ours, theirs, exact)


@modes
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "residual"])
def test_backward_is_the_derivative_in_float64(mode: str, fused: bool) -> None:
    inputs = make_inputs((3, 5, 17), torch.float64)
    for ours, exact in zip(through_fastft(inputs, mode, fused), reference(inputs, mode, fused), strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-13)


@modes
@dtypes
def test_saved_statistics(mode: str, dtype: torch.dtype) -> None:
    inputs = make_inputs((2, 3, 40), dtype)
    _, inverse_rms, summed = rms_norm(inputs["x"], inputs["weight"], EPS, mode=mode)
    assert summed is inputs["x"]
    assert inverse_rms.dtype == torch.float32
    assert inverse_rms.shape == (6,)
    exact = torch.rsqrt(inputs["x"].double().square().mean(-1) + EPS).view(-1)
    torch.testing.assert_close(inverse_rms.double(), exact, rtol=1e-6, atol=0)


@dtypes
def test_in_place_equals_out_of_place(dtype: torch.dtype) -> None:
    inputs = make_inputs((3, 5, 97), dtype)
    weight = inputs["weight"]
    y, inverse_rms, summed = rms_norm(inputs["x"], weight, EPS, residual=inputs["residual"])
    residual, x = inputs["residual"].clone(), inputs["x"].clone()
    in_place = rms_norm(x, weight, EPS, residual=residual, out=x, summed_out=residual)
    assert in_place[0] is x
    assert in_place[2] is residual
    for ours, expected in zip(in_place, (y, inverse_rms, summed), strict=True):
        assert_same(ours, expected)
    expected, _ = rms_norm_backward(inputs["grad"], summed, weight, inverse_rms, residual_grad=inputs["residual_grad"])
    for name in ("grad", "residual_grad"):
        buffers = {key: inputs[key].clone() for key in ("grad", "residual_grad")}
        grad_x, _ = rms_norm_backward(
            buffers["grad"], summed, weight, inverse_rms, residual_grad=buffers["residual_grad"], out=buffers[name]
        )
        assert grad_x is buffers[name]
        assert_same(grad_x, expected)


@dtypes
def test_strides_as_they_come(dtype: torch.dtype) -> None:
    """Heads sliced out of a fused projection, a transposed batch, an expanded gradient: read as they lie."""
    fused = torch.randn(2, 5, 7, 24).to(dtype)
    weight = torch.randn(24).to(dtype)
    for x in (
        fused[:, :, 2:5],
        fused.transpose(0, 1),
        fused.view(2, 5, 168)[..., 24:48],
        torch.randn(24, 6).to(dtype).T,
    ):
        dense = x.contiguous()
        y, inverse_rms, _ = rms_norm(x, weight, EPS)
        expected, expected_rms, _ = rms_norm(dense, weight, EPS)
        assert_same_values(y, expected)
        assert_same_values(inverse_rms, expected_rms)
        grad = torch.ones((), dtype=dtype).expand(x.shape)
        ours = rms_norm_backward(grad, x, weight, inverse_rms, needs_weight_grad=True)
        for one, other in zip(
            ours, rms_norm_backward(grad.contiguous(), dense, weight, inverse_rms, needs_weight_grad=True), strict=True
        ):
            assert_same_values(one, other)


def test_output_with_strides_that_no_row_view_has() -> None:
    x, weight = torch.randn(3, 5, 16), torch.randn(16)
    out = torch.zeros(5, 3, 16).transpose(0, 1)
    y, _, _ = rms_norm(x, weight, EPS, out=out)
    assert y is out
    assert_same_values(out.contiguous(), rms_norm(x, weight, EPS)[0])


def test_weight_gradient_only_when_asked_and_bit_equal_twice() -> None:
    inputs = make_inputs((300, 33), torch.float32)
    _, inverse_rms, summed = rms_norm(inputs["x"], inputs["weight"], EPS)
    arguments = (inputs["grad"], summed, inputs["weight"], inverse_rms)
    without, none = rms_norm_backward(*arguments)
    assert none is None
    grad_x, first = rms_norm_backward(*arguments, needs_weight_grad=True)
    _, second = rms_norm_backward(*arguments, needs_weight_grad=True)
    assert_same(grad_x, without)
    assert_same(first, second)


def test_no_rows() -> None:
    x, weight = torch.empty(0, 8), torch.ones(8)
    y, inverse_rms, _ = rms_norm(x, weight, EPS)
    assert (y.shape, inverse_rms.shape) == ((0, 8), (0,))
    grad_x, grad_weight = rms_norm_backward(y, x, weight, inverse_rms, needs_weight_grad=True)
    assert grad_x.shape == (0, 8)
    assert_same(grad_weight, torch.zeros(8))


def test_rows_too_wide_for_a_program_take_the_twin() -> None:
    inputs = make_inputs((2, module.WIDEST_ROW + 1), torch.float32)
    for ours, stock in zip(through_fastft(inputs, "llama", True), through_stock(inputs, "llama", True), strict=True):
        torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-5)


@interpreted_only
def test_offsets_past_2_to_the_31_c17() -> None:
    """C17: a row that begins past 2**31 elements gives what it gives alone."""
    x, residual, grad, past = (sparse_rows(3, 40) for _ in range(4))
    weight = torch.randn(40).bfloat16()
    y, inverse_rms, summed = rms_norm(x, weight, EPS, residual=residual, out=sparse_rows(3, 40), summed_out=residual)
    dense = [tensor.contiguous() for tensor in (x, grad, past, summed)]
    assert_same(y.contiguous(), rms_norm(dense[3], weight, EPS)[0])
    ours, _ = rms_norm_backward(grad, summed, weight, inverse_rms, residual_grad=past, out=sparse_rows(3, 40))
    alone, _ = rms_norm_backward(dense[1], dense[3], weight, inverse_rms, residual_grad=dense[2])
    assert_same(ours.contiguous(), alone)
