"""The class patches of `import fastft`: methods that call the saved original unless the instance carries a plan.

This file is all that an import costs: it knows class names and signatures, not kernels. What a planned instance runs
is looked up on its first call (`modules.py`, `causal_lm.py`), which is when Triton is imported. A method whose
signature is not the one we were written against is left alone, with the reason kept for the report. Decoder-layer
classes are never touched (see `decoder_layer.py`).
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

from fastft.patching import registry
from fastft.patching.families import Family

# part: (module and function a planned instance runs, parameters its original must have)
_PARTS = {
    "RMSNorm": ("fastft.patching.modules", "norm_forward", ("self", "hidden_states")),
    "MLP": ("fastft.patching.modules", "mlp_forward", ("self", "x")),
    "Attention": (
        "fastft.patching.modules",
        "attention_forward",
        ("self", "hidden_states", "position_embeddings", "attention_mask", "cache|past_key_values", "**kwargs"),
    ),
    "ForCausalLM": (
        "fastft.patching.causal_lm",
        "causal_lm_forward",
        ("self", "input_ids", "labels", "logits_to_keep", "**kwargs"),
    ),
}


@functools.cache
def _implementation(part: str) -> Callable[..., Any]:
    module, name, _ = _PARTS[part]
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


def make_inert(part: str, family: Family, original: Callable[..., Any]) -> Callable[..., Any]:
    """`original` for every instance without a plan; the signature stays (generate() and Trainer read it)."""

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if registry.PLAN not in self.__dict__:
            return original(self, *args, **kwargs)
        if torch.compiler.is_compiling():
            from fastft.patching import compiled

            return compiled.forward(part, self, family, original, args, kwargs)
        return _implementation(part)(self, family, original, *args, **kwargs)

    return forward


def signature_matches(function: Callable[..., Any], expected: tuple[str, ...]) -> bool:
    """Whether `function` takes what we pass: every expected parameter, and no further one that is required.

    Optional parameters we do not know may come: they are passed through.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return False
    names = {("**" if p.kind is p.VAR_KEYWORD else "") + p.name for p in parameters}
    known = {alternative for name in expected for alternative in name.split("|")}
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    required = {p.name for p in parameters if p.default is p.empty and p.kind in kinds}
    return required <= known and all(names & set(name.split("|")) for name in expected)


def install(family: Family) -> None:
    """Swap the forwards of one family's classes, each where its signature is the one known; idempotent."""
    module = importlib.import_module(family.module)
    for part, (_, _, expected) in _PARTS.items():
        owner = getattr(module, family.prefix + part, None)
        what = f"{family.prefix}{part}.forward"
        original = None if owner is None else owner.__dict__.get("forward")
        if owner is None or original is None:
            registry.skip(what, f"{family.module} has no {what}")
        elif registry.is_ours(owner, "forward"):
            registry.installed(what)
        elif registry.is_wrapped(owner, "forward"):
            registry.skip(what, f"{what} was replaced by another library after fastft")
        elif not signature_matches(original, expected):
            registry.skip(what, f"{what} has an unknown signature {inspect.signature(original)}")
        else:
            registry.swap_method(owner, "forward", functools.partial(make_inert, part, family))
