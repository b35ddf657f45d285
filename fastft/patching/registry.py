"""What was exchanged, where, and why not: class patches by identity, plans per module, and the report.

A *class patch* is a method swapped on a transformers class for a version that calls the saved original (or, where the
class inherits the method, what it inherits) unless the instance carries a plan. It is recorded here so that `unpatch()`
restores the very object that was there, and leaves alone a method that somebody else has replaced since.

A *plan* is a `Site` in a module's `__dict__["_fastft"]`: pure data, so it survives deepcopy, pickle and PEFT surgery
and never appears in a state dict. It also counts what ran, because a report that says fast while stock runs is a
defect.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

PLAN = "_fastft"
AUTO = "auto"  # a decoder layer's level, left to the planner
Part = Literal["model", "decoder layer", "norm", "attention", "mlp", "loss"]


@dataclass(slots=True)
class Site:
    """One exchanged part of one model.

    Args:
        part: what it is.
        path: its name in the model, as `named_modules` gives it.
        model_type: family key of `families.FAMILIES`.
        level: what a decoder layer was asked to keep for its backward: a level of memory/planner.py, or "auto".
        pinned: the level the user named explicitly (checkpointing switched on or off leaves it), or None.
        compact: rows of the small tiles that the planner has the MLP run in; 0 for the usual ones.
        away: the most that an offloaded layer leaves in host memory (`LayerCall.away`).
        late: when that comes back (`LayerCall.late`).
        assigned: the level it runs at, as far as the planner has a say in it (patching/levels.py).
        reason: why it can never run fast (known when planned), or None.
        strict: raise where the part would run stock.
        fast_runs: forwards that ran fast.
        stock_runs: forwards that ran stock.
        last_reason: why the last stock forward ran stock.
        compiled: whether `torch.compile` has traced the model (on the backbone's site).
        max_seq_length: longest document allowed (on the backbone's site), or None.
        pad_checks: forwards still to be looked at for padding without a mask (on the backbone's site).
        empty_batches: batches without a counted label (on the loss's site).
        cuda_graphs: whether layers may be replayed from CUDA graphs (on the backbone's site).
        fold_adapters: whether s·B·A is added to dequantized weights (on a decoder layer's site).
        skip_probabilities: whether G W leaves out columns of small probabilities (on the loss's site).
        whole_product: why the last training loss left none out all the same, or None.
        padding_free: whether padding may be left out in training (on the backbone's site).
        tokens_padded: tokens of the padded batches whose padding was left out, pads included (on the backbone's site).
        tokens_real: the same without pads.
        memory: budget and plans (on the backbone's site): patching/size_plans.py.
        run_comfort: whether a trainer gets a `RunCallback` (on the backbone's site): training/watch.py.
        run: the `RunReport` of the last finished run (on the backbone's site).
    """

    part: Part
    path: str
    model_type: str
    level: str = "keep"
    pinned: str | None = None
    assigned: str | None = None
    compact: int = 0
    away: str = "input"
    late: bool = False
    reason: str | None = None
    strict: bool = False
    fast_runs: int = 0
    stock_runs: int = 0
    last_reason: str | None = None
    compiled: bool = False
    max_seq_length: int | None = None
    pad_checks: int = 4
    empty_batches: int = 0
    cuda_graphs: bool = True
    fold_adapters: bool = False
    skip_probabilities: bool = False
    whole_product: str | None = None
    padding_free: bool = True
    tokens_padded: int = 0
    tokens_real: int = 0
    memory: Any = None
    run_comfort: bool = True
    run: Any = None

    def skipped_columns(self, whole_product: str | None) -> None:
        """Note that the loss's second product left columns out, or why it did not."""
        self.whole_product = whole_product

    def ran_fast(self) -> None:
        """Count a fast forward."""
        self.fast_runs += 1

    def ran_stock(self, reason: str) -> None:
        """Count a stock forward, unless `stock_only` asked for it; raises in strict mode, except in generation.

        Raises:
            RuntimeError: with `strict=True`.
        """
        if reason == DISABLED:
            return
        self.stock_runs += 1
        self.last_reason = reason
        if self.strict and reason != GENERATING:
            raise RuntimeError(
                f"fastft: {self.path} ({self.part}) would run stock: {reason}. strict=True forbids that; change what "
                "the reason names, or patch with strict=False and read fastft.report(model)."
            )


GENERATING = "key/value cache in use (generation)"
DISABLED = "fastft.stock_only()"


@dataclass(slots=True)
class ClassPatch:
    """A method swapped on a class, or added to one that inherits it (`original` is then None)."""

    owner: type
    name: str
    original: Any | None
    replacement: Any


@dataclass(slots=True)
class _State:
    class_patches: dict[tuple[type, str], ClassPatch] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)  # "LlamaMLP.forward" -> why it was not exchanged
    heads: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    models: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    backbones: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    stock_only: int = 0


_state = _State()


def site_of(module: nn.Module) -> Site | None:
    """The plan a module carries, or None."""
    return module.__dict__.get(PLAN)


def swap_method(owner: type, name: str, make: Callable[[Any], Any]) -> None:
    """Swap `owner.name` for `make(original)`, once; remembered for `restore_classes`."""
    key = (owner, name)
    known = _state.class_patches.get(key)
    if known is not None and owner.__dict__.get(name) is known.replacement:
        return
    original = owner.__dict__[name]
    replacement = make(original)
    setattr(owner, name, replacement)
    _state.class_patches[key] = ClassPatch(owner, name, original, replacement)


def add_method(owner: type, name: str, method: Any) -> None:
    """Put `method` on a class that inherits `name`; remembered for `restore_classes`, which deletes it again."""
    setattr(owner, name, method)
    _state.class_patches[owner, name] = ClassPatch(owner, name, None, method)


def is_ours(owner: type, name: str) -> bool:
    """Whether `owner.name` is, at this moment, the replacement installed here."""
    known = _state.class_patches.get((owner, name))
    return known is not None and owner.__dict__.get(name) is known.replacement


def is_wrapped(owner: type, name: str) -> bool:
    """Whether somebody has put another method over ours: swapping again would run planned instances past theirs."""
    return (owner, name) in _state.class_patches and not is_ours(owner, name)


def original_of(owner: type, name: str) -> Any:
    """The method that was on the class before, whether or not it is exchanged now."""
    known = _state.class_patches.get((owner, name))
    return owner.__dict__[name] if known is None else known.original


def restore_classes() -> None:
    """Put every swapped method back, except where somebody else has replaced ours since."""
    for patch in class_patches():
        if patch.original is None:
            delattr(patch.owner, patch.name)
        else:
            setattr(patch.owner, patch.name, patch.original)
    _state.class_patches.clear()
    _state.skipped.clear()


def skip(what: str, reason: str) -> None:
    """Remember that a class patch was not installed, and why."""
    _state.skipped[what] = reason


def installed(what: str) -> None:
    """Note that a class patch is in place: an earlier reason why it was not no longer holds."""
    _state.skipped.pop(what, None)


def skipped() -> dict[str, str]:
    """Class patches that were not installed: what -> why."""
    return dict(_state.skipped)


def class_patches() -> list[ClassPatch]:
    """The class patches in force."""
    return [p for p in _state.class_patches.values() if p.owner.__dict__.get(p.name) is p.replacement]


def planned_heads() -> weakref.WeakSet[nn.Module]:
    """Output-embedding modules of live planned models: whose weight TRL's hook answers for."""
    return _state.heads


def planned_models() -> weakref.WeakSet[nn.Module]:
    """Live planned models (the outermost transformers model, not its PEFT wrapper)."""
    return _state.models


def running_backbones() -> weakref.WeakSet[nn.Module]:
    """Planned backbones that have run: how `unpatch` finds the deep copies of planned models."""
    return _state.backbones


@contextlib.contextmanager
def stock_only() -> Iterator[None]:
    """Run every planned model stock inside this context (the other half of `fastft.verify`)."""
    _state.stock_only += 1
    try:
        yield
    finally:
        _state.stock_only -= 1


def runs_stock_only() -> bool:
    """Whether `stock_only` is in force."""
    return _state.stock_only > 0
