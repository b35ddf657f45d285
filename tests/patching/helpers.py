"""A stock model beside a fast one: the pair, a step of each, and what the fast one's report and counters say."""

from __future__ import annotations

import copy
import json
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

import fastft
from fastft.patching import registry
from fastft.patching.plan import inner_model
from tests import support

ROOT = pathlib.Path(__file__).parents[2]
LEVELS = ("keep", "recompute")
ALL_LEVELS = ("keep", "lean", "recompute", "offload")  # for what a level could break; each costs the suite a run


class Step(NamedTuple):
    """One training step: its loss and the gradient of every trainable parameter."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]


def twins(model: Any, **patch_arguments: Any) -> tuple[Any, Any]:
    """(a deep copy made before patching, `model` patched)."""
    stock = copy.deepcopy(model)
    return stock, fastft.patch(model, **patch_arguments)


def set_level(level: str, *models: Any) -> None:
    """Pin the level of planned models; stock gets stock's checkpointing, as do layers of ours that run stock."""
    for model in models:
        if level in ("recompute", "offload"):
            model.gradient_checkpointing_enable()
        if level != "keep" and sites(model, "decoder layer"):
            fastft.patch(model, memory_levels=level)


def step(model: Any, batch: dict[str, torch.Tensor], **arguments: Any) -> Step:
    """Forward and backward from clean gradients; a missing or zero gradient fails."""
    model.zero_grad(set_to_none=True)
    loss = model(**batch, **arguments).loss
    loss.backward()
    return Step(loss.detach(), support.trainable_gradients(model))


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    return ((value.double() - reference.double()).norm() / reference.double().norm()).item()


def assert_same_step(stock: Step, fast: Step, tolerance: float = 1e-5) -> None:
    """Loss, norm of all gradients, and each gradient, relative to stock's."""
    assert relative_error(fast.loss, stock.loss) <= tolerance, (fast.loss.item(), stock.loss.item())
    assert fast.gradients.keys() == stock.gradients.keys()
    norms = [torch.stack([g.norm() for g in s.gradients.values()]).norm() for s in (stock, fast)]
    assert relative_error(norms[1], norms[0]) <= tolerance
    wrong = {
        name: error
        for name, gradient in fast.gradients.items()
        if not (error := relative_error(gradient, stock.gradients[name])) <= tolerance
    }
    assert not wrong, wrong


def sites(model: Any, part: str) -> list[registry.Site]:
    """The plans of one part of a fast model, in order."""
    found = [registry.site_of(m) for m in inner_model(model).modules()]
    return [site for site in found if site is not None and site.part == part]


def runs(model: Any, part: str) -> tuple[int, int]:
    """(fast forwards, stock forwards) of one part so far."""
    return sum(s.fast_runs for s in sites(model, part)), sum(s.stock_runs for s in sites(model, part))


def assert_ran_fast(model: Any, forwards: int = 1) -> None:
    """Every layer, the final norm and the loss ran fast in each of `forwards` forwards, and never stock."""
    layers = len(sites(model, "decoder layer"))
    assert layers > 0
    assert runs(model, "decoder layer") == (layers * forwards, 0)
    assert runs(model, "loss") == (forwards, 0)
    assert sites(model, "norm")[-1].fast_runs == forwards


def rows(model: Any, ending: str) -> list[Any]:
    """The report's rows of the sites whose name ends so."""
    found = [row for row in fastft.report(model).rows if row.site.endswith(ending)]
    assert found, f"no row ends with {ending!r} in\n{fastft.report(model)}"
    return found


def decoder_layers(model: Any) -> Any:
    return inner_model(model).model.layers


@contextmanager
def counted_forwards(*modules: torch.nn.Module) -> Iterator[dict[torch.nn.Module, int]]:
    """How often each module's class forward is entered, recomputations included (a class-level count: no hooks)."""
    counts = dict.fromkeys(modules, 0)
    classes = {type(module) for module in modules}
    originals = {owner: owner.__dict__["forward"] for owner in classes}

    def counting(original: Any) -> Any:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self in counts:
                counts[self] += 1
            return original(self, *args, **kwargs)

        return forward

    for owner, original in originals.items():
        owner.forward = counting(original)
    try:
        yield counts
    finally:
        for owner, original in originals.items():
            owner.forward = original


def saved_bytes(model: Any, batch: dict[str, torch.Tensor]) -> int:
    """Bytes of distinct storages that autograd saves in a training forward, parameters left out."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, int] = {}
    kept = []  # keeps storages alive, so that no address is seen twice for two tensors

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**batch).loss  # its backward comes after: what a recomputation saves for itself is soon gone
    loss.backward()
    return sum(storages.values())


def run_python(script: str, *arguments: str) -> Any:
    """What a fresh process prints as JSON on its last line."""
    result = subprocess.run(
        [sys.executable, "-c", script, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, f"the process failed:\n{result.stderr}"
    return json.loads(result.stdout.splitlines()[-1])
