"""RMSNorm, MLP and attention of planned models, called by the inert class methods of `inert.py`.

They serve where the whole decoder layer cannot be one node (a DoRA adapter, dropout, a hook) and where no layer is
around (the final norm, generation). Each piece decides for itself, so one odd projection costs that projection, not
the layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastft.autograd import mlp_half
from fastft.autograd.autocast import AutocastState, suspended
from fastft.autograd.lora_linear import apply_group
from fastft.autograd.mlp_half import apply_mlp
from fastft.autograd.products import products
from fastft.autograd.projection import Projection
from fastft.functional import rms_norm, rope
from fastft.patching import registry
from fastft.patching.attention import CACHE_NAMES, attention_callable, has_cache
from fastft.patching.decoder_layer import ATTENTIONS, FLOATS, global_hooks, wants_attentions
from fastft.patching.families import Family
from fastft.patching.peft import ProjectionReader, hooked

DECODE_ROWS = 32  # below this many tokens without gradient, bitsandbytes' fused 4-bit product beats dequantizing
_readers: weakref.WeakKeyDictionary[nn.Module, dict[str, ProjectionReader]] = weakref.WeakKeyDictionary()


def _common_reason(site: registry.Site, x: Any) -> str | None:
    if registry.runs_stock_only():
        return registry.DISABLED
    if site.reason is not None:
        return site.reason
    if not isinstance(x, Tensor) or x.dtype not in FLOATS or x.numel() == 0:
        return "called with arguments fastft does not know"
    return None


def _readers_of(module: nn.Module, names: Sequence[str]) -> dict[str, ProjectionReader]:
    readers = _readers.get(module)
    if readers is None:
        readers = _readers[module] = {name: ProjectionReader(module, name) for name in names}
    return readers


def _read(module: nn.Module, names: Sequence[str], x: Tensor, wanted: Sequence[str]) -> list[Projection] | str:
    """The projections `wanted` of `module` as they stand, or why they cannot run fast together."""
    state = AutocastState.current(x.device.type)
    readers, found = _readers_of(module, names), []
    for name in wanted:
        projection = readers[name].read(state.compute_dtype(x.dtype), state.enabled)
        if isinstance(projection, str):
            return projection
        found.append(projection)
    return found


def norm_forward(self: Any, family: Family, original: Callable[..., Any], hidden_states: Tensor) -> Tensor:
    """`RMSNorm.forward`: one kernel each way."""
    site = self.__dict__[registry.PLAN]
    reason = _common_reason(site, hidden_states)
    if reason is not None:
        site.ran_stock(reason)
        return original(self, hidden_states)  # type: ignore[no-any-return]
    site.ran_fast()
    return rms_norm(hidden_states, self.weight, self.variance_epsilon, family.norm_mode)


_MLP_NAMES = ("gate_proj", "up_proj", "down_proj")


def mlp_forward(self: Any, family: Family, original: Callable[..., Any], x: Tensor) -> Tensor:
    """`MLP.forward`: the MLP pair, where all three projections are as it assumes."""
    site = self.__dict__[registry.PLAN]
    reason = _common_reason(site, x) or _mlp_reason(self, x)
    projections = _read(self, _MLP_NAMES, x, _MLP_NAMES) if reason is None else reason
    if isinstance(projections, str):
        site.ran_stock(projections)
        return original(self, x)  # type: ignore[no-any-return]
    site.ran_fast()
    gate, up, down = projections
    if torch.is_grad_enabled():
        return apply_mlp(x, (gate, up), down)
    rows = x.reshape(-1, x.shape[-1])
    dtype = AutocastState.current(x.device.type).compute_dtype(x.dtype)
    with suspended(x.device.type):
        made = products((gate, up), dtype), products([down], dtype)
        output, _ = mlp_half.forward(rows.to(dtype), *made, down.out_features, gate.out_features, keep=False)
    return output.view(x.shape)


def _mlp_reason(module: nn.Module, x: Tensor) -> str | None:
    activation = module._modules["act_fn"]
    if type(activation).__name__ not in ("SiLUActivation", "SiLU"):
        return f"act_fn is {type(activation).__name__}, not SiLU"
    if global_hooks() or hooked(activation.__dict__):
        return "act_fn has a hook, or global module hooks are installed"
    if not torch.is_grad_enabled() and x.numel() <= DECODE_ROWS * x.shape[-1]:
        return registry.GENERATING
    return None


_ATTENTION_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj")


def attention_forward(
    self: Any, family: Family, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """`Attention.forward`: grouped Q/K/V, RoPE and the output projection, each fast where it can be."""
    site = self.__dict__[registry.PLAN]
    x = kwargs.get("hidden_states", args[0] if args else None)
    reason = _common_reason(site, x) or _attention_reason(args, kwargs)
    if reason is not None:
        site.ran_stock(reason)
        return original(self, *args, **kwargs)  # type: ignore[no-any-return]
    return _attention(self, site, family, x, kwargs)


def _attention_reason(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    if has_cache(kwargs):
        return registry.GENERATING
    if len(args) > 1 or kwargs.get("position_embeddings") is None:
        return "called with arguments fastft does not know"
    if not torch.is_grad_enabled():
        return registry.GENERATING
    if wants_attentions():
        return ATTENTIONS
    return "global module hooks are installed" if global_hooks() else None


def _project(module: nn.Module, site: registry.Site, x: Tensor, names: Sequence[str]) -> list[Tensor]:
    """Named projections of `x`: as one fast group where each is readable, else each by calling its module."""
    group = _read(module, _ATTENTION_NAMES, x, names)
    if isinstance(group, str):
        site.ran_stock(group)
        return [module._modules[name](x) for name in names]  # type: ignore[misc]
    return list(apply_group(x, group))


def _attention(
    module: Any, site: registry.Site, family: Family, x: Tensor, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Attention's forward over fast pieces; x `[batch, sequence, hidden]`."""
    site.ran_fast()
    shape = (*x.shape[:-1], -1, module.head_dim)
    query, key, value = (t.view(shape) for t in _project(module, site, x, _ATTENTION_NAMES[:3]))
    if family.head_norms:
        query, key = module.q_norm(query), module.k_norm(key)
    cos, sin = kwargs["position_embeddings"]
    query, key = rope(query.transpose(1, 2), key.transpose(1, 2), cos, sin)
    passed = ("hidden_states", "attention_mask", "position_embeddings", *CACHE_NAMES)
    arguments = {name: value for name, value in kwargs.items() if name not in passed}
    dropout = module.attention_dropout if module.training else 0.0
    attention = attention_callable(module, family, kwargs.get("attention_mask"), arguments, dropout)
    output = attention(query, key, value.transpose(1, 2))
    (projected,) = _project(module, site, output.reshape(*x.shape[:-1], -1), _ATTENTION_NAMES[3:])
    return projected, None
