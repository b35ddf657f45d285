"""The memory plans of one model, one for each batch size: made, remembered, corrected, announced.

A plan is made once for a size, then looked up. It is made again when a step shows that the prediction was off, or when
more is allocated than it reckoned with (a second graph alive, a reference model loaded since). All of it is plain data
in the backbone's site.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from fastft.autograd.layer_call import Away
from fastft.memory.away import AWAY
from fastft.memory.budget import allowed_bytes, device_memory, format_bytes
from fastft.memory.captures import CUBLAS_WORKSPACE, pays
from fastft.memory.costs import StepCosts, with_gradients, without_graphs
from fastft.memory.graphs import SHARED_STREAMS
from fastft.memory.planner import LEVELS, Plan, make_plan
from fastft.patching import registry
from fastft.patching.layer_costs import autocast_dtype, costs_of, model_of
from fastft.patching.registry import AUTO

__all__ = [
    "NO_PLAN_FITS",
    "Memory",
    "SizePlan",
    "away_of",
    "device_of",
    "host_budget",
    "learn",
    "plan_for",
    "size_of",
    "summary",
]

NO_PLAN_FITS = (
    "no plan fits; this is the one with the least memory. Use shorter rows, a smaller batch with more "
    "gradient_accumulation_steps, or raise memory_budget."
)
_SIZE_STEP = 256  # tokens: sizes are planned for the next multiple
_MOST_REPLANS = 3  # for one size
_MOST_HALVES = 2  # processes of a host that each keep their link busy all the time: 55 GB/s each way on an H200
_LEFT_OVER = 20  # an ended step has left at most this part of what it used
_OFF_BY = 0.1  # of the predicted peak: a step that was cheaper by more is planned again
_OPTIMIZER_BYTES = 8  # a trainable parameter: AdamW's two float32 moments, before its first step


@dataclass(slots=True)
class SizePlan:
    """The plan for batches of up to `tokens` tokens."""

    tokens: int
    plan: Plan
    above: int  # predicted peak, less `start`
    start: int  # bytes allocated when a step begins, the optimizer's state included; -1: to be planned again
    gradients: int = 0  # bytes of all gradients, part of `above`
    accumulates: bool = True  # whether a forward may find them there
    graph_buffers: int = 0  # part of `start` that comes with the capture of CUDA graphs
    replans: int = 0
    looks: int = 4  # steps still to be compared with the prediction

    def at_rest(self, allocated: int) -> int:
        """`allocated` less the gradients that accumulation has left, which `above` has room for already."""
        left = self.gradients if self.accumulates else 0
        return allocated - min(max(allocated - self.start, 0), left)


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
    outgrown: tuple[int, int] | None = None  # the last forward's size, if its plan had too little room
    accumulates: bool = False  # a forward has found gradients: they are there while the loss runs


def plan_for(
    backbone: nn.Module,
    memory: Memory,
    layers: list[nn.Module],
    sites: list[registry.Site],
    shape: tuple[int, int],
    *,
    host_held: int,
    graphs: bool,
    graphs_kept: int | None,
    release: Callable[[], None] | None = None,
) -> Plan | None:
    """The plan for this batch size: known, corrected, or new; None where none can be made.

    Args:
        backbone: holds the layers.
        memory: its budget and plans.
        layers: the planned layers.
        sites: theirs.
        shape: `[batch, sequence]`.
        host_held: bytes of host memory that the model's store has already.
        graphs: whether layers may be replayed from CUDA graphs.
        graphs_kept: bytes of activations that the CUDA graphs which will serve this batch keep between steps; None
            where none will. Their buffers, and all of another shape's graphs, are the model's own, as weights are.
        release: gives back what another shape's graphs keep: called where there is no plan beside it.
    """
    device = device_of(layers)
    if device is None:
        return None
    tokens, _ = size = size_of(shape)
    allocated = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    asked = (autocast_dtype(device), *(s.level for s in sites))
    if asked != memory.asked:
        memory.sizes.clear()
        memory.asked, memory.pending = asked, None
    if not memory.accumulates and _finds_gradients(layers):
        memory.accumulates = True
        memory.sizes.clear()
    # Replays tell nothing of an eager step's peak; but an eager step of another size may be what came before.
    if graphs_kept is None or (memory.pending is not None and memory.pending[0] != size):
        learn(memory, device)
    memory.pending = None
    if graphs_kept is not None:
        allocated -= graphs_kept  # part of what the plan counts as the step's own
    known = memory.sizes.get(size)
    if known is not None and not _outgrown(known, allocated + (known.graph_buffers if graphs_kept is None else 0)):
        plan, memory.outgrown = known.plan, None
    else:
        costs = _carried(costs_of(backbone, layers, tokens, size[1]))
        if not costs:
            return None
        fresh = functools.partial(_fresh, backbone, memory, device, layers, sites, tokens, costs, host_held)
        plan, start, gradients, buffers = fresh(allocated, graphs, graphs_kept)
        if not plan.fits and release is not None:
            release()
            allocated = torch.cuda.memory_allocated(device)
            plan, start, gradients, buffers = fresh(allocated, graphs, graphs_kept)
        # The plan of an extraordinary step (a second graph is alive) is not remembered, unless the next is like it.
        if known is not None and 0 <= known.start < start and memory.outgrown != size:
            memory.outgrown = size
        else:
            memory.outgrown = None
            replans = 0 if known is None else known.replans
            known = memory.sizes[size] = SizePlan(
                tokens, plan, plan.peak - start, start, gradients, memory.accumulates, buffers, replans
            )
            _announce(memory, plan, tokens)
    # What a replay uses while it runs is in the graphs' pool, and not in the allocator's statistics.
    if device.type == "cuda" and known is not None and known.plan is plan and known.looks > 0 and graphs_kept is None:
        known.looks -= 1
        memory.pending = (size, known.at_rest(allocated), torch.cuda.max_memory_allocated(device))
        memory.seen = None
        _watch(layers[0], memory, device)
    return plan


def _fresh(
    backbone: nn.Module,
    memory: Memory,
    device: torch.device,
    layers: Sequence[nn.Module],
    sites: list[registry.Site],
    tokens: int,
    costs: Sequence[StepCosts],
    host_held: int,
    allocated: int,
    graphs: bool,
    graphs_kept: int | None,
) -> tuple[Plan, int, int, int]:
    """The plan for a size beside what is allocated; with the start, the gradients and the graphs' buffers in it."""
    start, gradients = _start(backbone, memory, allocated)
    buffers = 0
    if graphs and device.type == "cuda" and pays(costs[0].forward_operations, device):
        costs = [without_graphs(one, "offload") for one in costs]
        buffers = _graph_buffers(backbone, layers[0], tokens)
        if graphs_kept is None:
            start += buffers
    if not memory.accumulates:
        of_a_layer = min(_leaf_bytes(layers[0]), _leaf_bytes(layers[-1]))
        costs = [with_gradients(one, of_a_layer) for one in costs]
    plan = _make(memory, device, sites, costs, start + gradients, host_budget(host_held))
    if buffers:
        plan = replace(plan, eager=_needs_eager(plan, costs, start + gradients + memory.correction))
    return plan, start, gradients, buffers


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


def device_of(layers: Sequence[nn.Module]) -> torch.device | None:
    """Where the layers are; None where they are spread over devices, or the device's memory is not known."""
    devices = {next(layer.parameters()).device for layer in layers}
    device = devices.pop()
    return None if devices or device.type not in ("cuda", "cpu") else device


def _make(
    memory: Memory,
    device: torch.device,
    sites: list[registry.Site],
    costs: Sequence[StepCosts],
    base: int,
    host_budget: int,
) -> Plan:
    """The best plan over the costs of all ways to run a layer."""
    plans = [
        replace(
            _make_one(memory, device, sites, one, base, host_budget), compact=one.compact, away=one.away, late=one.late
        )
        for one in costs
    ]

    def rank(plan: Plan) -> tuple[bool, float, int]:
        # Where nothing fits, host memory comes first: one that is overdrawn ends the process.
        return not plan.fits, plan.seconds if plan.fits else max(0, plan.host - host_budget), plan.peak

    return min(plans, key=rank)


def _make_one(
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


def _needs_eager(plan: Plan, costs: Sequence[StepCosts], base: int) -> bool:
    """Whether an offloaded layer's backward would pass the budget beside what graphs keep: that is never let go."""
    if "offload" not in plan.levels:
        return False
    levels = next(one.levels for one in costs if (one.compact, one.away) == (plan.compact, plan.away))
    kept = sum(levels[level].saved for level in plan.levels)
    return base + kept + levels["offload"].working > plan.budget


def away_of(
    backbone: nn.Module, layers: Sequence[nn.Module], size: tuple[int, int], count: int, host_held: int
) -> tuple[Away, bool]:
    """How much `count` layers that were told to offload leave in host memory: what pays, and what it has room for.

    Args:
        backbone: holds the layers.
        layers: the planned layers.
        size: tokens in a batch and in a row (`size_of`).
        count: how many offload.
        host_held: bytes of host memory that the model's store has already.

    Returns:
        How much, and whether it comes back late.
    """
    room = host_budget(host_held)
    found = _carried(costs_of(backbone, layers, *size))
    fitting = [one for one in found if count * one.levels["offload"].host <= room]
    most = max(fitting, key=lambda one: AWAY.index(one.away), default=None)
    return ("input", False) if most is None else (most.away, most.late)


def size_of(shape: tuple[int, int]) -> tuple[int, int]:
    """Tokens in a batch and in a row, rounded up to what is planned for."""
    tokens = -(-shape[0] * shape[1] // _SIZE_STEP) * _SIZE_STEP
    return tokens, min(-(-shape[1] // _SIZE_STEP) * _SIZE_STEP, tokens)


def host_budget(held: int) -> int:
    """Three quarters of the host's memory that is free or in the model's store, shared among the host's processes."""
    return (device_memory(torch.device("cpu")).limit // _processes() + held) * 3 // 4


def _processes() -> int:
    """How many train on this host, by torchrun's count."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))


def _carried(costs: Sequence[StepCosts] | None) -> list[StepCosts]:
    """Those that ask no more of the host's memory than it moves: one link's worth each way for two processes."""
    return [one for one in costs or [] if one.away != "half" or _processes() <= _MOST_HALVES]


def _outgrown(known: SizePlan, allocated: int) -> bool:
    """Whether more is allocated than the plan has room for."""
    if known.start < 0:
        return True
    rest = known.at_rest(allocated)
    return rest > known.start and rest + known.above > known.plan.budget


def learn(memory: Memory, device: torch.device) -> None:
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


def _start(backbone: nn.Module, memory: Memory, allocated: int) -> tuple[int, int]:
    """Bytes allocated when a step begins, and bytes of all gradients.

    Gradients that exist are left out of the first; the optimizer's state counts, whether it is there already or comes
    with the first step: it is there as far as more is allocated than when the first plan was made.
    """
    trainable = [p for p in model_of(backbone).parameters() if p.requires_grad]
    rest = max(0, allocated - sum(p.grad.nbytes for p in trainable if p.grad is not None))
    if memory.before is None:
        memory.before = rest
    optimizer = sum(p.numel() for p in trainable) * _OPTIMIZER_BYTES
    to_come = max(0, optimizer - max(0, rest - memory.before))
    return rest + to_come, sum(p.nbytes for p in trainable)


def _finds_gradients(layers: Sequence[nn.Module]) -> bool:
    """Whether a forward begins with gradients: of an earlier part of its step, or zeroed in place."""
    trainable = next((p for p in layers[-1].parameters() if p.requires_grad), None)
    return trainable is None or trainable.grad is not None


def _graph_buffers(backbone: nn.Module, layer: nn.Module, tokens: int) -> int:
    """Bytes that graphs will share: streams, one layer's adapter gradients, cuBLAS' workspace (memory/graphs.py)."""
    stream = tokens * int(backbone.config.hidden_size) * next(backbone.parameters()).element_size()  # type: ignore[union-attr,arg-type]
    return SHARED_STREAMS * stream + _leaf_bytes(layer) + CUBLAS_WORKSPACE


def _leaf_bytes(layer: nn.Module) -> int:
    return sum(p.nbytes for p in layer.parameters() if p.requires_grad)


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
        console.print(f"fastft: {NO_PLAN_FITS}")


def summary(site: registry.Site) -> str | None:
    """The plan of the largest size seen, and the measured peak: a note of the report."""
    memory = site.memory
    if memory is None or not memory.sizes:
        return None
    largest = memory.sizes[max(memory.sizes)]
    measured = "" if memory.measured is None else f"; measured peak {format_bytes(memory.measured)}"
    return f"memory plan for {largest.tokens} tokens a step: {largest.plan.summary()}{measured}"
