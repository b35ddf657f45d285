"""Each operator: what `opcheck` asks of it (schema, fake, autograd, tracing), and its values and gradients beside the
functional API, whose kernels have tests of their own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fastft import functional, operators
from fastft.kernels.nf4 import QuantizedWeight
from fastft.operators.cross_entropy import cross_entropy_backward_op, cross_entropy_op
from fastft.operators.linear_cross_entropy import (
    linear_cross_entropy_backward_again_op,
    linear_cross_entropy_backward_op,
    linear_cross_entropy_op,
)
from fastft.operators.lora_linear import (
    dequantize_op,
    flat_weight,
    lora_linear_4bit_backward_op,
    lora_linear_4bit_op,
)
from fastft.operators.rms_norm import rms_norm_backward_op, rms_norm_op
from fastft.operators.rope import rope_one_op, rope_op
from fastft.operators.swiglu import swiglu_backward_op, swiglu_op

ROWS, HIDDEN, VOCABULARY, RANK = 6, 64, 11, 4


def leaf(*shape: int, dtype: torch.dtype = torch.float32, needs: bool = True) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_(needs)


def labels(rows: int = ROWS) -> torch.Tensor:
    made = torch.randint(0, VOCABULARY, (rows,))
    made[1] = made[4] = -100
    return made


def quantized(nested: bool = True) -> QuantizedWeight:
    """Random 4-bit weight [32, HIDDEN] in blocks of 64, made by hand: no library needed."""
    blocks = 32 * HIDDEN // 64
    return QuantizedWeight(
        packed=torch.randint(0, 256, (32 * HIDDEN // 2,), dtype=torch.uint8),
        absmax=torch.randint(0, 256, (blocks,), dtype=torch.uint8) if nested else torch.rand(blocks),
        code=torch.linspace(-1, 1, 16),
        blocksize=64,
        shape=(32, HIDDEN),
        dtype=torch.float32,
        absmax_code=torch.rand(256) if nested else None,
        absmax_scale=torch.rand(1) if nested else None,
        offset=torch.tensor(0.1) if nested else None,
    )


def heads(count: int, needs: bool = True) -> torch.Tensor:
    """[2, count, 5, 8] as a projection leaves it: a transposed view."""
    return torch.randn(2, 5, count, 8).transpose(1, 2).requires_grad_(needs)


def _loss_arguments(summed: bool, trains: bool) -> tuple[Any, ...]:
    return (
        leaf(ROWS, HIDDEN),
        leaf(VOCABULARY, HIDDEN, needs=trains),
        leaf(VOCABULARY, needs=trains),
        labels(),
        -100,
        summed,
        torch.float32,
        [True, trains, trains],
        [0.5, 20.0, 0.7, 0.1],
        True,
    )


def _angles(batch: int = 2, rotary: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 5, rotary), torch.randn(batch, 5, rotary)


CASES: dict[str, Callable[[], tuple[Any, tuple[Any, ...]]]] = {
    "rms_norm llama": lambda: (rms_norm_op, (leaf(2, 3, HIDDEN), leaf(HIDDEN), 1e-6, "llama")),
    "rms_norm gemma": lambda: (rms_norm_op, (leaf(2, 3, HIDDEN), leaf(HIDDEN), 1e-6, "gemma")),
    "rms_norm frozen": lambda: (rms_norm_op, (leaf(2, 3, HIDDEN), leaf(HIDDEN, needs=False), 1e-6, "fp32")),
    "rms_norm bf16 x, fp32 weight": lambda: (
        rms_norm_op,
        (leaf(2, 3, HIDDEN, dtype=torch.bfloat16), leaf(HIDDEN), 1e-6, "llama"),
    ),
    "rms_norm transposed": lambda: (
        rms_norm_op,
        (torch.randn(3, 2, HIDDEN).transpose(0, 1).requires_grad_(), leaf(HIDDEN), 1e-6, "llama"),
    ),
    "rms_norm_backward": lambda: (
        rms_norm_backward_op,
        (torch.randn(3, HIDDEN), torch.randn(3, HIDDEN), torch.randn(HIDDEN), torch.rand(3), "llama", True),
    ),
    "swiglu": lambda: (swiglu_op, (leaf(2, 3, HIDDEN), leaf(2, 3, HIDDEN))),
    "swiglu one row": lambda: (swiglu_op, (leaf(HIDDEN), leaf(HIDDEN))),
    "swiglu_backward": lambda: (swiglu_backward_op, tuple(torch.randn(3, HIDDEN) for _ in range(3))),
    "rope": lambda: (rope_op, (heads(4), heads(2), *_angles(), False)),
    "rope one angle for all": lambda: (rope_op, (heads(4), heads(2), *_angles(1, 8), False)),
    "rope of one tensor": lambda: (rope_one_op, (heads(4), *_angles(), True)),
    "rope sliced": lambda: (rope_one_op, (torch.randn(2, 4, 5, 16)[..., ::2].requires_grad_(), *_angles(), False)),
    **{
        f"cross_entropy {reduction}": lambda reduction=reduction: (
            cross_entropy_op,
            (leaf(ROWS, VOCABULARY), labels(), -100, reduction),
        )
        for reduction in ("mean", "sum", "none")
    },
    "cross_entropy_backward": lambda: (
        cross_entropy_backward_op,
        (
            torch.randn(()),
            torch.randn(ROWS, VOCABULARY),
            labels(),
            torch.rand(7, ROWS),
            torch.tensor(4),
            -100,
            "mean",
        ),
    ),
    **{
        f"linear_cross_entropy {'summed' if summed else 'per token'}, {'trained' if trains else 'frozen'} head": (
            lambda summed=summed, trains=trains: (linear_cross_entropy_op, _loss_arguments(summed, trains))
        )
        for summed in (True, False)
        for trains in (True, False)
    },
    "linear_cross_entropy_backward": lambda: (
        linear_cross_entropy_backward_op,
        (
            torch.randn(ROWS),
            torch.randn(ROWS, HIDDEN),
            torch.empty(0),
            torch.empty(0),
            torch.bfloat16,
            torch.float32,
            torch.float32,
        ),
    ),
    "linear_cross_entropy_backward_again": lambda: (
        linear_cross_entropy_backward_again_op,
        (
            torch.randn(ROWS),
            torch.randn(ROWS, HIDDEN),
            torch.randn(VOCABULARY, HIDDEN),
            None,
            labels(),
            torch.rand(7, ROWS),
            -100,
            torch.float32,
            [True, True, False],
            [1.0, 1.0, 1.0, 0.0],
            False,
        ),
    ),
    "lora_linear_4bit": lambda: (
        lora_linear_4bit_op,
        (
            leaf(2, 3, HIDDEN),
            leaf(RANK, HIDDEN),
            leaf(32, RANK),
            leaf(32),
            *flat_weight(quantized()),
            torch.float32,
            2.0,
        ),
    ),
    "lora_linear_4bit without an adapter, bf16": lambda: (
        lora_linear_4bit_op,
        (leaf(2, 3, HIDDEN), None, None, None, *flat_weight(quantized(nested=False)), torch.bfloat16, 1.0),
    ),
    "lora_linear_4bit_backward": lambda: (
        lora_linear_4bit_backward_op,
        (
            torch.randn(3, 32),
            torch.randn(3, HIDDEN),
            torch.randn(3, 16),
            torch.randn(RANK, HIDDEN),
            torch.randn(32, RANK),
            None,
            *flat_weight(quantized()),
            2.0,
            [True, True, True, False],
        ),
    ),
    "dequantize": lambda: (dequantize_op, (*flat_weight(quantized()), torch.bfloat16)),
}


@pytest.mark.parametrize("case", CASES)
def test_operators_pass_opcheck(case: str) -> None:
    operator, arguments = CASES[case]()
    assert set(torch.library.opcheck(operator, arguments).values()) == {"SUCCESS"}


def gradients(function: Callable[..., Any], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Outputs, then gradients under random weights that are the same at every call; none may be zero."""
    outputs = function(*tensors)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(o.shape, generator=generator).to(o.dtype) for o in outputs]
    trained = [t for t in tensors if t.requires_grad]
    grads = torch.autograd.grad(outputs, trained, weights)
    assert all(grad.count_nonzero() for grad in grads)
    return [*outputs, *grads]


def same(ours: Callable[..., Any], theirs: Callable[..., Any], tensors: list[torch.Tensor]) -> None:
    for one, other in zip(gradients(ours, tensors), gradients(theirs, tensors), strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("mode", ["llama", "fp32", "gemma"])
def test_rms_norm_is_the_functional_one(mode: Any) -> None:
    same(
        lambda x, w: operators.rms_norm(x, w, 1e-5, mode),
        lambda x, w: functional.rms_norm(x, w, 1e-5, mode),
        [leaf(2, 3, HIDDEN), leaf(HIDDEN)],
    )


def test_swiglu_is_the_functional_one() -> None:
    same(operators.swiglu, functional.swiglu, [leaf(2, 3, HIDDEN), leaf(2, 3, HIDDEN)])


def test_rope_is_the_functional_one() -> None:
    cos, sin = _angles()
    same(
        lambda q, k: operators.rope(q, k, cos, sin),
        lambda q, k: functional.rope(q, k, cos, sin),
        [heads(4), heads(2)],
    )


def test_rope_of_queries_alone_leaves_keys_without_a_gradient() -> None:
    cos, sin = _angles()
    q, k = heads(4), heads(2)
    operators.rope(q, k, cos, sin)[0].sum().backward()
    assert q.grad is not None
    assert k.grad is None


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("trains", [True, False], ids=["trained head", "frozen head"])
@pytest.mark.parametrize("masked", [True, False], ids=["masked", "whole"])
def test_linear_cross_entropy_is_the_functional_one(reduction: Any, trains: bool, masked: bool) -> None:
    target = labels() if masked else labels().clamp(min=0)
    options = {"reduction": reduction, "softcap": 20.0, "logit_scale": 0.5, "label_smoothing": 0.1}
    same(
        lambda h, w, b: operators.linear_cross_entropy(h, w, target, bias=b, **options),
        lambda h, w, b: functional.linear_cross_entropy(h, w, target, bias=b, **options),
        [leaf(ROWS, HIDDEN), leaf(VOCABULARY, HIDDEN, needs=trains), leaf(VOCABULARY, needs=trains)],
    )


def test_num_items_in_batch_divides_and_an_empty_batch_warns_and_gives_zero() -> None:
    hidden, weight = leaf(ROWS, HIDDEN), leaf(VOCABULARY, HIDDEN)
    total = operators.linear_cross_entropy(hidden, weight, labels(), reduction="sum")
    for items in (8, torch.tensor([8])):
        torch.manual_seed(1)
        target = labels()
        total = operators.linear_cross_entropy(hidden, weight, target, reduction="sum")
        mean = operators.linear_cross_entropy(hidden, weight, target, num_items_in_batch=items)
        torch.testing.assert_close(mean, total / 8)
    with pytest.warns(UserWarning, match="no supervised tokens"):
        nothing = operators.linear_cross_entropy(hidden, weight, torch.full((ROWS,), -100))
    nothing.backward()
    assert nothing.item() == 0.0
    assert hidden.grad is not None
    assert not hidden.grad.any()


def test_a_label_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="outside the vocabulary"):
        operators.linear_cross_entropy(leaf(2, HIDDEN), leaf(VOCABULARY, HIDDEN), torch.tensor([1, VOCABULARY]))


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize("dense", [True, False], ids=["dense", "4-bit"])
def test_lora_linear_is_the_functional_one(dense: bool, nested: bool) -> None:
    weight = torch.randn(32, HIDDEN) if dense else quantized(nested)
    same(
        lambda x, a, b, bias: operators.lora_linear(x, weight, a, b, bias=bias, scale=0.5),
        lambda x, a, b, bias: functional.lora_linear(x, weight, a, b, bias=bias, scale=0.5),
        [leaf(2, 3, HIDDEN), leaf(RANK, HIDDEN), leaf(32, RANK), leaf(32)],
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("ignore_index", [-100, 7])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_is_torchs(reduction: Any, ignore_index: int, dtype: torch.dtype) -> None:
    target = torch.randint(0, 7, (ROWS,))
    target[1] = target[4] = ignore_index
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    logits = leaf(ROWS, VOCABULARY, dtype=dtype)
    loss = operators.cross_entropy(logits, target, ignore_index=ignore_index, reduction=reduction)
    raw = logits.detach().to(wide).requires_grad_()
    true = torch.nn.functional.cross_entropy(raw, target, ignore_index=ignore_index, reduction=reduction)
    assert loss.dtype == dtype
    torch.testing.assert_close(loss.to(wide), true, **tolerance)
    weights = torch.randn(true.shape, dtype=wide)
    (ours,) = torch.autograd.grad(loss, logits, weights.to(dtype))
    (theirs,) = torch.autograd.grad(true, raw, weights)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.to(wide), theirs, **tolerance)
    assert not ours[1].any()


def test_cross_entropy_of_nothing_is_zero_with_zero_gradients() -> None:
    logits = leaf(ROWS, VOCABULARY)
    loss = operators.cross_entropy(logits, torch.full((ROWS,), -100))
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_cross_entropy_refuses_other_ranks_and_targets() -> None:
    logits = torch.randn(2, VOCABULARY, 3)
    with pytest.raises(ValueError, match="expected logits"):
        operators.cross_entropy(logits, torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="expected logits"):
        operators.cross_entropy(logits[..., 0], torch.rand(2))
    with pytest.raises(ValueError, match="reduction must be"):
        operators.cross_entropy(logits[..., 0], torch.zeros(2, dtype=torch.int64), reduction="avg")  # type: ignore[arg-type]


def test_the_caller_s_autocast_decides_the_compute_dtype() -> None:
    x, a, b = leaf(3, HIDDEN), leaf(RANK, HIDDEN), leaf(32, RANK)
    with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("error")
        y = operators.lora_linear(x, quantized(), a, b)
        loss = operators.linear_cross_entropy(leaf(ROWS, HIDDEN), torch.randn(VOCABULARY, HIDDEN), labels())
    assert y.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    (y.float().sum() + loss).backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
