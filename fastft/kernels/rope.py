"""Rotary position embedding of queries and keys, in one launch.

Column i of a head's first half and column i of its second half are one point, turned by the token's angle:

    y1 = x1·cos1 - x2·sin1          forward
    y2 = x2·cos2 + x1·sin2
    d1 = g1·cos1 + g2·sin2          backward: the transpose (with equal halves the same as sin → -sin)
    d2 = g2·cos2 - g1·sin1

Hugging Face repeats the angles, so both halves of cos and sin are equal; nothing here rests on that. cos and sin come
from the model's own rotary module (every kind of scaling lives there), this file only turns. Where cos has R < D
columns (partial rotary) the columns from R on pass through.

Bytes: each element of q and k is read once and written once, in place if `out=(q, k)`. A token's angles are loaded once
for all its heads. Tensors are [B, S, heads, D] by strides: the projection's own layout and the attention's transposed
view are both read as they lie, no copy.

Rounding is Hugging Face's: each of the two products is rounded to the dtype, then their sum (fp32 angles with 16-bit
heads: only the sum).
"""

from __future__ import annotations

import functools

import torch

from fastft.kernels.backend import Settings, launch, launch_on, next_power_of_2, tl, triton, uses_triton

__all__ = ["rope", "rope_torch"]


def rope(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    inverse: bool = False,
    heads_first: bool = False,
    out: tuple[torch.Tensor, torch.Tensor | None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotate queries and keys by their positions' angles.

    Args:
        q: [B, S, q_heads, D], any strides with a contiguous last dimension.
        k: [B, S, k_heads, D] in q's dtype, or None.
        cos: [1 or B, S, R], any float dtype, R even and at most D.
        sin: as cos.
        inverse: apply the transpose instead, which is the backward.
        heads_first: q and k are [B, heads, S, D].
        out: (q_out, k_out) to write into, each of its input's shape and dtype; `out=(q, k)` is in place.

    Returns:
        The rotated q and k, in their own dtype (k None if k was).
    """
    if not (uses_triton(q) and uses_triton(cos) and q.numel()):
        return rope_torch(q, k, cos, sin, inverse=inverse, heads_first=heads_first, out=out)
    partial = cos.shape[-1] < q.shape[-1]
    q_out, k_out = (None, None) if out is None else out
    q, q_out = _source_and_target(q, q_out, partial)
    if k is not None:
        k, k_out = _source_and_target(k, k_out, partial)
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    token_axis, head_axis = (2, 1) if heads_first else (1, 2)
    batch, sequence, q_heads = q.shape[0], q.shape[token_axis], q.shape[head_axis]
    k_heads, k_strides = 0, None
    if k is not None and k_out is not None:
        k_heads = k.shape[head_axis]
        written, read = k_out.stride(), k.stride()
        k_strides = (written[0], written[token_axis], written[head_axis], read[0], read[token_axis], read[head_axis])
    written, read = q_out.stride(), q.stride()
    q_strides = (written[0], written[token_axis], written[head_axis], read[0], read[token_axis], read[head_axis])
    with launch_on(q):
        launch(
            _settings(q_heads, k_heads, cos.shape[-1] // 2, inverse),
            (batch * sequence,),
            q_out,
            k_out,
            q,
            k,
            cos,
            sin,
            q_strides,
            k_strides,
            (0 if cos.shape[0] == 1 else cos.stride(0), cos.stride(1)),
            sequence,
        )
    return q_out, None if k is None else k_out


@functools.cache
def _settings(q_heads: int, k_heads: int, half: int, inverse: bool) -> Settings:
    blocks = tuple(next_power_of_2(extent) for extent in (q_heads, k_heads, half))
    return Settings(
        _rope_kernel,
        HEADS=(q_heads, k_heads),
        HALF=half,
        BLOCKS=blocks,
        INVERSE=inverse,
        num_warps=min(8, max(1, blocks[0] * blocks[2] // 512)),  # 16 points a thread
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["sequence"])
def _rope_kernel(
    q_out,
    k_out,
    q,
    k,
    cos,
    sin,
    q_strides,  # batch, token, head of q_out, then of q
    k_strides,
    angle_strides,  # batch (0 where one row serves all), token
    sequence,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCKS: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """One program: all heads of one token, queries and keys."""
    batch = tl.program_id(0).to(tl.int64) // sequence  # int64: tokens x heads x D passes 2**31
    token = tl.program_id(0).to(tl.int64) % sequence
    column = tl.arange(0, BLOCKS[2])
    mask = column < HALF
    angle_offset = batch * angle_strides[0] + token * angle_strides[1] + column
    cos_first = tl.load(cos + angle_offset, mask=mask, other=0.0).to(tl.float32)[None, :]
    cos_second = tl.load(cos + angle_offset + HALF, mask=mask, other=0.0).to(tl.float32)[None, :]
    sin_first = tl.load(sin + angle_offset, mask=mask, other=0.0).to(tl.float32)[None, :]
    sin_second = tl.load(sin + angle_offset + HALF, mask=mask, other=0.0).to(tl.float32)[None, :]
    ROUND: tl.constexpr = q.dtype.element_ty == cos.dtype.element_ty  # torch multiplies different dtypes in fp32
    if INVERSE:  # y1 = x1·cos1 + x2·sin2 ; y2 = x2·cos2 - x1·sin1: the same shape with the sines exchanged and negated
        sin_first, sin_second = -sin_second, -sin_first
    _rotate_heads(
        q_out + batch * q_strides[0] + token * q_strides[1],
        q + batch * q_strides[3] + token * q_strides[4],
        q_strides[2],
        q_strides[5],
        cos_first,
        cos_second,
        sin_first,
        sin_second,
        HEADS[0],
        HALF,
        BLOCKS[0],
        ROUND,
    )
    if k is not None:
        _rotate_heads(
            k_out + batch * k_strides[0] + token * k_strides[1],
            k + batch * k_strides[3] + token * k_strides[4],
            k_strides[2],
            k_strides[5],
            cos_first,
            cos_second,
            sin_first,
            sin_second,
            HEADS[1],
            HALF,
            BLOCKS[1],
            ROUND,
        )


@triton.jit
def _rotate_heads(
    x_out,
    x,
    out_head_stride,
    head_stride,
    cos_first,  # [1, half block] fp32, and so the three after it
    cos_second,
    sin_first,
    sin_second,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUND: tl.constexpr,
):
    """y1 = x1·cos1 - x2·sin1 ; y2 = x2·cos2 + x1·sin2 for the HEADS heads of one token, which begins at x."""
    head = tl.arange(0, BLOCK)
    column = tl.arange(0, cos_first.shape[1])
    out_offset = head[:, None].to(tl.int64) * out_head_stride + column[None, :]
    offset = head[:, None].to(tl.int64) * head_stride + column[None, :]
    mask = (head < HEADS)[:, None] & (column < HALF)[None, :]
    first = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + offset + HALF, mask=mask, other=0.0).to(tl.float32)
    first_cos, first_sin = first * cos_first, first * sin_second
    second_cos, second_sin = second * cos_second, second * sin_first
    if ROUND:
        first_cos = first_cos.to(x.dtype.element_ty).to(tl.float32)
        first_sin = first_sin.to(x.dtype.element_ty).to(tl.float32)
        second_cos = second_cos.to(x.dtype.element_ty).to(tl.float32)
        second_sin = second_sin.to(x.dtype.element_ty).to(tl.float32)
    tl.store(x_out + out_offset, (first_cos - second_sin).to(x_out.dtype.element_ty), mask=mask)
    tl.store(x_out + out_offset + HALF, (second_cos + first_sin).to(x_out.dtype.element_ty), mask=mask)


def _source_and_target(x: torch.Tensor, out: torch.Tensor | None, partial: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel reads and what it writes, each of its own strides.

    Where columns pass through, `x` is copied into `out` and turned in place there.
    """
    if x.stride(-1) != 1:
        x = x.contiguous()
    if out is None:
        out = torch.empty_like(x)  # x's own strides, where x is dense
    if partial and (out.data_ptr() != x.data_ptr() or out.stride() != x.stride()):
        out.copy_(x)
        return out, out
    return x, out


def rope_torch(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    inverse: bool = False,
    heads_first: bool = False,
    out: tuple[torch.Tensor, torch.Tensor | None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Plain-torch twin of `rope`: same arguments, same arithmetic, any device and dtype."""
    q_out, k_out = (None, None) if out is None else out
    cos, sin = (angles.unsqueeze(1 if heads_first else 2) for angles in (cos, sin))  # [1 or B, S, 1, R], or 1 before S
    q_rotated = _rotate(q, cos, sin, inverse, q_out)
    return q_rotated, None if k is None else _rotate(k, cos, sin, inverse, k_out)


def _rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool, out: torch.Tensor | None
) -> torch.Tensor:
    """One tensor turned in its first R columns by angles that broadcast over it; the rest is copied."""
    rotary = cos.shape[-1]
    half = rotary // 2
    first, second = x[..., :half], x[..., half:rotary]
    cos_first, cos_second, sin_first, sin_second = cos[..., :half], cos[..., half:], sin[..., :half], sin[..., half:]
    if inverse:
        new_first = first * cos_first + second * sin_second
        new_second = second * cos_second - first * sin_first
    else:
        new_first = first * cos_first - second * sin_first
        new_second = second * cos_second + first * sin_second
    if out is None:
        out = torch.empty_like(x)
    out[..., :half] = new_first
    out[..., half:rotary] = new_second
    if rotary < x.shape[-1] and out is not x:
        out[..., rotary:] = x[..., rotary:]
    return out
