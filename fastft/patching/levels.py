"""Which level each planned layer runs at in this step: what was asked for, or what the memory planner says.

`Site.level` of a decoder layer is what was asked for: a level, or "auto". Before a training forward the backbone's
pre-hook calls `assign`, which gives every "auto" layer a level by the plan for the batch's size (size_plans.py). Levels
are plain data in the layers' sites; the host memory of level offload and the CUDA graphs belong to objects kept beside
the model, never in it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from fastft.memory.budget import format_bytes, parse_budget
from fastft.memory.graphs import ModelGraphs
from fastft.memory.offload import HostStore
from fastft.memory.planner import LEVELS
from fastft.memory.token_graphs import TokenGraphs
from fastft.patching import registry, size_plans
from fastft.patching.layer_costs import autocast_dtype
from fastft.patching.registry import AUTO

CHOICES = (AUTO, *LEVELS)
_ROOM_NEEDED = "a batch of another shape needed the room of those there were"
_stores: weakref.WeakKeyDictionary[nn.Module, HostStore] = weakref.WeakKeyDictionary()
_graphs: weakref.WeakKeyDictionary[nn.Module, ModelGraphs] = weakref.WeakKeyDictionary()
_away: weakref.WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], tuple[str, bool]]] = weakref.WeakKeyDictionary()
_token_graphs: weakref.WeakKeyDictionary[nn.Module, TokenGraphs] = weakref.WeakKeyDictionary()


def set_choice(layers: Sequence[nn.Module], choice: str | Sequence[str] | Mapping[int, str]) -> None:
    """Ask for levels explicitly; they outlast every later call that switches checkpointing on.

    Args:
        layers: the planned decoder layers, in order.
        choice: one of `CHOICES` for all layers, a sequence of them, or a mapping from layer index (negative counts from
            the end) for some: the others keep what they have.

    Raises:
        ValueError: an unknown level, a wrong number of them, or an index out of range.
    """
    count = len(layers)
    if isinstance(choice, str):
        wanted = dict.fromkeys(range(count), choice)
    elif isinstance(choice, Mapping):
        wanted = {}
        for index, level in choice.items():
            if not -count <= index < count:
                raise ValueError(f"memory_levels names layer {index}; the model has layers 0 to {count - 1}.")
            wanted[index % count] = level
    else:
        if len(choice) != count:
            raise ValueError(
                f"memory_levels has {len(choice)} entries for {count} layers; give one each, or a mapping."
            )
        wanted = dict(enumerate(choice))
    for level in wanted.values():
        if level not in CHOICES:
            raise ValueError(f"level {level!r} is not known; choose from {', '.join(CHOICES)}.")
    for index, level in wanted.items():
        site = registry.site_of(layers[index])
        assert site is not None
        site.pinned = level
        site.level = level
        site.assigned = None


def set_budget(backbone_site: registry.Site, budget: str | int | float | None) -> None:
    """Plan for at most this much allocated memory from the next step on (None: what is free, less a margin)."""
    known = backbone_site.memory  # how much was allocated before there was an optimizer's state stays true
    backbone_site.memory = size_plans.Memory(
        budget=parse_budget(budget), before=None if known is None else known.before
    )


def ask_planner(layers: Sequence[nn.Module]) -> None:
    """Leave to the planner what nobody has named: a budget means that there is to be a plan."""
    for layer in layers:
        site = registry.site_of(layer)
        assert site is not None
        if site.pinned is None:
            site.level = AUTO


def announce_elsewhere(backbone: nn.Module, site: registry.Site) -> None:
    """Somebody else will tell the first plan (a run's banner): the planner need not print it."""
    layers = [s for m in backbone.modules() if (s := registry.site_of(m)) is not None and s.part == "decoder layer"]
    if any(layer.level == AUTO for layer in layers):
        if site.memory is None:
            site.memory = size_plans.Memory()
        site.memory.announced = True


def assign(backbone: nn.Module, site: registry.Site, shape: tuple[int, int]) -> None:
    """Give every planned layer its level for a training forward over `[batch, sequence]` tokens."""
    if backbone in _token_graphs:  # generation is over, and its memory is wanted
        _token_graphs[backbone].release()
    layers = [m for m in backbone._modules["layers"]._modules.values() if registry.site_of(m) is not None]  # type: ignore[union-attr,arg-type]
    sites = [registry.site_of(layer) for layer in layers]  # type: ignore[arg-type]
    if any(s.level == AUTO for s in sites):  # type: ignore[union-attr]
        if site.memory is None:
            site.memory = size_plans.Memory()
        host_held = _stores[backbone].host_bytes if backbone in _stores else 0
        captured = _graphs[backbone] if _replays(backbone) else None
        serves = captured is not None and captured.serves(shape[0] * shape[1])
        plan = size_plans.plan_for(
            backbone,
            site.memory,
            layers,  # type: ignore[arg-type]
            sites,  # type: ignore[arg-type]
            shape,
            host_held=host_held,
            graphs=site.cuda_graphs,
            graphs_kept=captured.kept_bytes if captured is not None and serves else None,
            release=None if captured is None or serves else functools.partial(captured.release, _ROOM_NEEDED),
        )
        unplanned = ["recompute" if s.level == AUTO else s.level for s in sites]  # type: ignore[union-attr]
        levels: Sequence[str] = unplanned if plan is None else plan.levels
        compact, eager = (0, False) if plan is None else (plan.compact, plan.eager)
        away, late = ("input", False) if plan is None else (plan.away, plan.late)
    else:
        compact, eager = 0, False
        levels = [s.level for s in sites]  # type: ignore[union-attr]
        away, late = _away_of(backbone, layers, levels, shape)  # type: ignore[arg-type]
    for index, (layer_site, level) in enumerate(zip(sites, levels, strict=True)):
        # The last layer's input is wanted back as soon as it is gone.
        last = index == len(sites) - 1 and level == "offload"
        layer_site.assigned = "recompute" if last else level  # type: ignore[union-attr]
        layer_site.compact, layer_site.away, layer_site.late = compact, away, late  # type: ignore[union-attr]
    from fastft.patching import decoder_layer

    before = None
    for layer, level in zip(layers, levels, strict=True):
        if level == "offload" or before == "offload":  # the layer after the last one lets go of what is on its way out
            decoder_layer.hosts[layer] = store_of(backbone)  # type: ignore[index]
        else:
            decoder_layer.hosts.pop(layer, None)  # type: ignore[arg-type]
        if site.cuda_graphs and not eager:
            decoder_layer.graphs[layer] = graphs_of(backbone)  # type: ignore[index]
        else:
            decoder_layer.graphs.pop(layer, None)  # type: ignore[arg-type]
        before = level
    if site.cuda_graphs and not eager:
        graphs_of(backbone).begin()
    elif site.cuda_graphs:
        graphs_of(backbone).release("what they keep is not let go, and the budget has no room for it beside offload")


def _away_of(
    backbone: nn.Module, layers: list[nn.Module], levels: Sequence[str], shape: tuple[int, int]
) -> tuple[str, bool]:
    """`size_plans.away_of` for levels that somebody named; asked once for a size, count and dtype."""
    count = levels[:-1].count("offload")  # the last layer recomputes
    if not count:
        return "input", False
    known, size = _away.setdefault(backbone, {}), size_plans.size_of(shape)
    asked = (size, count, autocast_dtype(next(layers[0].parameters()).device))
    if asked not in known:
        host_held = _stores[backbone].host_bytes if backbone in _stores else 0
        known[asked] = size_plans.away_of(backbone, layers, size, count, host_held)
    return known[asked]


def level_of(site: registry.Site) -> str:
    """The level a layer runs at now; outside of its backbone's forward a layer left to the planner recomputes."""
    if site.level != AUTO:
        return "recompute" if site.assigned == "recompute" and site.level == "offload" else site.level
    return site.assigned or "recompute"


def store_of(backbone: nn.Module) -> HostStore:
    """The model's host memory for level offload."""
    store = _stores.get(backbone)
    if store is None:
        store = _stores[backbone] = HostStore(size_plans.host_budget)
    return store


def graphs_of(backbone: nn.Module) -> ModelGraphs:
    """The CUDA graphs of the model's layers."""
    graphs = _graphs.get(backbone)
    if graphs is None:
        graphs = _graphs[backbone] = ModelGraphs()
    return graphs


def token_graphs_of(backbone: nn.Module) -> TokenGraphs:
    """The CUDA graphs of the model's layers in generation."""
    graphs = _token_graphs.get(backbone)
    if graphs is None:
        graphs = _token_graphs[backbone] = TokenGraphs()
    return graphs


def _replays(backbone: nn.Module) -> bool:
    return backbone in _graphs and _graphs[backbone].captured > 0


def _release_graphs(backbone: nn.Module) -> None:
    for known in (_graphs, _token_graphs):
        if backbone in known:
            known[backbone].release()  # type: ignore[attr-defined]


def release(backbone: nn.Module) -> None:
    """Give the model's pinned host memory and its CUDA graphs back; the next training step makes them anew."""
    if backbone in _stores:
        _stores[backbone].release()
    _release_graphs(backbone)


def generate(backbone: nn.Module, site: registry.Site) -> None:
    """A forward over a cache began: its layers may be replayed."""
    from fastft.patching import decoder_layer

    if site.cuda_graphs:
        graphs = token_graphs_of(backbone)
        for layer in backbone._modules["layers"]._modules.values():  # type: ignore[union-attr]
            decoder_layer.token_graphs[layer] = graphs  # type: ignore[index]


def rest(backbone: nn.Module) -> None:
    """A forward began that is no training step's (evaluation, generation, a reference pass): its peak is its own.

    In evaluation, host memory that no graph waits for goes back as well.
    """
    site = registry.site_of(backbone)
    if site is not None and site.memory is not None and site.memory.pending is not None:
        device = (
            None if _replays(backbone) else size_plans.device_of(list(backbone._modules["layers"]._modules.values()))
        )  # type: ignore[union-attr,arg-type]
        if device is not None:
            size_plans.learn(site.memory, device)
        site.memory.pending = None
    store = _stores.get(backbone)
    if store is not None and not backbone.training and store.host_bytes and not store.in_flight:
        store.release()


def set_graphs(backbone: nn.Module, site: registry.Site, enabled: bool) -> None:
    """Allow CUDA graphs where they pay, or go without from the next step on."""
    from fastft.patching import decoder_layer

    site.cuda_graphs = enabled
    if not enabled:
        for layer in backbone._modules["layers"]._modules.values():  # type: ignore[union-attr]
            decoder_layer.graphs.pop(layer, None)  # type: ignore[arg-type]
            decoder_layer.token_graphs.pop(layer, None)  # type: ignore[arg-type]
        _release_graphs(backbone)


def graph_summary(backbone: nn.Module, site: registry.Site) -> str | None:
    """What CUDA graphs do for the model, or why they do nothing: a note of the report."""
    if not site.cuda_graphs:
        return "CUDA graphs: switched off"
    graphs, tokens = _graphs.get(backbone), _token_graphs.get(backbone)
    notes = []
    if graphs is not None and graphs.captured:
        held = format_bytes(graphs.held_bytes)
        notes.append(f"{graphs.captured} layers captured, {graphs.replays} forwards replayed, {held} held")
    elif graphs is not None and graphs.reason is not None:
        notes.append(f"none; {graphs.reason}")
    if tokens is not None and tokens.replays:
        notes.append(f"in generation {tokens.replays} layers' tokens replayed")
    elif tokens is not None and tokens.reason is not None:
        notes.append(f"none in generation; {tokens.reason}")
    return "CUDA graphs: " + "; ".join(notes) if notes else None


__all__ = [
    "AUTO",
    "CHOICES",
    "announce_elsewhere",
    "ask_planner",
    "assign",
    "generate",
    "graph_summary",
    "graphs_of",
    "level_of",
    "release",
    "rest",
    "set_budget",
    "set_choice",
    "set_graphs",
    "store_of",
    "token_graphs_of",
]
