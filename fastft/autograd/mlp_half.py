"""The gated MLP: Y = (silu(X Wgᵀ) ⊙ X Wuᵀ) Wdᵀ, each product with its adapter.

With G, U the gate and up outputs [tokens, intermediate], P = silu(G) ⊙ U and dP the gradient through the down
projection:

    dU = dP ⊙ silu(G)        dG = dP ⊙ U ⊙ σ(G) (1 + G (1 − σ(G)))

The forward keeps G, U and the two X Aᵀ; P is made again in the kernel that makes dG and dU (it reads G and U anyway),
because keeping it would cost a third [tokens, intermediate]. Gate and up share X, so they are one group: one product
with the stacked A, and one dA. When the caller says that G and U are its own (recomputation), dG and dU are written
over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastft.autograd import projection
from fastft.autograd.autocast import AutocastState, suspended
from fastft.autograd.first_order import first_order
from fastft.autograd.projection import (
    LEAVES,
    Operands,
    Projection,
    flatten_leaves,
    operands,
    restore_leaves,
    to_leaf_dtypes,
)
from fastft.kernels.swiglu import swiglu, swiglu_backward


class Saved(NamedTuple):
    """What the MLP keeps besides its input; `down_low_rank` is None where the down projection was left out."""

    gate: Tensor  # [tokens, intermediate]
    up: Tensor  # [tokens, intermediate]
    low_rank: Tensor | None  # X [Ag; Au]ᵀ
    down_low_rank: Tensor | None  # P Adᵀ


def forward(
    x: Tensor,
    gate_up: Sequence[Projection],
    down: Projection,
    adapters: Sequence[Operands],
    keep_weights: list[Tensor] | None = None,
    skip_down: bool = False,
) -> tuple[Tensor | None, Saved]:
    """The MLP's output and what its backward needs.

    Args:
        x: `[tokens, hidden]` in the compute dtype (the norm's output).
        gate_up: the gate and the up projection, in this order.
        down: the down projection.
        adapters: operands of gate and up, and of down.
        keep_weights: see `projection.forward`; gets the gate's and the up projection's dense weights.
        skip_down: leave out the down projection: a recomputation needs everything but the output.

    Returns:
        `[tokens, hidden]` (None with `skip_down`), and `Saved`.
    """
    (gate, up), low_rank = projection.forward(x, gate_up, adapters[0], keep_weights)
    if skip_down:
        return None, Saved(gate, up, low_rank, None)
    product = swiglu(gate, up)  # [tokens, intermediate]
    (output,), down_low_rank = projection.forward(product, [down], adapters[1])
    return output, Saved(gate, up, low_rank, down_low_rank)


def backward(
    grad: Tensor,
    x: Tensor,
    gate_up: Sequence[Projection],
    down: Projection,
    adapters: Sequence[Operands],
    saved: Saved,
    needs_leaves: Sequence[bool],
    needs_x: bool = True,
    weights: Sequence[Tensor] | None = None,
    owns_saved: bool = False,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Gradients of the MLP's input and of its leaves (gate, up, down; `LEAVES` each), in the compute dtype.

    Args:
        grad: `[tokens, hidden]` in the compute dtype; read, never written.
        x: the forward's input.
        gate_up: the forward's gate and up projections.
        down: the forward's down projection.
        adapters: operands of gate and up, and of down.
        saved: the forward's `Saved`.
        needs_leaves: three times `LEAVES` flags.
        needs_x: whether dX is wanted.
        weights: dense gate and up weights kept by a forward that has just run.
        owns_saved: G and U belong to this call alone, so dG and dU may be written over them.
    """
    stacked_a, (lora_b,) = adapters[1]
    # dP first, alone: the down projection's own leaves need P, which the SwiGLU backward makes from G and U below.
    grad_product = torch.mm(grad, down.dense(x.dtype))  # [tokens, intermediate]
    grad_low_rank = None
    if stacked_a is not None and lora_b is not None:
        grad_low_rank = torch.empty((x.shape[0], down.rank), dtype=x.dtype, device=x.device)
        grad_low_rank.addmm_(grad, lora_b, beta=0, alpha=down.scale)
        grad_product.addmm_(grad_low_rank, stacked_a)
    own = (grad_product, saved.gate, saved.up) if owns_saved else None
    product, grad_gate, grad_up = swiglu_backward(grad_product, saved.gate, saved.up, out=own)
    del grad_product
    down_low_rank = saved.down_low_rank
    if down_low_rank is None and stacked_a is not None:
        down_low_rank = torch.mm(product, stacked_a.t())
    down_grads = _down_leaf_grads(grad, product, grad_low_rank, down_low_rank, down.scale, needs_leaves[2 * LEAVES :])
    del product
    grad_x, leaf_grads = projection.backward(
        (grad_gate, grad_up), x, gate_up, adapters[0], saved.low_rank, needs_leaves[: 2 * LEAVES], needs_x, weights
    )
    return grad_x, leaf_grads + down_grads


def _down_leaf_grads(
    grad: Tensor,
    product: Tensor,
    grad_low_rank: Tensor | None,
    low_rank: Tensor | None,
    scale: float,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """dW, db, dA, dB of the down projection from dY `[tokens, hidden]` and P `[tokens, intermediate]`."""
    needs_weight, needs_bias, needs_a, needs_b = needs
    return [
        torch.mm(grad.t(), product) if needs_weight else None,
        grad.sum(0, dtype=projection.sum_dtype(grad.dtype)) if needs_bias else None,
        torch.mm(grad_low_rank.t(), product) if needs_a and grad_low_rank is not None else None,
        projection.grad_of_b(grad, low_rank, scale) if needs_b and low_rank is not None else None,
    ]


class _MLP(torch.autograd.Function):
    """Autograd shell of the pair above, for an MLP whose decoder layer runs stock."""

    @staticmethod
    def forward(
        ctx: Any,
        gate_up: Sequence[Projection],
        down: Projection,
        state: AutocastState,
        x: Tensor,
        *leaves: Tensor | None,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        ctx.gate_up, ctx.down, ctx.shape, ctx.compute_dtype = gate_up, down, x.shape, state.compute_dtype(x.dtype)
        with suspended(x.device.type):
            adapters = operands([gate_up, [down]], ctx.compute_dtype)
            output, saved = forward(rows.to(ctx.compute_dtype), gate_up, down, adapters)
        ctx.save_for_backward(rows, *saved, *leaves)
        return output.view(x.shape)  # type: ignore[union-attr]

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, *rest = ctx.saved_tensors
        saved, leaves = Saved(*rest[: len(Saved._fields)]), rest[len(Saved._fields) :]
        gate, up, down = restore_leaves([*ctx.gate_up, ctx.down], leaves)
        needs_x, needs_leaves = ctx.needs_input_grad[3], ctx.needs_input_grad[4:]
        with suspended(rows.device.type):
            grad_x, leaf_grads = backward(
                grad.reshape(-1, grad.shape[-1]).to(ctx.compute_dtype),
                rows.to(ctx.compute_dtype),
                (gate, up),
                down,
                operands([(gate, up), [down]], ctx.compute_dtype),
                saved,
                needs_leaves,
                needs_x,
            )
            leaf_grads = to_leaf_dtypes(leaf_grads, leaves)
        if grad_x is not None:
            grad_x = grad_x.to(rows.dtype).view(ctx.shape)
        return None, None, None, grad_x, *leaf_grads


def apply_mlp(x: Tensor, gate_up: Sequence[Projection], down: Projection) -> Tensor:
    """Differentiable gated MLP over `x` `[..., hidden]`; returns `[..., hidden]` in the compute dtype."""
    state = AutocastState.current(x.device.type)
    return _MLP.apply(gate_up, down, state, x, *flatten_leaves([*gate_up, down]))  # type: ignore[no-any-return]
