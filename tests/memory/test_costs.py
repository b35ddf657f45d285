"""What a layer is said to save against what autograd saves, and how the working bytes grow."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fastft
from fastft.autograd.attention_half import Heads
from fastft.autograd.autocast import AutocastState
from fastft.autograd.decoder_layer import apply_layer
from fastft.autograd.layer_call import LayerCall
from fastft.autograd.mlp_half import TILE_BYTES
from fastft.kernels.nf4 import QuantizedWeight
from fastft.memory.costs import LayerShape, StepCosts, step_costs, with_gradients, without_graphs
from fastft.memory.planner import LEVELS, make_plan, predict_peak
from fastft.patching import layer_costs, size_plans
from fastft.patching.plan import inner_model
from tests import support
from tests.autograd import pieces
from tests.autograd.test_decoder_layer import draw_call
from tests.patching.helpers import decoder_layers, saved_bytes

SAVING = ("keep", "lean", "recompute")  # offload saves nothing on the device
LLAMA_8B = LayerShape(
    hidden=4096,
    query=4096,
    key_value=1024,
    heads=32,
    intermediate=14336,
    qkv_rank=96,
    output_rank=32,
    gate_up_rank=64,
    down_rank=32,
    head_norms=False,
    compute_bytes=2,
    stream_bytes=2,
    copied=True,
)


class Fused(torch.autograd.Function):
    """Attention that saves what flash attention does: Q, K, V, O and a float32 a row and head. Values do not matter."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[batch, heads, sequence, head_dim] to [batch, sequence, heads, head_dim]."""
        output = query.transpose(1, 2).clone(memory_format=torch.contiguous_format)
        statistics = torch.zeros(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, statistics)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, _, _ = ctx.saved_tensors
        return grad.transpose(1, 2) + query, torch.ones_like(key), torch.ones_like(value)


def costs(shape: LayerShape, tokens: int, **changes: Any) -> StepCosts:
    given: dict[str, Any] = {"longest": 1024, "vocabulary": 1000, "loss_chunk": 0}
    return step_costs(shape, tokens=tokens, **{**given, **changes})


# What is saved.


def rank_of(*group: Any) -> int:
    """Columns of X Aᵀ of one product: those of 4-bit weights come in eights."""
    rank = sum(p.rank for p in group)
    return -(-rank // 8) * 8 if isinstance(group[0].weight, QuantizedWeight) else rank


def shape_of(call: LayerCall, stream: torch.dtype, compute: torch.dtype) -> LayerShape:
    width, heads = call.output.out_features, call.heads
    return LayerShape(
        hidden=width,
        query=heads.query * heads.dim,
        key_value=heads.key_value * heads.dim,
        heads=heads.query,
        intermediate=call.gate_up[0].out_features,
        qkv_rank=rank_of(*call.qkv),
        output_rank=rank_of(call.output),
        gate_up_rank=rank_of(*call.gate_up),
        down_rank=rank_of(call.down),
        head_norms=call.head_norms is not None,
        compute_bytes=compute.itemsize,
        stream_bytes=stream.itemsize,
        copied=isinstance(call.output.weight, QuantizedWeight),
    )


def saved_by_autograd(call: LayerCall, x: Tensor, angles: tuple[Tensor, Tensor]) -> int:
    """Bytes of the storages that the layer's forward keeps alive, leaves and what came in from outside left out."""
    outside = {t.untyped_storage().data_ptr() for t in (*angles, *(leaf for leaf in call.leaves() if leaf is not None))}
    kept: dict[int, int] = {}
    alive = []  # so that no address is seen twice for two storages

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in outside:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = apply_layer(x, *angles, call)
    y.sum().backward()
    return sum(kept.values())


SHAPES: dict[str, dict[str, Any]] = {
    "grouped queries": {"hidden": 32, "intermediate": 48, "heads": Heads(query=4, key_value=2, dim=8)},
    "all heads alike, wide heads": {"hidden": 24, "intermediate": 96, "heads": Heads(query=3, key_value=3, dim=16)},
    "one adapter": {
        "hidden": 32,
        "intermediate": 40,
        "heads": Heads(query=2, key_value=1, dim=8),
        "ranks": (None, None, 3, None, None, None, None),
    },
    "an adapter of its own rank each": {
        "hidden": 32,
        "intermediate": 40,
        "heads": Heads(query=2, key_value=1, dim=8),
        "ranks": (1, 2, 3, 5, 6, 7, 9),
    },
}


@pytest.mark.parametrize("head_norms", [False, True], ids=["", "head norms"])
@pytest.mark.parametrize("quantized", [None, "flat"], ids=["dense", "4 bits"])
@pytest.mark.parametrize("precision", ["float32", "autocast", "bfloat16"])
@pytest.mark.parametrize("name", SHAPES)
def test_saved_bytes_are_what_autograd_saves(
    name: str, precision: str, quantized: str | None, head_norms: bool
) -> None:
    """To the byte, whole storages counted: a view that keeps a buffer with room alive would show."""
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    call = draw_call(
        **SHAPES[name], dtype=dtype, head_norms=head_norms, quantized=quantized, adapter_dtype=torch.float32
    )
    call = replace(call, attention=Fused.apply)
    batch, sequence = 3, 7
    x = pieces.draw(batch, sequence, SHAPES[name]["hidden"], dtype=dtype, requires_grad=True)
    angles = pieces.draw_angles(1, sequence, call.heads.dim, dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        call = replace(call, autocast=AutocastState.current("cpu"))
        saved = {level: saved_by_autograd(replace(call, level=level), x, angles) for level in SAVING}
    shape = shape_of(call, dtype, call.autocast.compute_dtype(dtype))
    assert saved == {level: costs(shape, batch * sequence).levels[level].saved for level in SAVING}


@pytest.fixture
def fused_attention() -> Any:
    """`Fused` as an attention implementation of transformers; yields its name."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def interface(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return Fused.apply(query, key, value), None

    ALL_ATTENTION_FUNCTIONS.register("fastft_test_fused", interface)
    return "fastft_test_fused"


@pytest.mark.parametrize("level", SAVING)
@pytest.mark.parametrize("kind", ["dense", "nf4", "autocast", "qwen3"])
def test_the_shape_is_read_off_the_model(kind: str, level: str, fused_attention: str, tmp_path: Any) -> None:
    """Two more layers of a planned model save twice what the planner reckons with for one."""
    family = "qwen3" if kind == "qwen3" else "llama"
    batch = support.random_batch(rows=2, length=128)  # 256 tokens: a size that is planned for as it is
    saved, planned = [], 0
    for layers in (2, 4):
        model = support.build_model(family, num_hidden_layers=layers)
        if kind == "nf4":
            model = support.load_4bit(model, tmp_path)
        model = fastft.patch(support.add_lora(model, r=3), memory_levels=level)
        inner_model(model).config._attn_implementation = fused_attention
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            saved.append(saved_bytes(model, batch))
            found = layer_costs.costs_of(inner_model(model).model, list(decoder_layers(model)), 256, 128)
        assert found is not None
        planned = found[0].levels[level].saved
    assert saved[1] - saved[0] == 2 * planned


@pytest.mark.parametrize(
    ("autocast", "quantized", "copied"), [(False, False, False), (True, False, True), (False, True, True)]
)
def test_weights_that_each_use_copies(
    autocast: bool, quantized: bool, copied: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dequantized, or cast by autocast: the copies are alive while a layer works."""
    model = support.build_model()
    if quantized:
        model = support.load_4bit(model, tmp_path)
    model = fastft.patch(support.add_lora(model))
    shapes: list[LayerShape] = []
    nothing = StepCosts({}, 0, 0)
    monkeypatch.setattr(layer_costs, "step_costs", lambda shape, **_: shapes.append(shape) or nothing)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        layer_costs.costs_of(inner_model(model).model, list(decoder_layers(model)), 256, 128)
    assert [shape.copied for shape in shapes] == [copied] * 3
    assert {(shape.compute_bytes, shape.stream_bytes) for shape in shapes} == {(2 if autocast else 4, 4)}


@pytest.mark.parametrize("trained", ["adapters", "everything", "everything, tied", "adapters and the head"])
def test_a_head_that_trains_is_known(trained: str) -> None:
    """Its gradient is summed in float32, [vocabulary, hidden]; and it takes part in what is still to be allocated."""
    model = support.build_model(tie_word_embeddings=trained.endswith("tied"))
    if not trained.startswith("everything"):
        kept = ["lm_head"] if trained.endswith("head") else None
        model = support.add_lora(model, modules_to_save=kept)
    model = fastft.patch(model)
    body = inner_model(model).model
    found = layer_costs.costs_of(body, list(decoder_layers(model)), 256, 128)
    assert found is not None
    frozen = costs(levels_shape(model), 256, longest=128, vocabulary=128, loss_chunk=256 * 128 * 4)
    head = 4 * 128 * 64
    assert found[0].loss_working == frozen.loss_working + (0 if trained == "adapters" else head)
    _, gradients = size_plans._start(body, size_plans.Memory(), 0)
    assert gradients == sum(p.nbytes for p in model.parameters() if p.requires_grad)


def levels_shape(model: Any) -> LayerShape:
    """The tiny Llama's, as far as the loss asks."""
    return replace(LLAMA_8B, hidden=64, compute_bytes=4, stream_bytes=4)


# How it adds up.


def test_levels_go_from_memory_to_time() -> None:
    found = costs(LLAMA_8B, 8192).levels
    assert tuple(found) == LEVELS
    saved = [found[level].saved for level in LEVELS]
    assert saved == sorted(saved, reverse=True)
    assert saved[-1] == 0
    seconds = [found[level].seconds for level in LEVELS]
    assert seconds[0] == 0.0
    assert seconds == sorted(seconds)
    assert len(set(seconds)) == 4
    x = 8192 * 4096 * 2
    assert [found[level].host for level in LEVELS] == [0, 0, 0, x]
    assert found["recompute"].saved == x
    # the design's own table: 94 kB a token for keep, 37 for lean (adapters' X Aᵀ aside)
    assert found["keep"].saved / 8192 == pytest.approx(94e3, rel=0.02)
    assert found["lean"].saved / 8192 == pytest.approx(37e3, rel=0.04)


@pytest.mark.parametrize("level", LEVELS)
def test_working_bytes_grow_with_tokens(level: str) -> None:
    """In proportion while the MLP is one tile; twice the tokens never take less than twice what is not weights."""
    dense = replace(LLAMA_8B, copied=False)
    one, two, four = (costs(dense, tokens).levels[level].working for tokens in (1024, 2048, 4096))
    assert (two, four) == (2 * one, 4 * one)
    weights = costs(LLAMA_8B, 1024).levels[level].working - one
    assert 0 < weights <= 2 * 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("tokens", [2**13, 2**17, 2**20])
def test_long_batches_hold_one_tile_of_the_mlp(level: str, tokens: int) -> None:
    """However long the batch, a layer as wide as one likes needs no more than a tile of its width at once."""
    wide = replace(LLAMA_8B, copied=False)
    narrow = replace(wide, intermediate=128)
    of = functools.partial(costs, away="input")  # how much goes away depends on the width as well
    difference = of(wide, tokens).levels[level].working - of(narrow, tokens).levels[level].working
    assert abs(difference) <= 1.2 * TILE_BYTES
    forward = of(wide, tokens).forward_working - of(narrow, tokens).forward_working
    assert abs(forward) <= 1.2 * TILE_BYTES
    # what is left of the growth is as wide as the residual stream and attention
    growth = of(wide, 2 * tokens).levels[level].working - of(wide, tokens).levels[level].working
    assert growth <= 2 * tokens * (14 * 4096 + 6 * 1024) + TILE_BYTES // 4


def test_small_tiles_take_less_memory_and_more_time() -> None:
    usual, compact = costs(LLAMA_8B, 8192), costs(LLAMA_8B, 8192, compact=2048)
    saved_by_tiles = 2048 * 2 * (3 * 14336 + 64 + 4096 + 32)  # tiles of 2,048 rows instead of 4,096
    for level in LEVELS:
        assert compact.levels[level].saved == usual.levels[level].saved
        assert compact.levels[level].seconds > usual.levels[level].seconds
    assert usual.levels["recompute"].working - compact.levels["recompute"].working == saved_by_tiles
    assert compact.forward_working < usual.forward_working
    assert costs(LLAMA_8B, 2048, compact=2048).levels == costs(LLAMA_8B, 2048).levels  # one tile in any case


def test_grouped_queries_cost_attention_s_backward_keys_of_every_head() -> None:
    """8B, r=32, one long row: dK and dV of 32 heads in 16 bits, 16 KiB a token."""
    shape = replace(LLAMA_8B, qkv_rank=96, output_rank=32, gate_up_rank=64, down_rank=32)
    found = costs(shape, 148480, longest=148480)
    grouped = found.levels["recompute"].working
    each = costs(replace(shape, key_value=4096), 148480, longest=148480).levels["recompute"].working
    more = 2 * 2 * (4096 - 1024) * 148480 * 2  # wider Q K V, twice in the peak, kept and as gradients
    assert grouped - (each - more) == pytest.approx(2 * 4096 * 2 * 148480, rel=0.05)


def test_gradients_come_as_backwards_end() -> None:
    """Step by step: each layer's backward adds its gradients and lets go of what the layer saved."""
    found, each, layers, base = costs(LLAMA_8B, 8192), 40 * 2**20, 32, 10**9
    level = found.levels["recompute"]
    held = base + layers * level.saved
    expected = held + found.loss_working
    for done in range(layers):
        expected = max(expected, held + (done + 1) * each - done * level.saved + level.working)
    predicted = predict_peak(
        ["recompute"] * layers,
        with_gradients(found, each).levels,
        base=base + layers * each,
        forward_working=found.forward_working,
        loss_working=found.loss_working,
    )
    assert predicted == expected


def test_small_tiles_rather_than_layers_without_their_graphs() -> None:
    """A 1B model at 2 × 2048 tokens and 1.84 GiB: offload cannot be captured, small tiles can."""
    shape = replace(
        LLAMA_8B,
        hidden=2048,
        query=2048,
        key_value=512,
        intermediate=8192,
        qkv_rank=48,
        output_rank=16,
        gate_up_rank=32,
        down_rank=16,
    )
    logits = 1024 * 128256 * 2
    given: dict[str, Any] = {"longest": 2048, "vocabulary": 128256, "loss_chunk": logits}
    plans = []
    for compact in (0, 2048):
        eager = costs(shape, 4096, compact=compact, **given)
        for found in (eager, without_graphs(eager, "offload")):
            plans.append(
                make_plan(
                    layers=16,
                    costs=found.levels,
                    base=1_286_000_000,
                    forward_working=found.forward_working,
                    loss_working=found.loss_working,
                    budget=1_975_000_000,
                )
            )
    usual, usual_with_graphs, _, small_with_graphs = plans
    assert usual.levels.count("offload") == usual_with_graphs.levels.count("offload") == 2
    assert usual_with_graphs.seconds == usual.seconds + 2 * 2e12
    assert "offload" not in small_with_graphs.levels
    assert small_with_graphs.seconds < usual_with_graphs.seconds


def test_attention_costs_more_for_longer_rows() -> None:
    """Only time: its memory is linear."""
    short, long = (costs(LLAMA_8B, 32768, longest=longest).levels["recompute"] for longest in (1024, 32768))
    assert short.saved == long.saved
    assert short.working == long.working
    assert short.seconds < long.seconds
    lean = [costs(LLAMA_8B, 32768, longest=longest).levels["lean"].seconds for longest in (1024, 32768)]
    assert lean[0] == lean[1], "attention is not run again"


def test_the_loss_holds_its_chunk() -> None:
    small, large = (costs(LLAMA_8B, 4096, loss_chunk=chunk).loss_working for chunk in (0, 10**9))
    assert large - small == 10**9
    assert small >= 2 * 4096 * 4096 * 2, "the hidden states and their gradient"
