"""`fastft.functional.swiglu` in Thunder: silu(gate) · up for tensors of any rank; a pure backward."""

from __future__ import annotations

from typing import Any

from thunder.core.transforms import get_grad, put_grad

from fastft import functional
from fastft.integrations.thunder.executor import TensorProxy, executor, made_again
from fastft.operators.swiglu import run, run_backward

__all__ = ["swiglu"]


def _meta(gate: Any, up: Any) -> Any:
    return TensorProxy(like=gate)


_symbol = executor.register_operator("fastft_swiglu", meta=_meta, fn=run)


def _backward_meta(grad: Any, gate: Any, up: Any) -> tuple[Any, Any]:
    return TensorProxy(like=gate), TensorProxy(like=up)


_backward_symbol = executor.register_operator("fastft_swiglu_backward", meta=_backward_meta, fn=run_backward)


def _gradient(gate: Any, up: Any) -> Any:
    product = _symbol(gate, up)
    grad_gate, grad_up = _backward_symbol(get_grad(product), gate, up)
    put_grad(gate, grad_gate)
    put_grad(up, grad_up)
    return product


_composite = executor.register_operator(
    "fastft_swiglu_composite", like=lambda gate, up: _symbol(gate, up), fn=functional.swiglu
)
executor.register_implementation(_composite, execution_transform=_symbol, grad_transform=_gradient)


def swiglu(gate: Any, up: Any) -> Any:
    """What `fastft.functional.swiglu` is in a trace."""
    return made_again(_composite(gate, up))


executor.substitute(functional.swiglu, swiglu)
