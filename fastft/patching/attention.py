"""Attention as a callable: transformers' own interface with the mask, scaling and keywords its module would pass.

Nothing is computed here. Packed documents on sdpa go to kernels/document_attention.py (a `DocumentMask` names them),
everything else to transformers' function. On Hopper, SDPA's cuDNN backend runs causal attention 1.8 times as fast as
flash in training (8B shapes, H200). But it builds a plan for every new shape, 70 to 80 ms of the host's time for the
forward and as much for the backward, and PyTorch (2.11; not all versions) prefers it for every length: a run whose
rows differ would spend more time on plans than on steps. So the order of the backends is ours, set for the call by
`sdpa_kernel(…, set_priority=True)`: cuDNN first for lengths that are multiples of 128 (fixed and full rows, of which a
run has few) and where attention takes so long that a plan pays at once; flash first otherwise. It depends on the shape
alone: equal runs choose equally.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastft.autograd.attention_half import Attention
from fastft.kernels.document_attention import DocumentAttention
from fastft.patching.documents import DocumentMask
from fastft.patching.families import Family

CACHE_NAMES = ("cache", "past_key_values")  # from transformers 5.24 on, and before
_LENGTH_MULTIPLE = 128
_PLAN_PAYS = 3e11  # batch · heads · length² · head_dim: there cuDNN saves 5 ms a layer, two plans cost 150 ms a model
_PREFERS_CUDNN = frozenset({(9, 0), (10, 0)})  # capabilities for which PyTorch itself may put cuDNN first


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

        order = _backends(query) if attention_mask is None and implementation == "sdpa" else None
        if order is None:
            return run()
        with sdpa_kernel(order, set_priority=True):
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


def _backends(query: Tensor) -> list[Any] | None:
    """The order in which causal attention over `query` `[batch, heads, sequence, head_dim]` tries SDPA's backends.

    None: PyTorch's own, where it does not put cuDNN first.
    """
    batch, heads, length, width = query.shape
    if not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16) or width > 128 or width % 8:
        return None
    if _capability(query.device.index) not in _PREFERS_CUDNN:
        return None
    _have_pytorch_choose(query.device.index)
    plans = length % _LENGTH_MULTIPLE == 0 or batch * heads * length**2 * width >= _PLAN_PAYS
    return list(_CUDNN_FIRST if plans else _FLASH_FIRST)


_CUDNN_FIRST = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)
_FLASH_FIRST = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
)


@functools.cache
def _have_pytorch_choose(device_index: int) -> None:
    """Have PyTorch choose a backend once.

    At the first choice in a process it sets the order that it prefers, over one that was asked for; and who asked puts
    back, when done, what was there before.
    """
    one = torch.empty((1, 1, 8, 64), dtype=torch.float16, device=torch.device("cuda", device_index))
    torch._fused_sdp_choice(one, one, one, is_causal=True)


@functools.cache
def _capability(device_index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device_index)
