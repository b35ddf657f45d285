"""`fastft::rope`: the rotation of queries and keys in one launch. Its backward is itself, by the opposite angle.

Queries and keys are [B, heads, S, D], Hugging Face's layout, usually a transposed view of what the projection wrote.
The outputs keep those strides (`_like`), so attention reads them as it would have read the input; the fake must promise
the very strides that the kernel writes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastft.kernels import rope as kernels

__all__ = ["rope", "rope_one_op", "rope_op", "run", "run_one"]


def _like(x: Tensor) -> Tensor:
    """An uninitialized tensor of x's shape whose last dimension is contiguous; of x's strides where they are dense."""
    return torch.empty_like(x) if x.stride(-1) == 1 else x.new_empty(x.shape)


def run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    """q [B, q_heads, S, D] and k [B, k_heads, S, D] turned by cos and sin [1 or B, S, R]; see kernels/rope.py."""
    out = _like(q), _like(k)
    kernels.rope(
        q.transpose(1, 2),
        k.transpose(1, 2),
        cos,
        sin,
        inverse=inverse,
        out=(out[0].transpose(1, 2), out[1].transpose(1, 2)),
    )
    return out


rope_op = torch.library.custom_op("fastft::rope", run, mutates_args=())


@rope_op.register_fake
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    return _like(q), _like(k)


def run_one(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """One tensor [B, heads, S, D], where queries and keys do not come together."""
    out = _like(x)
    kernels.rope(x.transpose(1, 2), None, cos, sin, inverse=inverse, out=(out.transpose(1, 2), None))
    return out


rope_one_op = torch.library.custom_op("fastft::rope_one", run_one, mutates_args=())


@rope_one_op.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    return _like(x)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[-3:-1])
    ctx.set_materialize_grads(False)  # attention over q alone leaves k without a gradient
    ctx.inverse = inputs[-1]


def _backward(ctx: Any, grad_q: Tensor | None, grad_k: Tensor | None) -> tuple[Tensor | None, ...]:
    cos, sin = ctx.saved_tensors
    grad_q = grad_q if ctx.needs_input_grad[0] else None
    grad_k = grad_k if ctx.needs_input_grad[1] else None
    if grad_q is not None and grad_k is not None:
        grad_q, grad_k = rope_op(grad_q, grad_k, cos, sin, not ctx.inverse)
    elif grad_q is not None:
        grad_q = rope_one_op(grad_q, cos, sin, not ctx.inverse)
    elif grad_k is not None:
        grad_k = rope_one_op(grad_k, cos, sin, not ctx.inverse)
    return grad_q, grad_k, None, None, None


def _backward_one(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    cos, sin = ctx.saved_tensors
    return None if grad is None else rope_one_op(grad, cos, sin, not ctx.inverse), None, None, None


rope_op.register_autograd(_backward, setup_context=_setup_context)
rope_one_op.register_autograd(_backward_one, setup_context=_setup_context)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`fastft.functional.rope` as an operator call."""
    return rope_op(q, k, cos, sin, False)
