"""The pre-hook on a planned backbone: what must be settled once per forward, before any layer runs.

Lengths over `max_seq_length` are refused, packed documents are kept apart, padding is left out, a cache nobody reads in
training is left out, what is exchanged in TRL and PEFT is installed when they have appeared, and layers that lost their
binding in pickling get it back. It changes keywords only, and only where the issue is one of these. What left padding
out needs undoing after the forward: that is the second hook, `after_forward`.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from fastft.patching import decoder_layer, documents, levels, registry, traced_documents, trl, walks
from fastft.patching.attention import has_cache
from fastft.training import watch


def before_forward(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    """Forward pre-hook (with keywords) of a planned backbone."""
    site = registry.site_of(module)
    if site is None or registry.runs_stock_only():
        return None
    if torch.compiler.is_compiling():  # a trace reads nothing that changes from step to step; see compiled.py
        site.compiled = True
        if module.training:
            kwargs = {"use_cache": False, **kwargs}
        return args, traced_documents.keep_apart(module, args, kwargs)
    trl.install()
    walks.install_on_peft()
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
    rows, length = batch = (int(shape[0]), int(shape[1]))
    if site.max_seq_length is not None and length > site.max_seq_length:
        _check_length(site.max_seq_length, length, kwargs)
    _check_padding(module, site, ids, kwargs)
    learns = module.training and torch.is_grad_enabled()
    changed = dict(kwargs)
    cached = has_cache(kwargs)
    if learns and not cached and kwargs.get("use_cache") is None:
        changed["use_cache"] = False
    if not cached:
        device = (ids if isinstance(ids, Tensor) else embeds).device  # type: ignore[union-attr]
        documents.keep_apart(module, changed, rows, length, device)
    counted = _counted(changed.get("attention_mask"), batch)
    if module.training and not cached:
        line = _as_one_row(module, site, args, changed, rows, length)
        if line is not None:
            args, changed, counted = (), line, None
            rows, length = 1, documents.documents_of(changed["attention_mask"]).length  # type: ignore[union-attr]
        longer = _alike(module, site, args, changed, rows, length)
        if longer is not None:
            args, changed = (), longer
    if learns:
        run = watch.run_of(module, site)
        planned = documents.documents_of(changed.get("attention_mask"))
        levels.assign(module, site, (rows, length if planned is None else planned.length))
        if run is not None:
            run.before_layers(batch, rows * length, counted)
    else:
        levels.rest(module)
        if cached:
            levels.generate(module, site)
    return args, changed


def _counted(mask: Any, shape: tuple[int, int]) -> Tensor | None:
    """The mask that tells the real tokens of a batch of `shape`, where it has one that can."""
    return mask if isinstance(mask, Tensor) and tuple(mask.shape) == shape else None


def _as_one_row(
    module: nn.Module, site: registry.Site, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int, length: int
) -> dict[str, Any] | None:
    """The keywords of a training batch as one row without its padding, or None where that is not safe or no use.

    A batch without padding becomes a row where CUDA graphs want rows alike that have been of many lengths. In training
    mode with gradient and without: what DPO and GRPO compare must be computed alike. Not where somebody sees the batch
    between the layers: hidden states or attention weights asked for, NEFTune's noise (scaled by the length of a row),
    global hooks.
    """
    mask = kwargs.get("attention_mask")
    if not site.padding_free or kwargs.get("use_cache") is not False:
        return None
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
        return None
    if len(args) > 1 or documents.implementation_of(module) != "sdpa" or _is_looked_into(module, kwargs):
        return None
    if args:
        kwargs = {"input_ids": args[0], **kwargs}
    given = kwargs.get("input_ids", kwargs.get("inputs_embeds"))
    if not isinstance(given, Tensor) or (mask is not None and given.shape[:2] != mask.shape):
        return None
    row_lengths = levels.graphs_of(module).rows if site.cuda_graphs else None
    real = None if mask is None else mask.to(given.device) != 0
    lengths = [length] * rows if real is None else real.sum(1).tolist()  # waits for the device, as making a mask would
    count = sum(lengths)
    if row_lengths is not None:
        row_lengths.sees(count)
    is_full = count == rows * length
    if count == 0 or (is_full and (row_lengths is None or not row_lengths.fills(count, given.device))):
        return None
    line = documents.one_row(module, kwargs, length, lengths, real)
    if line is not None and not is_full:
        site.tokens_padded += rows * length
        site.tokens_real += count
    return line


def _alike(
    module: nn.Module, site: registry.Site, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int, length: int
) -> dict[str, Any] | None:
    """The keywords of a packed row made as long as others of its kind, or None where that is not safe or no use.

    Packing fills rows nearly, and a collator that lays them end to end makes a line of another length at every step, as
    does padding that is left out: CUDA graphs would never see the same shape twice.
    """
    mask = kwargs.get("attention_mask")
    row = documents.documents_of(mask)
    if row is None or rows != 1 or len(args) > 1 or not site.cuda_graphs:
        return None
    wanted = levels.graphs_of(module).rows.length(length, documents.padding_of(mask) is None, row.device)
    positions = kwargs.get("position_ids")
    if wanted == length or not isinstance(positions, Tensor) or positions.dim() != 2:
        return None
    if _is_looked_into(module, kwargs):
        return None
    if args:
        kwargs = {"input_ids": args[0], **kwargs}
    return documents.lengthen(module, kwargs, wanted)


def _is_looked_into(module: Any, kwargs: dict[str, Any]) -> bool:
    """Whether anybody reads more of this forward than its last hidden state."""
    asked = [
        kwargs.get(name) if kwargs.get(name) is not None else getattr(module.config, name, False)
        for name in ("output_hidden_states", "output_attentions")
    ]
    noisy = hasattr(module.get_input_embeddings(), "neftune_noise_alpha")
    return any(asked) or noisy or decoder_layer.global_hooks() or decoder_layer.wants_attentions()


def after_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Forward hook (with keywords) of a planned backbone: an output without padding gets its shape back."""
    if torch.compiler.is_compiling():
        return None
    padding = documents.padding_of(kwargs.get("attention_mask"))
    if padding is None:
        return None
    if isinstance(output, tuple):
        return (documents.restore_padding(output[0], padding), *output[1:])
    output.last_hidden_state = documents.restore_padding(output.last_hidden_state, padding)
    return output


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
    boundaries = kwargs.get("cu_seq_lens_q")
    if longest is None and isinstance(boundaries, Tensor):
        longest = int(boundaries.diff().max())
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


def install(backbone: nn.Module) -> None:
    """Register both hooks, once."""
    if before_forward not in backbone._forward_pre_hooks.values():
        backbone.register_forward_pre_hook(before_forward, with_kwargs=True)
    if after_forward not in backbone._forward_hooks.values():
        backbone.register_forward_hook(after_forward, with_kwargs=True)


def uninstall(backbone: nn.Module) -> None:
    """Remove them."""
    for key, hook in list(backbone._forward_pre_hooks.items()):
        if hook is before_forward:
            del backbone._forward_pre_hooks[key]
            backbone._forward_pre_hooks_with_kwargs.pop(key, None)
    for key, hook in list(backbone._forward_hooks.items()):
        if hook is after_forward:
            del backbone._forward_hooks[key]
            backbone._forward_hooks_with_kwargs.pop(key, None)
