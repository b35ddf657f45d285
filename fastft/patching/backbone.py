"""The pre-hook on a planned backbone: what must be settled once per forward, before any layer runs.

Lengths over `max_seq_length` are refused, packed documents are kept apart, a cache nobody reads in training is left
out, the TRL hook is installed when TRL has appeared, and layers that lost their binding in pickling get it back. It
changes keywords only, and only where the issue is one of these.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from fastft.patching import decoder_layer, levels, registry, trl
from fastft.patching.decoder_layer import CACHE_NAMES


def before_forward(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    """Forward pre-hook (with keywords) of a planned backbone."""
    site = registry.site_of(module)
    if site is None or registry.runs_stock_only():
        return None
    trl.install()
    _finish_compiling(module)
    registry.running_backbones().add(module)
    for layer in module._modules["layers"]._modules.values():  # type: ignore[union-attr]
        if not decoder_layer.is_bound(layer) and registry.site_of(layer) is not None:  # type: ignore[arg-type]
            decoder_layer.rebind(layer)  # type: ignore[arg-type]
    ids = kwargs.get("input_ids", args[0] if args else None)
    embeds = kwargs.get("inputs_embeds")
    shape = ids.shape if isinstance(ids, Tensor) else embeds.shape[:2] if isinstance(embeds, Tensor) else None
    if shape is None:
        return None
    if site.max_seq_length is not None and shape[1] > site.max_seq_length:
        _check_length(site.max_seq_length, shape[1], kwargs)
    _check_padding(module, site, ids, kwargs)
    if module.training and torch.is_grad_enabled():
        levels.assign(module, site, (int(shape[0]), int(shape[1])))
    else:
        levels.rest(module)
    changed = dict(kwargs)
    cached = any(kwargs.get(name) is not None for name in CACHE_NAMES)
    if module.training and torch.is_grad_enabled() and not cached and kwargs.get("use_cache") is None:
        changed["use_cache"] = False
    if not cached:
        _isolate_documents(changed)
    return args, changed


def _finish_compiling(module: nn.Module) -> None:
    """Wait for kernels that are being compiled ahead (patching/warm.py), if any are."""
    warm = sys.modules.get("fastft.patching.warm")
    if warm is not None:
        warm.finish(module)


def _check_length(limit: int, row: int, kwargs: dict[str, Any]) -> None:
    """Refuse a document longer than `limit`; a packed row may be longer than its documents.

    Raises:
        ValueError: naming both lengths.
    """
    positions = kwargs.get("position_ids")
    longest: Any = kwargs.get("max_length_q")
    if longest is None:
        longest = row if positions is None else int(positions.max()) + 1
    if int(longest) > limit:
        raise ValueError(
            f"fastft: a document of {int(longest)} tokens reached a model loaded with max_seq_length={limit}. Nothing "
            f"was truncated. Load with max_seq_length={int(longest)} or more, or shorten the data "
            f"(SFTConfig(max_length={limit}))."
        )


def _check_padding(module: nn.Module, site: registry.Site, ids: Any, kwargs: dict[str, Any]) -> None:
    """Warn once about pads without a mask; looks at the first few forwards only: looking waits for the device."""
    if site.pad_checks <= 0 or not isinstance(ids, Tensor):
        return
    site.pad_checks -= 1
    pad: Any = getattr(module.config, "pad_token_id", None)  # type: ignore[union-attr]
    if pad is None or kwargs.get("attention_mask") is not None or kwargs.get("position_ids") is not None:
        return
    # Rows are padded at an end. One token there may be the text's own bos or eos where that is the pad; two are pads.
    ends = (getattr(module.config, "bos_token_id", None), getattr(module.config, "eos_token_id", None))
    width = 2 if pad in ends else 1
    is_pad = ids == pad
    if ids.shape[1] > width and bool((is_pad[:, :width].all(1) | is_pad[:, -width:].all(1)).any()):
        site.pad_checks = 0
        warnings.warn(
            f"fastft: the batch holds pad tokens (id {pad}) and came without attention_mask: they are attended to. "
            "Pass the tokenizer's attention_mask.",
            stacklevel=2,
        )


def _isolate_documents(kwargs: dict[str, Any]) -> None:
    """Keep packed documents apart where transformers would let them attend to each other (all-ones mask, or a cache).

    transformers isolates documents by position_ids only without a mask and without a cache.

    Raises:
        ValueError: if they cannot be kept apart.
    """
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    risky = mask is not None or kwargs.get("use_cache") is not False
    if not risky or not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] < 2:
        return
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
        return  # a 4-D or prepared mask says itself who attends to whom
    restarts = positions[:, 1:] <= positions[:, :-1]
    if mask is not None:
        if mask.shape[1] != positions.shape[1]:
            return
        restarts = restarts & (mask[:, 1:] != 0) & (mask[:, :-1] != 0)
    if not bool(restarts.any()):
        return
    if kwargs.get("use_cache"):
        raise ValueError(
            "fastft: position_ids restart inside a row (packed documents) and use_cache=True was asked for; with a "
            "cache the documents would attend to each other. Pass use_cache=False, or one document a row."
        )
    if mask is not None and not bool((mask != 0).all()):
        raise ValueError(
            "fastft: position_ids restart inside a row (packed documents) and attention_mask marks padding; "
            "transformers would let the documents attend to each other. Pass attention_mask=None (padding-free rows), "
            "or one document a row."
        )
    kwargs["attention_mask"], kwargs["use_cache"] = None, False


def install(backbone: nn.Module) -> None:
    """Register the pre-hook, once."""
    if before_forward not in backbone._forward_pre_hooks.values():
        backbone.register_forward_pre_hook(before_forward, with_kwargs=True)


def uninstall(backbone: nn.Module) -> None:
    """Remove the pre-hook."""
    for key, hook in list(backbone._forward_pre_hooks.items()):
        if hook is before_forward:
            del backbone._forward_pre_hooks[key]
            backbone._forward_pre_hooks_with_kwargs.pop(key, None)
