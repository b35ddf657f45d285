"""The kernels as functions for anyone, differentiable, on any device.

    y = rms_norm(x, weight, eps)
    y = swiglu(gate, up)
    q, k = rope(q, k, cos, sin)                     # Hugging Face's layout [B, heads, S, D]
    loss = linear_cross_entropy(hidden, weight, labels)
    y = lora_linear(x, weight, ...)
    w = dequantize(weight)

On CUDA they run as Triton kernels, elsewhere (and in float64) as their plain-torch twins. No function writes to a
tensor it was given (but `out`), nor to a gradient handed to its backward. A backward through a backward raises.

Under `torch.compile` the same functions are operators of the dispatcher (fastft/operators), which a compiler keeps
whole: no graph break, and one graph for all lengths.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch

from fastft.autograd import linear_cross_entropy as _linear_cross_entropy
from fastft.autograd import lora_linear as _lora_linear
from fastft.autograd.first_order import first_order
from fastft.kernels import nf4
from fastft.kernels import rms_norm as rms_norm_kernels
from fastft.kernels import rope as rope_kernels
from fastft.kernels import swiglu as swiglu_kernels
from fastft.kernels.nf4 import QuantizedWeight
from fastft.kernels.rms_norm import NormMode

__all__ = ["QuantizedWeight", "dequantize", "linear_cross_entropy", "lora_linear", "rms_norm", "rope", "swiglu"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, mode: NormMode = "llama") -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension.

    Args:
        x: [..., hidden].
        weight: [hidden], any float dtype.
        eps: added to the mean square.
        mode: "llama" rounds the normalized x to its dtype before weight multiplies it (Llama, Mistral, Qwen, Granite);
            "fp32" multiplies in float32 and rounds once (OLMo 2); "gemma" so too, by 1 + weight.

    Returns:
        [..., hidden], in the promoted dtype of x and weight for "llama", else in x's.

    Raises:
        ValueError: an unknown mode, or a weight that is not [hidden].
    """
    if mode not in ("llama", "fp32", "gemma"):
        raise ValueError(f"rms_norm: mode is {mode!r}; it must be 'llama', 'fp32' or 'gemma'.")
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm: weight has shape {list(weight.shape)}, but the last dimension of x {list(x.shape)} needs "
            f"[{x.shape[-1]}]."
        )
    if torch.compiler.is_compiling():
        from fastft import operators

        return operators.rms_norm(x, weight, eps, mode)
    return _RMSNorm.apply(x, weight, eps, mode)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up.

    Args:
        gate: [..., intermediate].
        up: like gate.

    Returns:
        [..., intermediate] in gate's dtype.

    Raises:
        ValueError: gate and up differ in shape or dtype.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"swiglu: gate is {gate.dtype} {list(gate.shape)} and up {up.dtype} {list(up.shape)}; they must agree."
        )
    if torch.compiler.is_compiling():
        from fastft import operators

        return operators.swiglu(gate, up)
    return _SwiGLU.apply(gate, up)


def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary position embedding, as transformers' `apply_rotary_pos_emb(q, k, cos, sin)`.

    Args:
        q: [B, q_heads, S, D].
        k: [B, k_heads, S, D].
        cos: [B or 1, S, R], R even and at most D; columns of q and k from R on pass through. Not differentiated.
        sin: as cos.

    Returns:
        The rotated q and k, in their own dtypes.

    Raises:
        ValueError: shapes that do not fit each other.
    """
    batch, _, sequence, head = q.shape if q.dim() == 4 else (0, 0, 0, 0)
    fits = (
        q.dim() == k.dim() == 4
        and cos.shape == sin.shape
        and cos.dim() == 3
        and cos.shape[0] in (1, batch)
        and cos.shape[1] == sequence
    )
    if not fits or cos.shape[2] % 2 or cos.shape[2] > head or k.shape != (batch, k.shape[1], sequence, head):
        raise ValueError(
            f"rope: q {list(q.shape)}, k {list(k.shape)}, cos {list(cos.shape)} and sin {list(sin.shape)} do not fit; "
            "expected q and k [B, heads, S, D] and cos and sin [B or 1, S, R] with R even and at most D."
        )
    if torch.compiler.is_compiling():
        from fastft import operators

        return operators.rope(q, k, cos, sin)
    return _RoPE.apply(q, k, cos, sin)


@functools.wraps(_linear_cross_entropy.linear_cross_entropy)
def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, **options: Any
) -> torch.Tensor:
    if torch.compiler.is_compiling():
        from fastft import operators

        return operators.linear_cross_entropy(hidden, weight, labels, **traceable_options(options))
    return _linear_cross_entropy.linear_cross_entropy(hidden, weight, labels, **options)


def traceable_options(options: dict[str, Any]) -> dict[str, Any]:
    """`linear_cross_entropy`'s options less those that a compiled graph has no place for, where these are None.

    Raises:
        ValueError: where one of them is given.
    """
    given = [name for name in ("on_empty", "skip_below", "on_skip") if options.get(name) is not None]
    if given:
        raise ValueError(
            f"linear_cross_entropy: {', '.join(given)} cannot be traced by a compiler: a graph calls nothing back, and "
            "its hidden gradient multiplies by the whole head. Leave them out of the compiled function, or call it "
            "eagerly; a batch with no label warns in a graph too."
        )
    return {name: value for name, value in options.items() if name not in ("on_empty", "skip_below", "on_skip")}


@functools.wraps(_lora_linear.lora_linear)
def lora_linear(
    x: torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    lora_a: torch.Tensor | None = None,
    lora_b: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    if torch.compiler.is_compiling():
        from fastft import operators

        return operators.lora_linear(x, weight, lora_a, lora_b, **options)
    return _lora_linear.lora_linear(x, weight, lora_a, lora_b, **options)


def dequantize(
    weight: QuantizedWeight | torch.Tensor, dtype: torch.dtype | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The dense weight of a 4-bit one (NF4 or FP4, nested scales or not). Not differentiable: the codes are discrete.

    Args:
        weight: a QuantizedWeight, or a bitsandbytes `Params4bit`.
        dtype: of the result; None is what the weight was quantized from.
        out: [out_features, in_features] to write into.

    Returns:
        [out_features, in_features].

    Raises:
        TypeError: weight is neither, or has not been quantized yet.
    """
    if not isinstance(weight, QuantizedWeight):
        weight = _from_bitsandbytes(weight)
    if out is None and torch.compiler.is_compiling():
        from fastft import operators

        return operators.dequantize(weight, dtype)
    return nf4.dequantize(weight, dtype, out=out)


def _from_bitsandbytes(weight: torch.Tensor) -> QuantizedWeight:
    """A `Params4bit`'s tensors by reference. Read by attribute, so that bitsandbytes need not be imported."""
    state = getattr(weight, "quant_state", None)
    if state is None or getattr(state, "quant_type", None) not in ("nf4", "fp4"):
        raise TypeError(
            f"dequantize: weight is a {type(weight).__name__} without a 4-bit quant_state; expected a QuantizedWeight "
            "or a quantized bitsandbytes Params4bit, which is quantized when it is first moved to its device."
        )
    if getattr(state, "packing_format_for_cpu", False):
        raise TypeError(
            "dequantize: bitsandbytes has repacked this weight for its CPU inference kernel, in place. Set "
            "`support_avx512bf16_for_cpu = False` on the Linear4bit before its first use in eval mode."
        )
    return nf4.quantized_weight(weight, state)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, mode: NormMode) -> torch.Tensor:
        y, inverse_rms, _ = rms_norm_kernels.rms_norm(x, weight, eps, mode=mode)
        ctx.save_for_backward(x, weight, inverse_rms)
        ctx.mode = mode
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, inverse_rms = ctx.saved_tensors
        grad_x, grad_weight = rms_norm_kernels.rms_norm_backward(
            grad_output, x, weight, inverse_rms, mode=ctx.mode, needs_weight_grad=ctx.needs_input_grad[1]
        )
        return grad_x if ctx.needs_input_grad[0] else None, grad_weight, None, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return swiglu_kernels.swiglu(gate, up)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        gate, up = ctx.saved_tensors
        _, grad_gate, grad_up = swiglu_kernels.swiglu_backward(grad, gate, up, needs_product=False)
        return grad_gate if ctx.needs_input_grad[0] else None, grad_up if ctx.needs_input_grad[1] else None


class _RoPE(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.set_materialize_grads(False)  # attention over q alone leaves k without a gradient
        q_rotated, k_rotated = rope_kernels.rope(q, k, cos, sin, heads_first=True)
        return q_rotated, cast(torch.Tensor, k_rotated)  # None only where k is

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_q: torch.Tensor | None, grad_k: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        grad_q = grad_q if ctx.needs_input_grad[0] else None
        grad_k = grad_k if ctx.needs_input_grad[1] else None
        if grad_q is None:
            if grad_k is not None:
                grad_k, _ = rope_kernels.rope(grad_k, None, cos, sin, inverse=True, heads_first=True)
        else:
            grad_q, grad_k = rope_kernels.rope(grad_q, grad_k, cos, sin, inverse=True, heads_first=True)
        return grad_q, grad_k, None, None
