"""C17: more than 2**31 elements in one tensor. Rows past the limit equal the same rows computed alone, bit for bit.

A 32-bit offset would wrap there: it would read other rows, and write over rows at the start; those are compared too.
Peak memory stays under 40 GB.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fastft.kernels import nf4
from fastft.kernels.cross_entropy import STATISTICS, cross_entropy, cross_entropy_backward
from fastft.kernels.rms_norm import rms_norm, rms_norm_backward
from fastft.kernels.rope import rope
from fastft.kernels.swiglu import swiglu, swiglu_backward

LIMIT = 2**31
WIDTH = 4096
ROWS = LIMIT // WIDTH + 64  # of a tensor that just passes the limit
BYTES_NEEDED = 40 * 2**30


@pytest.fixture(autouse=True)
def enough_memory() -> None:
    """Skips on a GPU that is too small."""
    free, _ = torch.cuda.mem_get_info()
    if free < BYTES_NEEDED:
        pytest.skip(f"needs {BYTES_NEEDED / 2**30:.0f} GiB of GPU memory, {free / 2**30:.0f} are free")


def draw(*shape: int) -> Tensor:
    """Normal bf16 numbers, made in place: no wider copy of so large a tensor."""
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()


def samples(rows: int, width: int) -> list[slice]:
    """Eight rows each: at the start, around the limit, at the end."""
    at_limit = LIMIT // width
    return [slice(0, 8), slice(at_limit - 4, at_limit + 4), slice(rows - 8, rows)]


def assert_rows_alone(
    whole: tuple[Tensor, ...], alone: Callable[[slice], tuple[Tensor, ...]], parts: list[slice]
) -> None:
    """Each part of the whole equals what `alone` computes for it."""
    for part in parts:
        for big, small in zip(whole, alone(part), strict=True):
            assert torch.equal(big[part], small), f"rows {part.start} to {part.stop} differ"
            assert small.count_nonzero() > 0


def test_rms_norm() -> None:
    x, weight, parts = draw(ROWS, WIDTH), draw(WIDTH), samples(ROWS, WIDTH)
    y, inverse_rms, _ = rms_norm(x, weight, 1e-5)
    assert_rows_alone((y, inverse_rms), lambda part: rms_norm(x[part], weight, 1e-5)[:2], parts)
    grad = y.normal_()

    def alone(part: slice) -> tuple[Tensor]:
        return (rms_norm_backward(grad[part], x[part], weight, inverse_rms[part], residual_grad=x[part])[0],)

    whole, grad_weight = rms_norm_backward(grad, x, weight, inverse_rms, residual_grad=x, needs_weight_grad=True)
    assert_rows_alone((whole,), alone, parts)
    assert grad_weight.isfinite().all()


def test_rms_norm_with_a_residual() -> None:
    x, residual, weight, parts = draw(ROWS, WIDTH), draw(ROWS, WIDTH), draw(WIDTH), samples(ROWS, WIDTH)

    def run(part: slice) -> tuple[Tensor, Tensor]:
        y, _, summed = rms_norm(x[part], weight, 1e-5, residual=residual[part])
        return y, summed

    assert_rows_alone(run(slice(0, ROWS)), run, parts)


def test_swiglu() -> None:
    gate, up, parts = draw(ROWS, WIDTH), draw(ROWS, WIDTH), samples(ROWS, WIDTH)
    product = swiglu(gate, up)
    assert_rows_alone((product,), lambda part: (swiglu(gate[part], up[part]),), parts)
    grad = product.normal_()
    expected = [swiglu_backward(grad[part].clone(), gate[part].clone(), up[part].clone()) for part in parts]
    whole = swiglu_backward(grad, gate, up, out=(grad, gate, up))  # in place on all three
    for part, small in zip(parts, expected, strict=True):
        for big, alone in zip(whole, small, strict=True):
            assert torch.equal(big[part], alone)


@pytest.mark.parametrize("inverse", [False, True])
def test_rope(inverse: bool) -> None:
    """32 query heads of 128 over more than 524,288 tokens; 8 key heads beside them."""
    angles = torch.rand(1, ROWS, 64, device="cuda").mul_(6.3).repeat(1, 1, 2)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    q, k = draw(1, ROWS, 32, 128), draw(1, ROWS, 8, 128)

    def run(part: slice) -> tuple[Tensor, Tensor]:
        return rope(q[:, part], k[:, part], cos[:, part], sin[:, part], inverse=inverse)

    whole = run(slice(0, ROWS))
    for part in samples(ROWS, WIDTH):
        for big, small in zip(whole, run(part), strict=True):
            assert torch.equal(big[:, part], small)


def test_cross_entropy() -> None:
    """16,448 rows of 131,072 logits."""
    vocabulary = 131072
    rows = LIMIT // vocabulary + 64
    parts = samples(rows, vocabulary)
    logits, targets = draw(rows, vocabulary), torch.randint(0, vocabulary, (rows,), device="cuda")
    outputs = ("entropy", "is_top1", "log_sum_sq_probs", "mean_logits")
    kept = [logits[part].clone() for part in parts]
    whole = cross_entropy(logits, targets, outputs=outputs)
    for part, small in zip(parts, kept, strict=True):
        alone = cross_entropy(small, targets[part], outputs=outputs)
        for big, of_small in zip(whole, alone, strict=True):
            assert torch.equal(big[part], of_small)
        assert torch.equal(logits[part], small), "the gradient"
    del kept, whole
    logits.normal_()
    kept = [logits[part].clone() for part in parts]
    statistics = torch.full((len(STATISTICS), rows), 6.0, device="cuda")
    incoming = torch.randn(2, rows, device="cuda")
    cross_entropy_backward(logits, targets, statistics, grad_log_probs=incoming[0], grad_entropy=incoming[1])
    for part, small in zip(parts, kept, strict=True):
        first, second = incoming[:, part]
        cross_entropy_backward(small, targets[part], statistics[:, part], grad_log_probs=first, grad_entropy=second)
        assert torch.equal(logits[part], small)


@pytest.mark.parametrize("nested", [False, True])
def test_dequantization(nested: bool) -> None:
    """A 4-bit matrix of more than 2**31 elements; each sampled row is a small matrix of its own."""
    columns, blocksize = 131072, 64
    rows, blocks_per_row = LIMIT // columns + 64, columns // blocksize
    blocks = rows * blocks_per_row
    packed = torch.randint(0, 256, (rows * columns // 2,), device="cuda", dtype=torch.uint8)
    code = torch.linspace(-1, 1, 16, device="cuda")
    absmax = torch.randint(0, 256, (blocks,), device="cuda", dtype=torch.uint8) if nested else None
    scales = torch.rand(blocks // 256 if nested else blocks, device="cuda") + 0.5

    def weight(first: int, last: int) -> nf4.QuantizedWeight:
        part = slice(first * blocks_per_row, last * blocks_per_row)
        shared = {"code": code, "blocksize": blocksize, "shape": (last - first, columns), "dtype": torch.bfloat16}
        shared["packed"] = packed[first * columns // 2 : last * columns // 2]
        if absmax is None:
            return nf4.QuantizedWeight(absmax=scales[part], **shared)
        return nf4.QuantizedWeight(
            absmax=absmax[part],
            absmax_code=torch.linspace(-1, 1, 256, device="cuda"),
            absmax_scale=scales[part.start // 256 : part.stop // 256],
            offset=torch.tensor(0.1, device="cuda"),
            **shared,
        )

    whole = nf4.dequantize(weight(0, rows))
    for part in samples(rows, columns):
        assert torch.equal(whole[part], nf4.dequantize(weight(part.start, part.stop)))
