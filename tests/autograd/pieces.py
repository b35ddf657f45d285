"""What the autograd tests are built from: projections drawn from seeds, and stock code's arithmetic.

Ours is compared with *stock* (PEFT's own lora.Linear over the same numbers, transformers' order of operations,
autograd) in the same dtype, and with stock in float64 as the reference. Everything here is plain torch until
`stock_linear` meets an adapter: the tests that only check derivatives never import PEFT.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastft.autograd.attention_half import Heads, Norm
from fastft.autograd.projection import LEAVES, Dropout, Projection
from fastft.kernels.backend import interpreting
from fastft.kernels.nf4 import QuantizedWeight, dequantize_torch

EPSILON = 1e-5
_STREAMS = itertools.count(1)
SEEDS = (0, 1, 2)
# A whole layer amplifies roundings (softmax, four norms): over three seeds of so small a layer two equally good
# programs differ by a factor of two on some tensor.
MANY_SEEDS = range(15 if interpreting() else 25)
# In Triton's interpreter a program costs milliseconds, and 16-bit arithmetic is numpy's: one dtype, small shapes.
DTYPES = [torch.float32] if interpreting() else [torch.bfloat16, torch.float16, torch.float32]
# (activations, adapters, autocast)
MIXTURES = [(torch.float32, torch.bfloat16, False)] + (
    []
    if interpreting()
    else [
        (torch.bfloat16, torch.float32, False),
        (torch.float32, torch.float32, True),
        (torch.bfloat16, torch.float32, True),
        (torch.float32, torch.bfloat16, True),
    ]
)
PLAIN = [(dtype, dtype, False) for dtype in DTYPES]


def name_of(value: object) -> str | None:
    """Test ids: `bfloat16` for a dtype; pytest's own for the rest."""
    if isinstance(value, tuple):
        activations, adapters, autocast = value
        return f"{name_of(activations)}+{name_of(adapters)}-lora" + ("-autocast" if autocast else "")
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


def draw(*shape: int, dtype: torch.dtype, scale: float = 1.0, requires_grad: bool = False) -> Tensor:
    """Normal numbers; the same seed gives the same numbers in every dtype."""
    return (torch.randn(shape, dtype=torch.float64) * scale).to(dtype).requires_grad_(requires_grad)


def draw_quantized(out_features: int, in_features: int, nested: bool) -> QuantizedWeight:
    """A 4-bit weight of random bytes in blocks of 16, two of whose scale blocks are used where scales are nested."""
    elements, size = out_features * in_features, in_features**-0.5
    blocks = -(-elements // 16)
    packed = torch.randint(0, 256, ((elements + 1) // 2,), dtype=torch.uint8)
    code = torch.linspace(-1, 1, 16)
    if not nested:
        absmax = (torch.rand(blocks) + 1.0) * size
        return QuantizedWeight(packed, absmax, code, 16, (out_features, in_features), torch.float32)
    absmax_blocksize = max(1, blocks // 2)
    return QuantizedWeight(
        packed=packed,
        absmax=torch.randint(0, 256, (blocks,), dtype=torch.uint8),
        code=code,
        blocksize=16,
        shape=(out_features, in_features),
        dtype=torch.float32,
        absmax_code=torch.linspace(-1, 1, 256),
        absmax_scale=torch.rand(-(-blocks // absmax_blocksize)) * size,
        absmax_blocksize=absmax_blocksize,
        offset=torch.tensor(1.5 * size),
    )


def draw_projection(
    out_features: int,
    in_features: int,
    *,
    dtype: torch.dtype = torch.float64,
    adapter_dtype: torch.dtype | None = None,
    rank: int | None = 2,
    trains: str = "a b",
    bias: bool = False,
    quantized: str | None = None,
    dropout: float = 0.0,
) -> Projection:
    """A projection with random leaves, none of them zero.

    Args:
        out_features: rows of the weight.
        in_features: columns of the weight.
        dtype: of weight and bias.
        adapter_dtype: of A and B; None is `dtype`.
        rank: None for no adapter.
        trains: which of "weight bias a b" require gradients.
        bias: whether there is one.
        quantized: "nested" or "flat" for a 4-bit weight.
        dropout: of the adapter's input; every projection has a mask of its own.
    """
    adapter_dtype, wanted = adapter_dtype or dtype, trains.split()
    weight: Tensor | QuantizedWeight
    if quantized is None:
        weight = draw(out_features, in_features, dtype=dtype, scale=in_features**-0.5, requires_grad="weight" in wanted)
    else:
        weight = draw_quantized(out_features, in_features, quantized == "nested")
    return Projection(
        weight,
        draw(out_features, dtype=dtype, scale=0.5, requires_grad="bias" in wanted) if bias else None,
        None
        if rank is None
        else draw(rank, in_features, dtype=adapter_dtype, scale=in_features**-0.5, requires_grad="a" in wanted),
        None if rank is None else draw(out_features, rank, dtype=adapter_dtype, scale=0.5, requires_grad="b" in wanted),
        1.0 if rank is None else 1.7,
        dropout=Dropout(dropout, torch.tensor([5]), next(_STREAMS)) if dropout else None,
    )


def draw_norm(width: int, dtype: torch.dtype = torch.float64, trains: bool = False) -> Norm:
    """An RMSNorm whose weight is not ones."""
    weight = 1 + 0.3 * torch.randn(width, dtype=torch.float64)
    return Norm(weight.to(dtype).requires_grad_(trains), EPSILON)


def draw_angles(batch: int, sequence: int, rotary: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """cos and sin [batch, sequence, rotary], halves repeated as transformers makes them."""
    angles = torch.rand(batch, sequence, rotary // 2, dtype=torch.float64) * math.tau
    angles = torch.cat((angles, angles), -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def fresh(tensor: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
    """A leaf of its own with the same numbers, and with a gradient if the original has one."""
    if tensor is None:
        return None
    return tensor.detach().clone().to(dtype or tensor.dtype).requires_grad_(tensor.requires_grad)


def copy_projection(projection: Projection, dtype: torch.dtype | None = None) -> Projection:
    """Leaves of its own, in `dtype` if given; a 4-bit weight then becomes the dense numbers it stands for."""
    weight = projection.weight
    if isinstance(weight, Tensor):
        weight = fresh(weight, dtype)
    elif dtype is not None:
        weight = dequantize_torch(weight, dtype)
    leaves = [fresh(t, dtype) for t in (projection.bias, projection.lora_a, projection.lora_b)]
    return Projection(weight, *leaves, projection.scale, dropout=projection.dropout)


def copy_norm(norm: Norm, dtype: torch.dtype | None = None) -> Norm:
    """A norm with a weight of its own, in `dtype` if given."""
    return replace(norm, weight=fresh(norm.weight, dtype))


class Masked(nn.Module):
    """Stands in a PEFT layer where nn.Dropout stood: drops what our projection drops."""

    def __init__(self, dropout: Dropout) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout.of(torch.ones_like(x).reshape(-1, x.shape[-1])).view_as(x) * x


def stock_linear(projection: Projection, dtype: torch.dtype) -> nn.Module:
    """The projection as PEFT has it: an nn.Linear, or lora.Linear around one, over leaves of its own.

    Args:
        projection: whose numbers to copy.
        dtype: in which a 4-bit weight is dequantized, as bitsandbytes does (`bnb_4bit_compute_dtype`).
    """
    weight, bias, lora_a, lora_b = (
        projection.weight if isinstance(projection.weight, Tensor) else dequantize_torch(projection.weight, dtype),
        projection.bias,
        projection.lora_a,
        projection.lora_b,
    )
    holder = nn.Module()
    holder.linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    if lora_a is not None:
        from peft import LoraConfig, inject_adapter_in_model

        rank = lora_a.shape[0]
        config = LoraConfig(r=rank, lora_alpha=projection.scale * rank, target_modules=["linear"])
        inject_adapter_in_model(config, holder)
        if projection.dropout is not None:
            holder.linear.lora_dropout["default"] = Masked(projection.dropout)
        holder.linear.lora_A["default"].weight = nn.Parameter(lora_a.detach().clone(), lora_a.requires_grad)
        holder.linear.lora_B["default"].weight = nn.Parameter(lora_b.detach().clone(), lora_b.requires_grad)
    base = holder.linear if lora_a is None else holder.linear.base_layer
    base.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)
    if bias is not None:
        base.bias = nn.Parameter(bias.detach().clone(), bias.requires_grad)
    return holder.linear


def stock_leaves(linear: nn.Module) -> tuple[Tensor | None, ...]:
    """weight, bias, A and B of what `stock_linear` made."""
    base = getattr(linear, "base_layer", linear)
    if base is linear:
        return base.weight, base.bias, None, None
    return base.weight, base.bias, linear.lora_A["default"].weight, linear.lora_B["default"].weight


LEAF_NAMES = ("weight", "bias", "lora_a", "lora_b")


def named_gradients(leaves: Sequence[Sequence[Tensor | None]], **others: Tensor) -> dict[str, Tensor]:
    """Gradients by name: `LEAVES` per projection, then others; a leaf that trains must have one."""
    named = {f"{i}.{name}": leaf for i, four in enumerate(leaves) for name, leaf in zip(LEAF_NAMES, four, strict=True)}
    assert all(len(four) == LEAVES for four in leaves)
    gradients = {}
    for name, leaf in (named | others).items():
        if leaf is None or not leaf.requires_grad:
            continue
        assert leaf.grad is not None, f"{name} has no gradient"
        assert leaf.grad.dtype == leaf.dtype
        gradients[name] = leaf.grad
    return gradients


def projection_leaves(group: Sequence[Projection]) -> list[tuple[Tensor | None, ...]]:
    """weight (None if packed), bias, A and B of each projection."""
    return [(p.weight if isinstance(p.weight, Tensor) else None, p.bias, p.lora_a, p.lora_b) for p in group]


def plain_norm(x: Tensor, norm: Norm) -> Tensor:
    """RMSNorm in transformers' order of operations; statistics in float64 for float64."""
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    normalized = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.epsilon)
    return norm.weight * normalized.to(x.dtype)


def plain_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotation of x [batch, sequence, heads, head_dim] in transformers' order; columns beyond cos's pass through."""
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    turned, passed = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, -1)
    return torch.cat((turned * cos + torch.cat((-second, first), -1) * sin, passed), -1)


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Grouped-query causal attention, [batch, heads, sequence, head_dim] to [batch, sequence, heads, head_dim]."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    wide = torch.float64 if scores.dtype == torch.float64 else torch.float32
    weights = scores.masked_fill(hidden, float("-inf")).to(wide).softmax(-1).to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous()


def plain_mlp(x: Tensor, gate: Callable, up: Callable, down: Callable) -> Tensor:
    """The gated MLP over stock linears."""
    return down(F.silu(gate(x)) * up(x))


def plain_layer(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    linears: Sequence[Callable[[Tensor], Tensor]],
    norms: Sequence[Norm | None],
    heads: Heads,
) -> Tensor:
    """A Llama or Qwen3 decoder layer in transformers' order of operations, over seven linears and four norms."""
    q_proj, k_proj, v_proj, o_proj, gate, up, down = linears
    input_norm, post_norm, query_norm, key_norm = norms
    normed = plain_norm(x, input_norm)
    query = q_proj(normed).unflatten(-1, (heads.query, heads.dim))
    key = k_proj(normed).unflatten(-1, (heads.key_value, heads.dim))
    value = v_proj(normed).unflatten(-1, (heads.key_value, heads.dim))
    if query_norm is not None:
        query, key = plain_norm(query, query_norm), plain_norm(key, key_norm)
    query, key = plain_rope(query, cos, sin), plain_rope(key, cos, sin)
    attended = causal_attention(*(t.transpose(1, 2) for t in (query, key, value)))
    h = x + o_proj(attended.flatten(2))
    return h + plain_mlp(plain_norm(h, post_norm), gate, up, down)
