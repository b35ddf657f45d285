"""How a planned model and the trainer that trains it find each other, with nothing swapped on any trainer class.

Two moments of the model's own are enough. In a training forward the backbone's pre-hook asks who is calling
(frames.py); a trainer that is new gets a `RunCallback`. When a checkpoint's weights are about to be loaded, a
`load_state_dict` pre-hook (PyTorch's own) compares its `fastft.json` with the run, before the first weight is changed.

What is kept here is beside the model and weak; `leave` undoes it.
"""

from __future__ import annotations

import pathlib
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fastft.patching import registry
from fastft.training.frames import trainer_running

if TYPE_CHECKING:
    from fastft.training.run import RunCallback

__all__ = ["install", "leave", "run_of"]

# backbone -> the trainer that was last seen training it, and its callback (None: it trains another model)
_seen: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[Any], RunCallback | None]] = weakref.WeakKeyDictionary()


def run_of(backbone: nn.Module, site: registry.Site) -> RunCallback | None:
    """The run that this training forward belongs to; None outside of a trainer, or where it is switched off."""
    if not site.run_comfort or torch.compiler.is_compiling():
        return None
    found = trainer_running("training_step")
    if found is None:
        return None
    trainer, local = found
    known = _seen.get(backbone)
    if known is None or known[0]() is not trainer:
        known = _seen[backbone] = (weakref.ref(trainer), _callback_of(trainer, backbone))
    run = known[1]
    if run is None or run not in trainer.callback_handler.callbacks:  # removed by the user
        return None
    if not run.running:
        run.begin(trainer, backbone, site)
    inputs = local.get("inputs")
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    if isinstance(labels, Tensor) and labels.dim() > 1:
        run.count_labels(labels)
    return run


def _callback_of(trainer: Any, backbone: nn.Module) -> RunCallback | None:
    """The trainer's `RunCallback`, the user's own or a new one, if it is this model that it trains."""
    if not any(module is backbone for module in trainer.model.modules()):
        return None
    from fastft.training.run import RunCallback

    run = next((c for c in trainer.callback_handler.callbacks if isinstance(c, RunCallback)), None)
    if run is None:
        run = RunCallback()
        trainer.add_callback(run)
    return run


def _before_loading(
    inner: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, *lists: list[str]
) -> None:
    """Pre-hook of `load_state_dict`: where a trainer resumes, what its checkpoint says of itself is read first."""
    backbone = getattr(inner, getattr(inner, "base_model_prefix", "") or "", inner)
    site = registry.site_of(backbone)
    found = None if site is None or not site.run_comfort else trainer_running("_load_from_checkpoint")
    if site is None or found is None:
        return
    trainer, local = found
    folder = local.get("resume_from_checkpoint")
    from fastft.patching.plan import inner_model
    from fastft.training.checkpoint import check_before_resuming, describe

    if isinstance(folder, str) and inner_model(trainer.model) is inner:
        check_before_resuming(pathlib.Path(folder), describe(trainer, inner, site))


def install(inner: nn.Module) -> None:
    """Register the hook on `load_state_dict`, once."""
    if not any(getattr(hook, "hook", None) is _before_loading for hook in inner._load_state_dict_pre_hooks.values()):
        inner.register_load_state_dict_pre_hook(_before_loading)


def leave(inner: nn.Module, backbone: nn.Module) -> None:
    """Undo all of it: the hook, the callback in a live trainer, a signal handler that is in place."""
    for key, hook in list(inner._load_state_dict_pre_hooks.items()):
        if getattr(hook, "hook", None) is _before_loading:
            del inner._load_state_dict_pre_hooks[key]
    known = _seen.pop(backbone, None)
    run = None if known is None else known[1]
    if run is not None:
        run.detach()
