"""A hand-derived backward has no derivative of its own; asking for one must raise, not be silently wrong.

PyTorch's `once_differentiable` lets `create_graph=True` through when the incoming gradient needs no gradient itself,
as that of a loss never does: the gradients then come out as constants, and a penalty on them trains nothing, without
a word. Here the backward refuses as soon as it runs with grad mode on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a Function's static `backward`.

    Raises:
        RuntimeError: when the backward runs under `create_graph=True`.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "fastft: a double backward was asked for (create_graph=True), but fastft's hand-derived backward has "
                "no derivative of its own. Run this part inside fastft.stock_only(), or drop create_graph=True."
            )
        return backward(ctx, *grads)

    return checked
