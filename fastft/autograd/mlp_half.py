"""The gated MLP: Y = (silu(X Wgᵀ) ⊙ X Wuᵀ) Wdᵀ, each product with its adapter.

With G, U the gate and up outputs [tokens, intermediate], P = silu(G) ⊙ U and dP the gradient through the down
projection:

    dU = dP ⊙ silu(G)        dG = dP ⊙ U ⊙ σ(G) (1 + G (1 − σ(G)))

What is kept is G and U (level *keep*) or nothing: then the backward makes them again from X. P is made again in the
kernel that makes dG and dU in either case (it reads G and U anyway). Gate and up share X, so they are one group, and G
and U lie side by side.

Every row goes its own way, so both passes walk over the tokens in tiles: the tensors [tile, intermediate], of which the
backward holds three pairs' worth, are what would otherwise set the peak memory of a training step. Weights are
dequantized once for all tiles; adapters' gradients are summed over tiles in float32. A tile is large enough that the
matrix products do not notice; where memory is short, the caller asks for smaller ones, which they do a little.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastft.autograd.autocast import AutocastState, suspended
from fastft.autograd.first_order import first_order
from fastft.autograd.products import Products, add_leaf_grads, products, to_leaf_dtypes
from fastft.autograd.projection import LEAVES, Projection, flatten_leaves, restore_leaves
from fastft.kernels.swiglu import swiglu, swiglu_backward

TILE_BYTES = 384 * 2**20  # of gate, up and their product: 4,681 tokens of an 8B model in 16 bits
COMPACT_ROWS = (2048, 1024)  # small tiles: they fill the device, but do not hide every product's last wave
TILE_MULTIPLE = 128  # rows a matrix unit's tile takes


class Saved(NamedTuple):
    """What level *keep* keeps besides the input."""

    gate_up: Tensor  # [tokens, 2 · intermediate]
    low_rank: Tensor | None  # X [Ag; Au]ᵀ
    down_low_rank: Tensor | None  # P Adᵀ


def tile_rows(tokens: int, intermediate: int, itemsize: int, compact: int = 0) -> int:
    """Tokens in a tile: as many as `TILE_BYTES` (and `compact`, if not 0) allow, in tiles of equal size."""
    most = max(TILE_MULTIPLE, TILE_BYTES // (3 * intermediate * itemsize))
    if compact:
        most = min(most, compact)
    tiles = max(1, -(-tokens // most))
    rows = -(-tokens // tiles)
    return min(tokens, -(-rows // TILE_MULTIPLE) * TILE_MULTIPLE)


def _tiles(tokens: int, rows: int) -> Iterator[slice]:
    for start in range(0, tokens, rows):
        yield slice(start, min(start + rows, tokens))


def forward(
    x: Tensor,
    gate_up: Products,
    down: Products,
    width: int,
    intermediate: int,
    keep: bool,
    compact: int = 0,
) -> tuple[Tensor, Saved | None]:
    """The MLP's output [tokens, hidden] and, with `keep`, what its backward needs.

    Args:
        x: `[tokens, hidden]` in the compute dtype, with or without `gate_up`'s room.
        gate_up: products of the gate and the up projection, in this order.
        down: products of the down projection.
        width: hidden, the columns of the output.
        intermediate: columns of the gate.
        keep: whether gate and up are kept.
        compact: the most rows of a tile where memory is short; 0 for the usual ones.
    """
    tokens = x.shape[0]
    output = x.new_empty((tokens, width))
    rows = tile_rows(tokens, intermediate, x.element_size(), compact)
    kept = x.new_empty((tokens, 2 * intermediate)) if keep else None
    low_ranks: list[Tensor | None] = []
    down_low_ranks: list[Tensor | None] = []
    for part in _tiles(tokens, rows):
        both, low_rank = gate_up.from_row(part.start).forward(x[part], None if kept is None else kept[part])
        room = down.input_room(both.shape[0])
        product = room[:, :intermediate]
        swiglu(both[:, :intermediate], both[:, intermediate:], out=product)
        del both
        _, down_low_rank = down.from_row(part.start).forward(room, output[part])
        if keep:  # copies: a view would keep the room alive
            low_ranks.append(None if low_rank is None else low_rank.contiguous())
            down_low_ranks.append(None if down_low_rank is None else down_low_rank.contiguous())
    if kept is None:
        return output, None
    return output, Saved(kept, _joined(low_ranks), _joined(down_low_ranks))


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return None if not present else present[0] if len(present) == 1 else torch.cat(present)


def backward(
    grad: Tensor,
    x: Tensor,
    gate_up: Products,
    down: Products,
    intermediate: int,
    saved: Saved | None,
    needs_leaves: Sequence[bool],
    needs_x: bool = True,
    compact: int = 0,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Gradients of the MLP's input and of its leaves (gate, up, down; `LEAVES` each), in the compute dtype or wider.

    Args:
        grad: `[tokens, hidden]` in the compute dtype; read, never written.
        x: the forward's input, with or without `gate_up`'s room (which is written to).
        gate_up: products of gate and up.
        down: products of down.
        intermediate: columns of the gate.
        saved: the forward's `Saved`, read and never written; None: gate and up are made again.
        needs_leaves: three times `LEAVES` flags.
        needs_x: whether dX is wanted.
        compact: the most rows of a tile where memory is short; 0 for the usual ones.
    """
    tokens, width = grad.shape
    grad_x = x.new_empty((tokens, width)) if needs_x else None
    leaf_grads: list[Tensor | None] = [None] * (3 * LEAVES)
    rows = tile_rows(tokens, intermediate, x.element_size(), compact)
    for part in _tiles(tokens, rows):
        tile = _tile_backward(
            grad[part],
            x[part],
            gate_up.from_row(part.start),
            down.from_row(part.start),
            intermediate,
            None if saved is None else Saved(*(None if t is None else t[part] for t in saved)),  # type: ignore[arg-type]
            needs_leaves,
            needs_x,
            None if grad_x is None else grad_x[part],
        )
        if rows == tokens:
            return grad_x, tile
        add_leaf_grads(leaf_grads, tile)
    return grad_x, leaf_grads


def _tile_backward(
    grad: Tensor,
    x: Tensor,
    gate_up: Products,
    down: Products,
    intermediate: int,
    saved: Saved | None,
    needs_leaves: Sequence[bool],
    needs_x: bool,
    out: Tensor | None,
) -> list[Tensor | None]:
    """The leaves' gradients from one tile of tokens; dX goes to `out`."""
    tokens, width = grad.shape
    both = gate_up.grad_room(tokens)  # G and U, then dG and dU
    gate, up = both[:, :intermediate], both[:, intermediate : 2 * intermediate]
    if saved is None:
        _, low_rank = gate_up.forward(x, both[:, : 2 * intermediate])
        made_gate, made_up, down_low_rank = gate, up, None
    else:
        made_gate, made_up = saved.gate_up[:, :intermediate], saved.gate_up[:, intermediate:]
        low_rank, down_low_rank = saved.low_rank, saved.down_low_rank
    needs_down = needs_leaves[2 * LEAVES :]
    if down.columns:
        room = down.grad_room(tokens)
        room[:, :width].copy_(grad)
    else:
        room = grad
    # dP first, alone: the down projection's own leaves need P, which the SwiGLU backward makes from G and U.
    grad_product, low_rank_grad = down.input_grad(room)
    product, _, _ = swiglu_backward(grad_product, made_gate, made_up, out=(grad_product, gate, up))
    assert product is not None
    down_grads = down.leaf_grads(room, low_rank_grad, product, down_low_rank, needs_down)
    del grad_product, product, room
    _, grad_low_rank = gate_up.input_grad(both, needs_x, out)
    return gate_up.leaf_grads(both, grad_low_rank, x, low_rank, needs_leaves[: 2 * LEAVES]) + down_grads


class _MLP(torch.autograd.Function):
    """Autograd shell of the pair, for an MLP whose decoder layer does not run as one node."""

    @staticmethod
    def forward(
        ctx: Any,
        gate_up: tuple[Projection, Projection],
        down: Projection,
        state: AutocastState,
        x: Tensor,
        *leaves: Tensor | None,
    ) -> Tensor:
        rows, dtype = x.reshape(-1, x.shape[-1]), state.compute_dtype(x.dtype)
        with suspended(x.device.type):
            made = products(gate_up, dtype), products([down], dtype)
            output, saved = forward(rows.to(dtype), *made, down.out_features, gate_up[0].out_features, keep=True)
        assert saved is not None
        ctx.gate_up, ctx.down, ctx.compute_dtype, ctx.shape = gate_up, down, dtype, x.shape
        ctx.save_for_backward(rows, *saved, *leaves)
        return output.view(*x.shape[:-1], output.shape[-1])

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
                products((gate, up), ctx.compute_dtype),
                products([down], ctx.compute_dtype),
                gate.out_features,
                saved,
                needs_leaves,
                needs_x,
            )
            leaf_grads = to_leaf_dtypes(leaf_grads, leaves)
        if grad_x is not None:
            grad_x = grad_x.to(rows.dtype).view(ctx.shape)
        return None, None, None, grad_x, *leaf_grads


def apply_mlp(x: Tensor, gate_up: Sequence[Projection], down: Projection) -> Tensor:
    """The MLP, differentiable in x and in every leaf.

    Args:
        x: `[..., hidden]`. Under autocast the products run in its dtype, else in `x`'s.
        gate_up: the gate and the up projection.
        down: the down projection.

    Returns:
        `[..., hidden]` in the compute dtype.
    """
    gate, up = gate_up
    state = AutocastState.current(x.device.type)
    return _MLP.apply((gate, up), down, state, x, *flatten_leaves([gate, up, down]))  # type: ignore[no-any-return]
