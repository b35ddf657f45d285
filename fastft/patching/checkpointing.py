"""Gradient checkpointing asked for by anybody hands planned layers to the memory planner (level "auto"), once.

Every road (Trainer, TRL's DPO/KTO/GRPO toggles, PEFT's k-bit preparation, a user's own call; transformers 5.17 to
5.24) ends in `PreTrainedModel._set_gradient_checkpointing`, so one inert class patch there covers them. The
backbone's own flag stays as transformers sets it: it keeps the cache off in training, and trainers read it. Only the
flags of planned layers are cleared, because these layers recompute inside their own backward; a layer that runs stock
under the plan checkpoints itself. A level that the user named (`use_gradient_checkpointing="offload"`, False …) stays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from fastft.patching import registry


def planned_layers(model: nn.Module) -> list[nn.Module]:
    """The planned decoder layers inside `model`, in order."""
    return [m for m in model.modules() if (s := registry.site_of(m)) is not None and s.part == "decoder layer"]


def make_set_gradient_checkpointing(original: Callable[..., Any]) -> Callable[..., Any]:
    """`PreTrainedModel._set_gradient_checkpointing` that hands planned layers to their plan."""

    @functools.wraps(original)  # transformers looks for a parameter named "value" in the signature
    def _set_gradient_checkpointing(self: nn.Module, enable: bool = True, *args: Any, **kwargs: Any) -> Any:
        result = original(self, enable, *args, **kwargs)
        take_over(self)
        return result

    return _set_gradient_checkpointing


def take_over(model: nn.Module, *, planning: bool = False) -> None:
    """Turn the layers' own checkpointing flags into levels (a flag left off by `every_n_layers` means *keep*).

    A layer that runs another library's forward keeps its flag: nobody else would checkpoint it.

    Args:
        model: holds the layers.
        planning: the flags are as `patch` found them: off on a layer planned before, whose level then stays.
    """
    layers = planned_layers(model)
    if not layers:
        return
    from fastft.patching import decoder_layer  # brings the kernels, which a plain model does not need

    for layer in layers:
        site = registry.site_of(layer)
        assert site is not None
        asked = bool(getattr(layer, "gradient_checkpointing", False))
        if site.pinned is not None:
            site.level = site.pinned if asked or planning or site.pinned == "keep" else "keep"
        elif asked or not planning:
            site.level = registry.AUTO if asked else "keep"
        if decoder_layer.is_bound(layer):
            layer.gradient_checkpointing = False


def give_back(model: nn.Module) -> None:
    """The inverse of `take_over`, before the plans are removed."""
    switched_on = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    for layer in planned_layers(model):
        site = registry.site_of(layer)
        assert site is not None
        # A level that the user named says nothing about whether checkpointing was ever switched on.
        asked = switched_on if site.pinned is not None else site.level != "keep"
        asked = asked and "_gradient_checkpointing_func" in layer.__dict__
        if "gradient_checkpointing" in layer.__dict__ or asked:
            layer.gradient_checkpointing = asked


def install() -> None:
    """Swap the method on `PreTrainedModel`, if it is the one known."""
    from transformers import PreTrainedModel

    original = PreTrainedModel.__dict__.get("_set_gradient_checkpointing")
    if original is None:
        registry.skip("PreTrainedModel._set_gradient_checkpointing", "this transformers has no such method")
        return
    registry.swap_method(PreTrainedModel, "_set_gradient_checkpointing", make_set_gradient_checkpointing)
