"""One plain weight out of a live model: the base's, with every active adapter folded in, in float32.

The live model is only read. PEFT's own `merge()` works in place and, over 4-bit weights, quantizes the sum again, which
loses about half of an adapter; here a copy of one weight at a time is made dense and the update added to it. What the
base is can be chosen: the weight that training saw (4 bits made dense, rounded to the dtype the layer computes with),
or the tensor of the original checkpoint, given as `base`.

The update is what PEFT's forward computes at this moment, adapter after adapter in their active order:

    LoRA (rsLoRA is in s):   W ← W + s·B·A
    DoRA:                    W ← (m / ‖W₀ + s·B·A‖) · (W + s·B·A),   rows' norms of the *base* W₀

A layer whose adapters are merged already holds them in its weight; one whose adapters are disabled answers as its base.
An adapter kind that is no linear map of the input, or that we do not know, is refused by name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastft.autograd.autocast import suspended_everywhere
from fastft.patching.bitsandbytes import dense_weight, is_linear4bit

__all__ = ["adapter_changes", "base_module", "fold", "is_quantized"]


def base_module(module: nn.Module) -> nn.Module:
    """The module that holds the weight in use: under tuner layers, or the trained copy of a module to save."""
    while True:
        below = _one_below(module)
        if below is None:
            return module
        module = below


def _one_below(module: Any) -> nn.Module | None:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

    if isinstance(module, TrainableTokensWrapper):
        return module.token_adapter
    if isinstance(module, ModulesToSaveWrapper):
        chosen = module.active_adapters[0] if module.active_adapters else None
        if module.disable_adapters or chosen is None or chosen not in module.modules_to_save:
            return module.original_module
        return module.modules_to_save[chosen]
    return getattr(module, "base_layer", None) if isinstance(module, BaseTunerLayer) else None


def is_quantized(module: nn.Module) -> bool:
    """Whether the weight in use under `module` is stored in bitsandbytes' 4 or 8 bits."""
    return is_linear4bit(base_module(module)) or _is_linear8bit(base_module(module))


def _is_linear8bit(module: nn.Module) -> bool:
    return type(module).__name__ == "Linear8bitLt" and type(module).__module__.startswith("bitsandbytes")


@suspended_everywhere()  # float32 must stay float32
def fold(module: nn.Module, attribute: str, name: str, *, base: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One parameter or buffer of the plain model.

    Args:
        module: where the plain model has its module; here it may be a PEFT layer.
        attribute: "weight", "bias", or whatever the parameter or buffer is called.
        name: its name in the plain model, for errors.
        base: takes the place of the stored base weight; any dtype.

    Returns:
        (base, folded), float32 on the module's device. What no adapter can change comes as it is stored (4 bits made
        dense), the same object twice: a copy in float32 of a large embedding is memory for nothing.

    Raises:
        ValueError: an adapter or a weight format that cannot be folded; it is named.
    """
    stored = (_stored(base_module(module), attribute, name) if base is None else base).detach()
    if _one_below(module) is None or not stored.is_floating_point():
        return stored, stored
    stored = stored.float()
    return stored, _folded(module, attribute, name, stored)


def _stored(module: Any, attribute: str, name: str) -> Tensor:
    value = getattr(module, attribute, None)
    if not isinstance(value, Tensor):
        raise ValueError(
            f"{name}: the live {type(module).__name__} has no tensor {attribute!r}. Its weights are in a format that "
            "cannot be folded here (bitsandbytes 4 and 8 bits and plain tensors can); save the adapter instead."
        )
    if value.device.type == "meta":
        raise ValueError(
            f"{name} is on the meta device: this part of the model is offloaded or not loaded. Load the whole model "
            "onto a device (device_map={'': 0} or 'cpu') before saving it merged."
        )
    if attribute == "weight" and is_linear4bit(module):
        if getattr(module.quant_state, "packing_format_for_cpu", False):
            raise ValueError(
                f"{name}: bitsandbytes has repacked this 4-bit weight for evaluation on the CPU, and its own unpacking "
                "is not faithful. Load the model again, call fastft.patch(model) before the first evaluation (it "
                "switches the repacking off), then save."
            )
        return dense_weight(module, module.weight.quant_state.dtype)
    if attribute == "weight" and _is_linear8bit(module):
        from peft.utils.integrations import dequantize_module_weight

        return dequantize_module_weight(module)
    if not value.is_floating_point() and attribute == "weight":
        raise ValueError(
            f"{name}: {type(module).__name__} stores {value.dtype}, a quantized format that cannot be folded here "
            "(bitsandbytes 4 and 8 bits can). Save the adapter, and merge it onto the unquantized checkpoint."
        )
    return value


def _folded(module: Any, attribute: str, name: str, base: Tensor) -> Tensor:
    """`base` with what the layers from the inside out to `module` add."""
    below = _one_below(module)
    if below is None:
        return base
    weight = _folded(below, attribute, name, base)
    from peft.tuners.lora import LoraLayer
    from peft.tuners.trainable_tokens import TrainableTokensLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

    if not isinstance(module, BaseTunerLayer) or module.disable_adapters or module.merged:
        return weight
    if isinstance(module, TrainableTokensLayer):
        return _with_tokens(module, weight) if attribute == "weight" else weight
    if not isinstance(module, LoraLayer):
        raise ValueError(f"{name}: adapters of {type(module).__name__} cannot be folded here; LoRA and DoRA can.")
    if attribute == "weight":
        return _with_lora(module, name, weight)
    return _with_lora_bias(module, weight) if attribute == "bias" else weight


def _with_tokens(layer: Any, weight: Tensor) -> Tensor:
    for adapter in layer.active_adapters:
        rows = torch.tensor(layer.token_indices[adapter], device=weight.device)
        weight = weight.index_copy(0, rows, layer.trainable_tokens_delta[adapter].detach().to(weight))
    return weight


def _with_lora(layer: Any, name: str, base: Tensor) -> Tensor:
    weight = base
    for adapter in _active(layer):
        variant = layer.lora_variant.get(adapter)
        kind = "" if variant is None else type(variant).__name__
        if kind not in ("", "DoraLinearVariant", "DoraEmbeddingVariant"):
            raise ValueError(
                f"{name}: the adapter {adapter!r} is a {kind}, which cannot be folded here (LoRA, rsLoRA and DoRA can)."
            )
        if _trained_bias(layer, adapter) is not None and getattr(base_module(layer), "bias", None) is None:
            raise ValueError(
                f"{name}: the adapter {adapter!r} trains a bias (lora_bias=True) and the layer it is on has none, so "
                "there is nothing in the plain model to fold it into. Save the adapter instead."
            )
        update = _update(layer, adapter, name).to(base.device)
        if not kind:
            weight = update.add_(weight)
            continue
        # PEFT scales a row of a Linear (an output), and a column of an Embedding (also an output).
        across = 0 if kind == "DoraEmbeddingVariant" or getattr(layer, "fan_in_fan_out", False) else 1
        norm = torch.linalg.vector_norm(base + update, dim=across, keepdim=True)
        magnitude = layer.lora_magnitude_vector[adapter].weight.detach().to(base).view(norm.shape)
        weight = magnitude / norm * update.add_(weight)
    return weight


def _active(layer: Any) -> list[str]:
    """Active adapters that this layer has."""
    return [a for a in layer.active_adapters if a in layer.lora_A or a in layer.lora_embedding_A]


def _update(layer: Any, adapter: str, name: str) -> Tensor:
    """s·B·A in float32, shaped like the base weight."""
    from peft.tuners.lora import Embedding, Linear

    scaling = layer.scaling[adapter]
    if isinstance(layer, Embedding):
        a, b = layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]  # [r, rows], [columns, r]
        return (b.detach().float() @ a.detach().float()).T * scaling
    a, b = layer.lora_A[adapter].weight.detach().float(), layer.lora_B[adapter].weight.detach().float()
    if a.ndim == 2 and b.ndim == 2 and not hasattr(layer, "parameter_name"):
        update = (b @ a) * scaling
        return update.T if getattr(layer, "fan_in_fan_out", False) else update
    if isinstance(layer, Linear) or not hasattr(layer, "get_delta_weight") or hasattr(layer, "parameter_name"):
        raise ValueError(f"{name}: {type(layer).__name__} holds an adapter whose update is not s·B·A of two matrices.")
    return layer.get_delta_weight(adapter).detach().float()  # a convolution


def _trained_bias(layer: Any, adapter: str) -> Tensor | None:
    """The bias beside B, which `lora_bias=True` trains."""
    return getattr(layer.lora_B[adapter], "bias", None) if adapter in layer.lora_B else None


def _with_lora_bias(layer: Any, bias: Tensor) -> Tensor:
    for adapter in _active(layer):
        trained = _trained_bias(layer, adapter)
        if trained is not None:
            bias = bias + layer.scaling[adapter] * trained.detach().to(bias)
    return bias


def adapter_changes(model: nn.Module) -> bool | None:
    """Whether the adapters that are in use change any weight: None if the model has none at all.

    An adapter with B = 0, as PEFT starts it, changes nothing; nor does a disabled one.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    wrapped: list[Any] = [m for m in model.modules() if isinstance(m, (BaseTunerLayer, ModulesToSaveWrapper))]
    if not wrapped:
        return None
    return any(_changes(layer) for layer in wrapped)


def _changes(layer: Any) -> bool:
    if layer.disable_adapters:
        return False
    if not hasattr(layer, "lora_B"):  # a module to save, trained tokens
        return bool(layer.active_adapters)
    if layer.merged:
        return True
    for adapter in _active(layer):
        b = layer.lora_B[adapter].weight if adapter in layer.lora_B else layer.lora_embedding_B[adapter]
        a = layer.lora_A[adapter].weight if adapter in layer.lora_A else layer.lora_embedding_A[adapter]
        if bool(b.any()) and bool(a.any()):
            return True
        if _trained_bias(layer, adapter) is not None:
            return True
    return False
