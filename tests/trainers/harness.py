"""One harness for every trainer: the same run twice, stock and planned, and everything both logged compared.

A *case* says how to build a trainer around a model. The harness builds the model twice from the same seed, patches one
of the two, trains both and compares: the names of all logged metrics, their values step by step, what was generated,
and that the planned model's parts ran fast. Nothing is compared with a number written down here: stock is the
reference, in fp32 on the CPU, where the two differ by the order of sums alone.

Two kinds of metric are no smooth function of the logits: counts of tokens and accuracies. Counts must be equal. An
accuracy may differ by one comparison of one step, where two numbers are equal to the last bits.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

import fastft
from fastft.patching import registry
from tests import support

# In Triton's interpreter TRL 1.15's own loss takes a second and a half a step: there they are few.
STEPS = 4 if os.environ.get("TRITON_INTERPRET") == "1" else 10
# Relative to the metric's size (at least 1), over ten optimizer steps: rounding differences grow with every step.
TOLERANCE = 2e-4
# Metrics of time and memory, and of nothing else.
MEASURED = ("runtime", "per_second", "flos", "step_time", "/time", "profiling")
ACCURACIES = ("accurac",)

Log = list[dict[str, Any]]
Build = Callable[[Any, pathlib.Path], Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """One way of training.

    Args:
        name: the test's id.
        trainer: `(model, folder) -> trainer`, given a fresh model; may note what it generates in `trainer.noted`.
        family: the model's family.
        lora: train adapters (else every weight).
        architecture: "causal" or "classification".
        labels: of a classifier.
        loss: what the planned model's loss must have done: "fast", "none" (never asked: the trainer reads logits) or a
            part of the reason why it ran stock.
        moves: there are gradients at all (greedy RLOO has none: the completions of a group are equal).
        tolerance: of losses, norms and metrics.
        slow: too long for Triton's interpreter in CI.
    """

    name: str
    trainer: Build
    family: str = "llama"
    lora: bool = True
    architecture: str = "causal"
    labels: int = 1
    loss: str = "fast"
    moves: bool = True
    tolerance: float = TOLERANCE
    slow: bool = True


def build(case: Case) -> Any:
    """The case's model, the same at every call."""
    if case.architecture == "classification":
        model = classifier(case.family, case.labels)
    else:
        model = support.build_model(case.family)
    if not case.lora:
        return model
    return adapted_classifier(model) if case.architecture == "classification" else support.add_lora(model)


def classifier(family: str, labels: int) -> Any:
    """A random sequence classifier (a reward model has one label)."""
    from transformers import AutoModelForSequenceClassification

    with support.seeded(0):
        config = support.tiny_config(family, num_labels=labels)
        return AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).train()


def adapted_classifier(model: Any) -> Any:
    """Random adapters on the seven projections; PEFT trains the score head whole."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=list(support.PROJECTIONS), task_type="SEQ_CLS"))
    support.randomize_adapters(adapted)
    return adapted.train()


def run(case: Case, folder: pathlib.Path, *, fast: bool) -> tuple[Any, Log, list[Any]]:
    """One training run: the model, its log, and what the trainer noted (completions)."""
    model = build(case)
    if fast:
        fastft.patch(model)
    trainer = case.trainer(model, folder)
    torch.manual_seed(7)  # sampling: both runs draw the same numbers
    trainer.train()
    return model, trainer.state.log_history, list(getattr(trainer, "noted", []))


def compare(case: Case, folder: pathlib.Path) -> None:
    """Train stock and planned; fail where they differ."""
    _, stock, stock_noted = run(case, folder / "stock", fast=False)
    model, fast, fast_noted = run(case, folder / "fast", fast=True)
    if case.moves:
        assert_trained(stock)
    assert_same_log(fast, stock, case.tolerance)
    assert fast_noted == stock_noted
    assert_ran(model, case)


def assert_trained(log: Log) -> None:
    """The reference run itself must mean something: a finite loss a step, gradients that change and are not zero.

    GRPO's loss is itself near zero on policy: the advantages of a group sum to zero.
    """
    losses = [entry["loss"] for entry in log if "loss" in entry]
    norms = [entry["grad_norm"] for entry in log if "grad_norm" in entry]
    assert len(losses) >= STEPS
    assert all(map(math.isfinite, losses))
    assert len(set(norms)) > STEPS // 2
    assert sum(norm > 1e-4 for norm in norms) >= STEPS // 2, norms


def compared(fast: Log, stock: Log) -> Iterator[tuple[str, Any, float, float]]:
    """(name, step, value, stock's) of every number in two logs of the same names that is no time."""
    for ours, theirs in zip(fast, stock, strict=True):
        for name, expected in theirs.items():
            if isinstance(expected, (int, float)) and not any(word in name for word in MEASURED):
                yield name, theirs.get("step"), ours[name], expected


def is_accuracy(name: str) -> bool:
    """Whether a metric counts comparisons, so that one of them makes a step."""
    return any(word in name for word in ACCURACIES)


def assert_same_log(fast: Log, stock: Log, tolerance: float = TOLERANCE) -> None:
    """Every entry has the same metrics, and every metric the same value."""
    assert [sorted(entry) for entry in fast] == [sorted(entry) for entry in stock]
    for name, step, value, expected in compared(fast, stock):
        where = f"step {step}: {name} is {value}, stock's {expected}"
        if math.isnan(expected):
            assert math.isnan(value), where
        elif is_accuracy(name):
            assert abs(value - expected) <= 0.13, where
        elif name in ("step", "epoch", "num_tokens"):
            assert value == expected, where
        else:
            assert abs(value - expected) <= tolerance * max(1.0, abs(expected)), where


def assert_ran(model: Any, case: Case) -> None:
    """What the report must show: layers as one node each, and the loss where the case says."""
    sites = [site for module in model.modules() if (site := registry.site_of(module)) is not None]
    layers = [site for site in sites if site.part == "decoder layer"]
    assert layers
    for site in layers:
        assert site.fast_runs >= STEPS, site
        assert site.stock_runs == 0, site.last_reason
    losses = [site for site in sites if site.part == "loss"]
    if case.loss == "none":
        assert all((site.fast_runs, site.stock_runs) == (0, 0) for site in losses), losses
        return
    (site,) = losses
    if case.loss == "fast":
        assert site.fast_runs >= STEPS
        assert site.stock_runs == 0, site.last_reason
    else:
        assert case.loss in (site.last_reason or ""), site


def reference(model: Any) -> Any:
    """An explicit reference model: near the trained one and not equal to it."""
    other = copy.deepcopy(model.get_base_model() if hasattr(model, "peft_config") else model)
    fastft.unpatch(other)
    with support.seeded(3), torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01)
    return other.eval()
