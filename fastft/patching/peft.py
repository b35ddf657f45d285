"""Reading a projection as it stands: base weight, bias, the one active adapter, or the reason why it must run stock.

PEFT's state changes between calls (adapters switched, merged, disabled, deleted; weights replaced by `.to`, FSDP or
DeepSpeed), so nothing that can change is remembered, and no module is held: a reader outlives what PEFT takes out of
the model. It goes by dictionaries, because walking `nn.Module.__getattr__` for 224 projections costs 6 ms a forward,
the dictionaries 0.6. The one thing kept is a 4-bit weight as the kernels read it, for as long as that weight lives.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from fastft.autograd.projection import Dropout, Projection
from fastft.kernels.nf4 import QuantizedWeight, quantized_weight
from fastft.patching import bitsandbytes

_NO_SEED = torch.zeros(1, dtype=torch.int64)
_LORA_CLASSES = {"peft.tuners.lora.layer.Linear", "peft.tuners.lora.bnb.Linear4bit"}


def hooked(attributes: dict[str, Any]) -> bool:
    """Whether a module (its `__dict__`) has a hook or an instance forward: calling it is not just its class forward."""
    return bool(
        (attributes["_forward_hooks"] and not all(map(_captures_outputs, attributes["_forward_hooks"].values())))
        or attributes["_forward_pre_hooks"]
        or attributes["_backward_hooks"]
        or attributes["_backward_pre_hooks"]
        or ("forward" in attributes and _foreign(attributes["forward"]))
    )


def _captures_outputs(hook: Any) -> bool:
    """Whether `hook` is the one transformers leaves on modules for good after the first `output_hidden_states=True`.

    On the parts a fused layer bypasses it collects attention weights only, and asking for those is looked at per call.
    """
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


def _foreign(forward: Any) -> bool:
    """Whether an instance forward is more than the class's own (accelerate leaves that behind) or our CPU repair."""
    function, owner = getattr(forward, "__func__", None), getattr(forward, "__self__", None)
    return function is None or (function is not type(owner).forward and not bitsandbytes.is_repair(function))


def _class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


@functools.cache
def _is_lora(kind: type) -> bool:
    return _class_name(kind) in _LORA_CLASSES


class ProjectionReader:
    """Reads one named child of a module (`self_attn.q_proj`) into a `Projection`, at every call.

    Args:
        parent: the module that owns the projection.
        name: the child's name.
    """

    __slots__ = ("_quantized", "_siblings", "name")

    def __init__(self, parent: nn.Module, name: str) -> None:
        self.name = name
        self._siblings: dict[str, Any] = parent._modules
        # a 4-bit weight (weakly), its state and address, and what was made of them
        self._quantized: tuple[weakref.ref[Any], Any, int, QuantizedWeight] | None = None

    def read(self, dtype: torch.dtype, autocast: bool, drops: bool = False) -> Projection | str:
        """The projection now, or why it must run stock.

        Args:
            dtype: compute dtype of the products (autocast's if it is on, else the activations').
            autocast: whether autocast is on: then weights of another dtype are cast, as stock casts them.
            drops: whether the caller sees to dropout of the adapter's input: it gives a seed before anything runs.
        """
        module = self._siblings.get(self.name)
        if module is None:
            return f"{self.name} is missing"
        lora: dict[str, Any] | None = module.__dict__ if _is_lora(type(module)) else None
        base = module if lora is None else lora["_modules"]["base_layer"]
        attributes = base.__dict__
        if type(base) is not nn.Linear and not bitsandbytes.is_linear4bit(base):
            return f"{self.name} is {_class_name(type(base))}, not a plain or 4-bit linear layer"
        if "_is_replica" in attributes:
            return "the module is a copy that nn.DataParallel made for another GPU: start one process a GPU instead"
        lora_a = lora_b = dropout = None
        scale = 1.0
        if lora is not None:
            if hooked(lora):
                return f"{self.name} has a hook or its own forward"
            adapter = self._active_adapter(lora, drops)
            if isinstance(adapter, tuple):
                lora_a, lora_b, scale, p = adapter
                if p > 0:
                    dropout = Dropout(p, _NO_SEED, 0)
            elif adapter is not None:
                return adapter
        if hooked(attributes):
            return f"{self.name}'s base layer has a hook or its own forward"
        parameters = attributes["_parameters"]
        weight = self._weight(base, parameters["weight"], dtype, autocast)
        if isinstance(weight, str):
            return weight
        bias = parameters["bias"]
        if bias is not None and isinstance(weight, Tensor) and bias.dtype != weight.dtype:
            return f"{self.name}'s bias is {bias.dtype}, its weight {weight.dtype}"
        return Projection(weight, bias, lora_a, lora_b, scale, dropout=dropout)

    def adapter_over_4bit(self, dtype: torch.dtype) -> Projection | None:
        """The projection if it is one active LoRA adapter over a 4-bit weight, and nothing speaks against one operator.

        For a tracer: remembers nothing, makes no weak references. `dtype` is the compute dtype, as in `read`.
        """
        module = self._siblings.get(self.name)
        if module is None or _class_name(type(module)) != "peft.tuners.lora.bnb.Linear4bit":
            return None
        lora: dict[str, Any] = module.__dict__
        base = lora["_modules"]["base_layer"]
        attributes = base.__dict__
        if not bitsandbytes.is_linear4bit(base) or hooked(lora) or hooked(attributes):
            return None
        adapter = self._active_adapter(lora, drops=False)
        state = getattr(attributes["_parameters"]["weight"], "quant_state", None)
        if not isinstance(adapter, tuple) or state is None or getattr(state, "packing_format_for_cpu", False):
            return None
        if attributes["compute_dtype"] not in (None, dtype):
            return None
        weight = quantized_weight(attributes["_parameters"]["weight"], state)
        return Projection(weight, attributes["_parameters"]["bias"], *adapter[:3])

    def _weight(self, base: nn.Module, weight: Any, dtype: torch.dtype, autocast: bool) -> Any:
        """The base weight, dense or packed, or a reason."""
        if type(base) is nn.Linear:
            if type(weight) is not nn.Parameter and type(weight) is not Tensor:
                return f"{self.name}'s weight is a {type(weight).__name__}"
            if weight.dtype != dtype and not autocast:
                return f"{self.name}'s weight is {weight.dtype}, the activations {dtype}"
            return weight
        state = weight.quant_state
        if state is None:
            return f"{self.name} is not quantized yet"
        if getattr(state, "packing_format_for_cpu", False):
            return (
                f"{self.name} was repacked by bitsandbytes for CPU inference before fastft saw it; load the model again"
            )
        compute = base.__dict__["compute_dtype"]
        if compute is not None and compute != dtype and not autocast:
            return (
                f"{self.name} computes in {compute} while activations are {dtype}; "
                f"set bnb_4bit_compute_dtype={dtype} to run it fast"
            )
        known, pointer = self._quantized, weight.data_ptr()
        if known is None or known[0]() is not weight or known[1] is not state or known[2] != pointer:
            quantized = quantized_weight(weight, state)
            known = self._quantized = (weakref.ref(weight, self._forget), state, pointer, quantized)
        return known[3]

    def _forget(self, weight: weakref.ref[Any]) -> None:
        """Let go of a weight that was replaced (a merge makes a new one) without waiting for the next read."""
        if self._quantized is not None and self._quantized[0] is weight:
            self._quantized = None

    def _active_adapter(self, lora: dict[str, Any], drops: bool) -> tuple[Tensor, Tensor, float, float] | str | None:
        """(A, B, scaling, p of its input's dropout now) of the one active adapter of a LoRA layer's `__dict__`, None
        where the base runs alone, or a reason for stock; `drops`: a p above 0 is none."""
        modules = lora["_modules"]
        if lora["_disable_adapters"]:
            return f"{self.name} is merged and disabled: PEFT unmerges it" if lora["merged_adapters"] else None
        if lora["merged_adapters"]:
            return None
        a_modules = modules["lora_A"]._modules
        active = lora["_active_adapter"]
        names = [n for n in ([active] if isinstance(active, str) else active) if n in a_modules]
        if not names:
            return None  # adapters of other names or kinds: the base runs alone, as in PEFT
        if len(names) > 1:
            return f"{self.name} has {len(names)} active adapters ({', '.join(names)})"
        name = names[0]
        variant = lora["lora_variant"].get(name)
        if variant is not None:
            return f"{self.name}'s adapter is a LoRA variant ({type(variant).__name__})"
        if lora["lora_bias"].get(name):
            return f"{self.name}'s adapter has a bias (lora_bias)"
        if lora.get("fan_in_fan_out") or not lora["cast_input_dtype_enabled"]:
            return f"{self.name} has fan_in_fan_out, or PEFT's input casting switched off"
        dropout, p = modules["lora_dropout"]._modules[name], 0.0
        if type(dropout) is not nn.Identity and dropout.training and getattr(dropout, "p", 1.0) > 0:
            p = getattr(dropout, "p", 1.0)
            if not drops or type(dropout) is not nn.Dropout or p >= 1:
                return f"{self.name} has lora_dropout={getattr(dropout, 'p', '?')} in training"
        a_module, b_module = a_modules[name], modules["lora_B"]._modules[name]
        if type(a_module) is not nn.Linear or type(b_module) is not nn.Linear:
            return f"{self.name}'s adapter is a {type(a_module).__name__}"
        if hooked(a_module.__dict__) or hooked(b_module.__dict__) or hooked(dropout.__dict__):
            return f"{self.name}'s adapter has a hook or its own forward"
        lora_a, lora_b = a_module._parameters["weight"], b_module._parameters["weight"]
        if type(lora_a) is not nn.Parameter or type(lora_b) is not nn.Parameter:
            return f"{self.name}'s adapter weight is a {type(lora_a).__name__}"
        return lora_a, lora_b, lora["scaling"][name], p
