"""Making a transformers 5 model traceable by Thunder, with its norms, MLPs and rotation on our functions.

Three things stand between `thunder.jit` and a transformers 5 model. The backbone's forward is wrapped by decorators
that set a context variable, which Thunder refuses ("trying to set .global_var"): the function inside is bound to the
instance. The hook that makes embeddings require a gradient (PEFT under gradient checkpointing) calls a method proxies
lack: it is taken off, which non-reentrant checkpointing does not miss. And the model's RMSNorm and MLP are written out
in torch operations, where an executor can only claim what has a name: their forwards call `fastft.functional`. In a
trace transformers also makes a dense mask for every batch; rows whose positions the model counts itself go without.

Everything is bound to this model's instances. No class is touched, and `undo()` takes it all off again.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

import thunder.torch as ltorch
import torch
from thunder.core.trace import get_tracectx
from torch import nn

from fastft import functional
from fastft.integrations.thunder.executor import TensorProxy, executor
from fastft.integrations.thunder.repeat import claim_repeat_kv
from fastft.integrations.thunder.rope import claim_apply_rotary_pos_emb
from fastft.patching import registry
from fastft.patching.families import FAMILIES
from fastft.patching.plan import inner_model

__all__ = ["Prepared", "prepare_hf"]


def _mlp_forward(self: Any, x: Any) -> Any:
    return self.down_proj(functional.swiglu(self.gate_proj(x), self.up_proj(x)))


def _norm_forward_llama(self: Any, hidden_states: Any) -> Any:
    return functional.rms_norm(hidden_states, self.weight, self.variance_epsilon, "llama")


def _norm_forward_fp32(self: Any, hidden_states: Any) -> Any:
    return functional.rms_norm(hidden_states, self.weight, self.variance_epsilon, "fp32")


def _norm_forward_gemma(self: Any, hidden_states: Any) -> Any:
    return functional.rms_norm(hidden_states, self.weight, self.variance_epsilon, "gemma")


_NORMS = {"llama": _norm_forward_llama, "fp32": _norm_forward_fp32, "gemma": _norm_forward_gemma}


class Prepared:
    """What was bound to a model.

    Attributes:
        model: the model that was handed in.
        notes: what could not be prepared, and why.
        norms: how many RMSNorm modules call our function.
        mlps: how many MLP modules do.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.notes: list[str] = []
        self.norms = self.mlps = 0
        self._bound: list[tuple[nn.Module, Any]] = []
        self._embedding: Any = None  # the model whose hook on the input embedding was taken off

    def bind(self, module: nn.Module, function: Any) -> bool:
        """Bind `function` as the instance's forward, unless it has one of its own."""
        if "forward" in module.__dict__:
            self.notes.append(f"{type(module).__name__} has its own forward: left as it is")
            return False
        method = types.MethodType(function, module)
        module.forward = method
        self._bound.append((module, method))
        return True

    def undo(self) -> None:
        """Take the bound forwards off the instances; one that somebody has replaced since stays."""
        for module, method in self._bound:
            if module.__dict__.get("forward") is method:
                del module.__dict__["forward"]
        self._bound.clear()
        if self._embedding is not None:
            self._embedding.enable_input_require_grads()
            self._embedding = None

    def take_hook_off(self, inner: Any) -> None:
        """Take off the hook that makes embeddings require a gradient, if the model has it."""
        if getattr(inner, "_require_grads_hooks", None):
            inner.disable_input_require_grads()
            self._embedding = inner


_MOVES_A_COUNT = frozenset({"torch.add", "torch.unsqueeze", "torch.Tensor.expand"})


def _is_counted(positions: Any) -> bool:
    """Whether `positions` go up by one along each row, because the program counted them: one `torch.arange`, moved.

    Made of a constant alone is not enough: two ranges side by side are two documents.
    """
    made_by = {out.name: symbol for symbol in get_tracectx().bound_symbols for out in symbol.flat_proxy_outs}
    while (symbol := made_by.get(positions.name)) is not None:
        sources = [x for x in symbol.flat_proxy_args if isinstance(x, TensorProxy)]
        if symbol.sym.id == ltorch.arange.id:
            given = dict(zip(("start", "end", "step"), symbol.args, strict=False)) | symbol.kwargs
            return bool(given.get("step", 1) == 1)
        if symbol.sym.id not in _MOVES_A_COUNT or len(sources) != 1:
            return False
        (positions,) = sources
    return False


def _packed_sequence_indices(position_ids: Any) -> Any:
    """transformers' `find_packed_sequence_indices` in a trace, which cannot look whether documents are packed.

    Positions that the model counted by itself are one document a row, and need no mask: attention is causal then, and
    ours. Positions that were given may begin anew, so each gets the number of its document, for a dense mask.
    """
    if _is_counted(position_ids):
        return None
    before = ltorch.cat((position_ids[:, :1] - 1, position_ids[:, :-1]), -1)
    return ltorch.cumsum(ltorch.to(position_ids - before != 1, torch.int64), -1)


def prepare_hf(model: nn.Module) -> Prepared:
    """Prepare a transformers (or PEFT) causal language model for `thunder.jit`.

    Args:
        model: not planned by `fastft.patch`: under Thunder it is Thunder that runs the layers.

    Returns:
        What was done; `undo()` reverses it. Pass the model itself to `thunder.jit`.

    Raises:
        TypeError: `model` is not a transformers model.
        ValueError: `model` is planned by `fastft.patch`.
    """
    from transformers import masking_utils

    inner = inner_model(model)
    if not isinstance(inner, nn.Module) or not hasattr(inner, "config"):
        raise TypeError(f"prepare_hf takes a transformers or PEFT model, got {type(model).__name__}.")
    backbone = getattr(inner, getattr(inner, "base_model_prefix", "") or "", inner)
    if registry.site_of(backbone) is not None:
        raise ValueError(
            "prepare_hf: this model is planned by fastft.patch, whose layers read state that a trace cannot. Call "
            "fastft.unpatch(model) first; under Thunder the executor 'fastft' brings the kernels in."
        )
    prepared = Prepared(model)
    prepared.take_hook_off(inner)
    claim_apply_rotary_pos_emb()
    claim_repeat_kv()
    executor.substitute(masking_utils.find_packed_sequence_indices, _packed_sequence_indices)
    for owner in {id(backbone): backbone, id(inner): inner}.values():
        prepared.bind(owner, inspect.unwrap(type(owner).forward))
    model_type = getattr(inner.config, "model_type", None)
    family = FAMILIES.get(str(model_type))
    if family is None:
        prepared.notes.append(f"model_type {model_type!r} has no family declaration: norms and MLPs as is")
        return prepared
    for module in backbone.modules():
        if type(module).__module__ != family.module:
            continue
        name = type(module).__name__.removeprefix(family.prefix)
        if name == "RMSNorm":
            prepared.norms += prepared.bind(module, _NORMS[family.norm_mode])
        elif name == "MLP" and type(module.act_fn).__name__ in ("SiLUActivation", "SiLU"):
            prepared.mlps += prepared.bind(module, _mlp_forward)
        elif name == "MLP":
            prepared.notes.append(f"MLP with {type(module.act_fn).__name__}: left as it is")
    return prepared
