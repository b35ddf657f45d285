"""Generation over a cache: stock's tokens, by the layers' nodes and by CUDA graphs."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
import torch
from torch import Tensor

import fastft
from fastft.patching import levels, registry
from tests.gpu import models

pytestmark = pytest.mark.gpu
NEW = 32
LOGIT_ERROR = 0.05  # of the largest logit, in bfloat16; 0.02 on a CPU
SETTINGS = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A planned NF4 model of middle size in evaluation; adapters small enough not to blow roundings up."""
    dtype = getattr(torch, request.param)
    model = models.load_qlora(tmp_path_factory.mktemp("generation"), dtype, **models.MIDDLE)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data *= 0.1
    return fastft.patch(model).eval()


def prompts(rows: int = 8, longest: int = 40) -> dict[str, Tensor]:
    """Left-padded, every row of another length."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 2048, (rows, longest), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : 3 * row] = 0
    return models.on_gpu({"input_ids": ids * mask, "attention_mask": mask})


def generate(model: Any, batch: dict[str, Tensor], **settings: Any) -> tuple[Tensor, Tensor]:
    """New tokens `[rows, NEW]`, and the logits they were chosen by `[NEW, rows, vocabulary]`."""
    found = model.generate(**batch, **SETTINGS, **settings, return_dict_in_generate=True, output_logits=True)
    return found.sequences[:, -NEW:], torch.stack(found.logits).float()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_greedy_tokens_are_stocks_up_to_ties(model: Any, cache: str) -> None:
    """float32: all of them. bfloat16: the first one of a row that differs is one that stock itself could not tell."""
    settings = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
    batch = prompts()
    with fastft.stock_only():
        expected, theirs = generate(model, batch, **settings)
    sites = [s for m in model.modules() if (s := registry.site_of(m)) is not None and s.part == "decoder layer"]
    before = [(site.fast_runs, site.stock_runs) for site in sites]
    tokens, ours = generate(model, batch, **settings)
    ran = [(s.fast_runs - fast, s.stock_runs - stock) for s, (fast, stock) in zip(sites, before, strict=True)]
    assert ran == [(NEW, 0)] * len(sites)
    if next(model.parameters()).dtype == torch.float32:
        assert torch.equal(tokens, expected)
        return
    differ, errors = 0, []
    for row in range(tokens.shape[0]):
        unequal = (tokens[row] != expected[row]).nonzero()
        last = int(unequal[0]) if len(unequal) else NEW - 1
        error = (ours[: last + 1, row] - theirs[: last + 1, row]).abs().max().item()
        if len(unequal):
            differ += 1
            first, second = theirs[last, row].topk(2).values.tolist()
            assert first - second <= 2 * error, (row, last, first - second, error)
        errors.append(error / theirs[: last + 1, row].abs().max().item())
    print(f"{cache}: {differ} of {len(errors)} rows leave stock's at ties; logits off by {max(errors):.3f}")
    assert max(errors) <= LOGIT_ERROR


def graphs_of(model: Any) -> Any:
    """The graphs of the model's layers in generation."""
    return levels.token_graphs_of(model.get_base_model().model)


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.inference_mode])
@pytest.mark.parametrize("settings", [{}, {"cache_implementation": "static", "disable_compile": True}])
def test_replayed_tokens_are_the_eager_ones(model: Any, mode: Any, settings: dict[str, Any]) -> None:
    """To the bit; other prompts with the graphs of the first ones; then another number of rows."""
    fastft.release_memory(fastft.patch(model, cuda_graphs=True))
    batches = [prompts(), models.on_gpu({k: v.flip(0) for k, v in prompts().items()}), prompts(rows=3)]
    before, layers = graphs_of(model).replays, model.config.num_hidden_layers
    with mode():
        replayed = [generate(model, batch, **settings) for batch in batches]
        assert graphs_of(model).reason is None
        assert graphs_of(model).replays - before == layers * (NEW - 2 + NEW - 1 + NEW - 2)
        fastft.patch(model, cuda_graphs=False)
        eager = [generate(model, batch, **settings) for batch in batches]
    fastft.patch(model, cuda_graphs=True)
    for ours, theirs in zip(replayed, eager, strict=True):
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1]), (ours[1] - theirs[1]).abs().max()


def test_a_training_step_between_two_generations(model: Any) -> None:
    """The adapters it wrote are seen, and the graphs' memory is given back before it."""
    batch, held, found = prompts(), [], []
    for _ in range(3):
        found.append(generate(model, batch)[1])
        assert graphs_of(model).captured == model.config.num_hidden_layers
        model.train()
        models.loss_and_gradients(model, models.on_gpu({"input_ids": batch["input_ids"], "labels": batch["input_ids"]}))
        assert graphs_of(model).captured == 0
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-1e-3)
        model.zero_grad(set_to_none=True)
        fastft.release_memory(model.eval())
        held.append(torch.cuda.memory_allocated() - sum(logits.nbytes for logits in found))
    assert not torch.equal(found[0], found[1])
    assert held[2] == held[1]


def test_milliseconds_a_token(model: Any) -> None:
    """Printed, not judged: eight rows, beside stock in the same run."""
    batch, found = prompts(), {}
    for name in ("stock", "fast", "eager") * 2:
        fastft.patch(model, cuda_graphs=name == "fast")
        generate(model, batch)
        torch.cuda.synchronize()
        start = time.perf_counter()
        with fastft.stock_only() if name == "stock" else contextlib.nullcontext():
            generate(model, batch)
        torch.cuda.synchronize()
        found[name] = (time.perf_counter() - start) * 1e3 / NEW
    dtype, layers = next(model.parameters()).dtype, model.config.num_hidden_layers
    times = ", ".join(f"{name} {milliseconds:.1f}" for name, milliseconds in found.items())
    print(f"{dtype}, {layers} layers, ms a token: {times}")
