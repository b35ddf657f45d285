"""Dropout's check: ours by the twin's mask, a peer's by its own mask, and by how much that keeps (C40)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastft.bench.checking import TOLERANCE, check_provider
from fastft.bench.operations import find_operation
from fastft.bench.operations.base import Function, Inputs, Problem
from fastft.bench.operations.dropout import P
from fastft.bench.prepared import Prepared
from fastft.bench.registry import find_model

ROWS = 1500  # two pieces of the reference, the second shorter
DROPOUT = find_operation("dropout")


def inputs_of(dtype: torch.dtype = torch.float32, rows: int = ROWS) -> Inputs:
    return DROPOUT.draw(Problem(find_model("tiny"), rows, dtype, "cpu"), torch.Generator().manual_seed(0))


def error_of(provider: str, function: Function, inputs: Inputs | None = None) -> tuple[str, float]:
    return check_provider(DROPOUT, provider, function, inputs or inputs_of(), 0.0)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_ours_has_the_twins_mask_in_every_piece_of_the_rows(dtype: torch.dtype) -> None:
    inputs = inputs_of(dtype)
    assert error_of("fastft", DROPOUT.load("fastft", "full"), inputs)[1] < TOLERANCE[dtype]
    other = inputs.arguments["seed"] + 1
    name, error = error_of("fastft", lambda seed, **x: DROPOUT.load("fastft", "full")(seed=other, **x), inputs)
    assert name in ("output 0", "gradient of x")
    assert error == pytest.approx(math.sqrt(2 * P), rel=0.1), "another seed is another mask"


def test_what_is_right_for_a_peer_is_wrong_for_us() -> None:
    assert error_of("fastft", DROPOUT.load("torch", "full"))[1] > 0.3


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_peers_own_masks_are_right_whichever_they_are(dtype: torch.dtype) -> None:
    for _ in range(3):  # torch's generator goes on
        assert error_of("torch", DROPOUT.load("torch", "full"), inputs_of(dtype))[1] < TOLERANCE[dtype]


def test_chance_is_not_held_against_a_peer() -> None:
    """In a few rows the share kept is off by more than the tolerance nearly always."""
    inputs = inputs_of(rows=16)
    for _ in range(20):
        assert error_of("torch", DROPOUT.load("torch", "full"), inputs)[1] < TOLERANCE[torch.float32]


class BackwardOfAnotherMask(torch.autograd.Function):
    """Torch's dropout, and dropout anew of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return F.dropout(x, P)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return F.dropout(grads[0], P)


WRONG = {
    "too many kept": (lambda x, **_: F.dropout(x, P / 2) * (1 - P / 2) / (1 - P), "share kept", 0.05),
    "too few kept": (lambda x, **_: F.dropout(x, 2 * P) * (1 - 2 * P) / (1 - P), "share kept", 0.11),
    "not scaled": (lambda x, **_: F.dropout(x, P) * (1 - P), "output 0", 0.1),
    "nothing dropped": (lambda x, **_: x / (1 - P), "share kept", 0.11),
    "backward of another mask": (lambda x, **_: BackwardOfAnotherMask.apply(x), "gradient of x", math.sqrt(2 * P)),
    "NaN": (lambda x, **_: F.dropout(x, P) * math.nan, "output 0", math.inf),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_peer_is_named(case: str) -> None:
    function, what, size = WRONG[case]
    name, error = error_of("torch", function)
    assert error == pytest.approx(size, rel=0.1)
    assert name == what or case in ("not scaled", "NaN"), "the gradient is as wrong there"


def test_a_peer_is_timed_after_its_own_check() -> None:
    problem = Problem(find_model("tiny"), 48, torch.float32, "cpu")
    prepared = Prepared(DROPOUT, "torch", problem, "full")
    assert prepared.check()[0] == ""
    prepared.make_ready(l2_bytes=1)
    assert len(prepared.sample(2)[0]) == 2


def test_no_peer_is_left_to_be_compared_with_our_mask() -> None:
    assert set(DROPOUT.provider_names()) - {"fastft"} == set(DROPOUT.checks)
