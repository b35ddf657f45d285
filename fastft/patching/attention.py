"""Attention as a callable: transformers' own interface with the mask, scaling and keywords its module would pass.

Nothing is computed here. Packed documents on sdpa go to kernels/document_attention.py (a `DocumentMask` names them),
everything else to transformers' function. On Hopper, SDPA's cuDNN backend runs causal attention faster than flash in
training (1.8 times for 8B shapes on an H200); PyTorch does not prefer it by itself, so the call is wrapped in
`sdpa_kernel(…, set_priority=True)`, which is restored at once. cuDNN builds a plan per shape, so it gets lengths that
are multiples of 128 (fixed and full rows, of which a run has few); ragged lengths stay with flash. The choice depends
on the shape alone: equal runs choose equally.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fastft.autograd.attention_half import Attention
from fastft.kernels.document_attention import DocumentAttention
from fastft.patching.documents import DocumentMask
from fastft.patching.families import Family

CACHE_NAMES = ("cache", "past_key_values")  # from transformers 5.24 on, and before
_LENGTH_MULTIPLE = 128


def interface_of(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The attention function transformers would call for `module` now (`config._attn_implementation`)."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    eager = sys.modules[type(module).__module__].eager_attention_forward  # type: ignore[attr-defined]
    config: Any = module.config
    return ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, eager)  # type: ignore[no-any-return]


def family_arguments(module: nn.Module, family: Family) -> dict[str, Any]:
    """The keywords this family's attention adds, read off the module as its declaration says."""
    return {
        keyword: functools.reduce(lambda owner, name: getattr(owner, name, None), path.split("."), module)
        for keyword, path in family.attention_arguments.items()
    }


def attention_callable(
    module: nn.Module, family: Family, attention_mask: Any, kwargs: dict[str, Any], dropout: float = 0.0
) -> Attention:
    """`(query, key, value) -> output [batch, sequence, heads, head_dim]` over transformers' interface.

    Args:
        module: the attention module (read by the interface: `num_key_value_groups`, `is_causal`).
        family: its declaration.
        attention_mask: as the decoder layer received it.
        kwargs: the layer's further keywords (document boundaries among them), passed on as received.
        dropout: attention dropout of this call.
    """
    interface = interface_of(module)
    arguments = {**family_arguments(module, family), **kwargs}
    scaling = module.scaling
    implementation = module.config._attn_implementation  # type: ignore[union-attr]

    if implementation == "sdpa" and isinstance(attention_mask, DocumentMask):
        return DocumentAttention(attention_mask.documents, scaling, attention_mask.window, dropout)

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        def run() -> Tensor:
            return interface(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **arguments)[
                0
            ]

        if attention_mask is None and implementation == "sdpa" and _prefers_cudnn(query):
            from torch.nn.attention import SDPBackend, sdpa_kernel

            order = [
                SDPBackend.CUDNN_ATTENTION,
                SDPBackend.FLASH_ATTENTION,
                SDPBackend.EFFICIENT_ATTENTION,
                SDPBackend.MATH,
            ]
            with sdpa_kernel(order, set_priority=True):
                return run()
        return run()

    return attention


def has_cache(kwargs: dict[str, Any]) -> bool:
    """Whether a layer's keywords bring a cache of keys and values."""
    return any(kwargs.get(name) is not None for name in CACHE_NAMES)


def over_cache(attention: Attention, kwargs: dict[str, Any], layer_index: int, further: dict[str, Any]) -> Attention:
    """`attention` over all keys and values so far, as transformers' modules call it while generating.

    Args:
        attention: over keys and values as given.
        kwargs: the layer's keywords, a transformers `Cache` among them: these keys and values are added to it.
        layer_index: the layer's place in it.
        further: the keywords that the attention module would pass on.
    """
    name = next(name for name in CACHE_NAMES if kwargs.get(name) is not None)
    cache, passed = kwargs[name], {"kwargs": further} if name == "cache" else {}

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = cache.update(key, value, layer_index, **passed)
        return attention(query, key, value)

    return attend


def attention_key(module: nn.Module, attention_mask: Any, kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """What the call depends on besides Q, K and V, if that is plain data: then it can be replayed from a CUDA graph.

    transformers' sdpa function reads the mask, `is_causal`, scaling and dropout, and nothing else of its keywords.
    Packed documents are not plain data; what else their attention goes by is (memory/graphs.py sees to the documents).
    """
    if module.config._attn_implementation != "sdpa":  # type: ignore[union-attr]
        return None
    if isinstance(attention_mask, DocumentMask):
        return "documents", module.scaling, attention_mask.window
    if attention_mask is not None:
        return None
    causal = kwargs.get("is_causal")
    return None if isinstance(causal, Tensor) else ("sdpa", module.scaling, causal, getattr(module, "is_causal", None))


@functools.cache
def _is_hopper(device_index: int) -> bool:
    return torch.cuda.get_device_capability(device_index) == (9, 0)


def _prefers_cudnn(query: Tensor) -> bool:
    """Whether cuDNN is the faster backend for causal attention over `query` `[batch, heads, sequence, head_dim]`."""
    if not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16) or query.shape[2] % _LENGTH_MULTIPLE:
        return False
    return query.shape[-1] <= 128 and query.shape[-1] % 8 == 0 and _is_hopper(query.device.index)
