"""The loss's gradient over the logits: where the traces prove it safe, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fastft.integrations.thunder as fastft_thunder
from tests.integrations.thunder.harness import DEVICE, backward_names, leaf

import thunder  # isort: skip

IN_PLACE, FRESH = {"cross_entropy_backward_in_place": 1}, {"cross_entropy_backward": 1}


def loss_of(logits: Any, targets: Any) -> Any:
    return F.cross_entropy(logits.reshape(-1, logits.size(-1)), targets.reshape(-1))


def plain(x: Any, weight: Any, targets: Any) -> Any:
    return loss_of(F.linear(x, weight), targets)


def returns_logits(x: Any, weight: Any, targets: Any) -> Any:
    logits = F.linear(x, weight)
    return loss_of(logits, targets), logits


def reads_logits_again(x: Any, weight: Any, targets: Any) -> Any:
    logits = F.linear(x, weight)
    return loss_of(logits, targets) + 0.1 * logits.sin().sum()


def two_losses(x: Any, weight: Any, targets: Any) -> Any:
    logits = F.linear(x, weight)
    return loss_of(logits, targets) + loss_of(logits, targets.flip(0))


def logits_as_an_input(x: Any, weight: Any, targets: Any) -> Any:
    return loss_of(x, targets) + weight.sum()


def logits_of_another_kind(x: Any, weight: Any, targets: Any) -> Any:
    return loss_of(F.linear(x, weight).tanh(), targets)


def operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    targets = torch.randint(0, 8, (2, 3), device=DEVICE)
    targets[0, 1] = -100
    return leaf(2, 3, 8), leaf(8, 8), targets


@pytest.mark.parametrize("fuser", ["torch", "torchcompile"])
@pytest.mark.parametrize(
    ("function", "expected", "reason"),
    [
        (plain, IN_PLACE, None),
        (returns_logits, FRESH, "returned to the caller"),
        (reads_logits_again, FRESH, "read by"),
        (two_losses, {"cross_entropy_backward": 2}, "read by"),
        (logits_as_an_input, FRESH, "an input of the program"),
        (logits_of_another_kind, FRESH, "tanh, which is no matrix product"),
    ],
)
def test_in_place_only_where_nobody_else_reads_the_logits(
    function: Any, expected: dict[str, int], reason: str | None, fuser: str
) -> None:
    if fuser == "torchcompile" and function not in (plain, reads_logits_again):
        pytest.skip("one safe and one unsafe program do for fused regions")
    transform = fastft_thunder.InPlaceLoss()
    names = ("fastft", fuser, "torch")
    jitted = thunder.jit(function, executors=fastft_thunder.executors(*names), transforms=[transform])
    arguments = operands()
    results = []
    for run in (function, jitted):
        outputs = run(*arguments)
        outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
        results.append([*outputs, *torch.autograd.grad(outputs, arguments[:2], [torch.ones_like(o) for o in outputs])])
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert backward_names(jitted) == expected
    assert (transform.refused == []) if reason is None else any(reason in why for why in transform.refused)


def test_a_second_backward_raises_instead_of_reading_what_was_overwritten() -> None:
    jitted = thunder.jit(
        plain, executors=fastft_thunder.executors("fastft", "torch"), transforms=[fastft_thunder.InPlaceLoss()]
    )
    loss = jitted(*operands())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
