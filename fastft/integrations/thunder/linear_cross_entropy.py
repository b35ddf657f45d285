"""`fastft.functional.linear_cross_entropy` in Thunder: head and loss as one operator, no logits in either trace.

The forward makes the gradients of hidden, weight and bias on the way (a frozen head's are not made); the backward
scales them. Per-token losses of a head that trains would need the logits a second time, which this integration does not
offer: they raise, and name the way out.
"""

from __future__ import annotations

from typing import Any

import thunder.torch as ltorch
from thunder.core import dtypes
from thunder.core.transforms import get_grad, put_grad
from torch import Tensor

from fastft import functional
from fastft.integrations.thunder.executor import TensorProxy, executor, needs_gradient
from fastft.operators.linear_cross_entropy import linear_cross_entropy_backward_op, linear_cross_entropy_op

__all__ = ["linear_cross_entropy"]


def _run(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int,
    summed: bool,
    needs: tuple[bool, bool, bool],
    transform: tuple[float, float, float, float],
    has_softcap: bool,
) -> tuple[Tensor, ...]:
    """The operator in hidden's dtype, without the statistics that only a recomputing backward reads."""
    loss, counted, _, *grads = linear_cross_entropy_op(
        hidden,
        weight,
        bias,
        labels,
        ignore_index,
        summed,
        hidden.dtype,
        list(needs),
        list(transform),
        has_softcap,
    )
    return loss, counted, *grads


def _meta(
    hidden: Any,
    weight: Any,
    bias: Any,
    labels: Any,
    ignore_index: int,
    summed: bool,
    needs: tuple[bool, bool, bool],
    transform: tuple[float, float, float, float],
    has_softcap: bool,
) -> tuple[Any, ...]:
    wide = dtypes.float64 if hidden.dtype == dtypes.float64 else dtypes.float32
    heads = summed and (needs[1] or needs[2])

    def made(shape: tuple[int, ...], dtype: Any = wide) -> Any:
        return TensorProxy(shape=shape, dtype=dtype, device=hidden.device, requires_grad=False)

    return (
        made(() if summed else (labels.shape[0],)),
        made((), dtypes.int64),
        made(tuple(hidden.shape), hidden.dtype) if needs[0] else made((0,)),
        made(tuple(weight.shape)) if heads and needs[1] else made((0,)),
        made((weight.shape[0],)) if heads and needs[2] else made((0,)),
    )


_symbol = executor.register_operator("fastft_linear_cross_entropy", meta=_meta, fn=_run)


# grad_rows has hidden's dtype from the forward. Hidden itself, were it an argument, would be kept for the backward.
def _run_backward(
    grad: Tensor, grad_rows: Tensor, grad_weight: Tensor, grad_bias: Tensor, weight: Tensor
) -> tuple[Tensor, ...]:
    return linear_cross_entropy_backward_op(
        grad, grad_rows, grad_weight, grad_bias, grad_rows.dtype, weight.dtype, weight.dtype
    )


def _backward_meta(grad: Any, grad_rows: Any, grad_weight: Any, grad_bias: Any, weight: Any) -> tuple[Any, ...]:
    return (
        TensorProxy(like=grad_rows),
        TensorProxy(like=grad_weight, dtype=weight.dtype),
        TensorProxy(like=grad_bias, dtype=weight.dtype),
    )


_backward_symbol = executor.register_operator(
    "fastft_linear_cross_entropy_backward", meta=_backward_meta, fn=_run_backward
)


_NONE = (False, False, False)  # what a forward alone needs


def _like(hidden: Any, weight: Any, bias: Any, labels: Any, ignore_index: int, summed: bool, *rest: Any) -> Any:
    loss, counted, *_ = _symbol(hidden, weight, bias, labels, ignore_index, summed, _NONE, *rest)
    return loss, counted


def _gradient(hidden: Any, weight: Any, bias: Any, labels: Any, ignore_index: int, summed: bool, *rest: Any) -> Any:
    needs = tuple(needs_gradient(tensor) for tensor in (hidden, weight, bias))
    if not summed and (needs[1] or needs[2]):
        raise NotImplementedError(
            "linear_cross_entropy under Thunder: per-token losses of a head that trains need the logits a second time. "
            "Use reduction='sum' or 'mean', freeze the head, or call F.cross_entropy over the logits."
        )
    loss, counted, *grads = _symbol(hidden, weight, bias, labels, ignore_index, summed, needs, *rest)
    made = _backward_symbol(get_grad(loss), *grads, weight)
    for tensor, grad, needed in zip((hidden, weight, bias), made, needs, strict=True):
        if needed:
            put_grad(tensor, grad)
    return loss, counted


def _run_forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, ignore_index: int, summed: bool, *rest: Any
) -> tuple[Tensor, ...]:
    return _run(hidden, weight, bias, labels, ignore_index, summed, _NONE, *rest)[:2]


_composite = executor.register_operator(
    "fastft_linear_cross_entropy_composite",
    like=_like,
    fn=_run_forward,
)
executor.register_implementation(_composite, execution_transform=_like, grad_transform=_gradient)


def linear_cross_entropy(
    hidden: Any,
    weight: Any,
    labels: Any,
    *,
    bias: Any = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items_in_batch: Any = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    label_smoothing: float = 0.0,
    on_empty: Any = None,
    skip_below: float | None = None,
    on_skip: Any = None,
) -> Any:
    """What `fastft.functional.linear_cross_entropy` is in a trace.

    Raises:
        ValueError: for an unknown reduction, labels of another shape than hidden's rows, or one of `on_empty`,
            `skip_below` and `on_skip`, which a trace has no place for.
        NotImplementedError: for reduction "none" over a head that trains.
    """
    functional.traceable_options({"on_empty": on_empty, "skip_below": skip_below, "on_skip": on_skip})
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"linear_cross_entropy: reduction must be 'mean', 'sum' or 'none', not {reduction!r}")
    if tuple(labels.shape) != tuple(hidden.shape[:-1]):
        raise ValueError(
            f"linear_cross_entropy: labels {tuple(labels.shape)} must have hidden's shape {tuple(hidden.shape)} less "
            "its last dimension"
        )
    summed = reduction != "none"
    rows = ltorch.reshape(hidden, (-1, hidden.shape[-1]))
    targets = ltorch.to(ltorch.reshape(labels, (-1,)), dtypes.int64)
    transform = (float(logit_scale), float(softcap or 1.0), float(temperature), float(label_smoothing))
    loss, counted = _composite(rows, weight, bias, targets, ignore_index, summed, transform, softcap is not None)
    if not summed:
        return ltorch.reshape(loss, tuple(labels.shape))
    if reduction == "sum":
        return loss
    if num_items_in_batch is None:
        return loss / ltorch.clamp(counted, min=1)
    return loss / num_items_in_batch


executor.substitute(functional.linear_cross_entropy, linear_cross_entropy)
