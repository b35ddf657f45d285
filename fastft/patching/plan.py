"""`patch(model)` plans one loaded model; `unpatch()` takes plans and class patches away again.

Planning writes a `Site` into the modules it found, binds the decoder layers, and registers one pre-hook on the
backbone. It is idempotent: planning again looks at the model anew (adapters added since, modules exchanged) and keeps
levels and counters.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import nn

from fastft.patching import (
    backbone,
    bitsandbytes,
    causal_lm,
    checkpointing,
    decoder_layer,
    inert,
    levels,
    registry,
    trl,
    walks,
)
from fastft.patching.approximations import set_approximations
from fastft.patching.families import FAMILIES, Family
from fastft.training import watch

_warned: set[str] = set()


def inner_model(model: nn.Module) -> Any:
    """The transformers model inside a PEFT wrapper, or the model itself."""
    get_base_model = getattr(model, "get_base_model", None)
    return get_base_model() if get_base_model is not None and hasattr(model, "peft_config") else model


def patch(
    model: Any,
    *,
    strict: bool | None = None,
    max_seq_length: int | None = None,
    memory_budget: str | int | float | None = None,
    memory_levels: str | Sequence[str] | Mapping[int, str] | None = None,
    cuda_graphs: bool | None = None,
    approximations: Sequence[str] | None = None,
    padding_free: bool | None = None,
    run_comfort: bool | None = None,
) -> Any:
    """Make a loaded transformers or PEFT model run on fastft's parts; it stays the same object, parameters and all.

    Idempotent. What does not fit runs stock, that piece alone; `fastft.report(model)` lists every site. An architecture
    without a family declaration is left as it is, with one warning.

    Args:
        model: a `PreTrainedModel` or a `PeftModel` around one.
        strict: raise where a part would run stock, now and in any later forward (generation excepted). None keeps what
            an earlier `patch` said (at first False).
        max_seq_length: longest document the model accepts, in tokens; None sets no limit.
        memory_budget: the most memory that training may have allocated at once on the model's device: "20GiB", bytes,
            or a share of the device ("80%", 0.8). The planner fits the layers' levels to it. None keeps what an earlier
            `patch` said (at first: what is free, less a margin).
        memory_levels: levels by hand: "auto", "keep", "lean", "recompute" or "offload" for all layers, a sequence of
            them, or a mapping from layer index to level, the other layers being planned around it. None keeps what was
            said before (at first: "auto" once gradient checkpointing is switched on, else "keep").
        cuda_graphs: False never replays layers from CUDA graphs; True does so where it is safe and pays. None keeps
            what an earlier `patch` said (at first True).
        approximations: names of what may be computed with a larger error than stock's, for speed: "fold_adapters"
            (s·B·A is added to the dequantized weight before its rounding), "skip_probabilities" (a frozen head's
            product with P − Y leaves out tokens whose probability is below 2⁻¹⁶ in 256 rows).
            docs/approximations.md has the measured errors. None keeps what an earlier `patch` said (at first none); ()
            switches all off.
        padding_free: False runs the layers over a padded training batch as it is; True leaves the padding out where
            nobody can see it. None keeps what an earlier `patch` said (at first True).
        run_comfort: False leaves trainers alone; True gives the one that trains this model a `fastft.RunCallback`:
            banner, tokens per second, a report, a checkpoint on Ctrl-C, `fastft.json` in checkpoints
            (docs/trainers.md). None keeps what an earlier `patch` said (at first True).

    Returns:
        `model`.

    Raises:
        TypeError: if `model` is not a transformers model, or a switch is neither True nor False.
        RuntimeError: with `strict`, naming the first part that would run stock and why.
        ValueError: for a budget, a level or an approximation that is not known, or a `max_seq_length` below 1.
    """
    inner = inner_model(model)
    if not isinstance(inner, nn.Module) or not hasattr(inner, "config"):
        raise TypeError(
            f"fastft.patch takes a transformers model or a PEFT model around one, got {type(model).__name__}. "
            "Load it with FastModel.from_pretrained or AutoModelForCausalLM.from_pretrained first."
        )
    if max_seq_length is not None and (not isinstance(max_seq_length, Integral) or max_seq_length < 1):
        raise ValueError(
            f"max_seq_length={max_seq_length!r} is no number of tokens. Give 1 or more, or None for no limit."
        )
    switches = {
        "strict": strict,
        "cuda_graphs": cuda_graphs,
        "padding_free": padding_free,
        "run_comfort": run_comfort,
    }
    for name, value in switches.items():
        if value not in (None, True, False):
            raise TypeError(f"{name}={value!r} is neither True nor False (nor None, which keeps what it was).")
    model_type = getattr(inner.config, "model_type", None)
    family = FAMILIES.get(str(model_type))
    body = getattr(inner, getattr(inner, "base_model_prefix", "") or "", inner)
    if family is None or type(body).__module__ != family.module:
        _unknown(str(model_type), bool(strict))
        return model
    planned = registry.site_of(body)
    if strict is None:
        strict = planned is not None and planned.strict
    checkpointing.install()
    inert.install(family)
    reason = "loaded with use_kernels=True: hub kernels are in place" if getattr(inner, "_use_kernels", False) else None
    _plan_modules(body, inner, family, strict, reason)
    body_site = registry.site_of(body)
    assert body_site is not None
    if max_seq_length is not None:
        body_site.max_seq_length = max_seq_length
    if padding_free is not None:
        body_site.padding_free = padding_free
    if run_comfort is not None:
        body_site.run_comfort = run_comfort
    if body_site.run_comfort:
        watch.install(inner)
    else:
        watch.leave(inner, body)
    backbone.install(body)
    bitsandbytes.repair_on_cpu(inner)
    if memory_budget is not None:
        levels.set_budget(body_site, memory_budget)
        levels.ask_planner(checkpointing.planned_layers(inner))
    if cuda_graphs is not None:
        levels.set_graphs(body, body_site, cuda_graphs)
    if approximations is not None:
        set_approximations(inner, approximations)
    if memory_levels is not None:
        levels.set_choice(checkpointing.planned_layers(inner), memory_levels)
    checkpointing.take_over(inner, planning=True)
    registry.planned_models().add(inner)
    trl.install()
    walks.install(type(inner))
    if strict:
        _raise_if_stock(inner)
    return model


def _unknown(model_type: str, strict: bool) -> None:
    known = ", ".join(sorted(FAMILIES))
    message = f"fastft: model_type {model_type!r} has no fast parts yet (known: {known}); the model runs stock."
    if strict:
        raise RuntimeError(message + " strict=True forbids that.")
    if model_type not in _warned:
        _warned.add(model_type)
        warnings.warn(message, stacklevel=3)


def _plan_modules(body: nn.Module, inner: nn.Module, family: Family, strict: bool, reason: str | None) -> None:
    """Write a plan into every module that plays a part."""
    parts: dict[str, registry.Part] = {
        "RMSNorm": "norm",
        "MLP": "mlp",
        "Attention": "attention",
        "DecoderLayer": "decoder layer",
    }
    known = {family.prefix + suffix: part for suffix, part in parts.items()}
    prefix = "" if body is inner else f"{getattr(inner, 'base_model_prefix', 'model')}."
    _write(body, "model", prefix.rstrip("."), family, strict, reason)
    for name, module in body.named_modules():
        part = known.get(type(module).__name__)
        if part is None or type(module).__module__ != family.module:
            continue
        what = f"{type(module).__name__}.forward"
        site = _write(module, part, prefix + name, family, strict, reason or registry.skipped().get(what))
        if part == "decoder layer":
            site.reason = site.reason or decoder_layer.bind(module)
    if inner is not body and type(inner).__name__ == f"{family.prefix}ForCausalLM":
        what = f"{type(inner).__name__}.forward"
        _write(inner, "loss", "lm_head + loss", family, strict, reason or registry.skipped().get(what))
        head = inner.get_output_embeddings()  # type: ignore[operator]
        if reason is None and head is not None:
            registry.planned_heads().add(head)


def _write(
    module: nn.Module, part: registry.Part, path: str, family: Family, strict: bool, reason: str | None
) -> registry.Site:
    site = registry.site_of(module)
    if site is None:
        site = registry.Site(part, path, family.model_type)
        module.__dict__[registry.PLAN] = site
    site.path, site.strict, site.reason = path, strict, reason
    return site


def static_reason(module: nn.Module, dtype: torch.dtype) -> str | None:
    """Why a planned module would run stock in training as it stands now, without running it; None means fast."""
    site = registry.site_of(module)
    if site is None or site.reason is not None:
        return None if site is None else site.reason
    if site.part == "decoder layer":
        reader = decoder_layer.reader_of(module, FAMILIES[site.model_type])
        projections = reader.projections(dtype, autocast=True)
        return reader.structural_reason() or (projections if isinstance(projections, str) else None)
    if site.part == "loss":
        return causal_lm.head_reason(module.get_output_embeddings())  # type: ignore[operator]
    return None


def _raise_if_stock(inner: nn.Module) -> None:
    dtype = next((p.dtype for p in inner.parameters() if p.is_floating_point()), torch.float32)
    for module in inner.modules():
        reason = static_reason(module, dtype)
        if reason is not None:
            site = registry.site_of(module)
            raise RuntimeError(f"fastft: strict=True, but {site.path} ({site.part}) would run stock: {reason}.")  # type: ignore[union-attr]


def unplan(model: nn.Module) -> None:
    """Take every plan off one model: it runs stock again, checkpointing as asked."""
    inner = inner_model(model)
    checkpointing.give_back(inner)
    bitsandbytes.undo_repairs(inner)
    for module in inner.modules():
        if registry.site_of(module) is None:
            continue
        decoder_layer.unbind(module)
        backbone.uninstall(module)
        if registry.site_of(module).part == "model":  # type: ignore[union-attr]
            watch.leave(inner, module)
        levels.release(module)
        del module.__dict__[registry.PLAN]
    registry.planned_models().discard(inner)
    get_head = getattr(inner, "get_output_embeddings", None)
    head = get_head() if get_head is not None else None
    if head is not None:
        registry.planned_heads().discard(head)


def unpatch(model: Any = None) -> None:
    """Undo one model's plan, or, without an argument, all of them, the class patches and the TRL hook.

    Class methods are restored by identity: a method that somebody else has replaced since is left alone. `patch` (and
    `FastModel`) install them again when next used.

    Args:
        model: a planned model, or None for everything.
    """
    if model is not None:
        unplan(model)
        return
    for planned in [*registry.planned_models(), *registry.running_backbones()]:
        unplan(planned)
    registry.running_backbones().clear()
    trl.uninstall()
    registry.restore_classes()


def release_memory(model: Any) -> None:
    """Give back what training holds between steps: pinned host memory (level offload) and CUDA graphs.

    Evaluation gives host memory back by itself; `unpatch` and the model's end give back both. A training step after
    this makes anew what it needs.

    Args:
        model: a planned model.
    """
    for module in inner_model(model).modules():
        site = registry.site_of(module)
        if site is not None and site.part == "model":
            levels.release(module)


def patched() -> list[str]:
    """What is exchanged in this process now, one line each: class methods, the TRL hook, live planned models."""
    lines = [f"{p.owner.__module__}.{p.owner.__qualname__}.{p.name}" for p in registry.class_patches()]
    head = getattr(sys.modules.get("trl.trainer.utils"), "_ChunkedLogProbFunction", None)
    if head is trl.LogProbFunction:
        lines.append("trl.trainer.utils._ChunkedLogProbFunction")
    lines += [f"{type(m).__qualname__} instance at {id(m):#x}" for m in registry.planned_models()]
    return lines
