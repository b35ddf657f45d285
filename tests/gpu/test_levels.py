"""The planner on a GPU: what it predicts is what is used, budgets hold, and every level gives the same numbers.

One QLoRA model of 0.4B parameters, shaped like a 1B one, at 4 × 2048 tokens. Graphs are off where peaks are compared:
what a replay uses is not in the allocator's statistics.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fastft
from fastft.memory import away as away_costs
from fastft.memory.planner import LEVELS
from fastft.patching import levels, registry
from tests import support
from tests.contract import relative_error
from tests.gpu import models

LAYERS, HIDDEN, VOCABULARY = 8, 2048, 16384
SHAPE: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 5632,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 8192,
    "initializer_range": 0.02,
}
ROUNDING = 4 * torch.finfo(torch.bfloat16).eps  # of two runs whose products were rounded at other places
RESHAPED = 2 * ROUNDING  # of two runs whose products had other shapes, or other weights by a rounding


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The model, loaded once: every test says anew at which levels it runs.

    Its adapters are a tenth of the usual size: eight layers of this width with large random adapters turn a rounding
    into another gradient (in bfloat16 35 to 80 per cent off float32's; so, 3).
    """
    model = models.load_qlora(tmp_path_factory.mktemp("levels"), torch.bfloat16, **SHAPE)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(0.1)
    return model


@pytest.fixture
def model(loaded: Any) -> Iterator[Any]:
    """The model planned, without graphs; as it was afterwards."""
    yield fastft.patch(loaded, cuda_graphs=False)
    loaded.zero_grad(set_to_none=True)
    fastft.unpatch(loaded)


def draw_batch(rows: int = 4, length: int = 2048, seed: int = 0) -> dict[str, Tensor]:
    """Full rows, a third of the labels ignored."""
    return models.on_gpu(support.random_batch(seed, rows=rows, length=length, vocabulary=VOCABULARY))


def backbone(model: Any) -> Any:
    return model.get_base_model().model


def plan_for(model: Any, budget: int | None) -> None:
    """Leave every layer to the planner, under this budget."""
    levels.set_budget(registry.site_of(backbone(model)), budget)
    fastft.patch(model, memory_levels="auto")


class Trainer:
    """AdamW over the adapters; `step` returns the peak of allocated bytes."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)

    def step(self, batch: dict[str, Tensor]) -> int:
        torch.cuda.reset_peak_memory_stats()
        loss = self.model(**batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        assert loss.isfinite()
        return torch.cuda.max_memory_allocated()


def peak_at(model: Any, level: str) -> int:
    """Measured peak of a step with every layer at this level."""
    fastft.patch(model, memory_levels=level)
    trainer = Trainer(model)
    return [trainer.step(draw_batch()) for _ in range(2)][1]


def last_plan(model: Any) -> Any:
    """The plan of the only size there was."""
    (known,) = registry.site_of(backbone(model)).memory.sizes.values()
    return known.plan


def test_predictions_and_budgets_hold(model: Any) -> None:
    """Predicted within 10 per cent of measured from the second step, and never above a budget that fits."""
    least, most = peak_at(model, "offload"), peak_at(model, "keep")
    assert least < 0.6 * most, "there is nothing to plan"
    chosen = {}
    for name, budget in {"none": None, "middle": (least + 3 * most) // 4, "tight": int(1.1 * least)}.items():
        plan_for(model, budget)
        trainer, batch = Trainer(model), draw_batch()
        trainer.step(batch)
        for step in (2, 3):
            measured = trainer.step(batch)
            plan = last_plan(model)
            assert abs(plan.peak - measured) <= 0.1 * measured, f"{name}, step {step}: {plan.summary()}; {measured}"
            assert plan.fits, f"{name}: {plan.summary()}"
            assert measured <= plan.budget, f"{name}, step {step}: {plan.summary()}; {measured}"
        chosen[name] = plan.levels
        del trainer
    models.assert_ran_fast(model)
    assert chosen["none"] == ("keep",) * LAYERS
    assert len(set(chosen["middle"])) > 1, "the middle budget should give different layers different levels"
    assert "keep" not in chosen["tight"][: LAYERS // 2]


def test_levels_give_the_same_loss_and_gradients(model: Any) -> None:
    """Offload and recompute to the bit; keep and lean round their products elsewhere at most."""
    batch = draw_batch(rows=2)
    found = {}
    torch.use_deterministic_algorithms(True)  # fused attention's backward adds in any order otherwise
    try:
        for level in LEVELS:
            fastft.patch(model, memory_levels=level)
            found[level] = models.loss_and_gradients(model, batch)
    finally:
        torch.use_deterministic_algorithms(False)
    models.assert_ran_fast(model)
    reference = found["recompute"]
    assert [name for name, g in reference.items() if not torch.equal(g, found["offload"][name])] == []
    for level in ("keep", "lean"):
        errors = {name: relative_error(g, reference[name]) for name, g in found[level].items()}
        assert {name: error for name, error in errors.items() if not error <= ROUNDING} == {}, level


@pytest.mark.parametrize("level", ["keep", "recompute"])
def test_folded_adapters_differ_by_no_more_than_weights_roundings(level: str, model: Any) -> None:
    """W + s·B·A is rounded where W alone was: errors of that size in every gradient, and not the joined bits."""
    batch = draw_batch(rows=2)
    fastft.patch(model, memory_levels=level)
    joined = models.loss_and_gradients(model, batch)
    fastft.patch(model, approximations=["fold_adapters"])
    folded = models.loss_and_gradients(model, batch)
    fastft.patch(model, approximations=())
    models.assert_ran_fast(model)
    errors = {name: relative_error(g, joined[name]) for name, g in folded.items()}
    print(f"folded, {level}: largest error {max(errors.values()):.4f}, loss {errors['loss']:.2e}")
    assert {name: error for name, error in errors.items() if not error <= 2 * RESHAPED} == {}
    assert max(errors.values()) > 0


def test_small_tiles_give_the_same_gradients(model: Any) -> None:
    plan_for(model, int(1.02 * peak_at(model, "offload")))
    trainer = Trainer(model)
    batch = draw_batch()
    measured = [trainer.step(batch) for _ in range(2)][1]
    plan = last_plan(model)
    assert plan.compact, plan.summary()
    assert measured <= plan.budget, (plan.summary(), measured)
    del trainer
    small = models.loss_and_gradients(model, batch)
    fastft.patch(model, memory_levels="recompute")
    whole = models.loss_and_gradients(model, batch)
    errors = {name: relative_error(g, whole[name]) for name, g in small.items()}
    print(f"small tiles: largest error {max(errors.values()):.4f}")
    assert {name: error for name, error in errors.items() if not error <= RESHAPED} == {}


def test_offload_leaves_memory_flat(model: Any) -> None:
    """Twenty steps: device and host memory as after the second; one buffer for each layer but the last."""
    fastft.patch(model, memory_levels="offload")
    trainer, batch = Trainer(model), draw_batch()
    store = levels.store_of(backbone(model))
    seen = []
    for _ in range(20):
        peak = trainer.step(batch)
        seen.append((peak, torch.cuda.memory_allocated(), store.host_bytes))
    assert set(seen[2:]) == {seen[2]}
    assert store.host_bytes == (LAYERS - 1) * batch["input_ids"].numel() * HIDDEN * 2
    assert store.in_flight == 0


@pytest.fixture
def asked_anew() -> Iterator[None]:
    """What a layer leaves in host memory is asked once for a size."""
    levels._away.clear()
    yield
    levels._away.clear()


@pytest.mark.parametrize(("link", "away"), [(12e3, "input"), (8e3, "attention"), (0.0, "half")])
def test_however_much_of_a_layer_is_in_host_memory_gradients_and_predictions_hold(
    link: float, away: str, model: Any, asked_anew: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name and by plan; the numbers of recomputation to the bit, or, where no product runs again, of level lean."""
    monkeypatch.setattr(away_costs, "_LINK_OPERATIONS", link)
    batch, found = draw_batch(), {}
    torch.use_deterministic_algorithms(True)
    try:
        for level in ("offload", "lean" if away == "half" else "recompute"):
            fastft.patch(model, memory_levels=level)
            found[level] = models.loss_and_gradients(model, batch)
    finally:
        torch.use_deterministic_algorithms(False)
    ours, theirs = found.values()
    assert [name for name, g in ours.items() if not torch.equal(g, theirs[name])] == []
    least = peak_at(model, "offload")
    assert {registry.site_of(layer).away for layer in backbone(model).layers} == {away}
    plan_for(model, int(1.05 * least))
    trainer = Trainer(model)
    measured = [trainer.step(batch) for _ in range(3)][2]
    plan = last_plan(model)
    assert plan.away == away
    print(f"{away}: {plan.summary()}; measured {measured / 2**30:.2f} GiB")
    assert abs(plan.peak - measured) <= 0.1 * measured
    assert measured <= plan.budget
    models.assert_ran_fast(model)


def test_nothing_waits_on_the_device_after_the_last_offload(model: Any) -> None:
    """The tensors on their way out are let go as soon as a layer keeps its input (`HostStore.settle`)."""
    fastft.patch(model, memory_levels=["offload"] * 2 + ["recompute"] * (LAYERS - 2))
    store, batch = levels.store_of(backbone(model)), draw_batch(rows=1)
    loss = model(**batch).loss
    assert store.in_flight == 2
    assert len(store._leaving) == 0
    loss.backward()


def test_varying_lengths_and_packed_rows_stay_within_a_budget(model: Any) -> None:
    """Each size has its plan; a packed row brings a mask, which costs more than the planner knows: it learns."""
    least, most = peak_at(model, "offload"), peak_at(model, "keep")
    budget = (2 * least + most) // 3
    plan_for(model, budget)
    trainer = Trainer(model)
    lengths = [(4, 2048), (2, 500), (4, 1024), (1, 3000), (3, 1700)]
    for count, length in lengths:  # what is learned here holds from the second time on
        trainer.step(draw_batch(count, length))
    for count, length in lengths:
        assert trainer.step(draw_batch(count, length)) <= budget, (count, length)
    packed = draw_batch(rows=1, length=8192)
    documents = [1000, 3000, 92, 4100]
    packed["position_ids"] = torch.cat([torch.arange(n) for n in documents]).unsqueeze(0).to(models.DEVICE)
    peaks = [trainer.step(packed) for _ in range(4)]
    assert peaks[-1] <= budget, peaks
    del trainer
    planned = models.loss_and_gradients(model, packed)
    fastft.patch(model, memory_levels="keep")
    kept = models.loss_and_gradients(model, packed)
    errors = {name: relative_error(g, kept[name]) for name, g in planned.items()}
    assert {name: error for name, error in errors.items() if not error <= RESHAPED} == {}
    models.assert_ran_fast(model)


def test_memory_returns_after_unpatch(loaded: Any) -> None:
    """Device and host memory, graphs included: a second round leaves what the first one left."""
    left = []
    for _ in range(2):
        fastft.patch(loaded, memory_levels="offload", cuda_graphs=True)
        trainer = Trainer(loaded)
        for length in (2048, 256):
            for _ in range(5):
                trainer.step(draw_batch(rows=1, length=length))
            fastft.patch(loaded, memory_levels="keep")
        store = levels.store_of(backbone(loaded))
        assert store.host_bytes > 0
        fastft.unpatch(loaded)
        assert store.host_bytes == 0
        del trainer
        gc.collect()
        left.append(torch.cuda.memory_allocated())
    assert abs(left[1] - left[0]) <= 2**20
