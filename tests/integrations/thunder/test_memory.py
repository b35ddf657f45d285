"""What a step under Thunder keeps for its backward: less with our operators than with fusion alone, and the least.

Counted are the bytes of the storages behind the saved tensors, so that a view of a larger buffer counts as all of it;
parameters are not counted, nor are the step's inputs. Fused regions run as they are written: inductor is not what is
tested, and takes minutes.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastft.integrations.thunder as fastft_thunder
from fastft import functional
from tests.integrations.thunder import attention
from tests.integrations.thunder.harness import DEVICE, backward_names, forward_names, leaf

import thunder  # isort: skip

BATCH, LENGTH = 4, 16
TOKENS = BATCH * LENGTH
# TinyLlama-1.1B's proportions: 11/4 of hidden in the MLP, four tokens to the words of the vocabulary
HIDDEN, HEADS, GROUPS, INTERMEDIATE, VOCABULARY = 32, 8, 2, 88, 256
HEAD = HIDDEN // HEADS
FUSION = "sdpa", "torchcompile", "torch"
OURS = "sdpa", "fastft", "torchcompile", "torch"
IN_32_BITS = "attention in 32 bits is Thunder's on a GPU, with backends that keep other things"
UNFUSED = "sdpa", "fastft", "torchcompile_cat", "torch"


@pytest.fixture(autouse=True)
def regions_run_as_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def jit(function: Any, names: tuple[str, ...]) -> Any:
    first = [] if DEVICE == "cuda" else [attention.executor]
    return thunder.jit(function, executors=fastft_thunder.executors(*first, *names))


def step(
    jitted: Any, arguments: tuple[torch.Tensor, ...], trained: list[torch.Tensor], buffers: Any = ()
) -> tuple[int, list[Any]]:
    """Bytes kept by the forward; loss and gradients."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = jitted(*arguments)
    for tensor in (*arguments, *trained, *buffers):
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(kept.values()), [loss.detach(), *torch.autograd.grad(loss, trained)]


def labels() -> torch.Tensor:
    """[TOKENS], some of them masked."""
    made = torch.randint(0, VOCABULARY, (TOKENS,), device=DEVICE)
    made[::5] = -100
    return made


def grouped_attention(x: Any, weight: Any, repeated: bool = True, turned: bool = True) -> Any:
    """Queries (until they are turned), keys and values are views of one product; the latter two may be repeated."""
    q, k, v = (
        part.view(BATCH, LENGTH, -1, HEAD).transpose(1, 2)
        for part in F.linear(x, weight).split((HIDDEN, GROUPS * HEAD, GROUPS * HEAD), dim=-1)
    )
    q = q * 2 if turned else q
    if repeated:
        k, v = (heads.repeat_interleave(HEADS // GROUPS, dim=1) for heads in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum()
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).square().sum()


X, MIDDLE = (TOKENS, HIDDEN), (TOKENS, INTERMEDIATE)
OPERATIONS: dict[
    str, tuple[Callable[..., Any], Callable[..., Any] | None, list[tuple[int, ...]], int, Counter[str]]
] = {
    # ours, the same written out, shapes of the arguments, elements kept, our operators in the backward
    "rms_norm: nothing beside x": (
        lambda x, weight, out: F.linear(functional.rms_norm(x, weight, 1e-6, "fp32"), out).square().sum(),
        lambda x, weight, out: (
            F.linear(
                (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight, out
            )
            .square()
            .sum()
        ),
        [X, (HIDDEN,), (INTERMEDIATE, HIDDEN)],
        TOKENS * INTERMEDIATE,
        Counter(rms_norm=1, rms_norm_backward=1),
    ),
    "torch's rms_norm: nothing beside x": (
        lambda x, weight, out: F.linear(F.rms_norm(x, (HIDDEN,), weight, 1e-6), out).square().sum(),
        lambda x, weight, out: F.linear(F.rms_norm(x, (HIDDEN,), weight, 1e-6), out).square().sum(),
        [X, (HIDDEN,), (INTERMEDIATE, HIDDEN)],
        TOKENS * INTERMEDIATE,
        Counter(rms_norm=1, rms_norm_backward=1),
    ),
    "an adapter's product, which reshapes what it reads": (
        lambda x, weight, a: (functional.rms_norm(x, weight, 1e-6, "fp32") @ a.transpose(0, 1)).square().sum(),
        None,
        [(BATCH, LENGTH, HIDDEN), (HIDDEN,), (INTERMEDIATE, HIDDEN)],
        TOKENS * INTERMEDIATE,
        Counter(rms_norm=1, rms_norm_backward=1),
    ),
    "swiglu: nothing beside gate and up": (
        lambda gate, up, out: F.linear(functional.swiglu(gate, up), out).square().sum(),
        lambda gate, up, out: F.linear(F.silu(gate) * up, out).square().sum(),
        [MIDDLE, MIDDLE, (HIDDEN, INTERMEDIATE)],
        TOKENS * HIDDEN,
        Counter(swiglu=1, swiglu_backward=1),
    ),
    "cross_entropy: logits and three numbers a row, in seven": (
        lambda x, head, target: F.cross_entropy(F.linear(x, head), target),
        None,
        [X, (VOCABULARY, HIDDEN), (TOKENS,)],
        TOKENS * VOCABULARY + 7 * TOKENS + 2,  # and an int64, how many rows count
        Counter(cross_entropy_backward=1),
    ),
    "linear_cross_entropy: gradients, and no hidden states": (
        lambda x, head, target: functional.linear_cross_entropy(x * 2, head, target, reduction="sum"),
        None,
        [X, (VOCABULARY, HIDDEN), (TOKENS,)],
        TOKENS * HIDDEN + VOCABULARY * HIDDEN,
        Counter(linear_cross_entropy_backward=1),
    ),
    "repeated keys and values: as they were projected": (
        grouped_attention,
        None,
        [X, (HIDDEN + 2 * GROUPS * HEAD, HIDDEN)],
        TOKENS * (2 * HIDDEN + 2 * GROUPS * HEAD + HEADS),  # queries, output, keys, values, log-sums
        Counter(attention_backward=1),
    ),
    "grouped queries: keys and values as they were projected": (
        lambda x, weight: grouped_attention(x, weight, repeated=False),
        grouped_attention,
        [X, (HIDDEN + 2 * GROUPS * HEAD, HIDDEN)],
        TOKENS * (2 * HIDDEN + 2 * GROUPS * HEAD + HEADS),
        Counter(attention_backward=1),
    ),
    "queries that are a view of the product too: the product, once": (
        lambda x, weight: grouped_attention(x, weight, turned=False),
        lambda x, weight: grouped_attention(x, weight, turned=False),
        [X, (HIDDEN + 2 * GROUPS * HEAD, HIDDEN)],
        TOKENS * (2 * HIDDEN + 2 * GROUPS * HEAD + HEADS),
        Counter(attention_backward=1),
    ),
}


@pytest.mark.parametrize("case", OPERATIONS)
def test_an_operator_s_output_is_made_again_and_not_kept(case: str) -> None:
    ours, written_out, shapes, elements, names = OPERATIONS[case]
    if "attention_backward" in names and DEVICE == "cuda":
        pytest.skip(IN_32_BITS)
    arguments = tuple(leaf(*shape) if shape != (TOKENS,) else labels() for shape in shapes)
    trained = [argument for argument in arguments if argument.requires_grad]
    jitted = jit(ours, OURS)
    kept, results = step(jitted, arguments, trained)
    assert kept == 4 * elements
    assert backward_names(jitted) == names
    if written_out is not None:
        assert kept <= step(jit(written_out, FUSION), arguments, trained)[0]
    assert_same(results, step(written_out or ours, arguments, trained)[1])


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert other.count_nonzero()
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


class Pretraining(nn.Module):
    """litgpt's model and its loss, the head inside the loss or before it."""

    def __init__(self, linear: bool) -> None:
        super().__init__()
        from litgpt.model import GPT, Config

        config = Config(
            n_layer=1,
            n_head=HEADS,
            n_query_groups=GROUPS,
            n_embd=HIDDEN,
            intermediate_size=INTERMEDIATE,
            padded_vocab_size=VOCABULARY,
            block_size=LENGTH,
            rotary_percentage=1.0,
            norm_class_name="RMSNorm",
            mlp_class_name="LLaMAMLP",
            bias=False,
            parallel_residual=False,
        )
        self.gpt = GPT(config).to(DEVICE)
        self.head, self.linear = self.gpt.lm_head, linear
        self.gpt.lm_head = nn.Identity()

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.gpt(ids)
        if self.linear:
            return functional.linear_cross_entropy(hidden, self.head.weight, targets.view(ids.shape))
        return F.cross_entropy(self.head(hidden).view(-1, VOCABULARY), targets)


def everything(trace: Any) -> set[str]:
    """Names of what runs in a trace, inside of fused regions too."""
    regions = (symbol.subsymbols if symbol.sym.is_fusion else [symbol] for symbol in trace.bound_symbols)
    return {symbol.sym.name for region in regions for symbol in region}


LAYER = TOKENS * (4 * HIDDEN + 2 * GROUPS * HEAD + HEADS + 2 * INTERMEDIATE)
"""Stream before attention and MLP, queries, attention's output; keys and values; log-sums; gate and up."""
AGAIN = Counter(rms_norm=3, swiglu=1)


@pytest.mark.skipif(not importlib.util.find_spec("litgpt"), reason="litgpt is not installed")
@pytest.mark.skipif(DEVICE == "cuda", reason=IN_32_BITS)
@pytest.mark.parametrize("names", [OURS, UNFUSED], ids=["beside fusion", "instead of fusion"])
def test_a_step_keeps_the_least_and_less_than_fusion_alone(names: tuple[str, ...]) -> None:
    models = [Pretraining(linear) for linear in (False, True)]
    models[1].load_state_dict(models[0].state_dict())
    batch = torch.randint(0, VOCABULARY, (BATCH, LENGTH), device=DEVICE), labels()

    def run(model: nn.Module, jitted: Any) -> tuple[int, list[Any]]:
        return step(jitted, batch, [*model.parameters()], [*model.buffers()])

    by_fusion, expected = run(models[0], jit(models[0], FUSION))
    ends = TOKENS * VOCABULARY + 7 * TOKENS + 2, TOKENS * HIDDEN + VOCABULARY * HIDDEN + 1
    for model, end in zip(models, ends, strict=True):
        with fastft_thunder.patch_litgpt():
            jitted = jit(model, names)
            kept, results = run(model, jitted)
        assert kept == 4 * (LAYER + TOKENS * HIDDEN + end) < by_fusion
        assert forward_names(jitted)["kept"] == 2
        assert backward_names(jitted) & AGAIN == AGAIN
        assert "repeat" not in forward_names(jitted) | backward_names(jitted)
        assert "cat" not in everything(thunder.last_traces(jitted)[-1])
        assert "pad" not in everything(thunder.last_backward_traces(jitted)[-1])
        assert_same(results, expected)
