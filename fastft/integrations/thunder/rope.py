"""Rotary embedding in Thunder: ours, transformers' `apply_rotary_pos_emb`, litgpt's `apply_rope`.

`fastft.functional.rope` and transformers' function (every modeling file has its own copy) turn queries and keys in one
operator; litgpt's turns one tensor. cos and sin may be one row for all or one a batch element, and may cover fewer
columns than a head has. Where a call does not fit (another `unsqueeze_dim`, other ranks) it is spelled out in Thunder's
operations, as the function itself is written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import thunder.torch as ltorch
from thunder.core.transforms import get_grad, put_grad

from fastft import functional
from fastft.integrations.thunder.executor import FLOATS, TensorProxy, executor, torch_dtype
from fastft.operators.rope import run, run_one

__all__ = ["claim_apply_rotary_pos_emb", "rope", "rope_one"]


def _meta(q: Any, k: Any, cos: Any, sin: Any, inverse: bool) -> tuple[Any, Any]:
    return TensorProxy(like=q), TensorProxy(like=k)


def _one_meta(x: Any, cos: Any, sin: Any, inverse: bool) -> Any:
    return TensorProxy(like=x)


_symbol = executor.register_operator("fastft_rope", meta=_meta, fn=run)
_backward_symbol = executor.register_operator("fastft_rope_backward", meta=_meta, fn=run)
_one_symbol = executor.register_operator("fastft_rope_one", meta=_one_meta, fn=run_one)
_one_backward_symbol = executor.register_operator("fastft_rope_one_backward", meta=_one_meta, fn=run_one)


def _like(q: Any, k: Any, cos: Any, sin: Any) -> tuple[Any, Any]:
    return _symbol(q, k, cos, sin, False)


def _gradient(q: Any, k: Any, cos: Any, sin: Any) -> tuple[Any, Any]:
    q_turned, k_turned = _symbol(q, k, cos, sin, False)
    grad_q, grad_k = _backward_symbol(get_grad(q_turned), get_grad(k_turned), cos, sin, True)
    put_grad(q, grad_q)
    put_grad(k, grad_k)
    return q_turned, k_turned


def _one_like(x: Any, cos: Any, sin: Any) -> Any:
    return _one_symbol(x, cos, sin, False)


def _one_gradient(x: Any, cos: Any, sin: Any) -> Any:
    turned = _one_symbol(x, cos, sin, False)
    put_grad(x, _one_backward_symbol(get_grad(turned), cos, sin, True))
    return turned


_composite = executor.register_operator("fastft_rope_composite", like=_like, fn=functional.rope)
executor.register_implementation(_composite, execution_transform=_like, grad_transform=_gradient)
_one_composite = executor.register_operator(
    "fastft_rope_one_composite", like=_one_like, fn=lambda x, cos, sin: run_one(x, cos, sin, False)
)
executor.register_implementation(_one_composite, execution_transform=_one_like, grad_transform=_one_gradient)


def _reason(cos: Any, sin: Any, *heads: Any) -> str | None:
    """Why the kernel cannot turn `heads` [B, heads, S, D] by cos and sin, or None."""
    if cos.ndim != 3 or tuple(cos.shape) != tuple(sin.shape):
        return f"cos of shape {tuple(cos.shape)} and sin of {tuple(sin.shape)}: expected [1 or B, S, R] of both"
    for x in heads:
        if x.ndim != 4 or torch_dtype(x) not in FLOATS:
            return f"{torch_dtype(x)} heads of shape {tuple(x.shape)}: expected [B, heads, S, D]"
        if cos.shape[0] not in (1, x.shape[0]) or cos.shape[1] != x.shape[2]:
            return f"cos of shape {tuple(cos.shape)} for heads of {tuple(x.shape)}"
        if cos.shape[2] % 2 or cos.shape[2] > x.shape[3]:
            return f"{cos.shape[2]} columns turned in heads of {x.shape[3]}"
        if x.device != cos.device:
            return "cos and heads on different devices"
    if len(heads) == 2 and heads[0].dtype != heads[1].dtype:
        return f"queries of {torch_dtype(heads[0])} and keys of {torch_dtype(heads[1])}"
    return None


def rope(q: Any, k: Any, cos: Any, sin: Any) -> tuple[Any, Any]:
    """What `fastft.functional.rope` is in a trace.

    Raises:
        ValueError: shapes that do not fit each other.
    """
    reason = _reason(cos, sin, q, k)
    if reason is not None:
        raise ValueError(f"rope: {reason}.")
    return _composite(q, k, cos, sin)


executor.substitute(functional.rope, rope)


def _rotate_half(x: Any) -> Any:
    half = x.shape[-1] // 2
    return ltorch.cat((-x[..., half:], x[..., :half]), -1)


def _apply_rotary_pos_emb(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> tuple[Any, Any]:
    """transformers' function in a trace; its heads are turned whole, so R is D."""
    reason = f"unsqueeze_dim={unsqueeze_dim}" if unsqueeze_dim != 1 else _reason(cos, sin, q, k)
    if reason is None and cos.shape[-1] != q.shape[-1]:
        reason = f"cos of {cos.shape[-1]} columns for heads of {q.shape[-1]}"
    if not executor.decline("apply_rotary_pos_emb", reason):
        return _composite(q, k, cos, sin)
    cos, sin = ltorch.unsqueeze(cos, unsqueeze_dim), ltorch.unsqueeze(sin, unsqueeze_dim)
    return (q * cos) + (_rotate_half(q) * sin), (k * cos) + (_rotate_half(k) * sin)


def rope_one(x: Any, cos: Any, sin: Any) -> Any:
    """`litgpt.model.apply_rope` in a trace; it turns the slice of the head that it is given, so R is D."""
    reason = _reason(cos, sin, x)
    if reason is None and cos.shape[-1] != x.shape[-1]:
        reason = f"cos of {cos.shape[-1]} columns for heads of {x.shape[-1]}"
    if not executor.decline("apply_rope", reason):
        return _one_composite(x, cos, sin)
    added = x.ndim - cos.ndim
    if added > 0:
        shape = (cos.shape[0],) + (1,) * added + tuple(cos.shape[1:])
        cos, sin = ltorch.reshape(cos, shape), ltorch.reshape(sin, shape)
    return ltorch.to((x * cos) + (_rotate_half(x) * sin), x.dtype)


def claim_apply_rotary_pos_emb() -> None:
    """Claim the rotation of every transformers model whose modeling file is loaded; call again after loading more."""
    for name, module in list(sys.modules.items()):
        if not name.startswith("transformers.models.") or ".modeling_" not in name:
            continue
        function: Callable[..., Any] | None = vars(module).get("apply_rotary_pos_emb")
        if function is not None and _is_the_usual_rotation(function):
            executor.substitute(function, _apply_rotary_pos_emb)


def _is_the_usual_rotation(function: Any) -> bool:
    """Whether a modeling file's function is Llama's: same parameters, same body (multimodal models have other ones)."""
    from transformers.models.llama import modeling_llama

    def code(candidate: Any) -> Any:
        inner = candidate if hasattr(candidate, "__code__") else type(candidate).forward
        inner = getattr(inner, "__wrapped__", inner)
        return getattr(inner, "__code__", None)

    ours, theirs = code(modeling_llama.apply_rotary_pos_emb), code(function)
    return ours is not None and theirs is not None and ours.co_code == theirs.co_code
