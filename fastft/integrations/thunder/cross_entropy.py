"""`torch.nn.functional.cross_entropy` in Thunder, for class indices: any reduction, any `ignore_index`.

`fastft::cross_entropy` has the arithmetic. Here is what Thunder needs around it: shapes, the pairing of forward and
backward, and which calls are ours. Label smoothing, class weights, probability targets and logits with further
dimensions are not, and fall back to Thunder's own decomposition.

Two things of that decomposition are mended on the way: in 0.2.6 the backward of `reduction="sum"` raises ("expected
scalar type Float but found Double"), and "sum" is what transformers' loss uses with `num_items_in_batch`; and a batch
whose labels are all masked gives 0 here, with zero gradients, where eager torch gives NaN.
"""

from __future__ import annotations

from typing import Any

import thunder.torch as ltorch
from thunder.core import dtypes
from thunder.core.transforms import get_grad, put_grad

from fastft.integrations.thunder.executor import FLOATS, TensorProxy, executor, torch_dtype
from fastft.kernels.cross_entropy import STATISTICS
from fastft.operators.cross_entropy import cross_entropy_backward_op, cross_entropy_op

__all__ = ["backward_meta", "cross_entropy_backward_symbol", "cross_entropy_symbol"]


def _meta(a: Any, target: Any, ignore_index: int, reduction: str) -> tuple[Any, Any, Any]:
    rows = a.shape[0]
    wide = dtypes.float64 if a.dtype == dtypes.float64 else dtypes.float32
    return (
        TensorProxy(like=a, shape=(rows,) if reduction == "none" else ()),
        TensorProxy(shape=(len(STATISTICS), rows), dtype=wide, device=a.device, requires_grad=False),
        TensorProxy(shape=(), dtype=dtypes.int64, device=a.device, requires_grad=False),
    )


cross_entropy_symbol = executor.register_operator("fastft_cross_entropy", meta=_meta, fn=cross_entropy_op)


def backward_meta(
    grad: Any, a: Any, target: Any, statistics: Any, counted: Any, ignore_index: int, reduction: str
) -> Any:
    return TensorProxy(like=a)


cross_entropy_backward_symbol = executor.register_operator(
    "fastft_cross_entropy_backward", meta=backward_meta, fn=cross_entropy_backward_op
)


def _reason(
    a: Any,
    target: Any,
    weight: Any,
    size_average: Any,
    reduce: Any,
    reduction: str,
    label_smoothing: float,
) -> str | None:
    if weight is not None:
        return "class weights"
    if label_smoothing:
        return "label smoothing"
    if size_average is not None or reduce is not None:
        return "size_average or reduce, which torch has deprecated"
    if reduction not in ("mean", "sum", "none"):
        return f"reduction={reduction!r}"
    if target.dtype not in (dtypes.int64, dtypes.int32):
        return f"a target of {torch_dtype(target)}: class probabilities"
    if a.ndim != 2 or target.ndim != 1:
        return f"logits with {a.ndim} dimensions and a target with {target.ndim}: expected 2 and 1"
    if torch_dtype(a) not in FLOATS:
        return f"logits of {torch_dtype(a)}"
    return "logits and target on different devices" if a.device != target.device else None


# Checker, execution and gradient take the signature of `thunder.torch.cross_entropy`, names and defaults included.
def _checker(
    a: Any,
    /,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> bool:
    reason = _reason(a, target, weight, size_average, reduce, reduction, label_smoothing)
    return not executor.decline("cross_entropy", reason)


def _forward(
    a: Any,
    /,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    return cross_entropy_symbol(a, target, ignore_index, reduction)[0]


def _gradient(
    a: Any,
    /,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    loss, statistics, counted = cross_entropy_symbol(a, target, ignore_index, reduction)
    grad = get_grad(loss)
    put_grad(a, cross_entropy_backward_symbol(grad, a, target, statistics, counted, ignore_index, reduction))
    return loss


executor.register_implementation(
    ltorch.cross_entropy, checker=_checker, execution_transform=_forward, grad_transform=_gradient
)
