"""`fastft::cross_entropy`: torch's cross-entropy over logits somebody else made, for compilers that have them already.

    loss_i = lse(x_i) - x_i[t_i]          0 where t_i = ignore_index
    mean: Σ loss_i / n      sum: Σ loss_i      none: loss_i          n: rows that count
    d x_i = g w_i (p_i - y_i)             w_i = 1/n, 1, g_i          0 where ignored

The forward reads the logits once and keeps three numbers a row; the backward reads them a second time and writes the
gradient into a fresh buffer: no softmax is kept, no copy made first. n is counted on the device and kept as a tensor,
so the mean's gradient divides by the rows that count, not by all rows (the existing Thunder executor of litgpt divides
by all: with three quarters of the labels masked its gradient is a quarter of the true one).

Two differences to torch: a batch in which nothing counts gives 0 with zero gradients, not NaN; and a label outside
[0, vocabulary) that is not `ignore_index` makes its row NaN instead of stopping the device.
Where hidden states and the head's weight are at hand, `fastft::linear_cross_entropy` does not build logits at all.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from fastft.kernels import cross_entropy as kernels

__all__ = ["Reduction", "cross_entropy", "cross_entropy_backward_op", "cross_entropy_op", "write_gradient"]

Reduction = Literal["mean", "sum", "none"]


def _wide(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(-1) == 1 else logits.contiguous()


@torch.library.custom_op("fastft::cross_entropy", mutates_args=())
def cross_entropy_op(
    logits: Tensor, target: Tensor, ignore_index: int, reduction: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss in the logits' dtype ([] or, for "none", [rows]), statistics [7, rows] and the count of rows that count [].

    Args:
        logits: [rows, vocabulary].
        target: [rows] integers.
        ignore_index: rows with this target count for nothing.
        reduction: "mean", "sum" or "none".
    """
    counts = target != ignore_index
    statistics = logits.new_zeros((len(kernels.STATISTICS), logits.shape[0]), dtype=_wide(logits))
    safe = target.masked_fill(~counts, 0)
    loss = kernels.cross_entropy(_rows(logits), safe, write_gradient=False, out=statistics).loss
    loss = loss.masked_fill(~counts, 0.0)
    counted = counts.sum()
    if reduction != "none":
        loss = loss.sum()
    if reduction == "mean":
        loss = loss / counted.clamp(min=1)
    return loss.to(logits.dtype), statistics, counted


@cross_entropy_op.register_fake
def _(logits: Tensor, target: Tensor, ignore_index: int, reduction: str) -> tuple[Tensor, Tensor, Tensor]:
    rows = logits.shape[0]
    statistics = logits.new_empty((len(kernels.STATISTICS), rows), dtype=_wide(logits))
    loss = logits.new_empty(rows if reduction == "none" else ())
    return loss, statistics, target.new_empty((), dtype=torch.int64)


def write_gradient(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    statistics: Tensor,
    counted: Tensor,
    ignore_index: int,
    reduction: str,
    out: Tensor,
) -> Tensor:
    """The logits' gradient [rows, vocabulary], written into `out`, which may be `logits` itself."""
    counts = target != ignore_index
    scale = grad.to(statistics.dtype)  # [] or [rows]
    if reduction == "mean":
        scale = scale / counted.clamp(min=1)
    # The kernel takes gradients of the log-probability, which is -loss
    per_row = (-scale).expand(target.shape).masked_fill(~counts, 0.0)
    safe = target.masked_fill(~counts, 0)
    return kernels.cross_entropy_backward(_rows(logits), safe, statistics, grad_log_probs=per_row, out=out)


@torch.library.custom_op("fastft::cross_entropy_backward", mutates_args=())
def cross_entropy_backward_op(
    grad: Tensor, logits: Tensor, target: Tensor, statistics: Tensor, counted: Tensor, ignore_index: int, reduction: str
) -> Tensor:
    """The logits' gradient [rows, vocabulary] in a buffer of its own."""
    out = logits.new_empty(logits.shape)
    return write_gradient(grad, logits, target, statistics, counted, ignore_index, reduction, out)


@cross_entropy_backward_op.register_fake
def _(
    grad: Tensor, logits: Tensor, target: Tensor, statistics: Tensor, counted: Tensor, ignore_index: int, reduction: str
) -> Tensor:
    return logits.new_empty(logits.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, target, ctx.ignore_index, ctx.reduction = inputs
    _, statistics, counted = output
    ctx.save_for_backward(logits, target, statistics, counted)
    ctx.mark_non_differentiable(statistics, counted)


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return cross_entropy_backward_op(grad, *ctx.saved_tensors, ctx.ignore_index, ctx.reduction), None, None, None


cross_entropy_op.register_autograd(_backward, setup_context=_setup_context)


def cross_entropy(logits: Tensor, target: Tensor, *, ignore_index: int = -100, reduction: Reduction = "mean") -> Tensor:
    """`torch.nn.functional.cross_entropy` for class indices, on our kernel.

    Args:
        logits: [rows, vocabulary], 16-, 32- or 64-bit float.
        target: [rows] integers.
        ignore_index: rows with this target count for nothing.
        reduction: "mean" over the rows that count, "sum" or "none".

    Returns:
        The loss in the logits' dtype: [], or [rows] for "none".

    Raises:
        ValueError: for other ranks, a floating-point target, or an unknown reduction.
    """
    if logits.dim() != 2 or target.shape != logits.shape[:1] or target.is_floating_point():
        raise ValueError(
            f"cross_entropy: logits {list(logits.shape)} and {target.dtype} target {list(target.shape)} do not fit; "
            "expected logits [rows, vocabulary] and integers [rows]."
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"cross_entropy: reduction must be 'mean', 'sum' or 'none', not {reduction!r}.")
    return cross_entropy_op(logits, target, ignore_index, reduction)[0]
