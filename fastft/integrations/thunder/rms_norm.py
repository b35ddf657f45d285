"""RMSNorm in Thunder: `torch.nn.functional.rms_norm` (so `nn.RMSNorm` too) and `fastft.functional.rms_norm`.

The two roundings are kept apart: "llama" rounds the normalized row before the weight multiplies it (transformers),
"fp32" after (torch's own, litgpt's), "gemma" is "fp32" with 1 + weight. A frozen weight's gradient is not computed.
"""

from __future__ import annotations

import math
from typing import Any

import thunder.torch as ltorch
import torch
from thunder.core import dtypes
from thunder.core.transforms import get_grad, put_grad

from fastft import functional
from fastft.integrations.thunder.executor import FLOATS, TensorProxy, executor, made_again, needs_gradient, torch_dtype
from fastft.operators.rms_norm import run, run_backward

__all__ = ["rms_norm"]


def _meta(x: Any, weight: Any, eps: float, mode: str) -> tuple[Any, Any]:
    wide = dtypes.float64 if x.dtype == dtypes.float64 else dtypes.float32
    y_dtype = x.dtype
    if mode == "llama":
        y_dtype = dtypes.to_dtype(torch.promote_types(torch_dtype(x), torch_dtype(weight)))
    return (
        TensorProxy(like=x, dtype=y_dtype),
        TensorProxy(shape=(math.prod(x.shape[:-1]),), dtype=wide, device=x.device, requires_grad=False),
    )


_symbol = executor.register_operator("fastft_rms_norm", meta=_meta, fn=run)


def _backward_meta(grad: Any, x: Any, weight: Any, inverse_rms: Any, mode: str, needs_weight: bool) -> tuple[Any, Any]:
    return TensorProxy(like=x), TensorProxy(like=weight, shape=tuple(weight.shape) if needs_weight else (0,))


_backward_symbol = executor.register_operator("fastft_rms_norm_backward", meta=_backward_meta, fn=run_backward)


def _gradient(x: Any, weight: Any, eps: float, mode: str) -> Any:
    y, inverse_rms = _symbol(x, weight, eps, mode)
    needs_weight = needs_gradient(weight)
    grad_x, grad_weight = _backward_symbol(get_grad(y), x, weight, inverse_rms, mode, needs_weight)
    put_grad(x, grad_x)
    if needs_weight:
        put_grad(weight, grad_weight)
    return made_again(y)


def _like(x: Any, weight: Any, eps: float, mode: str) -> Any:
    return _symbol(x, weight, eps, mode)[0]


_composite = executor.register_operator("fastft_rms_norm_composite", like=_like, fn=functional.rms_norm)
executor.register_implementation(_composite, execution_transform=_like, grad_transform=_gradient)


def rms_norm(x: Any, weight: Any, eps: float = 1e-6, mode: str = "llama") -> Any:
    """What `fastft.functional.rms_norm` is in a trace."""
    return made_again(_composite(x, weight, eps, mode))


executor.substitute(functional.rms_norm, rms_norm)


def _reason(a: Any, normalized_shape: Any, weight: Any) -> str | None:
    if weight is None:
        return "no weight"
    if tuple(normalized_shape) != tuple(a.shape[-1:]) or tuple(weight.shape) != tuple(a.shape[-1:]):
        return f"normalized_shape {tuple(normalized_shape)}: expected the last dimension alone"
    if a.dtype != weight.dtype or torch_dtype(a) not in FLOATS:
        return f"input of {torch_dtype(a)} and weight of {torch_dtype(weight)}"
    return None


def _epsilon(a: Any, eps: float | None) -> float:
    if eps is not None:
        return float(eps)
    dtype = torch_dtype(a)
    return torch.finfo(torch.float32 if dtype.itemsize == 2 else dtype).eps


# The signature of `thunder.torch.rms_norm`
def _checker(a: Any, /, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> bool:
    return not executor.decline("rms_norm", _reason(a, normalized_shape, weight))


def _torch_forward(a: Any, /, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    return _like(a, weight, _epsilon(a, eps), "fp32")


def _torch_gradient(a: Any, /, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    return _gradient(a, weight, _epsilon(a, eps), "fp32")


executor.register_implementation(
    ltorch.rms_norm, checker=_checker, execution_transform=_torch_forward, grad_transform=_torch_gradient
)
