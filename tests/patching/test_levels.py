"""The memory planner at work: which level each layer gets, when a plan is made again, and that the numbers stay.

What is planned for a CUDA device is tested on the CPU: `device` stands in for the allocator's counters, the layers run
at the levels they are given (a host store takes CPU tensors too). What a device really uses is in tests/gpu.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch

import fastft
from fastft.autograd import emptied_graph, mlp_half
from fastft.memory import away as away_costs
from fastft.memory import costs as memory_costs
from fastft.memory.budget import DeviceMemory
from fastft.memory.captures import CUBLAS_WORKSPACE
from fastft.memory.costs import StepCosts, with_gradients
from fastft.memory.offload import Parcel
from fastft.memory.planner import LevelCost, make_plan
from fastft.memory.row_lengths import RowLengths
from fastft.patching import decoder_layer, layer_costs, levels, registry, size_plans
from fastft.patching.plan import inner_model
from tests import support
from tests.patching.helpers import (
    ALL_LEVELS,
    Step,
    assert_ran_fast,
    assert_same_step,
    decoder_layers,
    relative_error,
    rows,
    saved_bytes,
    sites,
    step,
)

Batch = dict[str, torch.Tensor]
LAYERS = 6
BUSY = 10**6  # bytes allocated on the stand-in before anything runs
CUDA = torch.device("cuda", 0)
DEPTH = ("offload", "recompute", "lean", "keep")


@dataclasses.dataclass
class Device:
    """What levels.py asks of a CUDA device."""

    limit: int = 10**12
    allocated: int = BUSY
    peak: int = 0
    graphs_pay: bool = False

    def reach(self, peak: int) -> None:
        """So much was allocated once."""
        self.peak = max(self.peak, peak)

    def step(self, model: Any, batch: Batch, peak: int) -> Step:
        """A training step that comes to `peak`, in its backward."""
        model.zero_grad(set_to_none=True)
        loss = model(**batch).loss
        self.reach(peak)
        loss.backward()
        return Step(loss.detach(), support.trainable_gradients(model))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(size_plans, "device_of", lambda layers: CUDA)
    monkeypatch.setattr(
        size_plans, "allowed_bytes", lambda _, budget: device.limit if budget is None else min(budget, device.limit)
    )
    monkeypatch.setattr(size_plans, "pays", lambda *_: device.graphs_pay)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: device.allocated)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: device.peak)
    return device


def build(memory_levels: Any = "auto", layers: int = LAYERS, **settings: Any) -> Any:
    """A fast model with adapters, by default left to the planner."""
    model = support.add_lora(support.build_model(num_hidden_layers=layers, **settings))
    return fastft.patch(model, memory_levels=memory_levels)


def backbone(model: Any) -> Any:
    return inner_model(model).model


def memory(model: Any) -> size_plans.Memory:
    return registry.site_of(backbone(model)).memory


def asked(model: Any) -> list[str]:
    return [site.level for site in sites(model, "decoder layer")]


def assigned(model: Any) -> list[str]:
    """What each layer ran at in the last training forward."""
    return [levels.level_of(site) for site in sites(model, "decoder layer")]


def plan_of(model: Any) -> Any:
    """The one plan made so far."""
    (known,) = memory(model).sizes.values()
    return known.plan


def gradient_bytes(model: Any) -> int:
    return sum(p.nbytes for p in model.parameters() if p.requires_grad)


def optimizer_bytes(model: Any) -> int:
    """AdamW's two moments, in float32."""
    return sum(8 * p.numel() for p in model.parameters() if p.requires_grad)


def peak_of(model: Any, wanted: list[str], batch: Batch) -> int:
    """What the planner predicts for these levels."""
    count, length = batch["input_ids"].shape
    tokens = -(-count * length // 256) * 256
    found = layer_costs.costs_of(
        backbone(model), list(decoder_layers(model)), tokens, min(tokens, -(-length // 256) * 256)
    )
    assert found is not None
    usual = with_gradients(found[0], gradient_bytes(decoder_layers(model)[0]))
    return make_plan(
        layers=len(wanted),
        costs=usual.levels,
        base=BUSY + optimizer_bytes(model) + gradient_bytes(model),
        forward_working=usual.forward_working,
        loss_working=usual.loss_working,
        budget=1,
        fixed=dict(enumerate(wanted)),
    ).peak


MIXED = ["offload", "recompute", "recompute", "lean", "keep", "keep"]


def tight(model: Any, batch: Batch, wanted: list[str] | None = None) -> int:
    """A budget under which not everything can be kept: what `wanted` needs."""
    return peak_of(model, wanted or MIXED, batch)


def attention_calls(model: Any, batch: Batch) -> list[int]:
    """How often each layer computes attention in a step."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    calls = [0] * len(decoder_layers(model))

    def counting(module: Any, *arguments: Any, **keywords: Any) -> Any:
        calls[module.layer_idx] += 1
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, *arguments, **keywords)

    ALL_ATTENTION_FUNCTIONS.register("fastft_test_levels", counting)
    config = inner_model(model).config
    config._attn_implementation = "fastft_test_levels"
    try:
        step(model, batch)
    finally:
        config._attn_implementation = "sdpa"
    return calls


def assert_equal_steps(first: Any, second: Any) -> None:
    assert torch.equal(first.loss, second.loss)
    assert first.gradients.keys() == second.gradients.keys()
    assert [n for n, g in first.gradients.items() if not torch.equal(g, second.gradients[n])] == []


# --- asking ----------------------------------------------------------------------------------------------------------


def test_levels_by_name_sequence_and_mapping() -> None:
    assert asked(build("lean")) == ["lean"] * LAYERS
    every = ["keep", "lean", "recompute", "offload", "auto", "keep"]
    assert asked(build(every)) == every
    assert asked(build(tuple(every))) == every
    model = build(None)
    assert asked(model) == ["keep"] * LAYERS
    fastft.patch(model, memory_levels={0: "offload", -1: "recompute", 2: "auto"})
    assert asked(model) == ["offload", "keep", "auto", "keep", "keep", "recompute"]
    fastft.patch(model, memory_levels={2: "lean"})
    assert asked(model) == ["offload", "keep", "lean", "keep", "keep", "recompute"]
    fastft.patch(model)
    assert asked(model) == ["offload", "keep", "lean", "keep", "keep", "recompute"]
    fastft.patch(model, memory_levels="auto")
    assert asked(model) == ["auto"] * LAYERS


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("everything", r"level 'everything' is not known; choose from auto, keep, lean, recompute, offload"),
        (["keep"] * (LAYERS - 1), r"5 entries for 6 layers"),
        (["keep"] * (LAYERS - 1) + ["kept"], r"level 'kept'"),
        ({LAYERS: "keep"}, r"names layer 6; the model has layers 0 to 5"),
        ({-LAYERS - 1: "keep"}, r"names layer -7"),
        ({0: "keep", 1: "none"}, r"level 'none'"),
    ],
)
def test_what_cannot_be_meant_is_refused_and_changes_nothing(wrong: Any, message: str) -> None:
    model = build("recompute")
    with pytest.raises(ValueError, match=message):
        fastft.patch(model, memory_levels=wrong)
    assert asked(model) == ["recompute"] * LAYERS


@pytest.mark.parametrize("wrong", ["20 bananas", 20, 0.0, -1, True])
def test_a_budget_that_cannot_be_meant_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="memory_budget"):
        fastft.patch(support.build_model(), memory_budget=wrong)


def enable(model: Any) -> None:
    """As a Trainer asks for checkpointing."""
    function = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    inner_model(model)._set_gradient_checkpointing(True, function)


def disable(model: Any) -> None:
    inner_model(model)._set_gradient_checkpointing(False)


@pytest.mark.parametrize("level", ALL_LEVELS)
def test_a_named_level_outlasts_a_trainer_and_patching_again(level: str, batch: Batch) -> None:
    model = build(level, layers=2)
    for act in (enable, fastft.patch, disable, enable, fastft.patch):
        act(model)
    assert asked(model) == [level] * 2
    reference = step(build("keep", layers=2), batch)
    assert_equal_steps(reference, step(model, batch))
    assert_ran_fast(model)


def test_without_a_name_switching_is_the_trainer_s(batch: Batch) -> None:
    model = build(None, layers=2)
    assert asked(model) == ["keep"] * 2
    enable(model)
    assert asked(model) == ["auto"] * 2
    disable(model)
    assert asked(model) == ["keep"] * 2
    enable(model)
    fastft.patch(model)
    assert asked(model) == ["auto"] * 2


@pytest.mark.trl
@pytest.mark.parametrize("named", [False, "keep", True, "offload"])
def test_what_get_peft_model_was_told_holds_under_sft(named: Any, tmp_path: Any) -> None:
    """`use_gradient_checkpointing=False` means keep, whatever SFTConfig's default says."""
    import datasets
    from trl import SFTConfig, SFTTrainer

    model = fastft.FastModel.get_peft_model(support.build_model(), r=4, use_gradient_checkpointing=named)
    config = SFTConfig(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True, bf16=False,
        save_strategy="no", disable_tqdm=True, gradient_checkpointing=True,
    )  # fmt: skip
    trainer = SFTTrainer(
        model=model,
        args=config,
        train_dataset=datasets.Dataset.from_list([{"text": f"{i} and {i + 1} is {2 * i + 1}"} for i in range(4)]),
        processing_class=support.build_tokenizer(),
    )
    trainer.train()
    expected = {True: "auto", False: "keep"}.get(named, named)
    assert asked(model) == [expected] * 2
    assert (memory(model) is not None) == (expected == "auto"), "nothing is planned where nothing is left to plan"
    assert_ran_fast(model, forwards=2)


# --- planning --------------------------------------------------------------------------------------------------------


def test_with_memory_to_spare_everything_is_kept(device: Device, batch: Batch) -> None:
    model = build()
    step(model, batch)
    assert assigned(model) == ["keep"] * LAYERS
    assert plan_of(model).fits
    assert attention_calls(model, batch) == [1] * LAYERS


def test_a_tight_budget_offloads_first_and_keeps_last(device: Device, batch: Batch) -> None:
    """What is freed last must be small; the levels are what the layers then do."""
    model, kept = build(), build("keep")
    device.limit = tight(model, batch)
    calls = attention_calls(model, batch)
    plan = plan_of(model)
    assert plan.fits
    assert plan.peak <= device.limit
    found = assigned(model)
    assert list(plan.levels) == found
    assert [DEPTH.index(level) for level in found] == sorted(DEPTH.index(level) for level in found)
    assert found[-1] in ("keep", "lean")
    assert found[0] in ("offload", "recompute")
    assert calls == [2 if level in ("offload", "recompute") else 1 for level in found]
    assert_equal_steps(step(kept, batch), step(model, batch))


def test_small_tiles_where_they_let_better_levels_fit(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen by the plan alone; every layer's MLP then runs in them, at the same gradients."""
    batch = support.random_batch(rows=2, length=250)
    model, kept = build(intermediate_size=1024), build("keep", intermediate_size=1024)
    monkeypatch.setattr(mlp_half, "COMPACT_ROWS", (256, 128))
    least = ["recompute"] * 5 + ["lean"]
    device.limit = tight(model, batch, least) - 100 * 1024  # bytes; the tile of all 512 rows takes 6 MiB
    seen: list[int] = []
    tile_rows = mlp_half.tile_rows
    monkeypatch.setattr(mlp_half, "tile_rows", lambda *shape: seen.append(tile_rows(*shape)) or seen[-1])
    ours = step(model, batch)
    plan = plan_of(model)
    assert plan.fits
    assert plan.compact
    assert "in small tiles" in plan.summary()
    assert seen == [256] * (2 * LAYERS)
    assert all(site.compact for site in sites(model, "decoder layer"))
    expected = step(kept, batch)
    assert torch.equal(ours.loss, expected.loss)
    for name, gradient in expected.gradients.items():  # summed tile by tile
        assert torch.allclose(ours.gradients[name], gradient, rtol=1e-4, atol=1e-6), name
    device.limit = 10 * device.limit
    fastft.patch(model, memory_budget=device.limit)  # planned again
    step(model, batch)
    assert not plan_of(model).compact
    assert seen[-1] == 500


@pytest.mark.parametrize("rows_are", ["padded", "packed"])
@pytest.mark.parametrize("wanted", [MIXED, ["offload"] * 5 + ["recompute"], ["recompute"] * 6, ["lean"] * 6])
def test_gradients_do_not_depend_on_the_budget(wanted: list[str], rows_are: str, device: Device) -> None:
    """Padded rows, or several documents in one: bit for bit those of a model that keeps everything."""
    if rows_are == "padded":
        batch = support.random_batch(rows=3, length=40, padded=True)
    else:
        batch = support.random_batch(rows=1, length=40)
        batch["position_ids"] = torch.cat([torch.arange(n) for n in (7, 20, 13)]).unsqueeze(0)
    model, kept = build(), build("keep")
    device.limit = tight(model, batch, wanted)
    got = step(model, batch)
    assert set(assigned(model)) != {"keep"}
    assert_equal_steps(step(kept, batch), got)
    assert_ran_fast(model)


def test_nothing_fits(device: Device, batch: Batch, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan with the least memory runs, and says what to do."""
    model = build()
    device.limit = 1000
    step(model, batch)
    assert not plan_of(model).fits
    assert set(assigned(model)) <= {"offload", "recompute", "lean"}, "the loss takes more than any layer's backward"
    assert assigned(model)[0] == "offload"
    assert assigned(model)[-1] != "offload", "the last layer's input is wanted back at once"
    message = capsys.readouterr().err
    assert "exceeds the" in message
    assert "no plan fits" in message
    assert "memory_budget" in message


def test_the_last_layer_is_not_planned_to_be_offloaded(device: Device, batch: Batch) -> None:
    """Not even where the loss is what takes the most, and an input less beside it would help."""
    model = build(vocab_size=8192)
    device.limit = 1000
    step(model, batch)
    assert plan_of(model).levels == ("offload",) * (LAYERS - 1) + ("recompute",)
    assert assigned(model) == list(plan_of(model).levels)


def test_named_levels_are_planned_around(device: Device, batch: Batch) -> None:
    model = build({0: "keep", 2: "lean", -1: "offload"})
    for index in (1, 3, 4):
        fastft.patch(model, memory_levels={index: "auto"})
    device.limit = tight(model, batch, ["keep", "recompute", "lean", "recompute", "recompute", "recompute"])
    step(model, batch)
    found = assigned(model)
    assert (found[0], found[2]) == ("keep", "lean")
    assert found[-1] == "recompute", "offloading the last layer brings nothing"
    assert asked(model)[-1] == "offload"
    assert set(found[1:2] + found[3:5]) <= {"offload", "recompute", "lean"}
    assert list(plan_of(model).levels) == found
    assert plan_of(model).fits


def test_naming_a_level_later_plans_again(device: Device, batch: Batch) -> None:
    """A plan made around other levels is not used."""
    model = build()
    device.limit = tight(model, batch)
    step(model, batch)
    before = plan_of(model)
    fastft.patch(model, memory_levels={0: "keep"})
    step(model, batch)
    assert plan_of(model).levels[0] == "keep"
    assert plan_of(model).levels != before.levels
    assert assigned(model) == list(plan_of(model).levels)


def test_a_budget_named_later_plans_again(device: Device, batch: Batch) -> None:
    model = build()
    step(model, batch)
    assert assigned(model) == ["keep"] * LAYERS
    device.peak = 10**9
    fastft.patch(model, memory_budget=2**20)
    step(model, batch)
    assert plan_of(model).budget == 2**20
    assert "keep" not in assigned(model)[:3]
    fastft.patch(model)
    assert memory(model).budget == 2**20, "patching again keeps what was said"


def test_the_cpu_is_planned_for_too(batch: Batch, capsys: pytest.CaptureFixture[str]) -> None:
    """By its free memory, or the budget; never by offloading from the CPU to the CPU."""
    model = build()
    step(model, batch)
    assert assigned(model) == ["keep"] * LAYERS
    fastft.patch(model, memory_budget="1MiB")
    step(model, batch)
    assert set(assigned(model)) <= {"recompute", "lean"}
    assert memory(model).budget == 2**20
    assert "no plan fits" in capsys.readouterr().err


def test_layers_on_several_devices_recompute(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows what fits where; a level that was named holds."""
    monkeypatch.setattr(size_plans, "device_of", lambda layers: None)
    model = build({1: "keep", 2: "offload"})
    fastft.patch(model, memory_levels={0: "auto", 3: "auto"})
    calls = attention_calls(model, batch)
    assert assigned(model) == ["recompute", "keep", "offload", "recompute", "keep", "keep"]
    assert calls == [2, 1, 2, 2, 1, 1]
    assert "level offload" in " ".join(row.reason for row in rows(model, "layers.[2]"))


def test_devices_are_told_apart() -> None:
    here, there = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1, device="meta")
    assert size_plans.device_of([here, here]) == torch.device("cpu")
    assert size_plans.device_of([here, there]) is None
    assert size_plans.device_of([there, there]) is None, "how much memory it has is not known"


def test_outside_of_a_backbone_s_forward_a_layer_recomputes(batch: Batch) -> None:
    """A layer called by hand, which no plan knows of."""
    model = build(layers=2)
    layer = decoder_layers(model)[0]
    calls = 0

    def counting(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        return ALL_ATTENTION_FUNCTIONS["sdpa"](*arguments, **keywords)

    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register("fastft_test_alone", counting)
    inner_model(model).config._attn_implementation = "fastft_test_alone"
    x = torch.randn(2, 5, 64, requires_grad=True)
    positions = torch.arange(5).unsqueeze(0)
    angles = backbone(model).rotary_emb(x, positions)
    layer(x, attention_mask=None, position_ids=positions, position_embeddings=angles).sum().backward()
    assert calls == 2
    assert x.grad is not None
    assert sites(model, "decoder layer")[0].fast_runs == 1


# --- sizes -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def planned_sizes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(tokens, longest row) of every plan made."""
    seen: list[tuple[int, int]] = []

    def recording(shape: Any, *, tokens: int, longest: int, **others: Any) -> Any:
        if not others.get("compact"):  # which every plan looks at as well
            seen.append((tokens, longest))
        return memory_costs.step_costs(shape, tokens=tokens, longest=longest, **others)

    monkeypatch.setattr(layer_costs, "step_costs", recording)
    return seen


def test_each_size_is_planned_for_once_and_never_too_small(
    device: Device, planned_sizes: list[tuple[int, int]]
) -> None:
    """Rounded up: batches of nearly the same size share a plan."""
    model = build(layers=2)
    shapes = [(2, 13), (2, 100), (1, 300), (3, 200), (2, 512), (1, 256), (1, 257)]
    for count, length in shapes + shapes:
        before = len(planned_sizes)
        model(**support.random_batch(rows=count, length=length)).loss.backward()
        model.zero_grad(set_to_none=True)
        made = planned_sizes[before:]
        assert all(tokens >= count * length and longest >= length for tokens, longest in made)
        assert any(tokens >= count * length and longest >= length for tokens, longest in memory(model).sizes)
    assert sorted(planned_sizes) == [(256, 256), (512, 512), (768, 256), (1024, 512)]
    assert sorted(memory(model).sizes) == sorted(planned_sizes)


def test_a_longer_batch_gets_smaller_levels_and_a_short_one_its_own_back(device: Device) -> None:
    model = build()
    short, long = support.random_batch(rows=2, length=100), support.random_batch(rows=4, length=500)
    device.limit = tight(model, short, ["keep"] * LAYERS)
    found = []
    for batch in (short, long, short):
        step(model, batch)
        found.append(assigned(model))
    assert found[0] == found[2] == ["keep"] * LAYERS
    assert "keep" not in found[1]


def test_embeddings_instead_of_tokens(device: Device, planned_sizes: list[tuple[int, int]]) -> None:
    model = build(layers=2)
    inner_model(model)(inputs_embeds=torch.randn(3, 200, 64)).logits.sum().backward()
    assert planned_sizes == [(768, 256)]


# --- saying so -------------------------------------------------------------------------------------------------------


def test_the_plan_is_printed_once(device: Device, capsys: pytest.CaptureFixture[str]) -> None:
    """To stderr; not for each size, not in evaluation, not for a model whose levels are all named."""
    model = build()
    step(build("recompute"), support.random_batch())
    with torch.no_grad():
        model(**support.random_batch())
    assert "memory plan" not in capsys.readouterr().err
    for length in (13, 13, 300):
        step(model, support.random_batch(length=length))
    captured = capsys.readouterr()
    assert captured.err.count("memory plan") == 1
    assert "fastft memory plan for 256 tokens a step: 6 layers: 6 keep; predicted peak" in captured.err
    assert captured.out == ""


def test_only_the_first_process_of_a_group_prints(
    device: Device, batch: Batch, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for rank in (1, 0):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        step(build(layers=2), batch)
        assert capsys.readouterr().err.count("memory plan") == (1 if rank == 0 else 0)


def test_the_report_shows_plan_and_levels(device: Device, batch: Batch) -> None:
    model = build()
    device.limit = tight(model, batch)
    assert "memory plan" not in str(fastft.report(model)), "nothing is planned yet"
    device.step(model, batch, 123 * 2**20)
    step(model, batch)
    report = fastft.report(model)
    notes = " ".join(report.notes)
    assert plan_of(model).summary() in notes
    assert "measured peak 123 MiB" in notes
    shown = [(row.reason, row.count) for row in report.rows if "one autograd node" in row.reason]
    assert shown == [
        (f"one autograd node, level {level}", assigned(model).count(level))
        for level in DEPTH
        if level in assigned(model)
    ]


# --- a step is not all there is --------------------------------------------------------------------------------------


def test_accumulation_and_evaluation_in_between(device: Device) -> None:
    """Four micro-batches of several sizes a step, with evaluations: the curve of a model that keeps everything."""
    curves = []
    for choice in ("keep", "auto"):
        model = build(choice)
        device.limit = tight(model, support.random_batch(length=120), MIXED)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        curve: list[float] = []
        for steps in range(2):
            for micro, length in enumerate((13, 120, 300, 120)):
                loss = model.train()(**support.random_batch(10 * steps + micro, length=length)).loss / 4
                loss.backward()
                with torch.no_grad():
                    model.eval()
                    curve += [loss.item(), model(**support.random_batch(5), use_cache=False).loss.item()]
            optimizer.step()
            optimizer.zero_grad()
        curves.append(curve)
    assert curves[0] == curves[1]
    assert len(memory(model).sizes) == 2
    assert len({known.plan.levels for known in memory(model).sizes.values()}) == 2, "both sizes got the same levels"
    assert_ran_fast(model, forwards=2 * 4 * 2)


def test_two_graphs_alive_at_once(device: Device, batch: Batch) -> None:
    """The second forward meets what the first one holds: it gets smaller levels, and the next step the old ones."""
    model, kept = build(), build("keep")
    other = support.random_batch(9, rows=3, length=7)
    device.limit = tight(model, batch, ["keep"] * LAYERS)
    losses, found = [], []
    for one in (batch, other):
        losses.append(model(**one).loss)
        found.append(assigned(model))
        device.allocated += 10**6
    sum(losses).backward()
    device.allocated = BUSY
    assert found[0] == ["keep"] * LAYERS
    assert "keep" not in found[1][:3]
    sum(kept(**one).loss for one in (batch, other)).backward()
    expected, got = (support.trainable_gradients(m) for m in (kept, model))
    assert [n for n, g in got.items() if not torch.equal(g, expected[n])] == []
    step(model, batch)
    assert assigned(model) == found[0]
    assert len(memory(model).sizes) == 1


def test_gradients_of_an_earlier_micro_batch_are_in_the_plan(
    device: Device, batch: Batch, planned_sizes: list[tuple[int, int]]
) -> None:
    """Without accumulation there are none while the loss runs; the first forward that finds some plans once more."""
    model = build(vocab_size=2048)  # the loss is what takes the most
    device.limit = tight(model, batch, ["lean"] * LAYERS)
    planned_sizes.clear()
    found = []
    for _ in range(3):
        model(**batch).loss.backward()
        found.append(plan_of(model))
        device.allocated = BUSY + optimizer_bytes(model) + gradient_bytes(model)
    assert found[0].levels == ("lean",) * LAYERS
    assert found[1].levels != found[0].levels, "gradients beside the loss"
    assert found[1].peak <= device.limit
    assert found[2] is found[1]
    assert len(planned_sizes) == 2


def test_the_optimizer_s_state_is_reckoned_with_once(device: Device) -> None:
    """Before the first step it is still to come, for every size; afterwards it is part of what is allocated."""
    model = build(layers=2)
    gradients, state = gradient_bytes(model), optimizer_bytes(model)
    model(**support.random_batch()).loss.backward()
    device.allocated = BUSY + gradients
    model(**support.random_batch(length=300)).loss.backward()  # a second micro-batch, of another size
    model.zero_grad(set_to_none=True)
    device.allocated = BUSY + state
    model(**support.random_batch(length=600)).loss.backward()
    starts = [known.start for known in memory(model).sizes.values()]
    assert starts == [BUSY + state] * 2, "planned anew when a forward found gradients"
    assert all(known.gradients == gradients for known in memory(model).sizes.values())
    for (tokens, longest), known in memory(model).sizes.items():
        found = layer_costs.costs_of(backbone(model), list(decoder_layers(model)), tokens, longest)
        assert found is not None
        usual, *_ = found
        working = max(usual.loss_working, usual.forward_working, usual.levels["keep"].working)
        assert known.plan.peak == BUSY + state + gradients + 2 * usual.levels["keep"].saved + working


def test_a_budget_named_in_mid_training_does_not_count_the_optimizer_s_state_again(
    device: Device, batch: Batch
) -> None:
    model = build()
    step(model, batch)
    device.allocated = BUSY + optimizer_bytes(model)
    fastft.patch(model, memory_budget=device.limit)
    step(model, batch)
    (known,) = memory(model).sizes.values()
    assert known.start == BUSY + optimizer_bytes(model)


def test_buffers_that_graphs_will_take_are_in_the_plan(device: Device, batch: Batch) -> None:
    """Streams, adapter gradients, cuBLAS' workspace; not where the user forbids graphs, nor where they do not pay."""
    model = build()
    device.graphs_pay = True
    step(model, batch)
    (known,) = memory(model).sizes.values()
    layer = sum(p.nbytes for p in decoder_layers(model)[0].parameters() if p.requires_grad)
    buffers = 3 * known.tokens * 64 * 4 + layer + CUBLAS_WORKSPACE
    assert known.start == BUSY + optimizer_bytes(model) + buffers
    fastft.patch(model, cuda_graphs=False, memory_budget=device.limit)
    step(model, batch)
    (known,) = memory(model).sizes.values()
    assert known.start == BUSY + optimizer_bytes(model)


def test_offload_that_leaves_no_room_for_what_graphs_keep_does_without_them(device: Device, batch: Batch) -> None:
    """Replayed layers never let go of what they keep; an offloaded layer's backward would come on top of it."""
    model = build()
    device.graphs_pay = True
    step(model, batch)
    assert not plan_of(model).eager
    assert all(layer in decoder_layer.graphs for layer in decoder_layers(model))
    fastft.patch(model, memory_budget="1MiB")
    step(model, batch)
    assert "offload" in assigned(model)
    assert plan_of(model).eager
    assert not any(layer in decoder_layer.graphs for layer in decoder_layers(model))
    assert "beside offload" in str(fastft.report(model))
    fastft.patch(model, memory_budget=10**11)
    step(model, batch)
    assert all(layer in decoder_layer.graphs for layer in decoder_layers(model))


class Captured:
    """Graphs as levels.py sees them, made for `tokens` tokens and keeping `kept_bytes`."""

    captured, reason, replays, held_bytes = LAYERS, None, 0, 0

    def __init__(self, device: Device, tokens: int, kept: int) -> None:
        self.device, self.tokens, self.kept_bytes, self.released = device, tokens, kept, ""
        self.rows = RowLengths()
        device.allocated += kept

    def serves(self, tokens: int) -> bool:
        return not self.released and tokens == self.tokens

    def begin(self) -> None:
        """A forward begins."""

    def run(self, *_: Any) -> None:
        """Every layer runs eagerly here."""

    def release(self, reason: str = "") -> None:
        if not self.released:
            self.device.allocated -= self.kept_bytes
        self.released, self.captured = reason, 0


@pytest.mark.parametrize("shape_is", ["theirs", "another"])
def test_what_graphs_keep_is_the_step_s_own_for_their_shape_alone(
    shape_is: str, device: Device, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured on the H200: 3.2 GiB kept for short rows came on top of what a long row was predicted to take."""
    model, kept = build(), 10**7
    tokens = batch["input_ids"].numel() + (shape_is == "another")
    monkeypatch.setitem(levels._graphs, backbone(model), Captured(device, tokens, kept))
    step(model, batch)
    (known,) = memory(model).sizes.values()
    assert known.start == BUSY + optimizer_bytes(model) + (kept if shape_is == "another" else 0)


def test_graphs_of_another_shape_go_where_there_is_no_plan_beside_them(
    device: Device, batch: Batch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, kept = build(), 10**9
    device.limit = tight(model, batch)
    captured = Captured(device, 7, kept)
    monkeypatch.setitem(levels._graphs, backbone(model), captured)
    step(model, batch)
    assert captured.released == levels._ROOM_NEEDED
    assert plan_of(model).fits
    assert capsys.readouterr().err.count("memory plan") == 1


def test_a_second_backward_through_a_mixed_plan(device: Device, batch: Batch) -> None:
    """retain_graph: what was offloaded is still in host memory, what was recomputed is made once more."""
    model = build()
    device.limit = tight(model, batch, ["offload"] * 5 + ["lean"])
    loss = model(**batch).loss
    assert len(set(assigned(model))) > 1
    assert "offload" in assigned(model)
    seen = []
    for retain in (True, True, False):
        model.zero_grad(set_to_none=True)
        loss.backward(retain_graph=retain)
        seen.append(support.trainable_gradients(model))
    for again in seen[1:]:
        assert [n for n, g in again.items() if not torch.equal(g, seen[0][n])] == []


# --- after a correction ----------------------------------------------------------------------------------------------


def planned(device: Device, batch: Batch, wanted: list[str] | None = None, spare: float = 1.0) -> Any:
    """A model after its first step under a tight budget, the optimizer's state in place."""
    model = build()
    device.limit = int(tight(model, batch, wanted) * spare)
    step(model, batch)
    device.allocated = BUSY + optimizer_bytes(model)
    return model


def test_a_step_above_the_budget_is_planned_again(
    device: Device, batch: Batch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By what the prediction lacked; said once more; and the numbers stay."""
    model = planned(device, batch)
    first, before = plan_of(model), step(build("keep"), batch)
    missing = 5 * 10**5
    assert_equal_steps(before, device.step(model, batch, first.peak + missing))
    assert device.peak > device.limit
    assert_equal_steps(before, step(model, batch))
    second = plan_of(model)
    assert memory(model).correction == missing
    assert memory(model).measured == device.peak
    assert [DEPTH.index(level) for level in second.levels] < [DEPTH.index(level) for level in first.levels]
    assert second.peak - memory(model).correction < first.peak, "it needs less by its own account"
    assert assigned(model) == list(second.levels)
    printed = capsys.readouterr().err
    assert printed.count("memory plan") == 2
    assert "more than predicted" in printed


def test_a_step_far_below_its_prediction_gets_better_levels(
    device: Device, batch: Batch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = planned(device, batch)
    first = plan_of(model)
    device.step(model, batch, int(first.peak * 0.7))
    step(model, batch)
    assert memory(model).correction < 0
    assert plan_of(model).seconds < first.seconds
    assert "less than predicted" in capsys.readouterr().err


@pytest.mark.parametrize("share", [0.92, 0.99, 1.0])
def test_a_step_near_its_prediction_changes_nothing(share: float, device: Device, batch: Batch) -> None:
    model = planned(device, batch)
    first = plan_of(model)
    device.step(model, batch, int(first.peak * share))
    step(model, batch)
    assert plan_of(model) is first
    assert memory(model).correction == 0
    assert memory(model).measured == device.peak


def test_a_peak_from_before_says_nothing(device: Device, batch: Batch) -> None:
    """Loading took more than the step: how high the step went is not known."""
    device.peak = 10**11
    model = planned(device, batch)
    first = plan_of(model)
    for _ in range(2):
        device.step(model, batch, 10**10)
    assert plan_of(model) is first
    assert memory(model).measured is None


def test_statistics_that_are_reset_after_a_step_lose_nothing(device: Device, batch: Batch) -> None:
    """A benchmark resets them between steps; the peak is read when the backward ends."""
    model = planned(device, batch)
    first = plan_of(model)
    device.step(model, batch, first.peak + 5 * 10**5)
    device.peak = device.allocated
    step(model, batch)
    assert memory(model).correction == 5 * 10**5
    assert plan_of(model) is not first


def test_a_step_that_kept_everything_is_not_planned_again_for_using_less(device: Device, batch: Batch) -> None:
    model = planned(device, batch, ["keep"] * LAYERS, spare=2.0)
    first = plan_of(model)
    assert first.levels == ("keep",) * LAYERS
    device.step(model, batch, first.peak * 2 // 3)
    step(model, batch)
    assert memory(model).measured == device.peak
    assert plan_of(model) is first


def test_a_plan_that_never_fitted_is_not_made_again(device: Device, batch: Batch) -> None:
    """It is the smallest there is."""
    model = build()
    device.limit = 1000
    for peak in (10**8, 10**9, 10**10):
        device.step(model, batch, peak)
    assert memory(model).measured == 10**9
    assert memory(model).correction == 0
    assert not plan_of(model).fits


def test_there_is_an_end_to_planning_again(device: Device, batch: Batch) -> None:
    model = planned(device, batch, ["keep"] * LAYERS, spare=1.001)
    plans = [plan_of(model)]
    for _ in range(6):
        device.step(model, batch, device.peak + device.limit)
        plans.append(plan_of(model))
    assert 2 <= len({id(plan) for plan in plans}) <= 4


def test_a_graph_that_is_alive_is_not_taken_for_a_cheap_step(device: Device, batch: Batch) -> None:
    """Two forwards, then one backward: the first one's peak is still to come when the second begins."""
    model = planned(device, batch)
    model.zero_grad(set_to_none=True)
    first = plan_of(model)
    waiting = model(**batch).loss
    device.reach(int(first.peak * 0.8))
    device.allocated += 10**6
    model(**batch).loss.backward()
    waiting.backward()
    assert memory(model).correction == 0
    device.allocated -= 10**6
    step(model, batch)
    assert plan_of(model) is first


def test_an_extraordinary_step_is_not_held_against_the_usual_plan(device: Device, batch: Batch) -> None:
    """With a second graph alive another plan runs: its peak says nothing about the remembered one."""
    model = planned(device, batch, ["keep"] * LAYERS)
    first = plan_of(model)
    device.allocated += 10**6
    device.step(model, batch, first.peak * 3)
    assert assigned(model) != list(first.levels)
    device.allocated -= 10**6
    step(model, batch)
    assert plan_of(model) is first
    assert memory(model).correction == 0


def test_an_evaluation_s_peak_is_not_the_step_s(device: Device, batch: Batch) -> None:
    """All logits of an evaluation may take more than training; that is no reason to train with less."""
    model = planned(device, batch)
    first = plan_of(model)
    device.step(model, batch, int(first.peak * 0.95))
    with torch.no_grad():
        model.eval()(**batch)
    device.reach(device.limit * 3)
    step(model.train(), batch)
    assert plan_of(model) is first
    assert memory(model).correction == 0
    assert memory(model).measured == int(first.peak * 0.95)


def test_host_memory_is_shared_by_the_processes_of_a_host(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what the model's own store holds counts as free."""
    model = build("offload")
    body = backbone(model)
    free = 10**9
    monkeypatch.setattr(size_plans, "device_memory", lambda _: DeviceMemory(2 * free, free, 0))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert size_plans.host_budget(0) == free * 3 // 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert size_plans.host_budget(0) == free // 4 * 3 // 4
    step(model, batch)
    held = levels.store_of(body).host_bytes
    assert held > 0
    assert size_plans.host_budget(held) == (free // 4 + held) * 3 // 4


@pytest.fixture
def once_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention's output is worth its way to host memory even at the sizes of tests."""
    for constant in ("_LINK_OPERATIONS", "_ONCE_OPERATIONS", "_HOST_COPY_OPERATIONS", "_HOST_LAUNCH_OPERATIONS"):
        monkeypatch.setattr(away_costs, constant, 0.0)
    monkeypatch.setattr(emptied_graph, "_SMALL", 64)


@pytest.mark.parametrize("away", ["input", "attention", "half"])
def test_named_offload_sends_away_what_the_host_has_room_for(
    away: str, once_pays: None, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, kept = build(["offload"] * (LAYERS - 1) + ["keep"]), build("keep")
    found = layer_costs.costs_of(backbone(model), list(decoder_layers(model)), 256, 256)
    assert found is not None
    assert [one.away for one in found] == ["half"] * 3 + ["input"] * 3 + ["attention"] * 3
    needed = max(one.levels["offload"].host for one in found if one.away == away) * (LAYERS - 1)
    monkeypatch.setattr(size_plans, "host_budget", lambda held: needed)
    assert attention_calls(model, batch) == [2 if away == "input" else 1] * (LAYERS - 1) + [1]
    assert {site.away for site in sites(model, "decoder layer")} == {away}
    assert_equal_steps(step(kept, batch), step(model, batch))


def test_many_processes_of_a_host_do_not_send_halves(
    once_pays: None, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would keep its link busy, and the host's memory is one."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    model = build("offload")
    step(model, batch)
    assert {site.away for site in sites(model, "decoder layer")} == {"attention"}


def test_a_plan_offloads_more_than_x(once_pays: None, device: Device, batch: Batch) -> None:
    model, kept = build(), build("keep")
    device.limit = tight(model, batch, ["offload"] * (LAYERS - 1) + ["lean"])
    assert attention_calls(model, batch) == [1] * LAYERS
    assert plan_of(model).levels == ("offload",) * (LAYERS - 1) + ("lean",)
    assert plan_of(model).away == "half"
    assert_equal_steps(step(kept, batch), step(model, batch))


@pytest.mark.parametrize(("host", "away"), [(90, "half"), (89, "attention"), (60, "attention"), (59, "input")])
def test_a_plan_s_offload_is_what_the_host_has_room_for(host: int, away: str, device: Device) -> None:
    """Three layers have to be away, with as much as fits."""
    kinds = {
        "half": LevelCost(0, 30, 30, 3.0),
        "input": LevelCost(0, 10, 10, 6.0),
        "attention": LevelCost(0, 20, 20, 4.0),
    }
    others = {
        "keep": LevelCost(900, 0, 0, 0.0),
        "lean": LevelCost(600, 0, 0, 1.0),
        "recompute": LevelCost(100, 10, 0, 9.0),
    }
    costs = [StepCosts(others | {"offload": cost}, 0, 0, away=kind) for kind, cost in kinds.items()]  # type: ignore[arg-type]
    found = size_plans._make(
        size_plans.Memory(budget=150), CUDA, sites(build(layers=4), "decoder layer"), costs, 0, host
    )
    assert found.levels == ("offload",) * 3 + ("recompute",)
    assert found.fits
    assert found.away == away


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("late_from", [256, 257])
def test_what_is_in_host_memory_comes_back_when_the_plan_has_room_for_it(
    late_from: int, named: bool, once_pays: None, device: Device, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of 13 tokens is planned for as one of 256; and documents may be shorter than their row."""
    monkeypatch.setattr(away_costs, "_LATE_FROM", late_from)
    wanted = ["offload"] * (LAYERS - 1) + ["lean"]
    model = build(wanted if named else "auto")
    device.limit = tight(model, batch, wanted)
    seen, add = [], Parcel.add
    monkeypatch.setattr(Parcel, "add", lambda *parts, ahead: seen.append(ahead) or add(*parts, ahead=ahead))
    step(model, batch)
    assert seen == [late_from == 257] * (LAYERS - 1)


def test_the_last_layer_needs_no_room_in_host_memory(
    once_pays: None, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("offload")
    found = layer_costs.costs_of(backbone(model), list(decoder_layers(model)), 256, 256)
    assert found is not None
    monkeypatch.setattr(size_plans, "host_budget", lambda held: (LAYERS - 1) * found[0].levels["offload"].host)
    assert attention_calls(model, batch) == [1] * (LAYERS - 1) + [2]
    assert {site.away for site in sites(model, "decoder layer")} == {found[0].away}


def test_naming_other_levels_asks_anew_whether_the_host_has_room(
    once_pays: None, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for one layer's output is not room for that of all."""
    model = build(["offload"] + ["keep"] * (LAYERS - 1))
    found = layer_costs.costs_of(backbone(model), list(decoder_layers(model)), 256, 256)
    assert found is not None
    least = min(one.levels["offload"].host for one in found if one.away == "attention")
    monkeypatch.setattr(size_plans, "host_budget", lambda held: least)
    assert attention_calls(model, batch) == [1] * LAYERS
    fastft.patch(model, memory_levels=["offload"] * (LAYERS - 1) + ["keep"])
    assert attention_calls(model, batch) == [2] * (LAYERS - 1) + [1]
    fastft.patch(model, memory_levels=["offload"] + ["keep"] * (LAYERS - 1))
    assert attention_calls(model, batch) == [1] * LAYERS


@pytest.mark.parametrize(("host", "away"), [(60, "attention"), (59, "input"), (29, "input")])
def test_where_nothing_fits_the_host_is_not_overdrawn_for_more_than_x(host: int, away: str, device: Device) -> None:
    """Layers that were told to offload do so in any plan: then the smaller way to is the better one."""
    kinds = {"attention": LevelCost(0, 10, 20, 4.0), "input": LevelCost(0, 10, 10, 6.0)}
    others = {level: LevelCost(900, 0, 0, 0.0) for level in ("keep", "lean", "recompute")}
    costs = [StepCosts(others | {"offload": cost}, 0, 0, away=kind) for kind, cost in kinds.items()]  # type: ignore[arg-type]
    told = sites(build([*["offload"] * 3, "keep"], layers=4), "decoder layer")
    found = size_plans._make(size_plans.Memory(budget=150), CUDA, told, costs, 0, host)
    assert not found.fits
    assert found.away == away


# --- the host store --------------------------------------------------------------------------------------------------


def store(model: Any) -> Any:
    return levels.store_of(backbone(model))


def test_offloaded_layers_share_the_model_s_store(batch: Batch) -> None:
    """One buffer a layer in the first step and none after it; the last layer's input stays where it is."""
    model = build("offload")
    step(model, batch)
    held = store(model).host_bytes
    assert held == (LAYERS - 1) * 2 * 4096, "2 × 13 × 64 float32, in pages"
    for _ in range(3):
        step(model, batch)
    assert store(model).host_bytes == held
    assert store(model).in_flight == 0


def test_the_store_keeps_to_what_the_host_has_room_for(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of short batches make room for those of long ones, which a plan may give all there is."""
    room = [10**9]
    monkeypatch.setattr(size_plans, "host_budget", lambda held: room[0])
    model = build("offload")
    step(model, {name: row.repeat(2, 1) for name, row in batch.items()})
    more = store(model).host_bytes
    fastft.release_memory(model)
    step(model, batch)
    assert 0 < store(model).host_bytes < more
    room[0] = more
    step(model, {name: row.repeat(2, 1) for name, row in batch.items()})
    assert store(model).host_bytes == more


def test_unpatch_gives_host_memory_back(batch: Batch) -> None:
    model = build("offload")
    enable(model)
    expected = step(model, batch)
    held = store(model)
    loss = model(**batch).loss
    fastft.unpatch(model)
    model.zero_grad(set_to_none=True)
    loss.backward()  # a graph that is alive keeps what it needs
    assert [n for n, g in support.trainable_gradients(model).items() if not torch.equal(g, expected.gradients[n])] == []
    del loss
    gc.collect()
    assert held.host_bytes == 0
    assert held.in_flight == 0
    assert_same_step(step(model, batch), expected)
    assert held.host_bytes == 0


def test_an_evaluation_gives_host_memory_back(batch: Batch) -> None:
    """Unless a graph waits for it."""
    model = build("offload")
    expected = step(model, batch)
    held = store(model).host_bytes
    model.zero_grad(set_to_none=True)
    loss = model(**batch).loss
    with torch.no_grad():
        model.eval()(**batch)
        assert store(model).host_bytes == held
        loss.backward()
        model(**batch)
    assert store(model).host_bytes == 0
    assert_equal_steps(expected, step(model.train(), batch))
    assert store(model).host_bytes == held


def test_the_store_goes_with_its_model(batch: Batch) -> None:
    model = build("offload", layers=2)
    step(model, batch)
    held = weakref.ref(store(model))
    del model
    gc.collect()
    assert held() is None


def test_a_forward_without_a_backward_does_not_keep_the_model(device: Device, batch: Batch) -> None:
    """Who waits for the step's end waits weakly."""
    model = build(layers=2)
    model(**batch)
    alive = [weakref.ref(layer) for layer in decoder_layers(model)]
    del model
    gc.collect()
    assert [layer() for layer in alive] == [None, None]


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_has_levels_and_a_store_of_its_own(how: str, device: Device, batch: Batch) -> None:
    """Plans and named levels travel; host memory does not."""
    model = build({0: "offload", 1: "recompute"})
    fastft.patch(model, memory_levels={2: "auto", 3: "auto"})
    expected = step(model, batch)
    copied = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert asked(copied) == asked(model) == ["offload", "recompute", "auto", "auto", "keep", "keep"]
    assert memory(copied) == memory(model)
    assert memory(copied) is not memory(model)
    held = store(model).host_bytes
    assert store(copied) is not store(model)
    assert store(copied).host_bytes == 0
    assert_equal_steps(expected, step(copied, batch))
    assert store(copied).host_bytes == held > 0
    assert store(model).host_bytes == held
    fastft.unpatch(copied)
    assert store(copied).host_bytes == 0
    assert store(model).host_bytes == held
    assert_equal_steps(expected, step(model, batch))


def test_a_loss_in_flight_keeps_its_level_when_the_next_batch_changes_it(device: Device) -> None:
    """Levels belong to a forward, not to the layer."""
    model, kept = build(), build("keep")
    short, long = support.random_batch(length=13), support.random_batch(rows=4, length=300)
    device.limit = tight(model, short, ["keep"] * LAYERS)
    losses = [model(**one).loss for one in (short, long)]
    assert "keep" not in assigned(model)
    sum(losses).backward()
    sum(kept(**one).loss for one in (short, long)).backward()
    expected, got = (support.trainable_gradients(m) for m in (kept, model))
    for name, gradient in got.items():
        assert relative_error(gradient, expected[name]) < 1e-6, name


def test_a_planned_layer_that_runs_stock_is_checkpointed(device: Device, batch: Batch) -> None:
    """Whatever the plan says of its neighbours."""
    model = support.add_lora(support.build_model(num_hidden_layers=3), use_dora=True)
    stock = copy.deepcopy(model)
    fastft.patch(model)
    for one in (model, stock):
        one.gradient_checkpointing_enable()
    results = []
    for one in (stock, model):
        with support.seeded(3):
            results.append(step(one, batch))
    assert_same_step(*results)
    assert assigned(model) == ["recompute"] * 3
    assert memory(model).sizes == {}


def with_lora(**config: Any) -> Any:
    """A small model with adapters, not planned yet."""
    return support.add_lora(support.build_model(**config))


def test_a_named_level_does_not_switch_checkpointing_on_when_unpatched() -> None:
    """Stock layers would look for transformers' checkpoint function, which nobody has set."""
    model = fastft.patch(with_lora(), memory_levels="recompute")
    fastft.unpatch(model)
    step(model, support.random_batch())
    assert not model.is_gradient_checkpointing


def test_checkpointing_that_was_switched_on_outlasts_a_named_level() -> None:
    model = with_lora()
    model.gradient_checkpointing_enable()
    fastft.patch(model, memory_levels="keep")
    fastft.unpatch(model)
    assert all(layer.gradient_checkpointing for layer in inner_model(model).model.layers)


def test_a_stock_layer_under_a_named_level_checkpoints_itself() -> None:
    batch = support.random_batch(rows=2, length=64)
    stock = support.add_lora(support.build_model(attention_dropout=0.1))
    stock.gradient_checkpointing_enable()
    fast = fastft.patch(support.add_lora(support.build_model(attention_dropout=0.1)), memory_levels="recompute")
    assert saved_bytes(fast, batch) <= 1.05 * saved_bytes(stock, batch)


def test_the_report_shows_keep_once_checkpointing_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size_plans, "device_of", lambda layers: None)  # auto means recompute then
    fast = fastft.patch(with_lora())
    assert "level keep" in str(fastft.report(fast))
    fast.gradient_checkpointing_enable()
    assert "level auto" in str(fastft.report(fast))
    step(fast, support.random_batch())
    assert "level recompute" in str(fastft.report(fast))
    inner_model(fast)._set_gradient_checkpointing(False)
    assert "level keep" in str(fastft.report(fast))


def test_a_budget_alone_asks_the_planner() -> None:
    fast = fastft.patch(with_lora(), memory_budget="1MiB")
    step(fast, support.random_batch(rows=4, length=256))
    assert levels.level_of(sites(fast, "decoder layer")[0]) != "keep"


@pytest.mark.parametrize(("named", "others"), [("recompute", "recompute"), (False, "keep"), (True, "auto")])
def test_a_mapping_beside_a_named_level(named: str | bool, others: str) -> None:
    model = fastft.FastModel.get_peft_model(
        support.build_model(), use_gradient_checkpointing=named, memory_levels={0: "lean"}
    )
    assert [site.level for site in sites(model, "decoder layer")] == ["lean", others]


def test_the_store_is_settled_by_the_layer_after_the_last_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fastft.patch(with_lora(num_hidden_layers=4), memory_levels=["offload", "offload", "keep", "keep"])
    settled: list[int] = []
    monkeypatch.setattr(levels.store_of(inner_model(model).model), "settle", lambda: settled.append(1))
    loss = model(**support.random_batch()).loss
    assert settled == [1]
    del loss


def test_a_reference_pass_in_training_mode_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """DPO, GRPO: no_grad forwards of the training model. Host memory stays: the next step wants it."""
    seen: list[bool] = []
    monkeypatch.setattr(levels, "rest", lambda backbone: seen.append(backbone.training))
    model = fastft.patch(with_lora(), memory_levels="auto").train()
    with torch.no_grad():
        model(**support.random_batch())
    assert seen == [True]
