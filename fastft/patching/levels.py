"""Which level each planned layer runs at in this step: what was asked for, or what the memory planner says.

`Site.level` of a decoder layer is what was asked for: a level, or "auto". Before a training forward the backbone's
pre-hook calls `assign`, which gives every "auto" layer a level from shapes, free memory (or the budget) and the batch's
size, and remembers the answer per size: a plan is made once for a size, then looked up. It is made again when a step
shows that the prediction was off, or when more is allocated than it reckoned with (a second graph alive, a reference
model loaded since).

The plan is printed to stderr once per model. All of it is plain data in the backbone's site; the host memory of level
offload belongs to a `HostStore` kept beside the model, never in it.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from fastft.autograd.linear_cross_entropy import chunk_bytes
from fastft.kernels.join import RANK_MULTIPLE
from fastft.kernels.nf4 import QuantizedWeight
from fastft.memory.budget import allowed_bytes, device_memory, format_bytes, parse_budget
from fastft.memory.costs import LayerShape, StepCosts, step_costs
from fastft.memory.graphs import ModelGraphs
from fastft.memory.offload import HostStore
from fastft.memory.planner import LEVELS, Plan, make_plan
from fastft.patching import registry
from fastft.patching.families import FAMILIES

AUTO = "auto"
CHOICES = (AUTO, *LEVELS)
_SIZE_STEP = 256  # tokens: sizes are planned for the next multiple
_MOST_REPLANS = 3  # for one size
_LEFT_OVER = 20  # an ended step has left at most this part of what it used
_OFF_BY = 0.1  # of the predicted peak: a step that was cheaper by more is planned again
_OPTIMIZER_BYTES = 8  # a trainable parameter: AdamW's two float32 moments, before its first step
_stores: weakref.WeakKeyDictionary[nn.Module, HostStore] = weakref.WeakKeyDictionary()
_graphs: weakref.WeakKeyDictionary[nn.Module, ModelGraphs] = weakref.WeakKeyDictionary()


@dataclass(slots=True)
class SizePlan:
    """The plan for batches of up to `tokens` tokens."""

    tokens: int
    plan: Plan
    above: int  # predicted peak, less `start`
    start: int  # bytes allocated when a step begins, the optimizer's state included; -1: to be planned again
    gradients: int = 0  # bytes of all gradients, part of `above`
    replans: int = 0
    looks: int = 4  # steps still to be compared with the prediction

    def at_rest(self, allocated: int) -> int:
        """`allocated` less the gradients that accumulation has left, which `above` has room for already."""
        return allocated - min(max(allocated - self.start, 0), self.gradients)


@dataclass(slots=True)
class Memory:
    """What the backbone's site remembers about memory: pure data."""

    budget: int | float | None = None
    sizes: dict[tuple[int, int], SizePlan] = field(default_factory=dict)
    asked: tuple[Any, ...] = ()  # what they were made for: autocast's dtype, and the level asked of each layer
    correction: int = 0  # measured less predicted bytes of a step
    before: int | None = None  # bytes allocated when the first plan was made, gradients aside
    pending: tuple[tuple[int, int], int, int] | None = None  # a step under way: its size, allocated, peak before it
    seen: int | None = None  # the peak when its backward ended
    measured: int | None = None  # the peak of the last step that set one
    announced: bool = False


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
    backbone_site.memory = Memory(budget=parse_budget(budget))


def ask_planner(layers: Sequence[nn.Module]) -> None:
    """Leave to the planner what nobody has named: a budget means that there is to be a plan."""
    for layer in layers:
        site = registry.site_of(layer)
        assert site is not None
        if site.pinned is None:
            site.level = AUTO


def assign(backbone: nn.Module, site: registry.Site, shape: tuple[int, int]) -> None:
    """Give every planned layer its level for a training forward over `[batch, sequence]` tokens."""
    layers = [m for m in backbone._modules["layers"]._modules.values() if registry.site_of(m) is not None]  # type: ignore[union-attr,arg-type]
    sites = [registry.site_of(layer) for layer in layers]  # type: ignore[arg-type]
    if any(s.level == AUTO for s in sites):  # type: ignore[union-attr]
        plan = _plan_for(backbone, site, layers, sites, shape)  # type: ignore[arg-type]
        unplanned = ["recompute" if s.level == AUTO else s.level for s in sites]  # type: ignore[union-attr]
        levels: Sequence[str] = unplanned if plan is None else plan.levels
    else:
        levels = [s.level for s in sites]  # type: ignore[union-attr]
    for index, (layer_site, level) in enumerate(zip(sites, levels, strict=True)):
        # The last layer's input is wanted back as soon as it is gone.
        last = index == len(sites) - 1 and level == "offload"
        layer_site.assigned = "recompute" if last else level  # type: ignore[union-attr]
    from fastft.patching import decoder_layer

    before = None
    for layer, level in zip(layers, levels, strict=True):
        if level == "offload" or before == "offload":  # the layer after the last one lets go of what is on its way out
            decoder_layer.hosts[layer] = store_of(backbone)  # type: ignore[index]
        else:
            decoder_layer.hosts.pop(layer, None)  # type: ignore[arg-type]
        if site.cuda_graphs:
            decoder_layer.graphs[layer] = graphs_of(backbone)  # type: ignore[index]
        before = level
    if site.cuda_graphs:
        graphs_of(backbone).begin()


def level_of(site: registry.Site) -> str:
    """The level a layer runs at now; outside of its backbone's forward a layer left to the planner recomputes."""
    if site.level != AUTO:
        return "recompute" if site.assigned == "recompute" and site.level == "offload" else site.level
    return site.assigned or "recompute"


def store_of(backbone: nn.Module) -> HostStore:
    """The model's host memory for level offload."""
    store = _stores.get(backbone)
    if store is None:
        store = _stores[backbone] = HostStore()
    return store


def graphs_of(backbone: nn.Module) -> ModelGraphs:
    """The CUDA graphs of the model's layers."""
    graphs = _graphs.get(backbone)
    if graphs is None:
        graphs = _graphs[backbone] = ModelGraphs()
    return graphs


def release(backbone: nn.Module) -> None:
    """Give the model's pinned host memory and its CUDA graphs back; the next training step makes them anew."""
    if backbone in _stores:
        _stores[backbone].release()
    if backbone in _graphs:
        _graphs[backbone].release()


def rest(backbone: nn.Module) -> None:
    """A forward began that is no training step's (evaluation, generation, a reference pass): its peak is its own.

    In evaluation, host memory that no graph waits for goes back as well.
    """
    site = registry.site_of(backbone)
    if site is not None and site.memory is not None and site.memory.pending is not None:
        replayed = backbone in _graphs and _graphs[backbone].captured > 0
        device = None if replayed else _device_of(list(backbone._modules["layers"]._modules.values()))  # type: ignore[union-attr,arg-type]
        if device is not None:
            _learn(site.memory, device)
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
        if backbone in _graphs:
            _graphs[backbone].release()


def _plan_for(
    backbone: nn.Module,
    site: registry.Site,
    layers: list[nn.Module],
    sites: list[registry.Site],
    shape: tuple[int, int],
) -> Plan | None:
    """The plan for this batch size: known, corrected, or new; None where none can be made."""
    device = _device_of(layers)
    if device is None:
        return None
    memory = site.memory
    if memory is None:
        memory = site.memory = Memory()
    tokens = -(-shape[0] * shape[1] // _SIZE_STEP) * _SIZE_STEP
    size = (tokens, min(-(-shape[1] // _SIZE_STEP) * _SIZE_STEP, tokens))
    allocated = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    asked = (_autocast_dtype(device), *(s.level for s in sites))
    if asked != memory.asked:
        memory.sizes.clear()
        memory.asked, memory.pending = asked, None
    replayed = backbone in _graphs and _graphs[backbone].captured > 0
    if replayed:
        allocated -= _graphs[backbone].held_bytes  # part of what the plan counts as the step's own
    if not replayed:
        _learn(memory, device)
    known = memory.sizes.get(size)
    if known is not None and not _outgrown(known, allocated):
        plan = known.plan
    else:
        costs = costs_of(backbone, layers, tokens, size[1])
        if costs is None:
            return None
        start, gradients = _start(backbone, memory, allocated)
        plan = _make(memory, device, sites, costs, start + gradients, _host_budget(backbone))
        # The plan of an extraordinary step (a second graph is alive) is not remembered.
        if known is None or known.start < 0 or known.start >= start:
            replans = 0 if known is None else known.replans
            known = memory.sizes[size] = SizePlan(tokens, plan, plan.peak - start, start, gradients, replans)
            _announce(memory, plan, tokens)
    # What a replay uses while it runs is in the graphs' pool, and not in the allocator's statistics.
    if device.type == "cuda" and known is not None and known.plan is plan and known.looks > 0 and not replayed:
        known.looks -= 1
        memory.pending = (size, known.at_rest(allocated), torch.cuda.max_memory_allocated(device))
        memory.seen = None
        _watch(layers[0], memory, device)
    return plan


def _watch(layer: nn.Module, memory: Memory, device: torch.device) -> None:
    """Read the peak when the first layer's backward ends: later, somebody may have reset the statistics."""
    from fastft.patching import decoder_layer

    reference = weakref.ref(layer)  # the observer hangs on the layer: it must not keep it alive

    def look() -> None:
        memory.seen = torch.cuda.max_memory_allocated(device)
        watched = reference()
        if watched is not None:
            decoder_layer.observers.pop(watched, None)

    decoder_layer.observers[layer] = look


def _device_of(layers: Sequence[nn.Module]) -> torch.device | None:
    """Where the layers are; None where they are spread over devices, or the device's memory is not known."""
    devices = {next(layer.parameters()).device for layer in layers}
    device = devices.pop()
    return None if devices or device.type not in ("cuda", "cpu") else device


def _make(
    memory: Memory, device: torch.device, sites: list[registry.Site], costs: StepCosts, base: int, host_budget: int
) -> Plan:
    fixed = {index: s.level for index, s in enumerate(sites) if s.level != AUTO}
    last = len(sites) - 1
    if fixed.get(last) == "offload":
        fixed[last] = "recompute"
    arguments: dict[str, Any] = {
        "layers": len(sites),
        "costs": costs.levels,
        "base": max(0, base + memory.correction),
        "forward_working": costs.forward_working,
        "loss_working": costs.loss_working,
        "budget": allowed_bytes(device, memory.budget),
        "host_budget": host_budget if device.type == "cuda" else None,
    }
    allowed = LEVELS if device.type == "cuda" else LEVELS[:-1]
    plan = make_plan(**arguments, fixed=fixed, allowed=allowed)
    if plan.levels[last] == "offload":
        plan = make_plan(**arguments, fixed=fixed | {last: "recompute"}, allowed=allowed)
    return plan


def _host_budget(backbone: nn.Module) -> int:
    """Three quarters of the host's memory that is free or in the model's store, shared among the host's processes."""
    processes = max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))  # torchrun's
    held = _stores[backbone].host_bytes if backbone in _stores else 0
    return (device_memory(torch.device("cpu")).limit // processes + held) * 3 // 4


def _outgrown(known: SizePlan, allocated: int) -> bool:
    """Whether more is allocated than the plan has room for."""
    if known.start < 0:
        return True
    rest = known.at_rest(allocated)
    return rest > known.start and rest + known.above > known.plan.budget


def _learn(memory: Memory, device: torch.device) -> None:
    """Compare the last step's measured peak with its plan, and drop the plan if it was off."""
    if memory.pending is None or device.type != "cuda":
        return
    size, rest, peak_before = memory.pending
    memory.pending = None
    known, seen, memory.seen = memory.sizes.get(size), memory.seen, None
    peak = max(seen or 0, torch.cuda.max_memory_allocated(device))  # the statistics may have been reset since
    if known is None or peak <= peak_before:
        return  # the step stayed below an earlier peak: how high it went is not known
    if seen is None and peak - rest < known.above // 2:
        return  # not a step's peak: the statistics were reset after it
    memory.measured = peak
    error = (peak - rest) - known.above
    over = peak > known.plan.budget and known.plan.fits  # one that never fitted is the smallest there is
    # While a graph is alive its backward is to come, and with it perhaps the peak.
    most_left = max(rest, known.start) + known.gradients + known.above // _LEFT_OVER
    ended = torch.cuda.memory_allocated(device) <= most_left
    wasteful = ended and error < -_OFF_BY * known.plan.peak and known.plan.seconds > 0
    if (over or wasteful) and known.replans < _MOST_REPLANS:
        memory.correction += error
        memory.sizes.clear()
        memory.sizes[size] = replace(known, start=-1, replans=known.replans + 1)
        memory.announced = False


def costs_of(backbone: nn.Module, layers: Sequence[nn.Module], tokens: int, longest: int) -> StepCosts | None:
    """Costs of the backbone's layers as they are now, or None where a layer cannot be read."""
    from fastft.patching import decoder_layer  # which reads levels from here

    shapes = []
    dtype = next(p.dtype for p in backbone.parameters() if p.is_floating_point())
    for layer in layers:
        site = registry.site_of(layer)
        assert site is not None
        reader = decoder_layer.reader_of(layer, FAMILIES[site.model_type])
        projections = reader.projections(dtype, autocast=True)
        if isinstance(projections, str):
            continue  # it runs stock
        shapes.append(_shape(layer, projections, dtype))
    if not shapes:
        return None
    widest = max(shapes, key=lambda s: (s.copied, s.qkv_rank + s.output_rank + s.gate_up_rank + s.down_rank))
    vocabulary = int(getattr(backbone.config, "vocab_size", 0))
    itemsize = widest.compute_bytes
    return step_costs(
        widest,
        tokens=tokens,
        longest=longest,
        vocabulary=vocabulary,
        loss_chunk=chunk_bytes(tokens, vocabulary, itemsize, next(backbone.parameters()).device),
        head_trains=_head_trains(backbone),
    )


def _shape(layer: Any, projections: Sequence[Any], dtype: torch.dtype) -> LayerShape:
    q, k, v, o, gate, up, down = projections
    width = layer.self_attn.head_dim
    compute = _autocast_dtype(next(layer.parameters()).device) or dtype
    return LayerShape(
        hidden=o.out_features,
        query=q.out_features,
        key_value=k.out_features,
        heads=q.out_features // width,
        intermediate=gate.out_features,
        qkv_rank=_rank(q, k, v),
        output_rank=_rank(o),
        gate_up_rank=_rank(gate, up),
        down_rank=_rank(down),
        head_norms=hasattr(layer.self_attn, "q_norm"),
        compute_bytes=compute.itemsize,
        stream_bytes=dtype.itemsize,
        copied=any(isinstance(p.weight, QuantizedWeight) or p.weight.dtype != compute for p in projections),
    )


def _autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of products under autocast, None where it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _rank(*group: Any) -> int:
    """Columns of X Aᵀ that a group saves: joined products of 4-bit weights round them up."""
    rank = sum(p.rank for p in group)
    joined = all(isinstance(p.weight, QuantizedWeight) for p in group)
    return -(-rank // RANK_MULTIPLE) * RANK_MULTIPLE if joined else rank


def _model_of(backbone: nn.Module) -> Any:
    """The planned model around the backbone (a copy has none before it is patched itself: then the backbone)."""
    for model in registry.planned_models():
        if getattr(model, str(getattr(model, "base_model_prefix", "")), None) is backbone:
            return model
    return backbone


def _head_trains(backbone: nn.Module) -> bool:
    get_head = getattr(_model_of(backbone), "get_output_embeddings", None)
    head = None if get_head is None else get_head()
    return head is not None and any(p.requires_grad for p in head.parameters())


def _start(backbone: nn.Module, memory: Memory, allocated: int) -> tuple[int, int]:
    """Bytes allocated when a step begins, and bytes of all gradients.

    Gradients that exist are left out of the first; the optimizer's state counts, whether it is there already or comes
    with the first step: it is there as far as more is allocated than when the first plan was made.
    """
    trainable = [p for p in _model_of(backbone).parameters() if p.requires_grad]
    rest = max(0, allocated - sum(p.grad.nbytes for p in trainable if p.grad is not None))
    if memory.before is None:
        memory.before = rest
    optimizer = sum(p.numel() for p in trainable) * _OPTIMIZER_BYTES
    to_come = max(0, optimizer - max(0, rest - memory.before))
    return rest + to_come, sum(p.nbytes for p in trainable)


def _announce(memory: Memory, plan: Plan, tokens: int) -> None:
    """Print the plan once (again after a correction); only the first process of a group does."""
    if memory.announced:
        return
    memory.announced = True
    ranked = torch.distributed.is_available() and torch.distributed.is_initialized()
    if ranked and torch.distributed.get_rank() != 0:
        return
    note = ""
    if memory.correction:
        note = f" (planned again: the last step used {format_bytes(abs(memory.correction))} "
        note += "more than predicted)" if memory.correction > 0 else "less than predicted)"
    from rich.console import Console

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"fastft memory plan for {tokens} tokens a step: {plan.summary()}{note}", markup=False)
    if not plan.fits:
        console.print(
            "fastft: no plan fits; this is the one with the least memory. Use shorter rows, a smaller batch with more "
            "gradient_accumulation_steps, or raise memory_budget."
        )


def graph_summary(backbone: nn.Module, site: registry.Site) -> str | None:
    """What CUDA graphs do for the model, or why they do nothing: a note of the report."""
    if not site.cuda_graphs:
        return "CUDA graphs: switched off"
    graphs = _graphs.get(backbone)
    if graphs is None:
        return None
    if graphs.captured:
        held = format_bytes(graphs.held_bytes)
        return f"CUDA graphs: {graphs.captured} layers captured, {graphs.replays} forwards replayed, {held} held"
    return None if graphs.reason is None else f"CUDA graphs: none; {graphs.reason}"


def summary(site: registry.Site) -> str | None:
    """The plan of the largest size seen, and the measured peak: a note of the report."""
    memory = site.memory
    if memory is None or not memory.sizes:
        return None
    largest = memory.sizes[max(memory.sizes)]
    measured = "" if memory.measured is None else f"; measured peak {format_bytes(memory.measured)}"
    return f"memory plan for {largest.tokens} tokens a step: {largest.plan.summary()}{measured}"


__all__ = [
    "AUTO",
    "CHOICES",
    "Memory",
    "SizePlan",
    "ask_planner",
    "assign",
    "costs_of",
    "graph_summary",
    "graphs_of",
    "level_of",
    "release",
    "rest",
    "set_budget",
    "set_choice",
    "set_graphs",
    "store_of",
    "summary",
]
