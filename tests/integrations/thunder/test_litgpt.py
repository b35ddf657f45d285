"""litgpt's GPT under Thunder on our operators, and in eager torch: values, gradients, and names by bound symbol.

The names of the first four tests are those of litgpt's own (`test_unsloth_cross_entropy`, `_swiglu`, `_rope`, `_gpt`),
with RMSNorm, bfloat16 and masked labels added; they run on CUDA where there is one.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import nn

if not importlib.util.find_spec("litgpt"):
    pytest.skip("litgpt is not installed", allow_module_level=True)

import fastft.integrations.thunder as fastft_thunder
from fastft.integrations.thunder import lit
from tests.integrations.thunder.harness import DEVICE, assert_same, backward_names, forward_names, jit, leaf

import litgpt.lora  # isort: skip
import litgpt.model  # isort: skip
from litgpt.utils import chunked_cross_entropy  # isort: skip

VOCABULARY, LENGTH = 40, 16
CONFIG = {
    "n_layer": 1,
    "n_head": 4,
    "n_embd": 32,
    "intermediate_size": 64,
    "block_size": LENGTH,
    "padded_vocab_size": VOCABULARY,
    "rotary_percentage": 1.0,
    "norm_class_name": "RMSNorm",
    "mlp_class_name": "LLaMAMLP",
    "bias": False,
    "parallel_residual": False,
}
STOCK = {
    "norm": litgpt.model.RMSNorm.forward,
    "mlp": litgpt.model.LLaMAMLP.forward,
    "apply_rope": litgpt.model.apply_rope,
    "attention": litgpt.model.CausalSelfAttention.forward,
}
FORWARD = {"rms_norm": 3, "rope_one": 2, "swiglu": 1, "attention": 1}
AGAIN = {"rms_norm": 3, "swiglu": 1}  # outputs that the backward makes again
KEPT = {"kept": 2}  # keys and values, alone
BACKWARD = {f"{name}_backward": count for name, count in FORWARD.items()} | AGAIN


@pytest.fixture(autouse=True)
def litgpt_on_ours() -> Any:
    fastft_thunder.executor.clear()
    with fastft_thunder.patch_litgpt() as patch:
        yield patch


class Pretraining(nn.Module):
    """Model and loss, the loss as litgpt's pretraining has it."""

    def __init__(self, gpt: nn.Module, chunk_size: int) -> None:
        super().__init__()
        self.gpt, self.chunk_size = gpt, chunk_size

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return chunked_cross_entropy(self.gpt(ids), targets, chunk_size=self.chunk_size)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and targets [2, LENGTH]; more than half of the targets are masked."""
    ids = torch.randint(0, VOCABULARY, (2, LENGTH), device=DEVICE)
    targets = torch.randint(0, VOCABULARY, (2, LENGTH), device=DEVICE)
    targets[:, :9] = -100
    return ids, targets


def step(model: Any, run: Any, data: Any) -> list[torch.Tensor]:
    loss = run(*data)
    return [loss, *torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])]


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_fastft_cross_entropy(reduction: str) -> None:
    logits, targets = leaf(64, VOCABULARY), torch.randint(0, VOCABULARY, (64,), device=DEVICE)
    targets[:48] = -100

    def loss(x: Any, t: Any) -> Any:
        return torch.nn.functional.cross_entropy(x, t, reduction=reduction, ignore_index=-100)

    assert_same(loss, logits, targets, forward={"cross_entropy": 1}, backward={"cross_entropy_backward": 1})


def test_fastft_swiglu() -> None:
    mlp = litgpt.model.LLaMAMLP(litgpt.model.Config(**CONFIG)).to(DEVICE)
    jitted, x = jit(mlp), leaf(2, 16, 32)
    theirs = mlp.proj(torch.nn.functional.silu(mlp.fc_1(x)) * mlp.fc_2(x))
    torch.testing.assert_close(jitted(x), theirs)
    assert forward_names(jitted) == {"swiglu": 1}
    assert backward_names(jitted) == {"swiglu": 1, "swiglu_backward": 1}


def test_fastft_rope() -> None:
    cos, sin = litgpt.model.build_rope_cache(LENGTH, 8, device=torch.device(DEVICE))
    cos, sin = cos.unsqueeze(0), sin.unsqueeze(0)

    def turn(x: Any) -> Any:
        return litgpt.model.apply_rope(x, cos, sin)

    x = leaf(2, 4, LENGTH, 8)
    assert_same(turn, x, forward={"rope_one": 1}, backward={"rope_one_backward": 1})
    torch.testing.assert_close(turn(x), STOCK["apply_rope"](x, cos, sin))
    torch.testing.assert_close(litgpt.model.apply_rope(x[0], cos, sin), STOCK["apply_rope"](x[0], cos, sin))


def left_to_thunder(names: dict[str, int], dtype: torch.dtype, grouped: bool) -> Counter[str]:
    """`names`, less attention where it is not ours: on a GPU in 32 bits. Grouped keys and values are repeated then."""
    found = Counter(names)
    if DEVICE == "cuda" and dtype == torch.float32:
        found.pop("attention", None)
        found.pop("attention_backward", None)
        found.pop("kept", None)
        found.update({"repeat": 2} | (KEPT if "rope_one" in names else {}) if grouped else {})
    return found


GPTS: dict[str, tuple[dict[str, Any], torch.dtype, int, dict[str, int]]] = {
    "plain, whole loss": ({}, torch.float32, 0, {"cross_entropy": 1}),
    "grouped queries, half the head turned, chunked loss": (
        {"n_query_groups": 2, "rotary_percentage": 0.5},
        torch.float32,
        8,
        {"cross_entropy": 4},
    ),
    "bfloat16": ({}, torch.bfloat16, 0, {"cross_entropy": 1, "add": 2}),
    "bfloat16, grouped queries, Qwen3's norms of the heads": (
        {"n_query_groups": 2, "norm_qk": True},
        torch.bfloat16,
        0,
        {"cross_entropy": 1, "add": 2, "rms_norm": 5},
    ),
    "grouped queries, OLMo 2's norms before the heads": (
        {"n_query_groups": 2, "norm_qk": True, "norm_qk_type": "olmo2"},
        torch.float32,
        0,
        {"cross_entropy": 1, "rms_norm": 5},
    ),
}


@pytest.mark.parametrize("case", GPTS)
def test_fastft_gpt(case: str, litgpt_on_ours: Any) -> None:
    overrides, dtype, chunk_size, losses = GPTS[case]
    model = Pretraining(litgpt.model.GPT(litgpt.model.Config(**CONFIG | overrides)), chunk_size).to(DEVICE, dtype)
    data, jitted = batch(), jit(model)
    ours = step(model, jitted, data)
    litgpt_on_ours.restore()
    theirs = step(model, model, data)
    for one, other in zip(ours, theirs, strict=True):
        assert other.count_nonzero()
        if dtype == torch.float32:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
        else:
            assert (one - other).norm() <= 0.03 * other.norm()
    grouped, norms = "n_query_groups" in overrides, losses.get("rms_norm", 3)
    assert forward_names(jitted) == left_to_thunder(FORWARD | KEPT | losses, dtype, grouped)
    backward = BACKWARD | {"cross_entropy_backward": losses["cross_entropy"]}
    backward |= {"rms_norm_backward": norms, "rms_norm": norms}
    if "add" in losses:  # two residual sums; for each a gradient's sum, and one for gate and up
        backward["add"] = 3
    assert backward_names(jitted) == left_to_thunder(backward, dtype, grouped)
    ours_all = DEVICE == "cpu" or dtype == torch.bfloat16
    assert set(fastft_thunder.executor.declined) == (set() if ours_all else {"scaled_dot_product_attention"})


def test_litgpts_lora_trains_its_adapters_on_our_operators(
    litgpt_on_ours: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # litgpt's Q/K/V adapter is a grouped convolution, which cuDNN computes in TF32 unless told not to.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    settings = {"lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "lora_query": True, "lora_value": True}
    config = litgpt.lora.Config(**CONFIG, **settings, lora_mlp=True)
    model = litgpt.lora.GPT(config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.1)
    litgpt.lora.mark_only_lora_as_trainable(model)
    model = model.to(DEVICE)
    (ids, targets), jitted, results = batch(), jit(model), []
    for run in (jitted, model):
        loss = chunked_cross_entropy(run(ids), targets, chunk_size=0)
        results.append([loss, *torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])])
        litgpt_on_ours.restore()
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert forward_names(jitted) == left_to_thunder(FORWARD | KEPT, torch.float32, False)
    backward = BACKWARD | {"rms_norm_backward": 2}  # the embedding is frozen
    assert backward_names(jitted) == left_to_thunder(backward, torch.float32, False)


def test_the_exchange_is_undone_and_leaves_a_foreign_method_alone(litgpt_on_ours: Any) -> None:
    def now() -> dict[str, Any]:
        parts = litgpt.model.RMSNorm.forward, litgpt.model.LLaMAMLP.forward, litgpt.model.apply_rope
        return dict(zip(STOCK, (*parts, litgpt.model.CausalSelfAttention.forward), strict=True))

    exchanged = now()
    assert not any(exchanged[name] is STOCK[name] for name in STOCK)
    fastft_thunder.patch_litgpt().restore()  # nested: the outer exchange stays
    assert now() == exchanged
    litgpt.model.LLaMAMLP.forward = foreign = lambda self, x: x
    try:
        litgpt_on_ours.restore()
        assert now() == STOCK | {"mlp": foreign}
    finally:
        litgpt.model.LLaMAMLP.forward = STOCK["mlp"]


@pytest.mark.parametrize("offset", [False, True], ids=["weight", "1 + weight"])
def test_litgpts_norm_is_the_same_in_both_forms(offset: bool, litgpt_on_ours: Any) -> None:
    norm = litgpt.model.RMSNorm(8, add_unit_offset=offset)
    nn.init.normal_(norm.weight)
    x = torch.randn(3, 8)
    torch.testing.assert_close(norm(x), STOCK["norm"](norm, x))


GROUPED = {"n_head": 8, "n_query_groups": 2, "head_size": 8, "n_embd": 32}
ATTENTIONS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "half the head turned": {"rotary_percentage": 0.5},
    "another scale": {"attention_scores_scalar": 3},
    "interleaved rotation": {"rope_interleave": True},
    "norms of the heads": {"norm_qk": True},
    "norms before the heads": {"norm_qk": True, "norm_qk_type": "olmo2"},
    "softcapping, which is litgpt's own": {"attention_logit_softcapping": 5.0},
    "a window, which is litgpt's own": {"sliding_window_size": 3, "sliding_window_indices": [1]},
}


@pytest.mark.parametrize("case", ATTENTIONS)
def test_attention_over_grouped_queries_is_litgpts(case: str, litgpt_on_ours: Any) -> None:
    config = litgpt.model.Config(**CONFIG | GROUPED | ATTENTIONS[case])
    attention = litgpt.model.CausalSelfAttention(config, 0).to(DEVICE)
    cos, sin = (x[None].to(DEVICE) for x in litgpt.model.build_rope_cache(LENGTH, config.rope_n_elem))
    x = leaf(2, LENGTH, 32)
    ours = attention(x, cos, sin)
    litgpt_on_ours.restore()
    theirs = attention(x, cos, sin)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_generation_with_a_cache_is_litgpts(litgpt_on_ours: Any) -> None:
    model = litgpt.model.GPT(litgpt.model.Config(**CONFIG | GROUPED)).to(DEVICE).eval()
    model.set_kv_cache(1, device=torch.device(DEVICE))
    ids, positions = torch.ones(1, 5, dtype=torch.long, device=DEVICE), torch.arange(5, device=DEVICE)
    with torch.no_grad():
        ours = model(ids, positions)
        litgpt_on_ours.restore()
        torch.testing.assert_close(ours, model(ids, positions))


def attention_and_input(made: type = litgpt.model.CausalSelfAttention) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    config = litgpt.model.Config(**CONFIG | GROUPED)
    cos, sin = (x[None].to(DEVICE) for x in litgpt.model.build_rope_cache(LENGTH, config.rope_n_elem))
    return made(config, 0).to(DEVICE), (leaf(2, LENGTH, 32), cos, sin)


def test_attention_takes_litgpts_keywords() -> None:
    attention, arguments = attention_and_input()
    ours = attention(*arguments, mask=None, input_pos=None, input_pos_maxp1=None)
    torch.testing.assert_close(ours, STOCK["attention"](attention, *arguments))
    with pytest.raises(TypeError, match="set_kv_cache"):
        attention(*arguments, input_pos=torch.arange(LENGTH))


def nothing_attended(q: Any, k: Any, v: Any, mask: Any = None) -> torch.Tensor:
    return q.new_zeros(q.shape).transpose(1, 2)


@pytest.mark.parametrize("when", ["before", "after", "on an instance"])
def test_an_attention_that_somebody_exchanged_is_called(
    when: str, litgpt_on_ours: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if when == "before":
        litgpt_on_ours.restore()
    attention, arguments = attention_and_input()
    if when == "on an instance":
        attention.scaled_dot_product_attention = nothing_attended
    else:
        method = staticmethod(nothing_attended)
        monkeypatch.setattr(litgpt.model.CausalSelfAttention, "scaled_dot_product_attention", method)
    with fastft_thunder.patch_litgpt():
        assert not attention(*arguments).count_nonzero()


def test_a_foreign_forward_of_attention_stays(litgpt_on_ours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    litgpt_on_ours.restore()
    monkeypatch.setattr(litgpt.model.CausalSelfAttention, "forward", lambda self, x, cos, sin: x * 0)
    attention, arguments = attention_and_input()
    with fastft_thunder.patch_litgpt():
        assert not attention(*arguments).count_nonzero()


def test_a_subclass_in_litgpts_place_is_served_and_left_as_it_was(
    litgpt_on_ours: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    litgpt_on_ours.restore()
    theirs = type("Theirs", (litgpt.model.CausalSelfAttention,), {})
    monkeypatch.setattr(litgpt.model, "CausalSelfAttention", theirs)
    attention, arguments = attention_and_input(theirs)
    expected = attention(*arguments)
    with fastft_thunder.patch_litgpt():
        assert theirs.forward is not STOCK["attention"]
        torch.testing.assert_close(attention(*arguments), expected)
    assert theirs.forward is STOCK["attention"]
    assert "forward" not in vars(theirs)


def test_exchanges_may_end_in_any_order(litgpt_on_ours: Any) -> None:
    inner = fastft_thunder.patch_litgpt()
    litgpt_on_ours.restore()
    assert litgpt.model.RMSNorm.forward is not STOCK["norm"]
    assert litgpt.model.CausalSelfAttention.forward is not STOCK["attention"]
    inner.restore()
    inner.restore()
    assert litgpt.model.RMSNorm.forward is STOCK["norm"]
    assert litgpt.model.apply_rope is STOCK["apply_rope"]
    assert litgpt.model.CausalSelfAttention.forward is STOCK["attention"]


@pytest.mark.parametrize(
    ("dtype", "head", "capability", "fused"),
    [
        (torch.bfloat16, 64, (9, 0), True),
        (torch.float32, 64, (9, 0), False),
        (torch.float16, 64, (7, 5), False),
        (torch.float16, 44, (8, 0), False),
    ],
)
def test_grouped_queries_stay_grouped_only_where_a_fused_kernel_takes_them(
    dtype: torch.dtype, head: int, capability: tuple[int, int], fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere torch writes every score out: on a T4, or in float32, litgpt's copies are the smaller evil."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    query = SimpleNamespace(is_cuda=True, dtype=dtype, shape=(1, 8, 4, head), device=torch.device("cuda", 0))
    assert lit._unrepeated(query) == fused
    assert lit._unrepeated(SimpleNamespace(is_cuda=False))

    def asks(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if lit.gpu_reason(x.dtype, x.shape[-1], 0) is None else x

    x = torch.zeros(2, head, dtype=dtype)
    compiled = torch.compile(asks, fullgraph=True, dynamic=True, backend="eager")
    assert bool(compiled(x).count_nonzero()) == fused


def test_keys_that_no_fused_kernel_takes_grouped_are_repeated(
    litgpt_on_ours: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    stock = torch.nn.functional.scaled_dot_product_attention

    def attend(q: Any, k: Any, v: Any, **settings: Any) -> Any:
        seen.append((k.shape[1], v.shape[1], settings.get("enable_gqa")))
        return stock(q, k, v, **settings)

    attention, arguments = attention_and_input()
    monkeypatch.setattr(lit.F, "scaled_dot_product_attention", attend)
    for unrepeated in (True, False):
        monkeypatch.setattr(lit, "_unrepeated", lambda query, answer=unrepeated: answer)
        torch.testing.assert_close(attention(*arguments), STOCK["attention"](attention, *arguments))
    assert seen == [(2, 2, True), (8, 8, None), (8, 8, False), (8, 8, None)]  # ours, litgpt's, ours, litgpt's


def test_a_compiled_gpt_of_many_lengths_is_as_few_graphs_as_litgpts(litgpt_on_ours: Any) -> None:
    model = litgpt.model.GPT(litgpt.model.Config(**CONFIG | GROUPED)).to(DEVICE)
    counts = []
    for _ in range(2):
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounter()
        compiled = torch.compile(model, fullgraph=True, backend=counter)
        for length in (8, 5, 6, 7, 3):
            compiled(torch.ones(2, length, dtype=torch.long, device=DEVICE))
        counts.append(counter.frame_count)
        litgpt_on_ours.restore()
    assert counts[0] <= counts[1]
