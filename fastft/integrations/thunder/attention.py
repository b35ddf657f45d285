"""Attention in Thunder: `F.scaled_dot_product_attention` without a mask, by the backend that torch would choose.

No kernel of ours: a claim for what Thunder's executor "sdpa" leaves out. That one knows FlashAttention 2 and the
memory-efficient kernel, where torch prefers cuDNN's on Hopper; and it has no `enable_gqa`, so keys and values are
repeated for the queries' heads before it and their gradients summed after it, each time a tensor as large as the
queries. Here keys and values keep the heads that they were projected to (where the program repeats them, what it
repeats is taken, and the copies are never made), and the backend is chosen when the step runs.

Kept for the backward are queries, keys, values, the output [B, heads, S, D] and a log-sum a query in float32; keys and
values alone, not the product that they may be views of (`fastft_kept`), unless the queries are views of it too.
"""

from __future__ import annotations

from typing import Any

import thunder.torch as ltorch
import torch
import torch.nn.functional as F
from thunder.core import dtypes
from thunder.core.compile_data import get_compile_data
from thunder.core.prims import OpTags, PrimIDs
from thunder.core.proxies import ProxyTag
from thunder.core.trace import get_tracectx
from thunder.core.transforms import get_grad, put_grads
from thunder.transforms.autocast import maybe_downcast_to
from torch import Tensor

from fastft.integrations.thunder.executor import FLOATS, TensorProxy, executor, torch_dtype
from fastft.integrations.thunder.repeat import kept

__all__ = ["attention", "gpu_reason"]

_CUDNN = 3  # torch.nn.attention.SDPBackend.CUDNN_ATTENTION
_LARGEST_HEAD = 128  # what every backend takes both ways on every device
_aten = torch.ops.aten


def _run(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None) -> tuple[Tensor, ...]:
    """Output [B, heads, S, D], log-sums [B, heads, S] (cuDNN: [B, heads, S, 1]), and two of the generator's numbers."""
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    if query.device.type == "cpu":
        found = _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal, scale=scale)
        return (*found, query.new_empty(0, dtype=torch.int64), query.new_empty(0, dtype=torch.int64))
    grouped = query.shape[1] != key.shape[1]
    chosen = torch._fused_sdp_choice(query, key, value, None, 0.0, is_causal, scale=scale, enable_gqa=grouped)
    if chosen == _CUDNN:
        found = _aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, is_causal, False, scale=scale
        )
    else:
        found = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, False, scale=scale)
    return found[0], found[1], found[6], found[7]


def _run_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sums: Tensor,
    seed: Tensor,
    offset: Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, by the backend that the forward ran on."""
    grad, query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (grad, query, key, value))
    tensors = grad, query, key, value, output, log_sums
    if query.device.type == "cpu":
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, 0.0, is_causal, scale=scale)
        return tuple(grads)
    lengths = query.shape[2], key.shape[2]
    if log_sums.dim() == query.dim():
        grads = _aten._scaled_dot_product_cudnn_attention_backward(
            *tensors, seed, offset, None, None, None, *lengths, 0.0, is_causal, scale=scale
        )
    else:
        grads = _aten._scaled_dot_product_flash_attention_backward(
            *tensors, None, None, *lengths, 0.0, is_causal, seed, offset, scale=scale
        )
    return tuple(grads)


def _meta(query: Any, key: Any, value: Any, is_causal: bool, scale: float | None) -> tuple[Any, ...]:
    def other(shape: tuple[Any, ...], dtype: Any) -> Any:
        return TensorProxy(shape=shape, dtype=dtype, device=query.device, requires_grad=False)

    return TensorProxy(like=query), other(query.shape[:-1], dtypes.float32), *(other((), dtypes.int64) for _ in "so")


def _backward_meta(grad: Any, query: Any, key: Any, value: Any, *_: Any) -> tuple[Any, Any, Any]:
    return TensorProxy(like=query), TensorProxy(like=key), TensorProxy(like=value)


_symbol = executor.register_operator("fastft_attention", meta=_meta, fn=_run)
_backward_symbol = executor.register_operator("fastft_attention_backward", meta=_backward_meta, fn=_run_backward)


def _like(query: Any, key: Any, value: Any, is_causal: bool, scale: float | None) -> Any:
    return _symbol(query, key, value, is_causal, scale)[0]


def _gradient(query: Any, key: Any, value: Any, is_causal: bool, scale: float | None) -> Any:
    alone = kept(key, query), kept(value, query)
    output, *rest = _symbol(query, *alone, is_causal, scale)
    grads = _backward_symbol(get_grad(output), query, *alone, output, *rest, is_causal, scale)
    put_grads((query, key, value), grads)
    return output


def _eager(query: Any, key: Any, value: Any, is_causal: bool, scale: float | None) -> Any:
    return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=True)


_composite = executor.register_operator("fastft_attention_composite", like=_like, fn=_eager)
executor.register_implementation(_composite, execution_transform=_like, grad_transform=_gradient)


def _reason(query: Any, key: Any, value: Any, mask: Any, dropout: float, is_causal: bool) -> str | None:
    """Why a call is left to Thunder, or None."""
    if mask is not None or dropout:
        return "a mask" if mask is not None else "dropout"
    shapes = tuple(tuple(x.shape) for x in (query, key, value))
    if any(len(shape) != 4 for shape in shapes) or shapes[1] != shapes[2] or shapes[0][::3] != shapes[1][::3]:
        return f"queries, keys, values of shapes {shapes}: expected [B, heads, S, D], keys like values"
    if any(0 in shape for shape in shapes):
        return f"nothing to attend to, or from: shapes {shapes}"  # torch's kernels divide by these lengths
    if is_causal and shapes[0][2] != shapes[1][2]:
        return "causal over keys that are not the queries' own"
    if {torch_dtype(key), torch_dtype(value)} != {torch_dtype(query)} or torch_dtype(query) not in FLOATS:
        return f"queries, keys, values of {[torch_dtype(x) for x in (query, key, value)]}"
    if query.device.type != "cuda":
        return None if query.device.type == "cpu" else f"tensors on {query.device.type}"
    return gpu_reason(torch_dtype(query), query.shape[3], query.device.index)


@torch.compiler.assume_constant_result  # litgpt's attention asks in torch.compile's graphs too
def _lacks_flash(index: int | None) -> str | None:
    """Why FlashAttention does not run on GPU `index`, or None."""
    if torch.cuda.get_device_capability(index) < (8, 0):
        return "a GPU before Ampere"
    if not (torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.is_flash_attention_available()):
        return "FlashAttention is switched off"
    return None


def gpu_reason(dtype: torch.dtype, head: int, index: int | None) -> str | None:
    """Why FlashAttention or cuDNN's does not take heads of `head` columns on GPU `index`, or None."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"{dtype}: expected 16 bits on a GPU"
    if head % 8 or head > _LARGEST_HEAD:
        return f"heads of {head}: expected a multiple of 8, {_LARGEST_HEAD} at most"
    return _lacks_flash(index)


def _writes(symbol: Any) -> bool:
    """Whether a symbol of the program, or one it is made of, writes in place."""
    own = symbol.sym.id == PrimIDs.COPY_ or OpTags.IN_PLACE in (symbol.sym.tags or ())
    return own or any(_writes(part) for part in symbol.subsymbols)


def _repeated(x: Any) -> tuple[Any, int]:
    """What `torch.repeat_interleave` made `x` of, head by head, and how often; or `x` itself and 1.

    `x` itself too where a gradient ends at the copies (`torch.no_grad`), and where anything was written in place since:
    the copies, or what they were made of, may be other numbers then.
    """
    compilation = get_compile_data()
    if ProxyTag.DETACHED_AUTOGRAD_GRAPH in x.tags and (compilation is None or compilation.is_grad_enabled):
        return x, 1
    for symbol in reversed([symbol for scope in get_tracectx().scopes for symbol in scope]):
        if _writes(symbol):
            break
        if symbol.sym.id == ltorch.repeat_interleave.id and symbol.output.name == x.name:
            given = dict(zip(("input", "repeats", "dim"), symbol.args, strict=False)) | symbol.kwargs
            times, dim = given["repeats"], given.get("dim")
            plain = isinstance(times, int) and isinstance(dim, int) and dim % x.ndim == x.ndim - 3
            return (given["input"], times) if plain else (x, 1)
    return x, 1


def _autocast(*tensors: Any) -> tuple[Any, ...]:
    """`tensors` as attention gets them under `torch.autocast`; Thunder asks its own rules for its own symbols alone."""
    compilation = get_compile_data()
    if compilation is None or compilation.autocast_stack.is_empty():
        return tensors
    kind = tensors[0].device.devicetype.name.lower()
    dtype = compilation.autocast_stack.get_dtype_for_device_if_enabled(kind)
    return tensors if dtype is None else tuple(maybe_downcast_to(dtypes.to_dtype(dtype), tensors))


def _groups(query: Any, x: Any) -> int:
    """How many queries' heads share a head of keys or of values `x`.

    Raises:
        RuntimeError: not a whole number of them; torch raises the same.
    """
    heads, own = query.shape[-3], x.shape[-3]
    if not own or heads % own:
        raise RuntimeError(
            f"scaled_dot_product_attention: enable_gqa needs keys and values whose number of heads divides the "
            f"queries'; got {heads} heads of queries over {own}."
        )
    return int(heads // own)


# The signature of `torch.nn.functional.scaled_dot_product_attention`
def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """What `F.scaled_dot_product_attention` is in a trace.

    Raises:
        RuntimeError: grouped queries whose heads the keys' or the values' do not divide.
    """
    projected = key, value
    query, key, value = _autocast(query, key, value)
    reason = _reason(query, key, value, attn_mask, dropout_p, is_causal)
    times = [_groups(query, x) if enable_gqa else 1 for x in (key, value)]
    if reason is None and query.shape[1] != key.shape[1] * times[0]:
        reason = f"{query.shape[1]} heads over {key.shape[1]}"
    if not executor.decline("scaled_dot_product_attention", reason):
        sources = [_repeated(x) for x in projected]
        if sources[0][1] == sources[1][1]:
            _, key, value = _autocast(query, *(source for source, _ in sources))
        return _composite(query, key, value, is_causal, scale)
    key, value = (x if n == 1 else ltorch.repeat_interleave(x, n, -3) for x, n in zip((key, value), times, strict=True))
    return ltorch.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)


executor.substitute(F.scaled_dot_product_attention, attention)
