"""What a decoder layer holds and needs at each level, in bytes, from its shapes: the planner's input.

The terms are the tensors of autograd/decoder_layer.py, counted where they live at once. With T tokens, element sizes
e (compute dtype) and s (the residual stream), and per token q, k/v, h, i: query and key/value widths, hidden and
intermediate size:

    saved     keep      x s·h, Q K V e(q + 2kv), O e·q, attention's statistics 4 per head, h s·h, two 1/rms, G U 2e·i,
                        and X Aᵀ of each product with adapters, e·rank
              lean      the same without G and U and the MLP's X Aᵀ
              recompute x;   offload: nothing (x is in host memory, and more if that pays: away.py)
    working   the larger of two moments of a layer's backward: the MLP's tile with everything the attention half still
              holds for its own backward, and attention's backward with its workspace

Dense copies of weights (4-bit ones, or of another dtype than the products') count where they are alive. Time is in
floating-point operations: only ratios matter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fastft.autograd.layer_call import Away
from fastft.autograd.mlp_half import tile_rows
from fastft.memory.away import AWAY, STATISTIC, goes_away, late, offload_cost
from fastft.memory.planner import LevelCost

__all__ = ["LayerShape", "StepCosts", "step_costs", "with_gradients", "without_graphs"]

_ACCUMULATOR = 4  # bytes of attention backward's dQ while it is summed
_EAGER_OPERATIONS = 2e12  # where graphs pay, a layer that runs without one costs the host 3 milliseconds more
_TILE_OPERATIONS = 3e10  # a further tile of the MLP costs a layer 50 microseconds: launches, products' last waves


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One decoder layer, and how it is computed.

    Attributes:
        hidden: width of the residual stream.
        query: heads · head_dim.
        key_value: key/value heads · head_dim.
        heads: query heads.
        intermediate: columns of gate, up.
        qkv_rank: columns of X Aᵀ of Q, K and V together (0 without adapters).
        output_rank: likewise of the output projection.
        gate_up_rank: likewise of gate and up.
        down_rank: likewise of down.
        head_norms: whether Q and K are normalized per head.
        compute_bytes: element size of the products' dtype.
        stream_bytes: element size of the residual stream.
        copied: whether each use makes a copy of the weights in the products' dtype: dequantized, or cast.
        drops: whether adapters' inputs are dropped out.
    """

    hidden: int
    query: int
    key_value: int
    heads: int
    intermediate: int
    qkv_rank: int
    output_rank: int
    gate_up_rank: int
    down_rank: int
    head_norms: bool
    compute_bytes: int
    stream_bytes: int
    copied: bool
    drops: bool = False


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What `make_plan` takes besides the budget."""

    levels: dict[str, LevelCost]
    forward_working: int
    loss_working: int
    forward_operations: float = 0.0  # of a layer's products
    compact: int = 0  # as they were asked for
    away: Away = "input"  # what of an offloaded layer is in host memory
    late: bool = False  # and comes back when that is reached, not ahead of time


def step_costs(
    shape: LayerShape,
    *,
    tokens: int,
    longest: int,
    vocabulary: int,
    loss_chunk: int,
    head_trains: bool = False,
    compact: int = 0,
    away: Away | None = None,
) -> StepCosts:
    """Costs of one layer at every level, and the working memory around the layers.

    Args:
        shape: the layer.
        tokens: in a batch.
        longest: length of a row, for attention's operations.
        vocabulary: rows of the head.
        loss_chunk: bytes of the logits that exist at once.
        head_trains: whether the head's weight gets a gradient (float32 while it is summed).
        compact: with the MLP in tiles of so many rows at most; 0 for the usual ones.
        away: the most of an offloaded layer that goes to host memory; None: as much as pays.
    """
    e, s = shape.compute_bytes, shape.stream_bytes
    hidden, query, both = shape.hidden, shape.query, 2 * shape.key_value
    stream = s * hidden * tokens
    narrow = e * hidden * tokens
    projected = e * (query + both) * tokens
    output = e * query * tokens
    statistics = STATISTIC * shape.heads * tokens
    key_value_heads = shape.heads * shape.key_value // query
    raw = 0  # Q and K before their norms, and 1/rms of each head
    if shape.head_norms:
        raw = (e * (query + shape.key_value) + STATISTIC * (shape.heads + key_value_heads)) * tokens
    attention_ranks = e * (shape.qkv_rank + shape.output_rank) * tokens
    attention = projected + raw + output + statistics + 2 * STATISTIC * tokens + attention_ranks
    gate_up = e * (2 * shape.intermediate + shape.gate_up_rank + shape.down_rank) * tokens

    dense = e if shape.copied else 0
    qkv_weight = dense * (query + both) * hidden
    output_weight = dense * query * hidden
    gate_up_weight = 2 * dense * shape.intermediate * hidden
    down_weight = dense * shape.intermediate * hidden
    rows = tile_rows(tokens, shape.intermediate, e, compact)
    tile = rows * e * (3 * shape.intermediate + shape.gate_up_rank + hidden + shape.down_rank)
    dropped = rows * e * shape.intermediate if shape.drops else 0  # D(P), and in the backward U A before and after
    tile += 2 * dropped

    # The MLP's backward: dy, dX of the MLP and RMSNorm(h) beside the tile.
    around_mlp = stream + 2 * narrow + tile + gate_up_weight + down_weight
    made_again = attention + stream + narrow + qkv_weight + output_weight  # by a recomputation: also h and RMSNorm(x)
    # Attention's backward: dy, dh, dO, dQ dK dV; in flash and cuDNN the accumulator, a sum for each row and head, and
    # with grouped queries dK and dV of every query head, before they are added up.
    workspace = (_ACCUMULATOR * query + STATISTIC * shape.heads) * tokens
    if shape.key_value < query:
        workspace += 2 * output
    around_attention = stream + narrow + output + projected + workspace
    kept_working = max(around_mlp, around_attention + output_weight, around_attention + projected + qkv_weight)
    recompute_working = max(around_mlp + made_again, around_attention + attention + narrow + qkv_weight)

    half_products = 2 * tokens * hidden * (2 * query + both)
    attention_operations = 2 * tokens * longest * query
    lean_operations = 4 * tokens * hidden * shape.intermediate
    recompute_operations = half_products + attention_operations + lean_operations
    more_tiles = -(-tokens // rows) - -(-tokens // tile_rows(tokens, shape.intermediate, e))
    tiling = _TILE_OPERATIONS * more_tiles
    forward_operations = 2.0 * tokens * hidden * (2 * query + both + 3 * shape.intermediate)
    most = goes_away(
        tokens=tokens,
        longest=longest,
        hidden=hidden,
        query=query,
        key_value=shape.key_value,
        heads=shape.heads,
        intermediate=shape.intermediate,
        compute_bytes=e,
        stream_bytes=s,
    )
    if away is None or AWAY.index(away) > AWAY.index(most):
        away = most
    forward_tile = rows * e * (3 * shape.intermediate + shape.down_rank) + dropped
    forward_working = max(
        attention + 2 * narrow + stream + gate_up_weight + forward_tile,
        stream + 2 * narrow + forward_tile + down_weight,
    )
    offload = offload_cost(
        away,
        longest=longest,
        stream=stream,
        further={"input": 0, "attention": output + statistics, "half": attention + stream}[away],
        backward=kept_working + attention + stream if away == "half" else recompute_working,
        forward=forward_working,
        operations=recompute_operations + tiling,
        attention=attention_operations,
        products=half_products,
        busy=forward_operations,
    )
    levels = {
        "keep": LevelCost(stream + attention + stream + gate_up, kept_working, 0, tiling),
        "lean": LevelCost(stream + attention + stream, kept_working, 0, lean_operations + tiling),
        "recompute": LevelCost(stream, recompute_working, 0, recompute_operations + tiling),
        "offload": offload,
    }
    head = 4 * vocabulary * hidden if head_trains else 0
    loss_working = loss_chunk + 2 * stream + 2 * narrow + head
    return StepCosts(levels, forward_working, loss_working, forward_operations, compact, away, late(longest))


def with_gradients(costs: StepCosts, gradients: int) -> StepCosts:
    """The same, where each layer's backward leaves `gradients` bytes behind; they count as there from the start.

    Backwards run from the last layer to the first, so what a layer will leave is not there while what it saves still
    is: that much less is saved. (Level offload saves nothing to set it against.)
    """
    levels = {
        level: replace(cost, saved=max(0, cost.saved - gradients), working=cost.working + gradients)
        for level, cost in costs.levels.items()
    }
    return replace(costs, levels=levels)


def without_graphs(costs: StepCosts, level: str) -> StepCosts:
    """The same, where all layers but those at `level` are replayed from CUDA graphs."""
    eager = costs.levels[level]
    return replace(costs, levels=costs.levels | {level: replace(eager, seconds=eager.seconds + _EAGER_OPERATIONS)})
