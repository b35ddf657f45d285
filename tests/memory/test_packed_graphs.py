"""Packed rows replayed from graphs: boundaries that differ from step to step, lines made alike; on the CPU.

Attention over boundaries that are read from their tensor when it runs, as FlashAttention does, is spelled out here.
tests/gpu/test_graphs.py has the real one.
"""

from __future__ import annotations

import itertools
import pathlib
import types
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import fastft
from fastft.kernels import document_attention as attention
from fastft.kernels.document_attention import Documents
from fastft.memory import captures, row_lengths
from fastft.memory.captures import Boundaries
from fastft.memory.graphs import ModelGraphs
from fastft.memory.row_lengths import RowLengths, alike_length
from fastft.patching import levels
from fastft.patching.plan import inner_model
from tests import support
from tests.memory.tapes import Tape, install
from tests.patching.helpers import relative_error
from tests.saving.tokenizers import byte_level

LAYERS = 3
WARM = 4  # steps, of which the last one captures
FILLED = 256  # tokens of the longest row that shorter ones are filled up to
Batch = dict[str, Tensor]


def over_boundaries(
    query: Tensor, key: Tensor, value: Tensor, documents: Any, scale: float | None, window: int | None
) -> Tensor:
    """Causal attention `[tokens, heads, head_dim]`; knows of the documents only what FlashAttention is told."""
    outputs = []
    ends = documents.boundaries.tolist()
    assert ends[-1] == len(query)
    for begin, end in itertools.pairwise(ends):
        assert end - begin <= documents.longest
        if begin == end:
            continue
        parts = [x[begin:end].transpose(0, 1)[None] for x in (query, key, value)]
        mask = attention.band(end - begin, window, query.device)
        output = functional.scaled_dot_product_attention(*parts, attn_mask=mask, scale=scale, enable_gqa=True)
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


class SavesBoundaries(torch.autograd.Function):
    """Saves boundaries as FlashAttention does: autograd then checks that nobody has written to them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, boundaries: Tensor) -> Tensor:
        ctx.save_for_backward(boundaries)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        _ = ctx.saved_tensors
        return grad, None


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs for CPU layers, and attention that reads boundaries when it runs."""
    install(monkeypatch)
    monkeypatch.setattr(attention, "takes_varlen", lambda *_: True)
    monkeypatch.setattr(attention, "_varlen", lambda: over_boundaries)

    def worth(self: RowLengths, test: Any, tokens: int, _: torch.device) -> bool:
        return self._open() and (test is not captures.fills or tokens <= FILLED)

    monkeypatch.setattr(RowLengths, "_worth", worth)


def build(family: str = "llama", level: str = "keep", **settings: Any) -> Any:
    """A fast model with adapters."""
    model = support.add_lora(support.build_model(family, num_hidden_layers=LAYERS, **settings))
    return fastft.patch(model, memory_levels=level)


def packed(*lengths: int, seed: int = 0, rows: int = 1) -> Batch:
    """Documents of these lengths in each row, as a collator gives them."""
    total = sum(lengths)
    ids = torch.randint(3, 128, (rows, total), generator=torch.Generator().manual_seed(seed))
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(rows, total).contiguous()
    return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}


def graphs_of(model: Any) -> ModelGraphs:
    return levels.graphs_of(inner_model(model).model)


def step(model: Any, batch: Batch) -> dict[str, Tensor]:
    """Loss and gradients of one step."""
    model.zero_grad(set_to_none=True)
    loss = model(**batch).loss
    loss.backward()
    return {"loss": loss.detach()} | {n: g.clone() for n, g in support.trainable_gradients(model).items()}


def assert_eager(model: Any, ours: dict[str, Tensor], batch: Batch, error: float = 0.0) -> None:
    """`ours` is what the same step gives without graphs, to the bit or up to `error`."""
    fastft.patch(model, cuda_graphs=False)
    theirs = step(model, batch)
    fastft.patch(model, cuda_graphs=True)
    if error:
        assert max(relative_error(ours[name], theirs[name]) for name in theirs) <= error
    else:
        assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("level", ["keep", "recompute"])
@pytest.mark.parametrize(("family", "settings"), [("llama", {}), ("mistral", {"sliding_window": 9})])
def test_each_step_has_boundaries_of_its_own(family: str, settings: dict[str, Any], level: str) -> None:
    model = build(family, level, **settings)
    for seed, lengths in enumerate([(50, 40, 38), (60, 60, 8), (20, 58, 50), (64, 33, 31)]):
        step(model, packed(*lengths, seed=seed))
    assert graphs_of(model).captured == LAYERS, graphs_of(model).reason
    batch, replays = packed(30, 35, 63, seed=7), graphs_of(model).replays
    ours = step(model, batch)
    assert graphs_of(model).replays == replays + LAYERS
    assert len(Tape.recorded) == 2 * LAYERS
    assert_eager(model, ours, batch)


def test_fewer_documents_than_there_is_room_for_and_rows_of_their_own() -> None:
    model = build()
    for seed in range(WARM):
        step(model, packed(30, 20, 6, 8, seed=seed, rows=2))
    batch = packed(32, 32, seed=7, rows=2)
    replays = graphs_of(model).replays
    ours = step(model, batch)
    assert graphs_of(model).replays == replays + LAYERS
    assert_eager(model, ours, batch)


@pytest.mark.parametrize("lengths", [(16,) * 8, (100, 28)])
def test_more_or_longer_documents_run_eagerly_until_there_is_room(lengths: tuple[int, ...]) -> None:
    model = build()
    for seed in range(WARM):
        step(model, packed(40, 40, 48, seed=seed))
    batch = packed(*lengths, seed=7)
    replays = graphs_of(model).replays
    ours = step(model, batch)
    assert graphs_of(model).replays == replays
    for seed in range(WARM - 1):
        step(model, packed(40, 40, 48, seed=seed))
    assert len(Tape.recorded) == 4 * LAYERS, "captured anew, with room for all that has been seen"
    again = step(model, batch)
    assert graphs_of(model).replays > replays
    assert_eager(model, ours, batch)
    assert_eager(model, again, batch)


@pytest.mark.parametrize("level", ["keep", "recompute"])
def test_one_layer_that_waits_for_its_backward_reads_its_own_forward_s_boundaries(level: str) -> None:
    """An early hidden state outlives its forward: the later layers' graphs are free, the boundaries are not."""
    model = build("llama", level)
    for seed in range(WARM):
        step(model, packed(40, 40, 48, seed=seed))
    first, second = packed(30, 35, 63, seed=7), packed(60, 20, 48, seed=8)
    gradients = []
    for replayed in (True, False):
        fastft.patch(model, cuda_graphs=replayed)
        if replayed:
            for seed in range(WARM):
                step(model, packed(40, 40, 48, seed=seed))
        model.zero_grad(set_to_none=True)
        before = graphs_of(model).replays
        early = model(**first, output_hidden_states=True).hidden_states[1]
        assert graphs_of(model).replays - before == (LAYERS if replayed else 0)
        model(**second)
        early.square().sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert [n for n, grad in gradients[1].items() if not torch.equal(grad, gradients[0][n])] == []


def test_a_load_is_no_write_to_what_a_capture_saved() -> None:
    """Attention saves the buffer in its own graph when captured; the next forward's load must not spoil the backward.

    The tape here runs the forward anew at each replay, so a model would not show it: tests/gpu/test_parity.py did.
    """
    device = torch.device("cpu")
    boundaries = Boundaries(Documents(1, 128, (40, 40, 48), device), 4, 64)
    x = torch.ones(128, requires_grad=True)
    output = SavesBoundaries.apply(x, boundaries.documents.boundaries)
    boundaries.load(Documents(1, 128, (64, 31, 33), device))
    assert boundaries.documents.boundaries.tolist() == [0, 64, 95, 128, 128]
    output.sum().backward()


def test_full_rows_and_packed_ones_have_graphs_of_their_own() -> None:
    model = build()
    for seed in range(WARM):
        step(model, packed(40, 40, 48, seed=seed))
    plain = {name: tensor for name, tensor in packed(128, seed=3).items() if name != "position_ids"}
    ours = step(model, plain)
    assert_eager(model, ours, plain)


@pytest.mark.parametrize("given", ["input_ids", "inputs_embeds"])
def test_lines_of_like_lengths_are_made_alike(given: str) -> None:
    """Nothing attends to what is added, and no gradient comes to it; what comes out has the length that came in."""
    model = build()
    embed = model.get_input_embeddings()

    def batch(*lengths: int, seed: int = 0) -> Batch:
        found = packed(*lengths, seed=seed)
        if given == "inputs_embeds":
            found["inputs_embeds"] = embed(found.pop("input_ids")).detach()
        return found

    for seed, last in enumerate([40, 31, 45, 40, 38]):
        step(model, batch(50, 30, last, seed=seed))
    assert graphs_of(model).captured == LAYERS
    some, replays = batch(50, 30, 33, seed=8), graphs_of(model).replays
    ours = step(model, some)
    assert graphs_of(model).replays == replays + LAYERS
    assert_eager(model, ours, some, 2e-6)
    assert model(**{name: t for name, t in some.items() if name != "labels"}).logits.shape[1] == 113


def test_lines_are_left_alone_where_somebody_looks_or_graphs_are_off() -> None:
    model, seen = build(), []
    backbone = inner_model(model).model
    backbone.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    for seed in range(2):
        step(model, packed(50, 30, 20, seed=seed))
    out = model(**packed(50, 30, 20), output_hidden_states=True)
    assert {state.shape[1] for state in out.hidden_states} == {100}
    fastft.patch(model, cuda_graphs=False)
    step(model, packed(50, 30, 20))
    with torch.no_grad():
        model(**packed(50, 30, 20), use_cache=False)
    assert seen == [100, 128, 100, 100, 100]


def ragged(*lengths: int, seed: int = 0, side: str = "right", mask: bool = True) -> Batch:
    """Rows of these lengths, padded to the longest as a collator does it."""
    longest = max(lengths)
    ids = torch.randint(3, 128, (len(lengths), longest), generator=torch.Generator().manual_seed(seed))
    places = torch.arange(longest)
    real = torch.stack([places < n if side == "right" else places >= longest - n for n in lengths])
    batch = {"input_ids": ids, "labels": ids.masked_fill(~real, -100)}
    return batch | ({"attention_mask": real.long()} if mask else {})


def seen_shapes(model: Any) -> list[tuple[int, ...]]:
    """`[rows, length]` of what reaches the layers, from now on."""
    seen: list[tuple[int, ...]] = []
    inner_model(model).model.rotary_emb.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape[:2])))
    return seen


BATCHES = {
    "padded": [(20, 13), (17, 8), (30, 21), (25, 25), (9, 4)],
    "one at a time": [(20,), (17,), (30,), (25,), (9,)],
}


@pytest.mark.parametrize("level", ["keep", "recompute"])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", BATCHES)
def test_short_rows_of_any_length_are_replayed_as_one(kind: str, side: str, level: str) -> None:
    """A full batch among padded ones too. Gradients are those of the rows by themselves, logits have their shape."""
    model = build(level=level)
    seen = seen_shapes(model)
    for seed, lengths in enumerate(BATCHES[kind]):
        step(model, ragged(*lengths, seed=seed, side=side))
    assert graphs_of(model).captured == LAYERS, graphs_of(model).reason
    assert seen[1:] == [(1, 128)] * 4, "once a second length is seen"
    batch, replays = ragged(*BATCHES[kind][0], seed=8, side=side), graphs_of(model).replays
    ours = step(model, batch)
    assert graphs_of(model).replays == replays + LAYERS
    assert_eager(model, ours, batch, 2e-6)
    alone = {name: tensor for name, tensor in batch.items() if name != "labels"}
    assert model(**alone).logits.shape[:2] == batch["input_ids"].shape


def test_full_batches_without_a_mask_are_rows_too() -> None:
    model = build()
    for seed in range(5):
        step(model, ragged(*(12 + seed,) * 2, seed=seed, mask=False))
    assert graphs_of(model).captured == LAYERS, graphs_of(model).reason
    batch, replays = ragged(19, 19, seed=8, mask=False), graphs_of(model).replays
    ours = step(model, batch)
    assert graphs_of(model).replays == replays + LAYERS
    assert_eager(model, ours, batch, 2e-6)


def test_batches_that_are_always_alike_are_left_as_they_are() -> None:
    for lengths, shape in (((20, 12), (1, 32)), ((20, 20), (2, 20))):
        model = build()
        seen = seen_shapes(model)
        for seed in range(3):
            step(model, ragged(*lengths, seed=seed))
        assert seen == [shape] * 3


def test_one_odd_batch_among_equal_ones_makes_no_difference() -> None:
    """The last one of an epoch; and where lengths have long stopped to vary, batches are left alone again."""
    model = build()
    seen = seen_shapes(model)
    for seed, length in enumerate([20, 20, 20, 9, 20]):
        step(model, ragged(length, seed=seed))
    assert seen == [(1, length) for length in (20, 20, 20, 9, 20)]
    for seed in range(8):
        step(model, ragged(10 + seed, seed=seed))
    assert seen[-1] == (1, 128)
    for seed in range(16):
        step(model, ragged(20, seed=seed))
    assert seen[-2:] == [(1, 128), (1, 20)]


def test_rows_are_as_long_as_the_longest_was_and_beyond_the_limit_their_own() -> None:
    model = build()
    seen = seen_shapes(model)
    for seed, length in enumerate([20, 30, 140, 25, 300, 40, 50]):
        step(model, ragged(length, seed=seed))
    assert [shape[1] for shape in seen] == [20, 128, 256, 256, 300, 256, 256]
    step(model, ragged(60, seed=8))
    step(model, ragged(70, seed=9))
    assert graphs_of(model).captured == LAYERS, graphs_of(model).reason


def test_what_is_added_stands_at_position_0() -> None:
    """Angles that are scaled by the largest position of a batch (longrope, dynamic) are those of its text."""
    model, largest = build(), []

    def look(_: Any, args: Any, kwargs: Any) -> None:
        largest.append(int(kwargs.get("position_ids", args[-1]).max()))

    inner_model(model).model.rotary_emb.register_forward_pre_hook(look, with_kwargs=True)
    for seed, lengths in enumerate([(20, 13), (17, 8), (30, 21)]):
        step(model, ragged(*lengths, seed=seed))
    step(model, packed(50, 30, 20))
    assert largest == [19, 16, 29, 49]


def test_a_pass_without_gradient_is_computed_alike() -> None:
    """DPO compares one with a pass with gradient: in training mode both are made as long; in evaluation none is."""
    model = build()
    for seed, lengths in enumerate([(20, 13), (17, 8)]):
        step(model, ragged(*lengths, seed=seed))
    seen = seen_shapes(model)
    batch = ragged(16, 11, seed=5)
    with torch.no_grad():
        model(**batch, use_cache=False)
    step(model, batch)
    model.eval()
    with torch.no_grad():
        model(**batch, use_cache=False)
    assert seen == [(1, 128), (1, 128), (2, 16)]


def test_rows_are_left_alone_where_their_like_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under level offload longer rows would bring nothing; it is tried again later, with shorter ones first."""
    monkeypatch.setattr(row_lengths, "_PAUSE", 2)
    model = build(level="offload")
    seen = seen_shapes(model)
    for seed, lengths in enumerate([(20, 13), (17, 8), (30, 21)]):
        step(model, ragged(*lengths, seed=seed))
    assert seen == [(1, 33), (1, 25), (1, 51)]
    fastft.patch(model, memory_levels="keep")
    for seed, lengths in enumerate([(7, 6), (8, 6), (9, 6), (70, 60), (20, 17)]):
        step(model, ragged(*lengths, seed=seed))
    assert seen[3:] == [(1, 13), (1, 14), (1, 15), (1, 256), (1, 256)]
    fastft.patch(model, memory_levels="offload")
    step(model, ragged(60, 20, seed=3))
    fastft.patch(model, memory_levels="keep")
    for seed, lengths in enumerate([(7, 6), (8, 6), (9, 6), (20, 17)]):
        step(model, ragged(*lengths, seed=seed))
    assert seen[8:] == [(1, 256), (1, 13), (1, 14), (1, 15), (1, 128)], "not as long as what was offloaded"


def test_rows_are_left_alone_where_somebody_looks_into_the_batch() -> None:
    model = build()
    seen = seen_shapes(model)
    for seed, lengths in enumerate([(20, 13), (17, 8), (30, 21)]):
        model(**ragged(*lengths, seed=seed), output_hidden_states=True).loss.backward()
    assert seen == [(2, 20), (2, 17), (2, 30)]


@pytest.mark.parametrize(("tokens", "alike"), [(1, 128), (128, 128), (2040, 2048), (6100, 6144), (6145, 6400)])
def test_lengths_that_rows_are_made(tokens: int, alike: int) -> None:
    assert alike_length(tokens) == alike


@pytest.mark.parametrize(
    ("capability", "processors", "tokens"),
    [((9, 0), 132, 4096), ((8, 0), 108, 1024), ((8, 9), 128, 1024), ((10, 0), 148, 8192)],
    ids=["H100", "A100", "4090", "B200"],
)
def test_rows_are_filled_up_to_what_a_device_computes_while_a_host_launches(
    capability: tuple[int, int], processors: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a layer of Llama 3.2 1B, 61 million weights; the limit lies between `tokens` and twice as many."""
    facts = types.SimpleNamespace(major=capability[0], minor=capability[1], multi_processor_count=processors)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    captures._rate.cache_clear()
    device = torch.device("cuda", 0)
    assert captures.fills(2.0 * tokens * 61e6, device)
    assert not captures.fills(4.0 * tokens * 61e6, device)
    captures._rate.cache_clear()


@pytest.mark.trl
@pytest.mark.slow
def test_trls_packing_is_replayed_and_logs_the_same(tmp_path: pathlib.Path) -> None:
    """Rows that bfd packing filled nearly, laid end to end, two micro-batches a step."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(8, 150, (300,), generator=generator).tolist()
    rows = [torch.randint(3, 100, (n,), generator=generator).tolist() for n in lengths]
    logs = []
    for replays in (True, False):
        model = fastft.patch(build(vocab_size=300), cuda_graphs=replays)
        trainer = SFTTrainer(
            model=model,
            processing_class=byte_level(),
            train_dataset=Dataset.from_dict({"input_ids": rows}),
            args=SFTConfig(
                output_dir=str(tmp_path),
                packing=True,
                max_length=256,
                per_device_train_batch_size=2,
                gradient_accumulation_steps=2,
                max_steps=8,
                logging_steps=1,
                report_to=[],
                use_cpu=True,
            ),
        )
        trainer.train()
        logs.append([entry for entry in trainer.state.log_history if "loss" in entry])
        assert (graphs_of(model).replays > 4 * LAYERS) == replays
    for ours, theirs in zip(*logs, strict=True):
        for name in ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5), name
