"""When layers are captured and replayed, and that replays are wired to the right numbers; on the CPU.

A stand-in tape runs what it was given, where a CUDA graph would launch it: the buffers, what is kept between the
passes, the order of captures and the autograd shell are the real ones. tests/gpu/test_graphs.py has real graphs.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import fastft
from fastft.memory import graphs as module
from fastft.patching import levels
from fastft.patching.plan import inner_model
from tests import support
from tests.memory.tapes import Tape, install

LAYERS = 4
WARM = 4  # steps, of which the last one captures
Batch = dict[str, Tensor]


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs for CPU layers."""
    install(monkeypatch)


def build(level: str = "keep", **settings: Any) -> Any:
    """A fast model with adapters."""
    model = support.add_lora(support.build_model(num_hidden_layers=LAYERS, **settings))
    return fastft.patch(model, memory_levels=level)


def draw(seed: int = 0, length: int = 12) -> Batch:
    """Two full rows, no mask."""
    ids = torch.randint(3, 128, (2, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def graphs_of(model: Any) -> module.ModelGraphs:
    return levels.graphs_of(inner_model(model).model)


def step(model: Any, batch: Batch) -> dict[str, Tensor]:
    """Loss and gradients of one step."""
    model.zero_grad(set_to_none=True)
    loss = model(**batch).loss
    loss.backward()
    return {"loss": loss.detach()} | {n: g.clone() for n, g in support.trainable_gradients(model).items()}


def warmed(level: str = "keep", **settings: Any) -> Any:
    """A model whose layers are captured for `draw()`'s shape."""
    model = build(level, **settings)
    for seed in range(WARM):
        step(model, draw(seed))
    assert graphs_of(model).captured == LAYERS, graphs_of(model).reason
    assert graphs_of(model).serves(draw()["input_ids"].numel())
    assert not graphs_of(model).serves(draw(length=13)["input_ids"].numel())
    return model


def assert_eager_bits(model: Any, ours: dict[str, Tensor], batch: Batch) -> None:
    """`ours` is what the same step gives without graphs."""
    fastft.patch(model, cuda_graphs=False)
    theirs = step(model, batch)
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("level", ["keep", "lean", "recompute"])
def test_replays_give_the_eager_bits(level: str) -> None:
    model = warmed(level)
    before = graphs_of(model).replays
    ours = step(model, draw(9))
    assert graphs_of(model).replays == before + LAYERS
    assert len(Tape.recorded) == 2 * LAYERS
    assert_eager_bits(model, ours, draw(9))


@pytest.mark.parametrize("level", ["keep", "recompute"])
def test_lora_dropout_draws_new_masks_at_every_replay(level: str) -> None:
    """Those that the eager layers draw: each layer's graph reads its seed from a buffer."""
    model = support.add_lora(support.build_model(num_hidden_layers=LAYERS), lora_dropout=0.3)
    fastft.patch(model, memory_levels=level)
    for seed in range(WARM):
        step(model, draw(seed))
    assert graphs_of(model).captured == LAYERS, graphs_of(model).reason
    found = []
    for graphs in (True, False):
        fastft.patch(model, cuda_graphs=graphs)
        with support.seeded(5):
            found.append([step(model, draw(9)) for _ in range(2)])
    assert graphs_of(model).replays == 0, "the last two were eager"
    assert not torch.equal(found[0][0]["loss"], found[0][1]["loss"])
    for ours, theirs in zip(*found, strict=True):
        assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def test_layers_are_captured_in_the_order_of_a_step() -> None:
    """All forwards, then all backwards in reverse: nothing that a layer keeps lies where an earlier replay writes."""
    model, order = build(), []
    original = module._LayerGraph.capture_backward
    made: list[Any] = []

    def forward(self: Any, *arguments: Any) -> None:
        made.append(self)
        order.append(("forward", len(made) - 1))
        return init(self, *arguments)

    init = module._LayerGraph.__init__
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module._LayerGraph, "__init__", forward)
        patched.setattr(
            module._LayerGraph,
            "capture_backward",
            lambda self, tape: (order.append(("backward", made.index(self))), original(self, tape))[1],
        )
        for seed in range(WARM):
            step(model, draw(seed))
    expected = [("forward", i) for i in range(LAYERS)] + [("backward", i) for i in reversed(range(LAYERS))]
    assert order == expected


def test_nothing_is_captured_while_lengths_vary() -> None:
    model = build()
    for seed in range(9):
        step(model, draw(seed, length=10 + seed % 2))
    assert len(Tape.recorded) == 0
    assert "same for long enough" in str(graphs_of(model).reason)


def test_another_length_in_between_leaves_the_graphs_alone() -> None:
    model = warmed()
    short = step(model, draw(1, length=7))
    ours = step(model, draw(2))
    assert len(Tape.recorded) == 2 * LAYERS
    assert_eager_bits(model, ours, draw(2))
    assert_eager_bits(model, short, draw(1, length=7))


def test_another_length_for_good_is_captured_anew() -> None:
    model = warmed()
    for seed in range(WARM):
        step(model, draw(seed, length=7))
    assert len(Tape.recorded) == 4 * LAYERS
    ours = step(model, draw(3, length=7))
    assert_eager_bits(model, ours, draw(3, length=7))


def test_one_layer_changed_captures_all_anew() -> None:
    model = warmed()
    fastft.patch(model, memory_levels={1: "recompute"})
    for seed in range(WARM):
        step(model, draw(seed))
    assert len(Tape.recorded) == 4 * LAYERS
    ours = step(model, draw(5))
    assert_eager_bits(model, ours, draw(5))


def test_an_optimizer_step_is_seen() -> None:
    model = warmed()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.5)
    replays = graphs_of(model).replays
    ours = step(model, draw(6))
    assert graphs_of(model).replays == replays + LAYERS
    assert_eager_bits(model, ours, draw(6))


def test_an_adapter_written_to_between_the_passes_raises() -> None:
    """As in stock PyTorch."""
    model = warmed()
    loss = model(**draw(1)).loss
    with torch.no_grad():
        next(p for p in model.parameters() if p.requires_grad).add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("level", ["keep", "recompute"])
def test_a_second_forward_before_the_backward_runs_eagerly(level: str) -> None:
    model, batches = warmed(level), [draw(7), draw(8)]

    def both() -> dict[str, Tensor]:
        model.zero_grad(set_to_none=True)
        losses = [model(**batch).loss for batch in batches]
        (losses[0] + 2 * losses[1]).backward()
        return {n: g.clone() for n, g in support.trainable_gradients(model).items()}

    replays, ours = graphs_of(model).replays, both()
    assert graphs_of(model).replays == replays + LAYERS
    fastft.patch(model, cuda_graphs=False)
    theirs = both()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def test_a_retained_graph_gives_the_same_gradients_twice() -> None:
    model = warmed()
    loss = model(**draw(1)).loss
    wanted = [p for p in model.parameters() if p.requires_grad]
    first = torch.autograd.grad(loss, wanted, retain_graph=True)
    second = torch.autograd.grad(loss, wanted)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not any(graph.busy for graph in graphs_of(model)._graphs.values())


def test_a_forward_that_is_dropped_frees_the_buffers() -> None:
    model = warmed()
    loss = model(**draw(1)).loss
    assert all(graph.busy for graph in graphs_of(model)._graphs.values())
    del loss
    gc.collect()
    assert not any(graph.busy for graph in graphs_of(model)._graphs.values())


def test_gradients_are_the_trainers_own() -> None:
    """The next replay must not write to what this step's gradients are."""
    model = warmed()
    first = step(model, draw(1))
    kept = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    model(**draw(2)).loss.backward()
    assert all(torch.equal(kept[n], first[n]) for n in kept)


def test_a_disabled_adapter_runs_eagerly_and_comes_back() -> None:
    model = warmed()
    with model.disable_adapter():
        without = model(**draw(1)).loss.detach()
    ours = step(model, draw(1))
    assert not torch.equal(without, ours["loss"])
    assert len(Tape.recorded) == 2 * LAYERS
    assert_eager_bits(model, ours, draw(1))


def test_a_capture_that_ends_half_way_leaves_right_gradients() -> None:
    """The last layer is called otherwise than in the steps before: its backward, and its neighbours', are eager."""
    model = build()
    for seed in range(WARM - 1):
        step(model, draw(seed))
    fastft.patch(model, memory_levels={-1: "recompute"})
    ours = step(model, draw(4))
    assert graphs_of(model).captured == 0
    for seed in range(WARM + 1):
        step(model, draw(seed))
    assert graphs_of(model).captured == LAYERS, "a later step is captured whole"
    assert_eager_bits(model, ours, draw(4))


@pytest.mark.parametrize("fails_at", [0, 2, LAYERS, 2 * LAYERS - 1])
def test_a_failed_capture_leaves_the_model_eager(fails_at: int) -> None:
    model = build()
    Tape.fails_at = fails_at
    for seed in range(WARM - 1):
        step(model, draw(seed))
    ours = step(model, draw(4))
    assert graphs_of(model).captured == 0
    assert "no capture today" in str(graphs_of(model).reason)
    again = step(model, draw(4))
    assert all(torch.equal(again[name], ours[name]) for name in ours)
    assert "capture failed: no capture today" in str(fastft.report(model))
    assert_eager_bits(model, ours, draw(4))


def test_gradients_in_evaluation_mode_are_eager_and_leave_no_trace() -> None:
    model = warmed().eval()
    replays = graphs_of(model).replays
    for seed in range(5):
        step(model, draw(seed) | {"use_cache": False})  # type: ignore[dict-item]
    assert graphs_of(model).replays == replays
    assert len(graphs_of(model)._step) == LAYERS
    ours = step(model.train(), draw(1))
    assert_eager_bits(model, ours, draw(1))


def test_a_trained_norm_and_frozen_adapters_find_their_gradients() -> None:
    """Leaves that train and leaves that do not, mixed: each gets its own piece of the flat gradient."""
    model = build()
    for name, parameter in model.named_parameters():
        if "q_proj.lora_A" in name or "down_proj.lora_B" in name:
            parameter.requires_grad_(False)
        if "layernorm" in name:
            parameter.requires_grad_(True)
    for seed in range(WARM):
        step(model, draw(seed))
    assert graphs_of(model).captured == LAYERS
    ours = step(model, draw(2))
    assert_eager_bits(model, ours, draw(2))


def test_graphs_go_with_their_model() -> None:
    model = warmed()
    reference = weakref.ref(inner_model(model).model.layers[0])
    del model
    gc.collect()
    assert reference() is None


def test_released_graphs_are_made_anew() -> None:
    model = warmed()
    fastft.release_memory(model)
    assert graphs_of(model).captured == graphs_of(model).held_bytes == 0
    for seed in range(WARM):
        step(model, draw(seed))
    assert graphs_of(model).captured == LAYERS
