"""Decoder layers, bound per instance: one autograd node where everything is as the node assumes, stock where it is not.

The class is never touched: on transformers >= 5.23 `GradientCheckpointingLayer` checkpoints only while
`type(self).forward` is the wrapper it made, so a swapped class method would silently end checkpointing for every
model in the process. The stock path is `type(self).forward(self, …)`; under level *recompute* it checkpoints itself,
because the layer's own flag is off.
"""

from __future__ import annotations

import math
import sys
import types
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from fastft.autograd.attention_half import Heads, Norm
from fastft.autograd.autocast import AutocastState
from fastft.autograd.decoder_layer import apply_layer
from fastft.autograd.layer_call import Away, LayerCall
from fastft.autograd.projection import Dropout, Projection
from fastft.kernels.nf4 import QuantizedWeight
from fastft.memory.away import AWAY, goes_away
from fastft.patching import levels, registry
from fastft.patching.attention import CACHE_NAMES, attention_callable, attention_key, has_cache, over_cache
from fastft.patching.documents import DocumentMask
from fastft.patching.families import FAMILIES, Family
from fastft.patching.peft import ProjectionReader, hooked

FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_ONE_TOKEN_WEIGHTS = 300e6  # of a layer: beyond, making them dense for one token takes longer than the host does
_FEW_TOKENS_ON_CPU = 32
ATTENTIONS = "attention weights are asked for (output_attentions)"
OWN_FORWARD = "the layer has its own forward (another library's)"
_BYPASSED = ("input_layernorm", "post_attention_layernorm", "self_attn", "mlp")
_readers: weakref.WeakKeyDictionary[nn.Module, LayerReader] = weakref.WeakKeyDictionary()
hosts: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()  # where offloaded layers leave x
observers: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()  # called after a layer's backward
graphs: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()  # layers that CUDA graphs may serve
token_graphs: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()  # the same, in generation


def global_hooks() -> bool:
    """Whether PyTorch has module hooks that fire on every module of the process."""
    return bool(
        torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
        or torch_module._global_backward_hooks
        or torch_module._global_backward_pre_hooks
    )


def wants_attentions() -> bool:
    """Whether transformers is collecting attention weights in this forward (hooks our node would not fire)."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    return collector is not None and "attentions" in (collector.get() or ())


class LayerReader:
    """Reads one decoder layer into a `LayerCall` at every forward; remembers only the way, while objects are the same.

    Holds the layer's children, never the layer: `_readers` is keyed weakly by it.
    """

    __slots__ = ("_children", "_parts", "_projections", "family")

    def __init__(self, layer: nn.Module, family: Family) -> None:
        self.family = family
        self._children: dict[str, Any] = layer._modules
        attention, mlp = layer._modules["self_attn"], layer._modules["mlp"]
        assert attention is not None
        assert mlp is not None
        self._projections = [
            *(ProjectionReader(attention, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
            *(ProjectionReader(mlp, name) for name in ("gate_proj", "up_proj", "down_proj")),
        ]
        inner = [(mlp._modules, "act_fn")]
        if family.head_norms:
            inner += [(attention._modules, "q_norm"), (attention._modules, "k_norm")]
        places = [(self._children, name) for name in _BYPASSED] + inner
        # (where it hangs, its name, the object, its __dict__): the node bypasses these modules' own forwards
        self._parts = [(owner, name, owner[name], owner[name].__dict__) for owner, name in places]  # type: ignore[union-attr]

    def current(self) -> bool:
        """Whether the children are still the objects this reader was made for."""
        return all(owner.get(name) is module for owner, name, module, _ in self._parts)

    def structural_reason(self) -> str | None:
        """Why the layer as built cannot run as one node, or None."""
        for _, name, module, attributes in self._parts:
            if hooked(attributes):
                return f"{name} has a hook or its own forward"
            if name == "act_fn":
                if type(module).__name__ not in ("SiLUActivation", "SiLU"):
                    return f"mlp.act_fn is {type(module).__name__}, not SiLU"
                continue
            if registry.site_of(module) is None:
                return f"{name} is a {type(module).__name__}, unknown to fastft"
            if not registry.is_ours(type(module), "forward"):
                what = f"{type(module).__name__}.forward"
                return registry.skipped().get(what, f"{what} was replaced by another library")
        return None

    def read(
        self, x: Tensor, kwargs: dict[str, Any], level: str, training: bool, host: Any = None, fold: bool = False
    ) -> LayerCall | str:
        """The layer's call for input `x`, or why it must run stock; `host` serves level offload, `fold` projections."""
        reason = self.structural_reason()
        if reason is not None:
            return reason
        attention: Any = self._children["self_attn"]
        if training and attention.attention_dropout > 0:
            return f"attention_dropout={attention.attention_dropout} in training"
        state = AutocastState.current(x.device.type)
        projections = self.projections(state.compute_dtype(x.dtype), state.enabled, fold)
        if isinstance(projections, str):
            return projections
        if has_cache(kwargs) and _better_packed(x, projections):
            return registry.GENERATING
        q, k, v, o, gate, up, down = projections
        arguments = {
            n: a for n, a in kwargs.items() if n not in ("attention_mask", "position_embeddings", *CACHE_NAMES)
        }
        head_norms = (self._norm(attention.q_norm), self._norm(attention.k_norm)) if self.family.head_norms else None
        width = attention.head_dim
        mask, cached = kwargs.get("attention_mask"), has_cache(kwargs)
        attend = attention_callable(attention, self.family, mask, arguments)
        if cached:
            attend = over_cache(attend, kwargs, attention.layer_idx, arguments)
        _draw(projections, x.device)
        return LayerCall(
            input_norm=self._norm(self._children["input_layernorm"]),
            post_norm=self._norm(self._children["post_attention_layernorm"]),
            head_norms=head_norms,
            qkv=(q, k, v),
            output=o,
            gate_up=(gate, up),
            down=down,
            heads=Heads(q.out_features // width, k.out_features // width, width),
            attention=attend,
            autocast=state,
            level=level,  # type: ignore[arg-type]
            host=host,
            attention_key=None if cached else attention_key(attention, mask, arguments),
        )

    def projections(self, dtype: torch.dtype, autocast: bool, fold: bool = False) -> list[Any] | str:
        """The seven projections, or the first reason why one must run stock; `fold` as in `Projection`.

        Dropouts have no seed yet: who only looks at a layer draws no random numbers.
        """
        projections = []
        for reader in self._projections:
            projection = reader.read(dtype, autocast, drops=True)
            if isinstance(projection, str):
                return projection
            projection.fold = fold
            projections.append(projection)
        return projections

    def _norm(self, module: Any) -> Norm:
        return Norm(module._parameters["weight"], module.variance_epsilon, self.family.norm_mode)


def _draw(projections: Sequence[Projection], device: torch.device) -> None:
    """Give the projections that drop out a seed of torch's own generator, one for all, and streams of their own."""
    dropping = [projection for projection in projections if projection.dropout is not None]
    if dropping:
        seed = torch.randint(2**63 - 1, (1,), device=device)
        for stream, projection in enumerate(dropping, 1):
            projection.dropout = Dropout(projection.dropout.p, seed, stream)  # type: ignore[union-attr]


def _goes_away(call: LayerCall, x: Tensor, mask: Any, most: str) -> Away:
    """How much of an offloaded layer goes to host memory, `most` at the most (memory/away.py).

    The plan knows rows, rounded up; documents in them may be so short that less pays. When it comes back is the plan's
    to say, which has room for it then.
    """
    pays = goes_away(
        tokens=x.shape[0] * x.shape[1],
        longest=mask.documents.longest if isinstance(mask, DocumentMask) else x.shape[1],
        hidden=x.shape[2],
        query=call.heads.query * call.heads.dim,
        key_value=call.heads.key_value * call.heads.dim,
        heads=call.heads.query,
        intermediate=call.gate_up[0].out_features,
        compute_bytes=call.autocast.compute_dtype(x.dtype).itemsize,
        stream_bytes=x.element_size(),
    )
    return min(pays, most, key=AWAY.index)  # type: ignore[arg-type,return-value]


def _better_packed(x: Tensor, projections: Sequence[Projection]) -> bool:
    """Whether so few tokens are faster by bitsandbytes' products with packed weights than by dense copies of them."""
    packed = sum(math.prod(p.weight.shape) for p in projections if isinstance(p.weight, QuantizedWeight))
    tokens = x.shape[0] * x.shape[1]
    if x.is_cuda:
        return tokens == 1 and packed > _ONE_TOKEN_WEIGHTS
    return packed > 0 and tokens <= _FEW_TOKENS_ON_CPU


def reader_of(layer: nn.Module, family: Family) -> LayerReader:
    """The layer's reader, made anew when one of the layer's children was exchanged."""
    reader = _readers.get(layer)
    if reader is None or not reader.current():
        reader = _readers[layer] = LayerReader(layer, family)
    return reader


def _stock_reason(site: registry.Site, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why this call cannot run fast whatever the layer's state, or None."""
    if registry.runs_stock_only():
        return registry.DISABLED
    if site.reason is not None:
        return site.reason
    if has_cache(kwargs) and torch.is_grad_enabled():
        return registry.GENERATING
    if args or kwargs.get("position_embeddings") is None or not isinstance(x, Tensor) or x.dim() != 3:
        return "called with arguments fastft does not know"
    if x.dtype not in FLOATS or x.numel() == 0:
        return f"activations are {x.dtype} of shape {tuple(x.shape)}"
    if global_hooks():
        return "global module hooks are installed"
    if wants_attentions():
        return ATTENTIONS
    return None


def fast_forward(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`DecoderLayer.forward` of a planned layer; keywords are passed on under the names received."""
    site = registry.site_of(self)
    if site is None:  # unpatched by hand: the plan is gone, this binding is not
        return type(self).forward(self, hidden_states, *args, **kwargs)
    if torch.compiler.is_compiling():
        from fastft.patching import compiled

        return compiled.layer_forward(self, site, hidden_states, *args, **kwargs)
    reason = _stock_reason(site, hidden_states, args, kwargs)
    call: LayerCall | str
    if reason is None:
        level = levels.level_of(site)
        host = hosts.get(self)
        if level != "offload" and host is not None:
            host.settle()
        call = reader_of(self, FAMILIES[site.model_type]).read(
            hidden_states, kwargs, level, self.training, host, site.fold_adapters
        )
    else:
        call = reason
    if isinstance(call, str):
        site.ran_stock(registry.GENERATING if has_cache(kwargs) and call != registry.DISABLED else call)
        return _stock_forward(self, site, call, hidden_states, args, kwargs)
    site.ran_fast()
    cos, sin = kwargs["position_embeddings"]
    call.compact, call.observer = site.compact, observers.get(self)
    if call.level == "offload" and call.host is not None and site.away != "input":
        call.away = _goes_away(call, hidden_states, kwargs.get("attention_mask"), site.away)
        call.late = site.late
    captured = graphs.get(self) if torch.is_grad_enabled() else token_graphs.get(self) if has_cache(kwargs) else None
    if captured is not None and hidden_states.is_contiguous():
        y = captured.run(self, call, hidden_states, cos, sin)
        if y is not None:
            return y
    return apply_layer(hidden_states, cos, sin, call)


fast_forward.__name__ = "forward"  # pickle finds a bound method by its name


def _stock_forward(
    layer: nn.Module,
    site: registry.Site,
    reason: str,
    hidden_states: Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The class's own forward, checkpointed where the plan does not say keep (the layer's own flag is off).

    Two reasons are gone when the backward runs the layer again, and the pieces inside would then decide otherwise than
    in the forward: `stock_only` and transformers' collector. Such a layer runs stock to its last piece, both times.
    """
    stock = partial(type(layer).forward, layer, **kwargs)
    if site.level != "keep" and layer.training and torch.is_grad_enabled() and not has_cache(kwargs):
        checkpoint = layer.__dict__.get("_gradient_checkpointing_func")
        if checkpoint is None:  # the level was named, and checkpointing as transformers has it never switched on
            checkpoint = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
        if reason in (registry.DISABLED, ATTENTIONS):
            stock = partial(_all_stock, stock)
        return checkpoint(stock, hidden_states, *args)
    return stock(hidden_states, *args)


def _all_stock(forward: Any, *args: Any) -> Any:
    with registry.stock_only():
        return forward(*args)


def bind(layer: nn.Module) -> str | None:
    """Bind `fast_forward` to a planned layer, once.

    Returns:
        None, or why the layer keeps the forward it has.
    """
    bound = layer.__dict__.get("forward")
    function = getattr(bound, "__func__", None)
    if function is fast_forward:
        if bound.__self__ is not layer:  # type: ignore[union-attr]
            layer.forward = types.MethodType(fast_forward, layer)
        return None
    if bound is not None and function is not type(layer).forward:
        return OWN_FORWARD
    layer.forward = types.MethodType(fast_forward, layer)  # over a class method bound by unpickling, too
    return None


def is_bound(layer: nn.Module) -> bool:
    """Whether calling `layer` reaches `fast_forward`, directly or through the forward that accelerate's hooks wrap.

    A copy of the instance dictionary (nn.DataParallel makes such) holds a binding to the layer it was copied from.
    """
    places = (layer.__dict__.get("forward"), layer.__dict__.get("_old_forward"))
    return any(getattr(p, "__func__", None) is fast_forward and p.__self__ is layer for p in places)  # type: ignore[union-attr]


def rebind(layer: nn.Module) -> None:
    """Bind a planned layer that lost its binding (unpickled, or a foreign forward went); else count it as stock."""
    site = registry.site_of(layer)
    assert site is not None
    reason = bind(layer)
    if reason is None:
        site.reason = None if site.reason == OWN_FORWARD else site.reason
    elif site.reason is None or site.reason == reason:
        site.reason = reason
        site.ran_stock(reason)
    if site.level != "keep":  # whoever runs the layer checkpoints it: we by the plan, others by its own flag
        layer.gradient_checkpointing = reason is not None


def unbind(layer: nn.Module) -> None:
    """Take `fast_forward` off the instance, if it is there."""
    if getattr(layer.__dict__.get("forward"), "__func__", None) is fast_forward:
        del layer.__dict__["forward"]
