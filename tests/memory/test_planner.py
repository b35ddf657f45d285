"""Plans against a brute force that writes a step out layer by layer, and what a plan says about itself."""

from __future__ import annotations

import itertools
import pickle
import random
import time
from typing import Any

import pytest

from fastft.memory.planner import LEVELS, LevelCost, Plan, make_plan, predict_peak

DEPTH = ("offload", "recompute", "lean", "keep")
MIB, GIB = 2**20, 2**30

# Llama-3 8B at 4 × 2048 tokens, about: per layer and in seconds.
LARGE = {
    "keep": LevelCost(saved=770 * MIB, working=900 * MIB, host=0, seconds=0.0),
    "lean": LevelCost(saved=303 * MIB, working=1200 * MIB, host=0, seconds=0.0022),
    "recompute": LevelCost(saved=64 * MIB, working=1450 * MIB, host=0, seconds=0.0041),
    "offload": LevelCost(saved=0, working=1578 * MIB, host=64 * MIB, seconds=0.0042),
}


def plan_large(budget: int, layers: int = 32, **changes: Any) -> Plan:
    given: dict[str, Any] = {
        "layers": layers,
        "costs": LARGE,
        "base": 6 * GIB,
        "forward_working": 700 * MIB,
        "loss_working": 1100 * MIB,
        "budget": budget,
    }
    return make_plan(**{**given, **changes})


def step_peak(levels: tuple[str, ...], costs: Any, base: int, forward_working: int, loss_working: int) -> int:
    """A step as it happens: memory taken and given back, and the most there was."""
    held, peak = base, 0
    for level in levels:
        held += costs[level].saved
        peak = max(peak, held + forward_working)
    peak = max(peak, held + loss_working)
    for level in reversed(levels):
        peak = max(peak, held + costs[level].working)
        held -= costs[level].saved
    assert held == base
    return peak


def best_by_brute_force(problem: dict[str, Any]) -> tuple[int, float, bool]:
    """(peak, seconds, fits) of the best plan, of all that read offload, recompute, lean, keep along depth."""
    fixed, costs = problem["fixed"], problem["costs"]
    free = [layer for layer in range(problem["layers"]) if layer not in fixed]
    choices = [level for level in DEPTH if level in problem["allowed"]]
    ranked = []
    for chosen in itertools.combinations_with_replacement(choices, len(free)):
        levels = tuple({**fixed, **dict(zip(free, chosen, strict=True))}[layer] for layer in range(problem["layers"]))
        peak = step_peak(levels, costs, problem["base"], problem["forward_working"], problem["loss_working"])
        seconds = sum(costs[level].seconds for level in levels)
        held_by_host = problem["host_budget"] is None or (
            sum(costs[level].host for level in levels) <= problem["host_budget"]
        )
        if held_by_host and peak <= problem["budget"]:
            ranked.append((0, seconds, peak, (peak, seconds, True)))
        else:
            ranked.append((1 if held_by_host else 2, peak, seconds, (peak, seconds, False)))
    return min(ranked)[3]


def random_problem(draw: random.Random, *, ordered: bool) -> dict[str, Any]:
    """Small numbers, so that budgets bind and ties happen. Ordered: from level to level more saved, less time."""
    layers, some_fixed = draw.randint(1, 6), draw.choice([0, 0, 0.4])
    saved = [draw.randint(0, 20) for _ in DEPTH]
    seconds = [draw.randint(0, 9) for _ in DEPTH]
    if ordered:
        saved, seconds = sorted(saved), sorted(seconds, reverse=True)
    return {
        "layers": layers,
        "costs": {
            level: LevelCost(s, draw.randint(0, 30), draw.randint(0, 10) if level == "offload" else 0, float(t))
            for level, s, t in zip(DEPTH, saved, seconds, strict=True)
        },
        "base": draw.randint(0, 20),
        "forward_working": draw.randint(0, 20),
        "loss_working": draw.randint(0, 30),
        "budget": draw.randint(0, 150),
        "fixed": {layer: draw.choice(LEVELS) for layer in range(layers) if draw.random() < some_fixed},
        "allowed": draw.choice([LEVELS, draw.sample(LEVELS, draw.randint(1, 4))]),
        "host_budget": draw.choice([None, draw.randint(0, 40)]),
    }


@pytest.mark.parametrize("ordered", [True, False])
def test_a_plan_is_the_best_of_all(ordered: bool) -> None:
    """Also where costs are not ordered from level to level: a level may be better in every respect, or useless."""
    outcomes = set()
    for seed in range(1500):
        problem = random_problem(random.Random(seed), ordered=ordered)
        plan = make_plan(**problem)
        assert (plan.peak, plan.seconds, plan.fits) == best_by_brute_force(problem), problem
        outcomes.add((plan.fits, len(set(plan.levels))))
    assert {(True, 3), (False, 3), (True, 1), (False, 1)} <= outcomes, "the problems are too much alike"


def test_a_plan_keeps_its_promises() -> None:
    """Order along depth, fixed and allowed levels, and figures that follow from the levels it returns."""
    for seed in range(300):
        problem = random_problem(random.Random(seed), ordered=True)
        costs, fixed = problem["costs"], problem["fixed"]
        plan = make_plan(**problem)
        free = [level for layer, level in enumerate(plan.levels) if layer not in fixed]
        assert [plan.levels[layer] for layer in fixed] == list(fixed.values())
        assert free == sorted(free, key=DEPTH.index)
        assert set(free) <= set(problem["allowed"])
        sizes = (problem["base"], problem["forward_working"], problem["loss_working"])
        assert plan.peak == step_peak(plan.levels, costs, *sizes)
        assert plan.host == sum(costs[level].host for level in plan.levels)
        assert plan.fits == (plan.peak <= problem["budget"] and plan.host <= (problem["host_budget"] or plan.host))


def test_room_for_everything_keeps_everything() -> None:
    plan = plan_large(80 * GIB)
    assert plan.levels == ("keep",) * 32
    assert (plan.seconds, plan.host, plan.fits) == (0.0, 0, True)


def test_less_room_costs_more_time_and_never_more_memory_than_there_is() -> None:
    seconds = []
    for budget in range(80 * GIB, 8 * GIB, -GIB):
        plan = plan_large(budget)
        assert plan.fits
        assert plan.peak <= budget
        seconds.append(plan.seconds)
    assert seconds == sorted(seconds)
    assert seconds[-1] > seconds[0] == 0


def test_the_layers_that_save_most_come_last() -> None:
    levels = plan_large(14 * GIB).levels
    assert len(set(levels)) >= 2
    assert list(levels) == sorted(levels, key=DEPTH.index)
    assert levels[0] != "keep"


def test_a_layer_freed_before_the_others_work_is_not_counted_against_them() -> None:
    """The last layer may keep 100 bytes although an earlier one's backward takes the whole budget."""
    costs = {"keep": LevelCost(100, 10, 0, 0.0), "recompute": LevelCost(1, 150, 0, 1.0)}
    plan = make_plan(
        layers=3, costs=costs, base=0, forward_working=20, loss_working=30, budget=152, allowed=("keep", "recompute")
    )
    assert plan.levels == ("recompute", "recompute", "keep")
    assert plan.peak == 152


def test_where_nothing_fits_it_is_the_least_peak() -> None:
    plan = plan_large(GIB)
    assert not plan.fits
    assert plan.peak == 6 * GIB + 1578 * MIB, "one offloaded layer's backward is the least there can be"
    assert plan.budget == GIB
    assert plan.levels == ("offload",) * 30 + ("recompute", "lean"), "as fast as that peak allows"


def test_host_memory_limits_the_offloaded_layers_even_where_nothing_fits() -> None:
    plan = plan_large(GIB, host_budget=10 * 64 * MIB + 1)
    assert not plan.fits
    assert plan.levels.count("offload") == 10
    assert plan.host == 10 * 64 * MIB


def test_of_equally_fast_plans_it_is_the_smallest() -> None:
    same = {level: LevelCost(saved, 0, 0, 1.0) for level, saved in zip(LEVELS, (40, 30, 20, 10), strict=True)}
    plan = make_plan(layers=4, costs=same, base=0, forward_working=0, loss_working=0, budget=1000)
    assert plan.levels == ("offload",) * 4


def test_fixed_layers_keep_their_level_and_the_others_fill_around_them() -> None:
    plan = plan_large(12 * GIB, fixed={0: "keep", 31: "recompute"})
    assert plan.fits
    assert (plan.levels[0], plan.levels[31]) == ("keep", "recompute")
    assert list(plan.levels[1:31]) == sorted(plan.levels[1:31], key=DEPTH.index)


def test_fixing_every_layer_leaves_nothing_to_choose() -> None:
    plan = plan_large(0, layers=2, costs={"lean": LARGE["lean"]}, fixed={0: "lean", 1: "lean"}, allowed=())
    assert plan.levels == ("lean", "lean")
    assert plan.peak == 6 * GIB + 2 * 303 * MIB + 1200 * MIB


def test_the_predicted_peak_of_given_levels() -> None:
    levels = ("recompute", "keep", "lean")
    assert predict_peak(levels, LARGE, base=5, forward_working=7, loss_working=11) == step_peak(levels, LARGE, 5, 7, 11)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers=0"),
        ({"allowed": ("keep", "spill")}, "allowed names level 'spill'; the levels are keep, lean"),
        ({"fixed": {3: "none"}}, "fixed names level 'none'"),
        ({"costs": {**LARGE, "Keep": LARGE["keep"]}}, "costs names level 'Keep'"),
        ({"costs": {"keep": LARGE["keep"]}}, "allowed names level 'lean', but costs has none"),
        ({"fixed": {32: "keep"}}, "layer 32 a level, but the layers are 0 to 31"),
        ({"fixed": {-1: "keep"}}, "layer -1 a level"),
        ({"allowed": (), "fixed": {0: "keep"}}, "31 of 32 layers have no fixed level"),
        ({"costs": {**LARGE, "keep": LevelCost(-1, 0, 0, 0.0)}}, r"costs\['keep'\].*cannot be negative"),
    ],
)
def test_nonsense_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_large(GIB, **changes)


def test_planning_a_deep_model_is_quick() -> None:
    """About 15 ms on an idle core; the bound leaves room for a busy machine."""

    def seconds(budget: int) -> float:
        start = time.perf_counter()
        plan_large(budget, layers=126)
        return time.perf_counter() - start

    assert min(seconds(40 * GIB) for _ in range(5)) < 0.1


def test_a_plan_in_one_line() -> None:
    plan = Plan(
        levels=("offload",) * 12 + ("recompute",) * 14 + ("keep",) * 6,
        peak=int(8.31 * GIB),
        budget=int(8.45 * GIB),
        host=int(1.8 * GIB),
        seconds=1.0,
        fits=True,
    )
    assert plan.summary() == (
        "32 layers: 12 offload, 14 recompute, 6 keep; predicted peak 8.31 GiB of 8.45 GiB allowed, "
        "1.80 GiB in host memory"
    )


def test_a_plan_that_does_not_fit_says_so() -> None:
    too_large = Plan(levels=("keep",), peak=9 * GIB, budget=8 * GIB, host=0, seconds=0.0, fits=False)
    assert too_large.summary() == "1 layer: 1 keep; predicted peak 9.00 GiB exceeds the 8.00 GiB allowed"
    host = Plan(levels=("offload",), peak=GIB, budget=8 * GIB, host=GIB, seconds=0.0, fits=False)
    assert host.summary().endswith("of 8.00 GiB allowed, 1.00 GiB in host memory (more than there is)")


def test_a_plan_is_pure_data() -> None:
    plan = plan_large(14 * GIB)
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert {type(value) for value in (plan.peak, plan.host, plan.budget)} == {int}
