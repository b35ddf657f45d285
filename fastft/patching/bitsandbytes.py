"""bitsandbytes weights as the kernels read them, and its two faults on CPU kept away from users.

On CPU bitsandbytes 0.50 (a) repacks a 4-bit weight in place at the first forward in eval mode without grad, after
which training is silently wrong (where the processor has AVX512-BF16), and (b) dequantizes wrongly when in_features
is a multiple of 16 but not of 64. (a) is switched off per module by its own flag; a layer hit by (b) gets an instance
forward over our dequantization, for stock and fast paths alike. Both act on planned models only, on CPU only, and are
undone by `unpatch`.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn

from fastft.autograd.lora_linear import apply_group
from fastft.autograd.projection import Projection
from fastft.kernels.nf4 import dequantize, quantized_weight


def is_linear4bit(module: nn.Module) -> bool:
    """Whether `module` is exactly bitsandbytes' Linear4bit (by name: nothing is imported for the question)."""
    kind = type(module)
    return kind.__name__ == "Linear4bit" and kind.__module__ == "bitsandbytes.nn.modules"


def dense_weight(module: nn.Module, dtype: torch.dtype) -> Tensor:
    """The weight `[out, in]` of a Linear4bit in `dtype`, by our dequantization."""
    weight: Any = module.weight
    return dequantize(quantized_weight(weight, weight.quant_state), dtype)


def _dequantizing_forward(self: nn.Module, x: Tensor) -> Tensor:
    """Linear4bit.forward over our dequantization: y = x Wᵀ + b, rounded as bitsandbytes rounds."""
    weight: Any = self.weight
    compute: torch.dtype = getattr(self, "compute_dtype", None) or x.dtype
    bias: Any = self.bias
    projection = Projection(quantized_weight(weight, weight.quant_state), bias)
    return apply_group(x.to(compute), [projection])[0].to(x.dtype)


_dequantizing_forward.__name__ = "forward"  # pickle finds a bound method by its name


def is_repair(function: Any) -> bool:
    """Whether `function` is the forward that `repair_on_cpu` binds."""
    return function is _dequantizing_forward


def repairs(module: nn.Module) -> bool:
    """Whether `module` carries the instance forward put there by `repair_on_cpu`."""
    return is_repair(getattr(module.__dict__.get("forward"), "__func__", None))


def repair_on_cpu(model: nn.Module) -> list[str]:
    """Keep both CPU faults away from `model`.

    Returns:
        Names of the layers that got an instance forward because bitsandbytes dequantizes their shape wrongly.
    """
    repaired = []
    for name, module in model.named_modules():
        if not is_linear4bit(module) or module.weight.device.type != "cpu":
            continue
        module.support_avx512bf16_for_cpu = False
        columns = module.weight.quant_state.shape[1] if module.weight.quant_state is not None else 64
        if columns % 16 == 0 and columns % 64 != 0:
            if "forward" not in module.__dict__:
                module.forward = types.MethodType(_dequantizing_forward, module)
            repaired.append(name)
    return repaired


def undo_repairs(model: nn.Module) -> None:
    """Remove the instance forwards of `repair_on_cpu`; the repacking flag stays off (on, it corrupts weights)."""
    for module in model.modules():
        if repairs(module):
            del module.__dict__["forward"]
