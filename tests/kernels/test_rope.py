"""RoPE against transformers' apply_rotary_pos_emb and float64 references."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from fastft.kernels.rope import rope
from tests.kernels.reference import (
    assert_as_good_as_stock,
    assert_same,
    dtypes,
    interpreted_only,
    relative_error,
    sparse_rows,
    twins_only,
)

# batch, sequence, q heads, k heads, head width: odd head counts, half widths that are no power of two, one token
shapes = pytest.mark.parametrize("shape", [(2, 5, 3, 1, 10), (1, 1, 9, 3, 64), (3, 4, 4, 4, 6)], ids=str)


def make_inputs(
    shape: tuple[int, ...], dtype: torch.dtype, *, rotary: int | None = None, angle_batch: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k [B, S, heads, D]; cos, sin [1 or B, S, R] with equal halves, as the rotary modules make them."""
    batch, sequence, q_heads, k_heads, head = shape
    rotary = head if rotary is None else rotary
    angles = torch.rand(angle_batch, sequence, rotary // 2) * 6.3
    angles = torch.cat((angles, angles), dim=-1)
    q, k = (torch.randn(batch, sequence, heads, head).to(dtype) for heads in (q_heads, k_heads))
    return q, k, angles.cos().to(dtype), angles.sin().to(dtype)


def stock_rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' function over the same layout; columns past R are cut off and put back, as partial families do."""
    rotary = cos.shape[-1]
    turned = apply_rotary_pos_emb(q[..., :rotary], k[..., :rotary], cos, sin, unsqueeze_dim=2)
    return tuple(torch.cat((y, x[..., rotary:]), dim=-1) for y, x in zip(turned, (q, k), strict=True))


@dtypes
@shapes
@pytest.mark.parametrize("per_row", [False, True], ids=["shared angles", "angles per row"])
def test_rotation_and_its_backward_are_as_good_as_stock(
    dtype: torch.dtype, shape: tuple[int, ...], per_row: bool
) -> None:
    q, k, cos, sin = make_inputs(shape, dtype, angle_batch=shape[0] if per_row else 1)
    leaves = [x.clone().requires_grad_() for x in (q, k)]
    stock = stock_rope(*leaves, cos, sin)
    exact_leaves = [x.double().requires_grad_() for x in (q, k)]
    exact = stock_rope(*exact_leaves, cos.double(), sin.double())
    grads = [torch.randn_like(x) for x in (q, k)]
    stock_grads = torch.autograd.grad(stock, leaves, grads)
    exact_grads = torch.autograd.grad(exact, exact_leaves, [grad.double() for grad in grads])
    for ours, theirs, reference in zip(rope(q, k, cos, sin), stock, exact, strict=True):
        assert_as_good_as_stock(ours, theirs, reference)
    for ours, theirs, reference in zip(rope(*grads, cos, sin, inverse=True), stock_grads, exact_grads, strict=True):
        assert_as_good_as_stock(ours, theirs, reference)


@twins_only
@dtypes
def test_rounds_as_stock_does(dtype: torch.dtype) -> None:
    q, k, cos, sin = make_inputs((2, 5, 3, 1, 64), dtype)
    for ours, theirs in zip(rope(q, k, cos, sin), stock_rope(q, k, cos, sin), strict=True):
        assert_same(ours, theirs)


@dtypes
@pytest.mark.parametrize("in_place", [False, True], ids=["out of place", "in place"])
def test_partial_rotary_copies_the_rest(dtype: torch.dtype, in_place: bool) -> None:
    q, k, cos, sin = make_inputs((2, 3, 3, 2, 20), dtype, rotary=6)
    expected = stock_rope(q.double(), k.double(), cos.double(), sin.double())
    ours = rope(q, k, cos, sin, out=(q, k) if in_place else None)
    for y, x, reference, stock in zip(ours, (q, k), expected, stock_rope(q.clone(), k.clone(), cos, sin), strict=True):
        assert (y is x) == in_place
        assert_same(y[..., 6:], x[..., 6:])
        if not in_place:
            assert_as_good_as_stock(y, stock, reference)
        else:
            assert relative_error(y, reference) < 2.0**-6


def test_inverse_is_the_transpose_even_where_the_halves_differ() -> None:
    """<R x, y> = <x, Rᵀ y> with four different angle vectors: a swapped sine or a wrong half shows."""
    q, k, _, _ = make_inputs((2, 5, 3, 2, 12), torch.float32)
    other_q, other_k = torch.randn_like(q), torch.randn_like(k)
    cos, sin = torch.randn(2, 1, 5, 12).unbind(0)
    forward, backward = rope(q, k, cos, sin), rope(other_q, other_k, cos, sin, inverse=True)
    for turned, other, x, turned_back in zip(forward, (other_q, other_k), (q, k), backward, strict=True):
        left, right = (turned.double() * other.double()).sum(), (x.double() * turned_back.double()).sum()
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-4)
        assert left.abs() > 1e-2


@dtypes
@pytest.mark.parametrize("inverse", [False, True])
def test_in_place_equals_out_of_place(dtype: torch.dtype, inverse: bool) -> None:
    q, k, cos, sin = make_inputs((2, 5, 3, 1, 10), dtype)
    expected = rope(q, k, cos, sin, inverse=inverse)
    ours = rope(q, k, cos, sin, inverse=inverse, out=(q, k))
    assert ours[0] is q
    assert ours[1] is k
    for one, other in zip(ours, expected, strict=True):
        assert_same(one, other)


@dtypes
def test_strides_as_they_come(dtype: torch.dtype) -> None:
    """Heads of a fused projection and the attention's transposed layout, in place and not, beside dense tensors."""
    fused = torch.randn(2, 3, 9, 16).to(dtype)
    _, _, cos, sin = make_inputs((2, 3, 1, 1, 16), dtype, angle_batch=2)
    transposed = [torch.randn(2, heads, 3, 16).to(dtype).transpose(1, 2) for heads in (4, 2)]
    for q, k in ((fused[:, :, :4], fused[:, :, 4:6]), transposed, (fused[:, :, :4], transposed[1])):
        expected = rope(q.contiguous(), k.contiguous(), cos, sin)
        beside = fused[:, :, 6:].clone()
        for ours, dense in zip(rope(q, k, cos, sin), expected, strict=True):
            assert_same(ours.contiguous(), dense)
        outs = (torch.empty(2, 4, 3, 16, dtype=dtype).transpose(1, 2), torch.empty(2, 3, 2, 16, dtype=dtype))
        for ours, dense in zip(rope(q, k, cos, sin, out=outs), expected, strict=True):
            assert_same(ours.contiguous(), dense)
        for ours, dense in zip(rope(q, k, cos, sin, out=(q, k)), expected, strict=True):
            assert_same(ours.contiguous(), dense)
        assert_same(fused[:, :, 6:], beside)


@dtypes
def test_queries_alone(dtype: torch.dtype) -> None:
    q, k, cos, sin = make_inputs((2, 5, 3, 2, 10), dtype)
    alone, none = rope(q, None, cos, sin)
    assert none is None
    assert_same(alone, rope(q, k, cos, sin)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fp32_angles_round_once(dtype: torch.dtype) -> None:
    """OLMo 2 keeps cos and sin in fp32: only the sum is rounded."""
    q, k, cos, sin = make_inputs((2, 5, 3, 2, 10), torch.float32)
    q, k = q.to(dtype), k.to(dtype)
    exact = stock_rope(q.double(), k.double(), cos.double(), sin.double())
    for ours, theirs, reference in zip(rope(q, k, cos, sin), stock_rope(q, k, cos, sin), exact, strict=True):
        assert_as_good_as_stock(ours, theirs.to(dtype), reference)


def test_no_tokens() -> None:
    q, k, cos, sin = make_inputs((2, 0, 3, 2, 10), torch.float32)
    assert rope(q, k, cos, sin)[0].shape == q.shape


@interpreted_only
def test_offsets_past_2_to_the_31_c17() -> None:
    """C17: a token that begins past 2**31 elements gives what it gives alone, along the sequence and the batch."""
    rows = sparse_rows(3, 24)
    for view in ((1, 3, 3, 8), (3, 1, 3, 8)):
        q = rows.view(3, 3, 8).view(view)
        _, _, cos, sin = make_inputs((*view[:2], 1, 1, 8), torch.bfloat16)
        expected = rope(q.contiguous(), None, cos, sin)[0]
        assert_same(rope(q, None, cos, sin, out=(q, None))[0].contiguous(), expected)


@dtypes
@pytest.mark.parametrize("inverse", [False, True], ids=["forward", "inverse"])
def test_heads_before_tokens_are_the_same_rotation(dtype: torch.dtype, inverse: bool) -> None:
    """Hugging Face's layout: the same numbers by other strides, of what is rotated and of what is passed through."""
    q, k, cos, sin = make_inputs((2, 5, 3, 1, 10), dtype, rotary=6, angle_batch=2)
    expected = rope(q, k, cos, sin, inverse=inverse)
    heads = [x.transpose(1, 2).contiguous() for x in (q, k)]
    found = rope(*heads, cos, sin, inverse=inverse, heads_first=True)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.transpose(1, 2), theirs)
