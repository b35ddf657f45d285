"""The gated MLP: Y = (silu(X Wgᵀ) ⊙ X Wuᵀ) Wdᵀ, each product with its adapter.

With G, U the gate and up outputs [tokens, intermediate], P = silu(G) ⊙ U and dP the gradient through the down projection:

    dU = dP ⊙ silu(G)        dG = dP ⊙ U ⊙ σ(G) (1 + G (1 − σ(G)))

The forward keeps G, U and the two X Aᵀ; P is made again in the kernel that makes dG and dU (it reads G and U anyway), because
keeping it would cost a third [tokens, intermediate]. Gate and up share X, so they are one group: one product with the
stacked A, and one dA. When the caller says that G and U are its own (recomputation), dG and dU are written over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastft.autograd import projection
from fastft.autograd.autocast import AutocastState, suspended
from fastft.autograd.projection import LEAVES, Projection, flatten_leaves, restore_leaves
from fastft.kernels.swiglu import swiglu, swiglu_backward


class Saved(NamedTuple):
    """What the MLP keeps besides its input; `down_low_rank` is None where the down projection was left out."""

    gate: Tensor  # [tokens, intermediate]
    up: Tensor  # [tokens, intermediate]
    low_rank: Tensor | None  # X [Ag; Au]ᵀ
    stacked_a: Tensor | None
    down_low_rank: Tensor | None  # P Adᵀ
    down_stacked_a: Tensor | None


def forward(
    x: Tensor,
    gate_up: Sequence[Projection],
    down: Projection,
    keep_weights: list[Tensor] | None = None,
    skip_down: bool = False,
) -> tuple[Tensor | None, Saved]:
    """The MLP's output and what its backward needs.

    Args:
        x: `[tokens, hidden]` in the compute dtype (the norm's output).
        gate_up: the gate and the up projection, in this order.
        down: the down projection.
        keep_weights: see `projection.forward`; gets the gate's and the up projection's dense weights.
        skip_down: leave out the down projection: a recomputation needs everything but the output.

    Returns:
        `[tokens, hidden]` (None with `skip_down`), and `Saved`.
    """
    (gate, up), saved = projection.forward(x, gate_up, keep_weights)
    if skip_down:
        return None, Saved(gate, up, *saved, None, None)
    product = swiglu(gate, up)  # [tokens, intermediate]
    (output,), down_saved = projection.forward(product, [down])
    return output, Saved(gate, up, *saved, *down_saved)


def backward(
    grad: Tensor,
    x: Tensor,
    gate_up: Sequence[Projection],
    down: Projection,
    saved: Saved,
    needs_leaves: Sequence[bool],
    needs_x: bool = True,
    weights: Sequence[Tensor] | None = None,
    owns_saved: bool = False,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Gradients of the MLP's input and of its leaves (gate, up, down; `LEAVES` each).

    Args:
        grad: `[tokens, hidden]` in the compute dtype; read, never written.
        x: the forward's input.
        gate_up: the forward's gate and up projections.
        down: the forward's down projection.
        saved: the forward's `Saved`.
        needs_leaves: three times `LEAVES` flags.
        needs_x: whether dX is wanted.
        weights: dense gate and up weights kept by a forward that has just run.
        owns_saved: G and U belong to this call alone, so dG and dU may be written over them.
    """
    gate_up_needs, down_needs = needs_leaves[: 2 * LEAVES], needs_leaves[2 * LEAVES :]
    # dP first, alone: the down projection's own leaves need P, which the SwiGLU backward makes from G and U below.
    grad_low_rank = None
    grad_product = torch.mm(grad, down.dense(x.dtype))  # [tokens, intermediate]
    if down.lora_b is not None:
        stacked_a = saved.down_stacked_a if saved.down_stacked_a is not None else down.lora_a.to(x.dtype)  # type: ignore[union-attr]
        grad_low_rank = torch.empty((x.shape[0], down.rank), dtype=x.dtype, device=x.device)
        grad_low_rank.addmm_(grad, down.lora_b.to(x.dtype), beta=0, alpha=down.scale)
        grad_product.addmm_(grad_low_rank, stacked_a)
    own = (grad_product, saved.gate, saved.up) if owns_saved else None
    product, grad_gate, grad_up = swiglu_backward(grad_product, saved.gate, saved.up, out=own)
    del grad_product
    down_grads = _down_leaf_grads(grad, product, grad_low_rank, down, saved, down_needs)
    del product
    grad_x, leaf_grads = projection.backward(
        (grad_gate, grad_up),
        x,
        gate_up,
        projection.Saved(saved.low_rank, saved.stacked_a),
        gate_up_needs,
        needs_x,
        weights,
    )
    return grad_x, leaf_grads + down_grads


def _down_leaf_grads(
    grad: Tensor,
    product: Tensor,
    grad_low_rank: Tensor | None,
    down: Projection,
    saved: Saved,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """dW, db, dA, dB of the down projection from dY [tokens, hidden] and P [tokens, intermediate]."""
    needs_weight, needs_bias, needs_a, needs_b = needs
    leaf_grads: list[Tensor | None] = [None] * LEAVES
    if needs_weight:
        leaf_grads[0] = torch.mm(grad.t(), product).to(down.weight.dtype)
    if needs_bias and down.bias is not None:
        leaf_grads[1] = grad.sum(0, dtype=projection._sum_dtype(grad.dtype)).to(down.bias.dtype)
    if grad_low_rank is not None and down.lora_a is not None and down.lora_b is not None:
        if needs_a:
            leaf_grads[2] = torch.mm(grad_low_rank.t(), product).to(down.lora_a.dtype)
        if needs_b:
            low_rank = saved.down_low_rank
            if low_rank is None:
                low_rank = torch.mm(product, down.lora_a.to(product.dtype).t())
            grad_b = torch.empty((down.out_features, down.rank), dtype=grad.dtype, device=grad.device)
            leaf_grads[3] = grad_b.addmm_(grad.t(), low_rank, beta=0, alpha=down.scale).to(down.lora_b.dtype)
    return leaf_grads


class _MLP(torch.autograd.Function):
    """Autograd shell of the pair above, for an MLP whose decoder layer runs stock."""

    @staticmethod
    def forward(
        ctx: Any, gate_up: Sequence[Projection], down: Projection, state: AutocastState, x: Tensor, *leaves: Tensor | None
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        ctx.gate_up, ctx.down, ctx.shape, ctx.compute_dtype = gate_up, down, x.shape, state.compute_dtype(x.dtype)
        with suspended(x.device.type):
            output, saved = forward(rows.to(ctx.compute_dtype), gate_up, down)
        ctx.save_for_backward(rows, *saved, *leaves)
        return output.view(x.shape)  # type: ignore[union-attr]

    @staticmethod
    @once_differentiable
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
                saved,
                needs_leaves,
                needs_x,
            )
        if grad_x is not None:
            grad_x = grad_x.to(rows.dtype).view(ctx.shape)
        return None, None, None, grad_x, *leaf_grads


def apply_mlp(x: Tensor, gate_up: Sequence[Projection], down: Projection) -> Tensor:
    """Differentiable gated MLP over `x` `[..., hidden]`; returns `[..., hidden]` in the compute dtype."""
    state = AutocastState.current(x.device.type)
    return _MLP.apply(gate_up, down, state, x, *flatten_leaves([*gate_up, down]))  # type: ignore[no-any-return]
