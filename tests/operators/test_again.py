"""What a compiled step keeps for its backward, as the partitioner cuts it: no norm's output and no SwiGLU product."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch._dynamo
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd

import fastft
from fastft import functional, operators
from tests import support
from tests.operators.test_compile import operators_in


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Cut:
    """A backend that remembers what passes from the forward to the backward, and our operators in either.

    Attributes:
        kept: bytes; inputs of the step, parameters among them, are not counted.
        makers: what made the kept tensors, views aside.
        forward: our operators in the forward graph.
        backward: those in the backward graph.
    """

    def __init__(self) -> None:
        self.kept = 0
        self.makers: set[str] = set()
        self.forward: Counter[str] = Counter()
        self.backward: Counter[str] = Counter()
        self.backend = aot_autograd(
            fw_compiler=self._see_forward,
            bw_compiler=self._see_backward,
            partition_fn=min_cut_rematerialization_partition,
        )

    def _see_forward(self, graph: torch.fx.GraphModule, _: Any) -> Any:
        self.forward += operators_in(graph)
        outputs = graph.graph.output_node().args[0]
        makers = {id(maker): (maker, node) for node in outputs[1:] if (maker := _maker(node)) is not None}
        for maker, node in makers.values():  # a tensor and its view count once
            self.makers.add(str(maker.target))
            self.kept += node.meta["val"].nbytes
        return make_boxed_func(graph)

    def _see_backward(self, graph: torch.fx.GraphModule, _: Any) -> Any:
        self.backward += operators_in(graph)
        return make_boxed_func(graph)


def _maker(node: Any) -> Any:
    """The node whose buffer `node` is or views; None where that is an input, or no tensor."""
    while node.op == "call_function" and any(name in str(node.target) for name in ("view", "alias", "transpose")):
        node = node.args[0]
    return node if node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor) else None


def step(run: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = run(**batch).loss
    loss.backward()
    return loss.detach()


def test_a_compiled_step_keeps_less_than_the_stock_model_s() -> None:
    batch = support.random_batch(length=32)
    stock, planned = support.build_model(), fastft.patch(support.build_model())
    cuts = Cut(), Cut()
    for model, cut in zip((stock, planned), cuts, strict=True):
        step(torch.compile(model, fullgraph=True, backend=cut.backend), batch)
    assert cuts[1].forward == {"rms_norm": 5, "rope": 2, "swiglu": 2, "linear_cross_entropy": 1}
    again = Counter(rms_norm=5, swiglu=2)
    assert cuts[1].backward & again == again
    assert not {maker for maker in cuts[1].makers if "rms_norm" in maker or "swiglu" in maker}
    assert cuts[1].kept < 0.85 * cuts[0].kept  # torch's cut differs by release: 0.78 and less
    ours, theirs = support.trainable_gradients(planned), support.trainable_gradients(stock)
    for name, grad in theirs.items():
        assert grad.count_nonzero()
        torch.testing.assert_close(ours[name], grad, rtol=1e-4, atol=1e-5)


def test_where_nothing_is_differentiated_or_traced_there_is_no_region() -> None:
    """Eagerly, and under a compiler without gradients, the operator is called as it is."""
    x, weight = torch.randn(3, 8), torch.ones(8)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    with torch.no_grad():
        compiled = torch.compile(functional.rms_norm, fullgraph=True, backend=backend)(x, weight)
    torch.testing.assert_close(compiled, functional.rms_norm(x, weight))
    assert operators_in(graphs[0]) == {"rms_norm": 1}
    assert not [node for node in graphs[0].graph.nodes if "checkpoint" in str(node.target)]
    y = operators.rms_norm(x.requires_grad_(), weight)
    assert "rms_norm" in y.grad_fn.name() or "rms_norm" in y.grad_fn.next_functions[0][0].name()
