"""`fastft::swiglu`, silu(gate) · up for tensors of any rank, and its backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastft.kernels import swiglu as kernels
from fastft.operators.again import made_again

__all__ = ["run", "run_backward", "swiglu", "swiglu_backward_op", "swiglu_op"]


def run(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up [..., intermediate]; see kernels/swiglu.py."""
    return kernels.swiglu(gate, up).contiguous()


swiglu_op = torch.library.custom_op("fastft::swiglu", run, mutates_args=())


@swiglu_op.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


def run_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up."""
    _, grad_gate, grad_up = kernels.swiglu_backward(grad, gate, up, needs_product=False)
    return grad_gate.contiguous(), grad_up.contiguous()


swiglu_backward_op = torch.library.custom_op("fastft::swiglu_backward", run_backward, mutates_args=())


@swiglu_backward_op.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    gate, up = ctx.saved_tensors
    grad_gate, grad_up = swiglu_backward_op(grad, gate, up)
    return grad_gate if ctx.needs_input_grad[0] else None, grad_up if ctx.needs_input_grad[1] else None


swiglu_op.register_autograd(_backward, setup_context=_setup_context)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`fastft.functional.swiglu` as an operator call."""
    return made_again(swiglu_op, gate, up)
