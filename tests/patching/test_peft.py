"""Reading projections as they stand: what a reader has seen once must not outlive the module it saw."""

from __future__ import annotations

import pathlib

import pytest
import torch

from tests import support
from tests.patching.helpers import LEVELS, assert_ran_fast, assert_same_step, decoder_layers, set_level, step, twins


@pytest.mark.parametrize("level", LEVELS)
def test_an_adapter_put_on_after_a_forward_is_seen(level: str, batch: dict[str, torch.Tensor]) -> None:
    """The plain projections have been read by then; the adapters stand in their places."""
    stock, fast = twins(support.build_model())
    set_level(level, stock, fast)
    assert_same_step(step(stock, batch), step(fast, batch))
    stock, fast = (support.add_lora(model) for model in (stock, fast))
    assert_same_step(step(stock, batch), step(fast, batch))
    assert_ran_fast(fast, forwards=2)


@pytest.mark.parametrize("level", LEVELS)
def test_an_adapter_taken_off_after_a_forward_is_gone(level: str, batch: dict[str, torch.Tensor]) -> None:
    stock, fast = twins(support.add_lora(support.build_model()))
    set_level(level, stock, fast)
    assert_same_step(step(stock, batch), step(fast, batch))
    stock, fast = (model.unload().requires_grad_() for model in (stock, fast))
    assert_same_step(step(stock, batch), step(fast, batch))
    assert_ran_fast(fast, forwards=2)


def test_a_4bit_weight_exchanged_after_a_forward_is_seen(
    tmp_path: pathlib.Path, batch: dict[str, torch.Tensor]
) -> None:
    """What the kernels read of a packed weight is remembered for as long as that weight is in place, and no longer."""
    stock, fast = twins(support.add_lora(support.load_4bit(support.build_model(), tmp_path)))
    assert_same_step(step(stock, batch), step(fast, batch))
    for model in (stock, fast):
        first, second = (layer.self_attn.q_proj.base_layer for layer in decoder_layers(model))
        first.weight, second.weight = second.weight, first.weight
    assert_same_step(step(stock, batch), step(fast, batch))
    assert_ran_fast(fast, forwards=2)
