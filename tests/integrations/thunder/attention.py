"""Attention on the CPU as one Thunder operator with one backward, as the executor "sdpa" has it on CUDA alone.

Written out, attention keeps its probabilities, which on a GPU nobody does: what a step keeps would be their bytes.
"""

from __future__ import annotations

from typing import Any

import thunder.torch as ltorch
import torch
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.transforms import get_grad, put_grads
from thunder.extend import OperatorExecutor

__all__ = ["executor"]

executor = OperatorExecutor("flash_on_cpu", version="0.1")


def _meta(query: Any, key: Any, value: Any, is_causal: bool, scale: float | None) -> tuple[Any, Any]:
    log_sums = TensorProxy(shape=query.shape[:-1], dtype=dtypes.float32, device=query.device, requires_grad=False)
    return TensorProxy(like=query), log_sums


def _run(query: Any, key: Any, value: Any, is_causal: bool, scale: float | None) -> Any:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal, scale=scale)


def _backward_meta(grad: Any, query: Any, key: Any, value: Any, *_: Any) -> tuple[Any, Any, Any]:
    return TensorProxy(like=query), TensorProxy(like=key), TensorProxy(like=value)


def _run_backward(grad: Any, query: Any, key: Any, value: Any, *rest: Any) -> Any:
    output, log_sums, is_causal, scale = rest
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, output, log_sums, 0.0, is_causal, scale=scale
    )


_symbol = executor.register_operator("flash_on_cpu", meta=_meta, fn=_run)
_backward_symbol = executor.register_operator("flash_on_cpu_backward", meta=_backward_meta, fn=_run_backward)


# The signature of `thunder.torch.scaled_dot_product_attention`
def _checker(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> bool:
    return attn_mask is None and dropout_p == 0.0


def _forward(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    return _symbol(query, key, value, is_causal, scale)[0]


def _gradient(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    output, log_sums = _symbol(query, key, value, is_causal, scale)
    grads = _backward_symbol(get_grad(output), query, key, value, output, log_sums, is_causal, scale)
    put_grads((query, key, value), grads)
    return output


executor.register_implementation(
    ltorch.scaled_dot_product_attention, checker=_checker, execution_transform=_forward, grad_transform=_gradient
)
