"""Layers replayed from CUDA graphs: the eager numbers, whatever happens between steps."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fastft
from fastft.patching import levels
from tests import support
from tests.gpu import models

pytestmark = pytest.mark.gpu
LEVELS = ("keep", "lean", "recompute")
WARM = 5  # steps after which every layer is captured


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Fused attention's backward adds in any order unless told not to."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def draw_batch(seed: int = 0, length: int = 256, rows: int = 2) -> dict[str, Tensor]:
    """Full rows, labels partly masked."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 2048, (rows, length), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, -100)
    return models.on_gpu({"input_ids": ids, "labels": labels})


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A planned model of middle size; adapters as drawn."""
    return fastft.patch(models.load_qlora(tmp_path_factory.mktemp("graphs"), torch.bfloat16, **models.MIDDLE))


def graphs_of(model: Any) -> Any:
    """The model's graphs."""
    return levels.graphs_of(model.get_base_model().model)


def eager(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Loss and gradients without graphs."""
    fastft.patch(model, cuda_graphs=False)
    return models.loss_and_gradients(model, batch)


def warmed(model: Any, level: str, batch: dict[str, Tensor]) -> Any:
    """The model at `level` with every layer captured for `batch`'s shape."""
    fastft.patch(model, cuda_graphs=True, memory_levels=level)
    for _ in range(WARM):
        models.loss_and_gradients(model, batch)
    assert graphs_of(model).captured == 4, graphs_of(model).reason
    return model


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """The same bits."""
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("level", LEVELS)
def test_replays_give_the_eager_bits_for_every_batch(level: str, loaded: Any) -> None:
    model = warmed(loaded, level, draw_batch())
    replayed_before = graphs_of(model).replays
    replayed = [models.loss_and_gradients(model, draw_batch(seed)) for seed in (1, 2)]
    assert graphs_of(model).replays == replayed_before + 8
    for seed, ours in zip((1, 2), replayed, strict=True):
        assert_equal(ours, eager(model, draw_batch(seed)))


def packed_batch(*lengths: int, seed: int = 0) -> dict[str, Tensor]:
    """Documents of these lengths, laid end to end in one row."""
    batch = draw_batch(seed, length=sum(lengths), rows=1)
    return batch | {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None].to(models.DEVICE)}


@pytest.mark.parametrize("level", LEVELS)
def test_packed_rows_are_replayed_with_boundaries_of_their_own(level: str, loaded: Any) -> None:
    model = warmed(loaded, level, packed_batch(100, 412))
    batches = [packed_batch(200, 180, 132, seed=1), packed_batch(*[32] * 16, seed=2), packed_batch(400, 112, seed=3)]
    for _ in range(4):  # room for the most documents and the longest
        for batch in batches:
            models.loss_and_gradients(model, batch)
    assert graphs_of(model).captured == 4, graphs_of(model).reason
    replayed_before = graphs_of(model).replays
    replayed = [models.loss_and_gradients(model, batch) for batch in batches]
    assert graphs_of(model).replays == replayed_before + 12
    for ours, batch in zip(replayed, batches, strict=True):
        assert_equal(ours, eager(model, batch))


def test_lines_of_like_lengths_are_made_alike(loaded: Any) -> None:
    """Other shapes round otherwise: the gradients differ by what bfloat16 does to them, and no more."""
    adapters = [p for name, p in loaded.named_parameters() if "lora_B" in name]
    before = [p.detach().clone() for p in adapters]
    with torch.no_grad():
        torch._foreach_mul_(adapters, 0.1)  # as drawn they blow a rounding up to half of a gradient
    model = warmed(loaded, "keep", packed_batch(300, 170))
    batch, replays = packed_batch(150, 150, 163, seed=5), graphs_of(model).replays
    ours = models.loss_and_gradients(model, batch)
    assert graphs_of(model).replays == replays + 4
    theirs = eager(model, batch)
    errors = {name: ((ours[name] - theirs[name]).norm() / theirs[name].norm()).item() for name in theirs}
    with torch.no_grad():
        torch._foreach_copy_(adapters, before)
    print(f"lengthened against not: {max(errors.values()):.4f} of a gradient at most")
    assert max(errors.values()) <= 0.03


@pytest.mark.parametrize("rows", [1, 3], ids=["one at a time", "padded"])
def test_short_rows_of_any_length_are_replayed_as_one(rows: int, loaded: Any) -> None:
    """In one shape, the longest so far; the gradients differ from those of the rows as they are by rounding."""

    def ragged(seed: int) -> dict[str, Tensor]:
        lengths = torch.randint(60, 300, (rows,), generator=torch.Generator().manual_seed(seed))
        batch = draw_batch(seed, length=int(lengths.max()), rows=rows)
        mask = torch.arange(int(lengths.max()))[None] < lengths[:, None]
        batch["attention_mask"] = mask.long().to(models.DEVICE)
        batch["labels"] = batch["labels"].masked_fill(~mask.to(models.DEVICE), -100)
        return batch

    adapters = [p for name, p in loaded.named_parameters() if "lora_B" in name]
    before = [p.detach().clone() for p in adapters]
    with torch.no_grad():
        torch._foreach_mul_(adapters, 0.1)  # as drawn they blow a rounding up to half of a gradient
    model = fastft.patch(loaded, cuda_graphs=False)
    fastft.patch(model, cuda_graphs=True, memory_levels="keep")
    for seed in range(16):
        models.loss_and_gradients(model, ragged(seed))
    assert graphs_of(model).captured == 4, graphs_of(model).reason
    replays, batches = graphs_of(model).replays, [ragged(seed) for seed in range(8)]
    found = [models.loss_and_gradients(model, batch) for batch in batches]
    assert graphs_of(model).replays == replays + 4 * len(batches)
    errors = []
    for ours, batch in zip(found, batches, strict=True):
        theirs = eager(model, batch)
        errors += [((ours[name] - theirs[name]).norm() / theirs[name].norm()).item() for name in theirs]
    with torch.no_grad():
        torch._foreach_copy_(adapters, before)
    print(f"{rows} rows, made alike against as they are: {max(errors):.4f} of a gradient at most")
    assert max(errors) <= 0.03


@pytest.mark.parametrize("level", LEVELS)
def test_an_optimizer_step_is_seen_by_the_next_replay(level: str, loaded: Any) -> None:
    model, batch = warmed(loaded, level, draw_batch()), draw_batch(3)
    models.loss_and_gradients(model, batch)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.01 * parameter.grad.sign())
    assert_equal(models.loss_and_gradients(model, batch), eager(model, batch))


def test_gradients_accumulate_over_replays(loaded: Any) -> None:
    model, batches = warmed(loaded, "keep", draw_batch()), [draw_batch(seed) for seed in (4, 5)]

    def accumulate() -> dict[str, Tensor]:
        model.zero_grad(set_to_none=True)
        for batch in batches:
            model(**batch).loss.backward()
        return support.trainable_gradients(model)

    ours = {name: grad.clone() for name, grad in accumulate().items()}
    fastft.patch(model, cuda_graphs=False)
    assert_equal(ours, accumulate())


def test_other_lengths_run_eagerly_in_between(loaded: Any) -> None:
    model, short = warmed(loaded, "keep", draw_batch()), draw_batch(6, length=160)
    ours = models.loss_and_gradients(model, short)
    replays = graphs_of(model).replays
    again = models.loss_and_gradients(model, draw_batch(1))
    assert graphs_of(model).replays == replays + 4, "the graph is still good for its own shape"
    assert_equal(ours, eager(model, short))
    assert_equal(again, eager(model, draw_batch(1)))


def test_two_forwards_before_their_backwards(loaded: Any) -> None:
    """The second finds the buffers taken and runs eagerly."""
    model, batches = warmed(loaded, "keep", draw_batch()), [draw_batch(7), draw_batch(8)]

    def both() -> dict[str, Tensor]:
        model.zero_grad(set_to_none=True)
        losses = [model(**batch).loss for batch in batches]
        (losses[0] + 2 * losses[1]).backward()
        return {name: grad.clone() for name, grad in support.trainable_gradients(model).items()}

    ours = both()
    fastft.patch(model, cuda_graphs=False)
    assert_equal(ours, both())


def test_a_forward_without_a_backward_frees_the_buffers(loaded: Any) -> None:
    model = warmed(loaded, "keep", draw_batch())
    loss = model(**draw_batch(9)).loss
    del loss
    replays = graphs_of(model).replays
    models.loss_and_gradients(model, draw_batch(9))
    assert graphs_of(model).replays == replays + 4


def test_a_retained_graph_gives_the_same_gradients_twice(loaded: Any) -> None:
    model = warmed(loaded, "keep", draw_batch())
    model.zero_grad(set_to_none=True)
    loss = model(**draw_batch(10)).loss
    loss.backward(retain_graph=True)
    first = {name: grad.clone() for name, grad in support.trainable_gradients(model).items()}
    model.zero_grad(set_to_none=True)
    loss.backward()
    assert_equal(first, support.trainable_gradients(model))


def test_one_layer_changed_captures_the_model_anew(loaded: Any) -> None:
    """What a layer keeps would lie where another's old capture writes, if only the one were captured again."""
    model, batch = warmed(loaded, "keep", draw_batch()), draw_batch(16)
    fastft.patch(model, memory_levels={0: "lean", 2: "recompute"})
    for _ in range(WARM):
        models.loss_and_gradients(model, draw_batch())
    assert graphs_of(model).captured == 4, graphs_of(model).reason
    ours = models.loss_and_gradients(model, batch)
    assert_equal(ours, eager(model, batch))


def test_evaluation_in_between_changes_nothing(loaded: Any) -> None:
    model, batch = warmed(loaded, "recompute", draw_batch()), draw_batch(11)
    expected = models.loss_and_gradients(model, batch)
    model.eval()
    with torch.no_grad():
        loss = model(**batch).loss
    model.train()
    torch.testing.assert_close(loss, expected["loss"], rtol=1e-3, atol=1e-3)
    assert_equal(models.loss_and_gradients(model, batch), expected)


def test_a_disabled_adapter_is_not_replayed(loaded: Any) -> None:
    model, batch = warmed(loaded, "keep", draw_batch()), draw_batch(12)
    with_adapter = model(**batch).loss.detach()
    with model.disable_adapter():
        without = model(**batch).loss.detach()
    again = model(**batch).loss.detach()
    assert not torch.equal(with_adapter, without)
    assert torch.equal(with_adapter, again)


def test_a_mask_or_another_stream_is_safe(loaded: Any) -> None:
    model, batch = warmed(loaded, "keep", draw_batch()), draw_batch(13)
    mask = torch.ones_like(batch["input_ids"])
    mask[0, :40] = 0
    padded = models.loss_and_gradients(model, batch | {"attention_mask": mask})
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        aside = models.loss_and_gradients(model, batch)
    torch.cuda.current_stream().wait_stream(stream)
    assert_equal(padded, eager(model, batch | {"attention_mask": mask}))
    assert_equal(aside, eager(model, batch))


def test_autocast_and_float32_residuals(tmp_path: pathlib.Path) -> None:
    """As under a trainer with bf16=True over a float32 model."""
    model = fastft.patch(models.load_qlora(tmp_path, torch.float32, **models.MIDDLE))

    def run(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        with torch.autocast("cuda", torch.bfloat16):
            return models.loss_and_gradients(model, batch)

    for _ in range(WARM):
        run(draw_batch())
    captured, ours = graphs_of(model).captured, run(draw_batch(14))
    fastft.patch(model, cuda_graphs=False)
    assert_equal(ours, run(draw_batch(14)))
    assert captured == 4


def test_memory_stays_flat_and_comes_back(loaded: Any) -> None:
    model, batch = warmed(loaded, "keep", draw_batch()), draw_batch(15)
    models.loss_and_gradients(model, batch)
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        models.loss_and_gradients(model, batch)
    assert torch.cuda.memory_allocated() <= before
    held = graphs_of(model).held_bytes
    assert held > 0
    fastft.patch(model, cuda_graphs=False)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before - held * 9 // 10
    assert graphs_of(model).held_bytes == 0


def test_the_report_says_what_is_replayed(loaded: Any) -> None:
    model = warmed(loaded, "keep", draw_batch())
    assert "CUDA graphs: 4 layers captured" in str(fastft.report(model))
    fastft.patch(model, cuda_graphs=False)
    assert "CUDA graphs: switched off" in str(fastft.report(model))


def test_a_failed_capture_leaves_the_model_eager(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fastft.patch(loaded, cuda_graphs=False)
    fastft.patch(model, cuda_graphs=True, memory_levels="keep")
    graphs = graphs_of(model)

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no capture today")

    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda.CUDAGraph, "capture_begin", refuse)
        for _ in range(WARM):
            models.loss_and_gradients(model, draw_batch())
    assert graphs.captured == 0
    assert "no capture today" in graphs.reason
    fastft.patch(model, cuda_graphs=False)  # forgets the failure
    warmed(model, "keep", draw_batch())
