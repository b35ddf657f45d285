"""`fastft::rms_norm`: y and the 1/rms its backward reads; a backward that sums the weight's gradient only on demand."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fastft.kernels import rms_norm as kernels
from fastft.kernels.rms_norm import NormMode
from fastft.operators.again import made_again

__all__ = ["rms_norm", "rms_norm_backward_op", "rms_norm_op", "run", "run_backward"]


def _y_dtype(x: Tensor, weight: Tensor, mode: str) -> torch.dtype:
    return torch.promote_types(x.dtype, weight.dtype) if mode == "llama" else x.dtype


def run(x: Tensor, weight: Tensor, eps: float, mode: str) -> tuple[Tensor, Tensor]:
    """y [..., hidden] and inverse_rms [rows]; see kernels/rms_norm.py."""
    y, inverse_rms, _ = kernels.rms_norm(x, weight, eps, mode=mode)  # type: ignore[arg-type]
    return y.contiguous(), inverse_rms


rms_norm_op = torch.library.custom_op("fastft::rms_norm", run, mutates_args=())


@rms_norm_op.register_fake
def _(x: Tensor, weight: Tensor, eps: float, mode: str) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty(x.shape, dtype=_y_dtype(x, weight, mode)), x.new_empty(math.prod(x.shape[:-1]), dtype=wide)


def run_backward(
    grad: Tensor, x: Tensor, weight: Tensor, inverse_rms: Tensor, mode: str, needs_weight: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of x [..., hidden] and of weight [hidden] ([0] where it does not train)."""
    grad_x, grad_weight = kernels.rms_norm_backward(
        grad,
        x,
        weight,
        inverse_rms,
        mode=mode,  # type: ignore[arg-type]
        needs_weight_grad=needs_weight,
    )
    return grad_x.contiguous(), weight.new_empty(0) if grad_weight is None else grad_weight


rms_norm_backward_op = torch.library.custom_op("fastft::rms_norm_backward", run_backward, mutates_args=())


@rms_norm_backward_op.register_fake
def _(
    grad: Tensor, x: Tensor, weight: Tensor, inverse_rms: Tensor, mode: str, needs_weight: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape if needs_weight else 0)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, mode = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.mode = mode


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, inverse_rms = ctx.saved_tensors
    grad_x, grad_weight = rms_norm_backward_op(grad, x, weight, inverse_rms, ctx.mode, ctx.needs_input_grad[1])
    return (
        grad_x if ctx.needs_input_grad[0] else None,
        grad_weight if ctx.needs_input_grad[1] else None,
        None,
        None,
    )


rms_norm_op.register_autograd(_backward, setup_context=_setup_context)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, mode: NormMode = "llama") -> Tensor:
    """`fastft.functional.rms_norm` as an operator call."""
    return made_again(rms_norm_op, x, weight, eps, mode)[0]
