"""The decoder layer as one node: derivatives, the error contract against PEFT, the two levels against each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastft.autograd import decoder_layer as node
from fastft.autograd import emptied_graph
from fastft.autograd.attention_half import Attention, Heads
from fastft.autograd.autocast import AutocastState
from fastft.autograd.decoder_layer import apply_layer
from fastft.autograd.layer_call import Away, LayerCall, Level
from fastft.autograd.projection import Projection
from fastft.kernels.backend import interpreting
from fastft.memory.offload import HostStore
from tests.autograd import pieces
from tests.autograd.pieces import draw, draw_angles, draw_norm, draw_projection
from tests.contract import Run, assert_contract

LEVELS: tuple[Level, ...] = ("keep", "lean", "recompute", "offload")
SMALL = {"hidden": 4, "intermediate": 5, "heads": Heads(query=2, key_value=1, dim=2)}
MEDIUM = {"hidden": 32, "intermediate": 48, "heads": Heads(query=4, key_value=2, dim=8)}
TOKENS = 7 if interpreting() else 16


def draw_call(
    *,
    hidden: int,
    intermediate: int,
    heads: Heads,
    dtype: torch.dtype = torch.float64,
    ranks: Sequence[int | None] = (2,) * 7,
    trains_norms: bool = False,
    head_norms: bool = False,
    qkv_bias: bool = False,
    level: Level = "keep",
    **settings: Any,
) -> LayerCall:
    """A layer with random leaves; `settings` go to every projection."""
    query, key_value = heads.query * heads.dim, heads.key_value * heads.dim
    shapes = [(query, hidden), (key_value, hidden), (key_value, hidden), (hidden, query)]
    shapes += [(intermediate, hidden), (intermediate, hidden), (hidden, intermediate)]
    q, k, v, o, gate, up, down = [
        draw_projection(*shape, dtype=dtype, rank=rank, **({"bias": qkv_bias and i < 3} | settings))
        for i, (shape, rank) in enumerate(zip(shapes, ranks, strict=True))
    ]
    both = (draw_norm(heads.dim, dtype, trains_norms), draw_norm(heads.dim, dtype, trains_norms))
    return LayerCall(
        input_norm=draw_norm(hidden, dtype, trains_norms),
        post_norm=draw_norm(hidden, dtype, trains_norms),
        head_norms=both if head_norms else None,
        qkv=(q, k, v),
        output=o,
        gate_up=(gate, up),
        down=down,
        heads=heads,
        attention=pieces.causal_attention,
        autocast=AutocastState("cpu", False, torch.bfloat16),
        level=level,
    )


CALLS: dict[str, Callable[[], LayerCall]] = {
    "Llama": lambda: draw_call(**SMALL),
    "Llama in 4 bits": lambda: draw_call(**SMALL, quantized="nested"),
    "Qwen2, biases frozen": lambda: draw_call(**SMALL, qkv_bias=True),
    "Qwen2, biases trained": lambda: draw_call(**SMALL, qkv_bias=True, trains="bias a b"),
    "Qwen3": lambda: draw_call(**SMALL, head_norms=True),
    "norms trained": lambda: draw_call(**SMALL, head_norms=True, trains_norms=True),
    "adapters on q and v": lambda: draw_call(**SMALL, ranks=(2, None, 2, None, None, None, None)),
    "different ranks, none on gate and down": lambda: draw_call(**SMALL, ranks=(1, 3, 2, 1, None, 2, None)),
    "full fine-tuning": lambda: draw_call(
        **SMALL, ranks=(None,) * 7, bias=True, trains="weight bias", trains_norms=True
    ),
}


def check_gradients(call: LayerCall, needs_x: bool = True) -> None:
    """gradcheck of the whole layer over x and every leaf."""
    x = draw(2, 3, SMALL["hidden"], dtype=torch.float64, requires_grad=needs_x)
    cos, sin = draw_angles(1, 3, 2)

    def run(x: Tensor, *leaves: Tensor | None) -> Tensor:
        return apply_layer(x, cos, sin, call.with_leaves(list(leaves)))

    assert torch.autograd.gradcheck(run, (x, *call.leaves()), raise_exception=True)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_the_derivatives(name: str, level: Level) -> None:
    """gradcheck runs the backward twice over one retained graph: the second must equal the first."""
    check_gradients(replace(CALLS[name](), level=level))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["Llama", "norms trained", "Qwen2, biases trained"])
def test_leaf_gradients_without_an_input_gradient(name: str, level: Level) -> None:
    """The first layer over frozen embeddings."""
    check_gradients(replace(CALLS[name](), level=level), needs_x=False)


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_under_autocast_in_float64(level: Level) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        check_gradients(replace(CALLS["Llama"](), level=level, autocast=AutocastState.current("cpu")))


def plain_linear(p: Projection) -> Callable[[Tensor], Tensor]:
    """The projection's formula over its own leaves, by autograd."""
    dense = p.weight if isinstance(p.weight, Tensor) else pieces.copy_projection(p, torch.float64).weight

    def run(x: Tensor) -> Tensor:
        y = x @ dense.t() if p.bias is None else x @ dense.t() + p.bias
        return y if p.lora_a is None else y + p.scale * (x @ p.lora_a.t() @ p.lora_b.t())

    return run


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", CALLS)
def test_output_is_the_layers_formula(name: str, level: Level) -> None:
    call = replace(CALLS[name](), level=level)
    x, (cos, sin) = draw(2, 3, SMALL["hidden"], dtype=torch.float64), draw_angles(2, 3, 2)
    expected = pieces.plain_layer(x, cos, sin, [plain_linear(p) for p in call.projections], call.norms, call.heads)
    with torch.no_grad():
        torch.testing.assert_close(apply_layer(x, cos, sin, call), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(apply_layer(x, cos, sin, call), expected, rtol=1e-12, atol=1e-12)


def draw_case(
    dtype: torch.dtype, adapter_dtype: torch.dtype, **settings: Any
) -> tuple[LayerCall, Tensor, tuple[Tensor, Tensor], Tensor]:
    """A layer, its input, angles and incoming gradient."""
    call = draw_call(**MEDIUM, dtype=dtype, adapter_dtype=adapter_dtype, **settings)
    x = draw(2, TOKENS, MEDIUM["hidden"], dtype=dtype, requires_grad=True)
    angles, grad = draw_angles(1, TOKENS, MEDIUM["heads"].dim, dtype), draw(*x.shape, dtype=torch.float64)
    return call, x, angles, grad


def copy_call(call: LayerCall, dtype: torch.dtype | None = None) -> LayerCall:
    """The call over leaves of its own, in `dtype` if given."""
    q, k, v, o, gate, up, down = (pieces.copy_projection(p, dtype) for p in call.projections)
    input_norm, post_norm, *both = (None if n is None else pieces.copy_norm(n, dtype) for n in call.norms)
    return replace(
        call,
        input_norm=input_norm,
        post_norm=post_norm,
        head_norms=None if call.head_norms is None else tuple(both),
        qkv=(q, k, v),
        output=o,
        gate_up=(gate, up),
        down=down,
    )


def norm_leaves(call: LayerCall) -> dict[str, Tensor]:
    """Norm weights by name."""
    names = ("input_norm", "post_norm", "query_norm", "key_norm")
    return {name: n.weight for name, n in zip(names, call.norms, strict=True) if n is not None}


def run_fast(
    call: LayerCall, x: Tensor, angles: tuple[Tensor, Tensor], grad: Tensor, autocast: bool, level: Level
) -> dict[str, Tensor]:
    """Output and gradients of ours."""
    call, x = replace(copy_call(call), level=level), pieces.fresh(x)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = apply_layer(x, *angles, replace(call, autocast=AutocastState.current("cpu")))
    y.backward(grad.to(y.dtype))
    return {"y": y} | pieces.named_gradients(pieces.projection_leaves(call.projections), x=x, **norm_leaves(call))


def run_stock(
    call: LayerCall,
    x: Tensor,
    angles: tuple[Tensor, Tensor],
    grad: Tensor,
    autocast: bool,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Output and gradients of PEFT's modules in transformers' order, in `dtype` if given."""
    call, x = copy_call(call, dtype), pieces.fresh(x, dtype)
    cos, sin = (t.to(x.dtype) for t in angles)
    compute_dtype = AutocastState("cpu", autocast, torch.bfloat16).compute_dtype(x.dtype)
    linears = [pieces.stock_linear(p, compute_dtype) for p in call.projections]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = pieces.plain_layer(x, cos, sin, linears, call.norms, call.heads)
    y.backward(grad.to(y.dtype))
    leaves = [pieces.stock_leaves(linear) for linear in linears]
    return {"y": y} | pieces.named_gradients(leaves, x=x, **norm_leaves(call))


CONTRACTS: dict[str, dict[str, Any]] = {
    "dense, everything trains": {"trains": "weight bias a b", "bias": True, "trains_norms": True, "head_norms": True},
    "4 bits": {"quantized": "nested"},
}


@pytest.mark.parametrize("name", CONTRACTS)
@pytest.mark.parametrize("mixture", pieces.PLAIN + pieces.MIXTURES, ids=pieces.name_of)
def test_contract_against_peft(mixture: tuple[torch.dtype, torch.dtype, bool], name: str) -> None:
    """C12, C41, C45: within 1.5 times stock's error, for x and all that trains; the other level is bit-equal."""
    dtype, adapter_dtype, autocast = mixture
    runs = []
    for seed in pieces.MANY_SEEDS:
        torch.manual_seed(seed)
        case = draw_case(dtype, adapter_dtype, **CONTRACTS[name])
        fast = run_fast(*case, autocast, "keep")
        runs.append(Run(fast, run_stock(*case, autocast), run_stock(*case, False, torch.float64)))
    assert runs[0].fast["y"].dtype == runs[0].stock["y"].dtype
    assert_contract(runs, AutocastState("cpu", autocast, torch.bfloat16).compute_dtype(dtype))


@pytest.mark.parametrize("name", CONTRACTS)
@pytest.mark.parametrize("mixture", pieces.PLAIN + pieces.MIXTURES, ids=pieces.name_of)
def test_levels_agree_to_the_bit(mixture: tuple[torch.dtype, torch.dtype, bool], name: str) -> None:
    """C46: recomputing changes when things are computed, not what."""
    dtype, adapter_dtype, autocast = mixture
    case = draw_case(dtype, adapter_dtype, **CONTRACTS[name])
    keep, *others = (run_fast(*case, autocast, level) for level in LEVELS)
    for other in others:
        assert keep.keys() == other.keys()
        assert [n for n in keep if not torch.equal(keep[n], other[n])] == []


def fused_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """PyTorch's, which saves Q, K, V, its output and a statistic of each row."""
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return output.transpose(1, 2).contiguous()


@pytest.mark.parametrize(
    "attention", [fused_attention, pieces.causal_attention], ids=["once", "twice, it saves scores"]
)
@pytest.mark.parametrize(
    ("away", "late"), [("input", False), ("attention", False), ("attention", True), ("half", False)]
)
@pytest.mark.parametrize("name", CONTRACTS)
@pytest.mark.parametrize("mixture", pieces.PLAIN + pieces.MIXTURES, ids=pieces.name_of)
def test_a_layer_in_host_memory_agrees_to_the_bit(
    mixture: tuple[torch.dtype, torch.dtype, bool],
    name: str,
    away: Away,
    late: bool,
    attention: Attention,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However much of it is there; where attention saves too much, attention runs again."""
    monkeypatch.setattr(emptied_graph, "_SMALL", 64)
    dtype, adapter_dtype, autocast = mixture
    call, *case = draw_case(dtype, adapter_dtype, **CONTRACTS[name])
    call = replace(call, attention=attention)
    keep = run_fast(call, *case, autocast, "keep")
    back = run_fast(replace(call, host=HostStore(), away=away, late=late), *case, autocast, "offload")
    assert keep.keys() == back.keys()
    assert [n for n in keep if not torch.equal(keep[n], back[n])] == []


@pytest.mark.parametrize("late", [False, True], ids=["ahead", "late"])
@pytest.mark.parametrize(
    ("away", "parcels"),
    # x; then O, statistics; or Q K V side by side, O, statistics, X̂ Aᵀ, O Aᵀ, h, two 1/rms
    [("attention", 3), ("half", 9)],
)
def test_an_offloaded_layer_s_attention_runs_once(
    away: Away, parcels: int, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing of the layer is left on the device, for as many backwards as there are."""
    monkeypatch.setattr(emptied_graph, "_SMALL", 64)
    call, x, angles, grad = draw_case(torch.float32, torch.float32)
    call, seen = count_attention(call, fused_attention)
    expected = run_fast(call, x, angles, grad, False, "keep")
    store = HostStore()
    call = replace(call, level="offload", host=store, away=away, late=late)
    seen.clear()
    y = apply_layer(x, *angles, call)
    assert len(seen) == 1
    assert store.in_flight == parcels
    assert saved_bytes(call, x, angles) == 0
    seen.clear()
    for retain in (True, False):
        (grad_x,) = torch.autograd.grad(y, x, grad.float(), retain_graph=retain)
        assert torch.equal(grad_x, expected["x"])
    assert seen == []
    assert store.in_flight == 0


def test_attention_runs_twice_where_saved_tensor_hooks_are_forbidden() -> None:
    """As in `torch.autograd.graph.disable_saved_tensors_hooks`: no hook, no emptied graph."""
    call, x, angles, grad = draw_case(torch.float32, torch.float32)
    call, seen = count_attention(call, fused_attention)
    expected = run_fast(call, x, angles, grad, False, "keep")
    for away in ("attention", "half"):
        seen.clear()
        with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):
            found = run_fast(replace(call, host=HostStore(), away=away), x, angles, grad, False, "offload")
        assert len(seen) == 2
        assert [n for n in expected if not torch.equal(expected[n], found[n])] == []


def test_an_offloaded_half_runs_no_product_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """But gate and up, as at level lean."""
    call, x, angles, grad = draw_case(torch.float32, torch.float32)
    made: list[int] = []
    stock = node.attention_half.forward_in
    monkeypatch.setattr(node.attention_half, "forward_in", lambda *a, **k: made.append(1) or stock(*a, **k))
    for away, forwards in (("input", 2), ("half", 1)):
        made.clear()
        run_fast(replace(call, host=HostStore(), away=away), x, angles, grad, False, "offload")
        assert len(made) == forwards


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mixture", pieces.PLAIN + pieces.MIXTURES, ids=pieces.name_of)
def test_two_runs_are_bit_equal(mixture: tuple[torch.dtype, torch.dtype, bool], level: Level) -> None:
    dtype, adapter_dtype, autocast = mixture
    case = draw_case(dtype, adapter_dtype, quantized="nested")
    first, second = run_fast(*case, autocast, level), run_fast(*case, autocast, level)
    assert [n for n in first if not torch.equal(first[n], second[n])] == []


@pytest.mark.parametrize("level", LEVELS)
def test_a_backward_writes_to_nothing_it_was_given(level: Level) -> None:
    call, x, angles, grad = draw_case(torch.float32, torch.float32, trains_norms=True)
    call, grad = replace(call, level=level), grad.float()
    given = [x, *angles, grad, *(leaf for leaf in call.leaves() if leaf is not None)]
    before = [t.detach().clone() for t in given]
    apply_layer(x, *angles, call).backward(grad)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


def count_attention(call: LayerCall, function: Attention = pieces.causal_attention) -> tuple[LayerCall, list[bool]]:
    """The call, and a list that gets an entry per attention forward."""
    seen: list[bool] = []

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        seen.append(torch.is_grad_enabled())
        return function(query, key, value)

    return replace(call, attention=attention), seen


@pytest.mark.parametrize(("level", "forwards"), [("keep", 1), ("lean", 1), ("recompute", 2), ("offload", 2)])
def test_attention_runs_once_when_kept_and_twice_when_recomputed(level: Level, forwards: int) -> None:
    call, x, angles, grad = draw_case(torch.float32, torch.float32)
    call, seen = count_attention(replace(call, level=level))
    y = apply_layer(x, *angles, call)
    assert len(seen) == 1
    y.backward(grad.float())
    assert len(seen) == forwards


def saved_bytes(call: LayerCall, x: Tensor, angles: tuple[Tensor, Tensor]) -> int:
    """Bytes autograd keeps for the layer's backward, leaves and what came in from outside left out."""
    outside = {t.data_ptr() for t in (*angles, *(leaf for leaf in call.leaves() if leaf is not None))}
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if t.data_ptr() not in outside:
            kept[t.data_ptr()] = t.numel() * t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        apply_layer(x, *angles, call)
    return sum(kept.values())


def test_recompute_keeps_the_input_and_nothing_else() -> None:
    call, x, angles, _ = draw_case(torch.float32, torch.float32)
    x_bytes = x.numel() * x.element_size()
    assert saved_bytes(replace(call, level="recompute"), x, angles) == x_bytes
    lean = saved_bytes(replace(call, level="lean"), x, angles)
    assert 3 * x_bytes < lean < saved_bytes(replace(call, level="keep"), x, angles) - 2 * x_bytes


@pytest.mark.parametrize("level", LEVELS)
def test_no_graph_is_built_where_nobody_wants_a_gradient(level: Level) -> None:
    call, x, angles, _ = draw_case(torch.float32, torch.float32)
    call, seen = count_attention(replace(call, level=level))
    trained = apply_layer(x, *angles, call)
    with torch.no_grad():
        y = apply_layer(x, *angles, call)
    assert torch.equal(y, trained)
    assert not y.requires_grad
    assert seen == [level in ("keep", "lean"), False]


@pytest.mark.parametrize("level", LEVELS)
def test_a_leaf_changed_between_forward_and_backward_raises(level: Level) -> None:
    """An optimizer step in between is an error in stock PyTorch too."""
    call, x, angles, _ = draw_case(torch.float32, torch.float32)
    y = apply_layer(x, *angles, replace(call, level=level))
    with torch.no_grad():
        call.down.lora_b.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("level", LEVELS)
def test_state_is_frozen_by_the_forward(level: Level) -> None:
    """C43: an adapter switched, or another scale set, between forward and backward leaves this backward alone."""
    case = draw_case(torch.float32, torch.float32)
    expected = run_fast(*case, False, level)
    call, x, angles, grad = case
    call, x = replace(copy_call(call), level=level), pieces.fresh(x)
    y = apply_layer(x, *angles, call)
    modified = replace(call.down, scale=100.0, lora_a=torch.zeros_like(call.down.lora_a))
    other = replace(call, down=modified, attention=lambda q, k, v: q.transpose(1, 2) * 0)
    with torch.no_grad():
        apply_layer(x, *angles, other)
    y.backward(grad.float())
    assert torch.equal(x.grad, expected["x"])


@pytest.mark.parametrize("level", LEVELS)
def test_a_double_backward_raises(level: Level) -> None:
    call, x, angles, _ = draw_case(torch.float32, torch.float32)
    y = apply_layer(x, *angles, replace(call, level=level))
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)


@pytest.mark.parametrize("level", LEVELS)
def test_two_layers_alive_at_once_keep_their_own_state(level: Level) -> None:
    """Two graphs, then one backward: as with accumulation inside one loss."""
    call, x, angles, grad = draw_case(torch.float32, torch.float32)
    call = replace(call, level=level)
    halves = [pieces.fresh(x.detach()[i : i + 1]).requires_grad_() for i in range(2)]
    outputs = [apply_layer(half, *angles, call) for half in halves]
    torch.autograd.backward(outputs, [g.float() for g in grad.split(1)])
    together = run_fast(call, x, angles, grad, False, level)
    torch.testing.assert_close(torch.cat([h.grad for h in halves]), together["x"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(call.down.lora_a.grad, together["6.lora_a"], rtol=1e-5, atol=1e-5)


def test_a_strided_input_is_taken_as_it_comes() -> None:
    call, x, angles, _ = draw_case(torch.float32, torch.float32)
    strided = x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    assert not strided.is_contiguous()
    y = apply_layer(strided, *angles, call)
    assert torch.equal(y, apply_layer(x, *angles, call))
    y.sum().backward()
    assert strided.grad.shape == x.shape
