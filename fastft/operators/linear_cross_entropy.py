"""`fastft::linear_cross_entropy`: the head and its loss as one operator; a compiler never sees logits either.

The pair in autograd/linear_cross_entropy.py drops ignored rows, so its saved tensors have as many rows as the batch has
supervised tokens: a number that is known on the device only. A compiler wants shapes it can predict. So inside the
operator rows are dropped as ever, but what leaves it has all N rows, zeros where ignored, and the count leaves it as a
tensor. The price is [N, hidden] where [counted, hidden] would do.

The three ways to serve a backward are the pair's (frozen head; trained head, summed; trained head, per token), chosen
when the call is traced, because what requires a gradient is known then: arguments say it. In the third way
`fastft::linear_cross_entropy_backward_again` makes the logits again.

Inside, the operator looks once at the labels' range, which waits for the device: it is tagged as unsafe for CUDA
graphs, so `mode="reduce-overhead"` splits its graphs there instead of failing.
"""

from __future__ import annotations

import warnings
from typing import Any, Literal

import torch
from torch import Tensor

from fastft.autograd import linear_cross_entropy as pair
from fastft.autograd.autocast import AutocastState, suspended
from fastft.autograd.head_arguments import check, check_reduction
from fastft.kernels.cross_entropy import STATISTICS

__all__ = [
    "linear_cross_entropy",
    "linear_cross_entropy_backward_again_op",
    "linear_cross_entropy_backward_op",
    "linear_cross_entropy_op",
]

_TAGS = (torch.Tag.cudagraph_unsafe,)


def _statics(
    ignore_index: int,
    summed: bool,
    compute_dtype: torch.dtype,
    needs: list[bool],
    transform: list[float],
    has_softcap: bool,
) -> pair.Statics:
    logit_scale, softcap, temperature, label_smoothing = transform
    return pair.Statics(
        ignore_index=ignore_index,
        outputs=(),
        summed=summed,
        compute_dtype=compute_dtype,
        needs_hidden=needs[0],
        needs_weight=needs[1],
        needs_bias=needs[2],
        logit_scale=logit_scale,
        softcap=softcap if has_softcap else None,
        temperature=temperature,
        label_smoothing=label_smoothing,
    )


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@torch.library.custom_op("fastft::linear_cross_entropy", mutates_args=(), tags=_TAGS)
def linear_cross_entropy_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int,
    summed: bool,
    compute_dtype: torch.dtype,
    needs: list[bool],
    transform: list[float],
    has_softcap: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Losses and what their gradients need; tensors that are not needed are [0].

    Args:
        hidden: [N, hidden].
        weight: [vocabulary, hidden].
        bias: [vocabulary] or None.
        labels: [N] int64.
        ignore_index: as in torch.
        summed: one loss for all rows, else one a row.
        compute_dtype: of the products.
        needs: whether hidden, weight and bias need gradients.
        transform: logit_scale, softcap, temperature, label_smoothing.
        has_softcap: whether the second of them counts.

    Returns:
        loss ([] or [N], at least float32), counted [] int64, statistics [7, N] (for making the logits again), grad_rows
        [N, hidden] in the compute dtype, grad_weight [vocabulary, hidden] and grad_bias, at least float32.
    """
    statics = _statics(ignore_index, summed, compute_dtype, needs, transform, has_softcap)
    with suspended(hidden.device.type):
        outputs, saved = pair.forward(pair.Tensors(hidden, weight, bias, labels), statics)
    if outputs.counted == 0:
        warnings.warn(pair.EMPTY_BATCH, stacklevel=2)
    kept, wide = saved.tensors, _wide(compute_dtype)
    statistics, grad_rows, none_weight, none_bias = (hidden.new_empty(0, dtype=wide) for _ in range(4))
    if statics.keeps_inputs and kept.statistics is not None:
        statistics = hidden.new_zeros((len(STATISTICS), labels.shape[0]), dtype=wide)
        positions = slice(None) if kept.positions is None else kept.positions
        statistics[:3, positions] = kept.statistics[:3]  # loss, maximum, log-sum; nothing else was asked for
    if kept.grad_rows is not None:
        grad_rows = _all_rows(kept.grad_rows, kept.positions, labels.shape[0])
    return (
        outputs.log_probs.neg(),
        torch.full((), outputs.counted, dtype=torch.int64, device=hidden.device),
        statistics,
        grad_rows,
        none_weight if kept.grad_weight is None else kept.grad_weight,
        none_bias if kept.grad_bias is None else kept.grad_bias,
    )


def _all_rows(rows: Tensor, positions: Tensor | None, count: int) -> Tensor:
    """`rows` of those that count among `count`, zeros elsewhere."""
    if positions is None:
        return rows
    return rows.new_zeros((count, rows.shape[1])).index_copy_(0, positions, rows)


@linear_cross_entropy_op.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int,
    summed: bool,
    compute_dtype: torch.dtype,
    needs: list[bool],
    transform: list[float],
    has_softcap: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    statics = _statics(ignore_index, summed, compute_dtype, needs, transform, has_softcap)
    wide, rows, heads = _wide(compute_dtype), labels.shape[0], statics.keeps_head_grads

    def none() -> Tensor:
        return hidden.new_empty(0, dtype=wide)

    return (
        hidden.new_empty(() if summed else rows, dtype=wide),
        labels.new_empty((), dtype=torch.int64),
        hidden.new_empty((len(STATISTICS), rows) if statics.keeps_inputs else 0, dtype=wide),
        hidden.new_empty(hidden.shape, dtype=compute_dtype) if statics.keeps_grad_rows else none(),
        weight.new_empty(weight.shape, dtype=wide) if heads and needs[1] else none(),
        weight.new_empty(weight.shape[0], dtype=wide) if heads and needs[2] else none(),
    )


@torch.library.custom_op("fastft::linear_cross_entropy_backward", mutates_args=())
def linear_cross_entropy_backward_op(
    grad: Tensor,
    grad_rows: Tensor,
    grad_weight: Tensor,
    grad_bias: Tensor,
    hidden_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """What the forward made, scaled: gradients of hidden, weight and bias ([0] where not needed).

    Args:
        grad: [] or [N].
        grad_rows: [N, hidden] or [0].
        grad_weight: [vocabulary, hidden] or [0].
        grad_bias: [vocabulary] or [0].
        hidden_dtype, weight_dtype, bias_dtype: of the three results.
    """
    results = []
    dtypes = (hidden_dtype, weight_dtype, bias_dtype)
    for made, dtype in zip((grad_rows, grad_weight, grad_bias), dtypes, strict=True):
        scale = grad.unsqueeze(-1) if grad.dim() == 1 and made is grad_rows else grad
        result = made.new_empty(made.shape, dtype=dtype)
        results.append(torch.mul(made, scale, out=result) if made.numel() else result)
    return results[0], results[1], results[2]


@linear_cross_entropy_backward_op.register_fake
def _(
    grad: Tensor,
    grad_rows: Tensor,
    grad_weight: Tensor,
    grad_bias: Tensor,
    hidden_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        grad_rows.new_empty(grad_rows.shape, dtype=hidden_dtype),
        grad_weight.new_empty(grad_weight.shape, dtype=weight_dtype),
        grad_bias.new_empty(grad_bias.shape, dtype=bias_dtype),
    )


@torch.library.custom_op("fastft::linear_cross_entropy_backward_again", mutates_args=(), tags=_TAGS)
def linear_cross_entropy_backward_again_op(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    statistics: Tensor,
    ignore_index: int,
    compute_dtype: torch.dtype,
    needs: list[bool],
    transform: list[float],
    has_softcap: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients for per-token losses of a head that trains; the arguments are the forward's."""
    statics = _statics(ignore_index, False, compute_dtype, needs, transform, has_softcap)
    _, index = pair._supervised_rows(labels, ignore_index, weight.shape[0])
    if index is not None:
        statistics = statistics.index_select(1, index)
    kept = pair.SavedTensors(
        positions=index,
        hidden=hidden,
        weight=weight,
        bias=bias,
        targets=labels if index is None else labels.index_select(0, index),
        statistics=statistics,
    )
    bias_dtype = None if bias is None else bias.dtype
    saved = pair.Saved(kept, statics, hidden.shape, hidden.dtype, weight.dtype, bias_dtype)
    with suspended(hidden.device.type):
        grads = pair.backward(saved, grad.neg(), None)
    first, second, third = (hidden.new_empty(0) if g is None else g for g in grads)
    return first, second, third


@linear_cross_entropy_backward_again_op.register_fake
def _(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    statistics: Tensor,
    ignore_index: int,
    compute_dtype: torch.dtype,
    needs: list[bool],
    transform: list[float],
    has_softcap: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        hidden.new_empty(hidden.shape if needs[0] else 0),
        weight.new_empty(weight.shape) if needs[1] else hidden.new_empty(0),
        bias.new_empty(bias.shape) if needs[2] and bias is not None else hidden.new_empty(0),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, labels, ctx.ignore_index, ctx.summed, ctx.compute_dtype, ctx.needs, *rest = inputs
    ctx.transform, ctx.has_softcap = rest
    _, counted, statistics, grad_rows, grad_weight, grad_bias = output
    ctx.mark_non_differentiable(counted, statistics, grad_rows, grad_weight, grad_bias)
    ctx.set_materialize_grads(False)
    ctx.dtypes = [hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype]
    ctx.again = not ctx.summed and (ctx.needs[1] or ctx.needs[2])
    ctx.has_bias = bias is not None
    if ctx.again:
        kept = (hidden, weight, labels, statistics) + ((bias,) if ctx.has_bias else ())
        ctx.save_for_backward(*kept)
    else:
        ctx.save_for_backward(grad_rows, grad_weight, grad_bias)


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    unused = (None,) * 7
    if grad is None:
        return (None, None, None, *unused)
    if ctx.again:
        hidden, weight, labels, statistics, *bias = ctx.saved_tensors
        grads = linear_cross_entropy_backward_again_op(
            grad,
            hidden,
            weight,
            bias[0] if ctx.has_bias else None,
            labels,
            statistics,
            ctx.ignore_index,
            ctx.compute_dtype,
            ctx.needs,
            ctx.transform,
            ctx.has_softcap,
        )
    else:
        grads = linear_cross_entropy_backward_op(grad, *ctx.saved_tensors, *ctx.dtypes)
    first, second, third = (g if needed else None for g, needed in zip(grads, ctx.needs, strict=True))
    return first, second, third, *unused


linear_cross_entropy_op.register_autograd(_backward, setup_context=_setup_context)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    num_items_in_batch: int | float | Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    label_smoothing: float = 0.0,
) -> Tensor:
    """`fastft.functional.linear_cross_entropy` as an operator call; a batch without a counted label warns and gives 0.

    What requires a gradient is read from the tensors when this line runs or is traced.

    Args:
        hidden: [..., hidden].
        weight: [vocabulary, hidden].
        labels: [...] integers.
        bias: [vocabulary].
        ignore_index, reduction, num_items_in_batch, softcap, logit_scale, temperature, label_smoothing: as there.

    Returns:
        A scalar, or [...] for "none"; float32 (float64 for float64 inputs).

    Raises:
        ValueError: for arguments that do not fit each other; at run time, for a label outside the vocabulary.
    """
    check_reduction(hidden, labels, reduction, num_items_in_batch)
    rows = hidden.reshape(-1, hidden.shape[-1])
    targets = labels.reshape(-1).to(device=hidden.device, dtype=torch.int64)
    check(rows, weight, bias, targets, softcap, temperature, label_smoothing, (), None)
    grad = torch.is_grad_enabled()
    loss, counted, *_ = linear_cross_entropy_op(
        rows,
        weight,
        bias,
        targets,
        ignore_index,
        reduction != "none",
        AutocastState.current(hidden.device.type).compute_dtype(hidden.dtype),
        [
            grad and hidden.requires_grad,
            grad and weight.requires_grad,
            grad and bias is not None and bias.requires_grad,
        ],
        [float(logit_scale), float(softcap or 1.0), float(temperature), float(label_smoothing)],
        softcap is not None,
    )
    if reduction == "none":
        return loss.view(labels.shape)
    if reduction == "sum":
        return loss
    if num_items_in_batch is None:
        return loss / counted.clamp(min=1)
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.reshape(()).to(device=hidden.device, dtype=loss.dtype)
    return loss / num_items_in_batch
