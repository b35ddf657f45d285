"""Rotary position embedding of queries and keys, in the layout a projection leaves: [batch, length, heads, head_dim],
seen as Hugging Face's [batch, heads, length, head_dim]."""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

from fastft.bench.operations.base import Cost, Function, Inputs, Operation, Problem, normal, normal_like
from fastft.bench.registry import ModelShape

LENGTH = 2048  # tokens of a row; fewer where there are fewer


def _batch_and_length(tokens: int) -> tuple[int, int]:
    """Rows of 2,048 tokens, or one row where the tokens do not divide."""
    return (tokens // LENGTH, LENGTH) if tokens % LENGTH == 0 else (1, tokens)


def _draw(problem: Problem, generator: torch.Generator) -> Inputs:
    shape = problem.shape
    batch, length = _batch_and_length(problem.tokens)
    q, k = (
        normal(problem, generator, batch, length, heads, shape.head_dim, grad=False).transpose(1, 2).requires_grad_()
        for heads in (shape.heads, shape.kv_heads)
    )
    half = torch.arange(0, shape.head_dim, 2, device=problem.device, dtype=torch.float32)
    frequencies = shape.rope_theta ** (-half / shape.head_dim)
    angles = torch.arange(length, device=problem.device)[:, None] * frequencies[None, :]
    angles = torch.cat((angles, angles), -1)[None]  # [1, length, head_dim]
    cos, sin = angles.cos().to(problem.dtype), angles.sin().to(problem.dtype)
    return Inputs({"q": q, "k": k, "cos": cos, "sin": sin}, (normal_like(q, generator), normal_like(k, generator)))


def _rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def _eager(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As transformers' apply_rotary_pos_emb."""
    cos, sin = cos[:, None], sin[:, None]
    return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin


def _cost(shape: ModelShape, tokens: int, itemsize: int, mode: str) -> Cost:
    elements = tokens * (shape.heads + shape.kv_heads) * shape.head_dim
    passes = {"forward": 1, "backward": 1, "full": 2}[mode]
    return Cost(3 * passes * elements, 2 * passes * elements * itemsize)


def _fastft() -> Function:
    functional = import_module("fastft.functional")
    return lambda q, k, cos, sin: functional.rope(q, k, cos, sin)


def _liger() -> Function:
    function = import_module("liger_kernel.ops").LigerRopeFunction
    return lambda q, k, cos, sin: function.apply(q, k, cos, sin)


def _unsloth() -> Function:
    function = import_module("unsloth.kernels.rope_embedding").fast_rope_embedding
    return lambda q, k, cos, sin: function(q, k, cos[0], sin[0])


OPERATION = Operation(
    name="rope",
    draw=_draw,
    reference=_eager,
    cost=_cost,
    providers={
        "fastft": _fastft,
        "torch": lambda: _eager,
        "liger": _liger,
        "unsloth": _unsloth,
    },
    rowwise=("q", "k"),
    check_rows=1,
)
