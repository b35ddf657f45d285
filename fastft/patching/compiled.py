"""Planned models under `torch.compile`: the same kernels as operators, in graphs without a break.

Eager planned models read PEFT's and bitsandbytes' state at every call, keep counters, choose levels, fold whole layers
into one autograd node. None of that can be traced, and most of it a compiler does itself. So while dynamo traces, a
planned module takes the short way here: RMSNorm, RoPE, SwiGLU, the loss and LoRA over 4-bit weights are operators
(fastft/operators), other projections are called as the modules they are, decoder layers run their class's own forward,
checkpointed where the plan does not say keep.

Nothing is read here that changes from step to step, and nothing counted: a counter in the trace would compile the model
anew at every step. `Site.compiled` of the backbone, only ever set, says that the model was traced
(backbone.py sets it: inside a checkpointed layer dynamo allows no such effect).

Not done under a compiler, and reported so: levels beyond keep and recompute (no offload, no planning by memory), CUDA
graphs of our own, approximations, padding left out, Q, K and V (or gate and up) as one product.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from fastft import operators
from fastft.autograd.autocast import AutocastState
from fastft.patching import causal_lm, registry
from fastft.patching.attention import CACHE_NAMES, family_arguments, has_cache, interface_of
from fastft.patching.families import Family
from fastft.patching.peft import ProjectionReader

__all__ = ["forward", "layer_forward"]


def forward(
    part: str, module: Any, family: Family, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What a planned module of `part` runs while it is traced; `original` where the plan has a reason for stock."""
    site = module.__dict__[registry.PLAN]
    if site.reason is not None or registry.runs_stock_only():
        kwargs.pop("return_logits", None)
        return original(module, *args, **kwargs)
    if part == "RMSNorm":
        return operators.rms_norm(args[0], module.weight, module.variance_epsilon, family.norm_mode)
    if part == "MLP":
        return _mlp(module, original, *args, **kwargs)
    if part == "ForCausalLM":
        return _causal_lm(module, original, *args, **kwargs)
    return _attention(module, family, original, *args, **kwargs)


def _mlp(module: Any, original: Callable[..., Any], x: Tensor) -> Tensor:
    if type(module.act_fn).__name__ not in ("SiLUActivation", "SiLU"):
        return original(module, x)
    product = operators.swiglu(_project(module, "gate_proj", x), _project(module, "up_proj", x))
    return _project(module, "down_proj", product)


def _project(parent: Any, name: str, x: Tensor) -> Tensor:
    """The named projection of x: one operator where it is an adapter over a 4-bit weight, else the module as it is."""
    found = None
    if torch.is_grad_enabled():  # generation: bitsandbytes' fused product is the faster one for a few tokens
        dtype = AutocastState.current(x.device.type).compute_dtype(x.dtype)
        found = ProjectionReader(parent, name).adapter_over_4bit(dtype)
    if found is None:
        return getattr(parent, name)(x)
    return operators.lora_linear_4bit(x, found.weight, found.lora_a, found.lora_b, bias=found.bias, scale=found.scale)  # type: ignore[arg-type]


def _attention(module: Any, family: Family, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Projections by their modules, one rotation, transformers' own attention function."""
    known = len(args) < 2 and kwargs.get("position_embeddings") is not None
    if not known or has_cache(kwargs):
        return original(module, *args, **kwargs)
    x = args[0] if args else kwargs["hidden_states"]
    passed = ("hidden_states", "attention_mask", "position_embeddings", *CACHE_NAMES)
    arguments = {name: value for name, value in kwargs.items() if name not in passed}
    shape = (*x.shape[:-1], -1, module.head_dim)
    query, key = _project(module, "q_proj", x).view(shape), _project(module, "k_proj", x).view(shape)
    if family.head_norms:
        query, key = module.q_norm(query), module.k_norm(key)
    value = _project(module, "v_proj", x).view(shape).transpose(1, 2)
    cos, sin = kwargs["position_embeddings"]
    query, key = operators.rope(query.transpose(1, 2), key.transpose(1, 2), cos, sin)
    output, weights = interface_of(module)(
        module,
        query,
        key,
        value,
        kwargs.get("attention_mask"),
        dropout=module.attention_dropout if module.training else 0.0,
        scaling=module.scaling,
        **family_arguments(module, family),
        **arguments,
    )
    return _project(module, "o_proj", output.reshape(*x.shape[:-1], -1).contiguous()), weights


def _causal_lm(model: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """With labels, the loss without logits; these are made where they may be read (evaluation, `return_logits`)."""
    if args:
        kwargs.update(zip(causal_lm.positional_names(original), args, strict=False))
    wants_logits = kwargs.pop("return_logits", None) or not model.training
    keep = kwargs.get("logits_to_keep")
    head = causal_lm.trained_copy(model.get_output_embeddings())
    own_loss = model.__dict__.get("_loss_function") is not None or getattr(model, "loss_type", None) != "ForCausalLM"
    if kwargs.get("labels") is None or isinstance(keep, Tensor) or keep or own_loss or type(head) is not nn.Linear:
        return original(model, **kwargs)
    return_dict = kwargs.get("return_dict")
    backbone = getattr(model, model.base_model_prefix)
    passed = {name: value for name, value in kwargs.items() if name not in causal_lm.CONSUMED}
    outputs = backbone(**passed, return_dict=True)
    hidden = outputs.last_hidden_state  # [batch, sequence, hidden]
    loss = operators.linear_cross_entropy(
        hidden,
        head.weight,
        causal_lm.shifted_labels(kwargs),
        bias=head.bias,
        num_items_in_batch=kwargs.get("num_items_in_batch"),
    )
    others = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
    output = CausalLMOutputWithPast(loss=loss, logits=head(hidden) if wants_logits else None, **others)
    if return_dict is None:
        return_dict = getattr(model.config, "return_dict", True)
    return output if return_dict else output.to_tuple()


def layer_forward(layer: nn.Module, site: registry.Site, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
    """A planned decoder layer: its class's forward, checkpointed under a plan that recomputes."""
    stock = partial(type(layer).forward, layer, **kwargs)
    cached = has_cache(kwargs)
    if site.level == "keep" or cached or not (layer.training and torch.is_grad_enabled()):
        return stock(hidden_states, *args)
    return torch.utils.checkpoint.checkpoint(stock, hidden_states, *args, use_reentrant=False)
