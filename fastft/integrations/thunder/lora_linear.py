"""LoRA over a packed 4-bit weight in Thunder: `fastft.operators.lora_linear_4bit_flat` as one operator.

A trace knows tensors and numbers, so the weight comes as its fields: a module that holds them as buffers calls the flat
function, in eager torch, under `torch.compile` and under Thunder alike. Over a dense weight there is nothing to claim:
Thunder and its fusers see plain matrix products.
"""

from __future__ import annotations

import math
from typing import Any

from thunder.core.transforms import get_grad, put_grad
from torch import Tensor

from fastft.integrations.thunder.executor import TensorProxy, executor, needs_gradient
from fastft.kernels.join import round_rank
from fastft.operators import lora_linear_4bit_flat as flat_function
from fastft.operators.lora_linear import lora_linear_4bit_backward_op, lora_linear_4bit_op

__all__ = ["lora_linear_4bit_flat"]

_WEIGHT = slice(1, 7)  # packed, absmax, code, absmax_code, absmax_scale, offset among the flat function's arguments


def _fields(arguments: tuple[Any, ...]) -> tuple[list[Tensor], list[int]]:
    """Weight tensors and numbers as the operators take them."""
    x, out_features, blocksize = arguments[0], arguments[10], arguments[11]
    return [t for t in arguments[_WEIGHT] if t is not None], [out_features, x.shape[-1], blocksize, 256]


def _run(*arguments: Any) -> tuple[Tensor, Tensor]:
    x, lora_a, lora_b, bias, scale = arguments[0], *arguments[7:10], arguments[12]
    weight, numbers = _fields(arguments)
    return lora_linear_4bit_op(x, lora_a, lora_b, bias, weight, numbers, x.dtype, x.dtype, scale)


def _meta(*arguments: Any) -> tuple[Any, Any]:
    x, lora_a, out_features = arguments[0], arguments[7], arguments[10]
    rank = () if lora_a is None else (math.prod(x.shape[:-1]), round_rank(lora_a.shape[0]))
    return (
        TensorProxy(like=x, shape=(*x.shape[:-1], out_features)),
        TensorProxy(like=x, shape=rank or (0,), requires_grad=False),
    )


_symbol = executor.register_operator("fastft_lora_linear_4bit", meta=_meta, fn=_run)


def _run_backward(grad: Tensor, low_rank: Tensor, needs: tuple[bool, ...], *arguments: Any) -> tuple[Tensor, ...]:
    x, lora_a, lora_b, bias, scale = arguments[0], *arguments[7:10], arguments[12]
    weight, numbers = _fields(arguments)
    return lora_linear_4bit_backward_op(
        grad, x, low_rank, lora_a, lora_b, bias, weight, numbers, x.dtype, scale, list(needs)
    )


def _backward_meta(grad: Any, low_rank: Any, needs: tuple[bool, ...], *arguments: Any) -> tuple[Any, ...]:
    x = arguments[0]
    trained = (x, *arguments[7:10])
    return tuple(
        TensorProxy(like=t) if needed else TensorProxy(like=x, shape=(0,))
        for t, needed in zip(trained, needs, strict=True)
    )


_backward_symbol = executor.register_operator("fastft_lora_linear_4bit_backward", meta=_backward_meta, fn=_run_backward)


def _like(*arguments: Any) -> Any:
    return _symbol(*arguments)[0]


def _gradient(*arguments: Any) -> Any:
    y, low_rank = _symbol(*arguments)
    trained = (arguments[0], *arguments[7:10])
    needs = tuple(needs_gradient(t) for t in trained)
    grads = _backward_symbol(get_grad(y), low_rank, needs, *arguments)
    for tensor, grad, needed in zip(trained, grads, needs, strict=True):
        if needed:
            put_grad(tensor, grad)
    return y


_composite = executor.register_operator("fastft_lora_linear_4bit_composite", like=_like, fn=flat_function)
executor.register_implementation(_composite, execution_transform=_like, grad_transform=_gradient)


def lora_linear_4bit_flat(
    x: Any,
    packed: Any,
    absmax: Any,
    code: Any,
    absmax_code: Any,
    absmax_scale: Any,
    offset: Any,
    lora_a: Any,
    lora_b: Any,
    bias: Any,
    out_features: int,
    blocksize: int,
    scale: float,
) -> Any:
    """What `fastft.operators.lora_linear_4bit_flat` is in a trace; the compute dtype is x's."""
    weight = (packed, absmax, code, absmax_code, absmax_scale, offset)
    return _composite(x, *weight, lora_a, lora_b, bias, out_features, blocksize, scale)


executor.substitute(flat_function, lora_linear_4bit_flat)
