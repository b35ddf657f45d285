"""`torch.compile` over the functional API and over planned models: our operators in the graph, no break in it, one
graph for all lengths (C58), and no setting of dynamo's touched."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.testing
import torch._dynamo.utils

import fastft
from fastft import functional
from tests import support
from tests.operators.test_operators import HIDDEN, VOCABULARY, quantized

LENGTHS = range(5, 25)  # 20 of them


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Any:
    torch._dynamo.reset()
    torch._dynamo.utils.clear_compilation_metrics()
    yield
    torch._dynamo.reset()


def counting(backend: str = "aot_eager") -> Any:
    """A backend that remembers its graphs."""
    return torch._dynamo.testing.CompileCounterWithBackend(backend)


def recompilations() -> list[str]:
    """Why dynamo compiled anew since `fresh_dynamo`: the guards that failed, in its own words."""
    reasons = (metrics.recompile_reason for metrics in torch._dynamo.utils.get_compilation_metrics())
    return [reason for reason in reasons if reason]


def operators_in(graph: Any) -> Counter[str]:
    """Our operators in a captured graph and the regions in it, by name."""
    graphs = (module for module in graph.modules() if isinstance(module, torch.fx.GraphModule))
    nodes = (node for each in graphs for node in each.graph.nodes if node.op == "call_function")
    names = (str(node.target) for node in nodes)
    return Counter(
        name.removeprefix("fastft.").removesuffix(".default") for name in names if name.startswith("fastft.")
    )


def block(x: Any, norm: Any, a: Any, b: Any, head: Any, labels: Any, weight: Any) -> torch.Tensor:
    """Everything of the functional API, once."""
    y = functional.rms_norm(x, norm)
    y = y + functional.lora_linear(y, head[:HIDDEN], a[:, :HIDDEN], b, scale=2.0)
    y = y + functional.lora_linear(y, weight, a, b[:32], scale=2.0).repeat(1, 1, 2)
    y = y + torch.nn.functional.linear(y, functional.dequantize(weight)).repeat(1, 1, 2)
    heads = y.view(*y.shape[:-1], 4, 16).transpose(1, 2)
    angle = torch.arange(x.shape[1], dtype=x.dtype)[None, :, None] * torch.arange(16, dtype=x.dtype) / 10
    q, k = functional.rope(heads, heads, angle.cos(), angle.sin())
    y = functional.swiglu((q * k).transpose(1, 2).reshape(x.shape), y)
    return functional.linear_cross_entropy(y, head, labels)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_functional_api_is_one_graph_for_all_lengths_c58(backend: str) -> None:
    """C58: at most two graphs (one for the first length, one for all others); values and gradients are eager's."""
    weight, counter = quantized(), counting(backend)
    compiled = torch.compile(block, fullgraph=True, backend=counter)
    shapes = [(HIDDEN,), (4, HIDDEN), (HIDDEN, 4), (97, HIDDEN)]
    leaves = [torch.randn(shape).mul_(0.3).requires_grad_() for shape in shapes]
    for length in LENGTHS if backend == "aot_eager" else (5, 9, 16):
        x, labels = torch.randn(2, length, HIDDEN).requires_grad_(), torch.randint(0, 97, (2, length))
        labels[:, 1] = -100
        results = []
        for function in (block, compiled):
            loss = function(x, *leaves, labels, weight)
            results.append([loss.detach(), *torch.autograd.grad(loss, [x, *leaves])])
        for one, other in zip(*results, strict=True):
            assert one.count_nonzero()
            torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-4)  # sums in another order
    assert counter.frame_count <= 2, recompilations()
    assert operators_in(counter.graphs[-1]) == {
        "rms_norm": 1,
        "lora_linear_4bit": 1,
        "dequantize": 1,
        "rope": 1,
        "swiglu": 1,
        "linear_cross_entropy": 1,
    }


def test_mistakes_are_named_under_a_compiler_too() -> None:
    compiled = torch.compile(functional.linear_cross_entropy, backend="eager")
    hidden, weight = torch.randn(3, HIDDEN), torch.randn(VOCABULARY, HIDDEN)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        compiled(hidden, weight, torch.tensor([0, VOCABULARY, 1]))
    with pytest.raises(Exception, match="softcap must be positive"):
        compiled(hidden, weight, torch.tensor([0, 1, 2]), softcap=-1.0)


def test_callbacks_and_approximations_are_refused_in_a_graph_and_kept_where_it_may_break() -> None:
    """Dropped in silence they would be a callback that never comes."""
    hidden, weight, labels = torch.randn(3, HIDDEN), torch.randn(VOCABULARY, HIDDEN), torch.full((3,), -100)
    whole = torch.compile(functional.linear_cross_entropy, backend="eager", fullgraph=True)
    for option in ({"on_empty": print}, {"skip_below": 1e-5}, {"on_skip": print}):
        with pytest.raises(Exception, match=f"{next(iter(option))} cannot be traced"):
            whole(hidden, weight, labels, **option)
    assert whole(hidden, weight, labels.clamp(min=0), on_empty=None, skip_below=None) > 0
    called: list[str] = []
    torch._dynamo.reset()
    torch.compile(functional.linear_cross_entropy, backend="eager")(
        hidden, weight, labels, on_empty=lambda: called.append("empty")
    )
    assert called == ["empty"]


def step(model: Any, run: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = run(**batch).loss
    loss.backward()
    return loss.detach(), support.trainable_gradients(model)


def assert_same_step(model: Any, compiled: Any, batch: dict[str, torch.Tensor]) -> None:
    (loss, grads), (compiled_loss, compiled_grads) = step(model, model, batch), step(model, compiled, batch)
    torch.testing.assert_close(compiled_loss, loss)
    assert compiled_grads.keys() == grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(compiled_grads[name], grad, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("family", "adapters", "lengths"),
    [("llama", True, LENGTHS), ("qwen3", False, (5, 9))],
    ids=["llama with LoRA, 20 lengths", "qwen3"],
)
def test_a_planned_model_is_one_graph_with_our_operators_c58(family: str, adapters: bool, lengths: Any) -> None:
    """C58: 20 lengths, no recompilation limit met; dynamo's settings are as they were."""
    settings = copy.deepcopy(torch._dynamo.config.get_config_copy())
    model = support.build_model(family)
    model = fastft.patch(support.add_lora(model) if adapters else model)
    counter = counting()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for length in lengths:
        assert_same_step(model, compiled, support.random_batch(length, length=length))
    assert counter.frame_count <= 2, recompilations()
    norms = 5 if family == "llama" else 9  # Q and K of Qwen 3 are normalized too
    assert operators_in(counter.graphs[-1]) == {"rms_norm": norms, "rope": 2, "swiglu": 2, "linear_cross_entropy": 1}
    assert torch._dynamo.config.get_config_copy() == settings
    assert any("traced by torch.compile" in note for note in fastft.report(model).notes)


def test_a_head_trained_as_a_copy_has_its_loss_in_one_operator() -> None:
    """PEFT's `modules_to_save=["lm_head"]`: no logits in the graph."""
    model = fastft.patch(
        support.add_lora(support.build_model(), target_modules=["q_proj"], modules_to_save=["lm_head"])
    )
    counter = counting()
    assert_same_step(model, torch.compile(model, fullgraph=True, backend=counter), support.random_batch())
    assert operators_in(counter.graphs[-1])["linear_cross_entropy"] == 1


@pytest.mark.slow
def test_qlora_keeps_adapter_and_4_bit_weight_in_one_operator(tiny_qlora: Any) -> None:
    """And follows PEFT's state: with adapters disabled the base alone runs."""
    model, counter = fastft.patch(tiny_qlora), counting()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for length in (5, 9):
        assert_same_step(model, compiled, support.random_batch(length, length=length))
    assert counter.frame_count <= 2, recompilations()
    assert operators_in(counter.graphs[-1])["lora_linear_4bit"] == 14
    batch = support.random_batch(3)
    with model.disable_adapter():
        without = model(**batch).loss
        torch.testing.assert_close(compiled(**batch).loss, without)
    assert not torch.isclose(model(**batch).loss, without)


@pytest.mark.parametrize("level", ["recompute", "auto"])
def test_recomputation_padding_and_evaluation_under_a_compiler(level: str) -> None:
    model = fastft.patch(support.build_model(), memory_levels=level, padding_free=False)
    batch, counter = support.random_batch(3, length=9, padded=True), counting()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    assert_same_step(model, compiled, batch)
    checkpoints = [node for node in counter.graphs[0].graph.nodes if "checkpoint" in str(node.target)]
    assert len(checkpoints) == 3  # two layers; and the last norm, whose output is not kept
    model.eval()
    with torch.no_grad():
        ours, theirs = compiled(**batch), model(**batch)
    torch.testing.assert_close(ours.loss, theirs.loss)
    torch.testing.assert_close(ours.logits, theirs.logits)


def test_a_model_without_a_plan_and_stock_only_keep_out_of_the_graph() -> None:
    batch, plain, planned = support.random_batch(), support.build_model(), fastft.patch(support.build_model())
    counters = counting("eager"), counting("eager")
    torch.compile(plain, fullgraph=True, backend=counters[0])(**batch)
    with fastft.stock_only():
        torch.compile(planned, fullgraph=True, backend=counters[1])(**batch)
    assert all(not operators_in(graph) for counter in counters for graph in counter.graphs)
