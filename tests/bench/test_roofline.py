"""Ceilings, shares of them, and the cost of a training step."""

from __future__ import annotations

import pytest
import torch

from fastft.bench.operations.base import Cost
from fastft.bench.registry import find_model
from fastft.bench.results import Row
from fastft.bench.roofline import Ceilings, ceilings_of, limit_rows, step_cost, with_rates
from tests import support
from tests.bench.samples import PLACE, kernel_row

CEILINGS = Ceilings(gbps=4000.0, tflops=800.0)


def test_the_longer_of_arithmetic_and_bytes_is_the_floor() -> None:
    assert CEILINGS.floor_ms(Cost(8e11, 4e9)) == pytest.approx(1.0)
    assert CEILINGS.floor_ms(Cost(8e11, 8e9)) == pytest.approx(2.0)
    assert CEILINGS.floor_ms(Cost(24e11, 4e9)) == pytest.approx(3.0)


def test_rates_of_a_row() -> None:
    row = with_rates(kernel_row(ms_50=2.0), Cost(8e11, 4e9), CEILINGS)
    assert (row.tflops, row.gbps, row.roofline_share) == (pytest.approx(400), pytest.approx(2000), pytest.approx(0.5))
    assert with_rates(kernel_row(ms_50=2.0), Cost(8e11, 4e9), None).roofline_share is None
    assert with_rates(kernel_row(ms_50=None), Cost(8e11, 4e9), CEILINGS).tflops is None
    assert with_rates(kernel_row(), None, CEILINGS) == kernel_row()


def limits(date: str, gpu: str, copy_ms: float) -> list[Row]:
    reply = {
        "device": "cuda",
        "limits": [
            {"name": "copy", "dtype": "", "samples_ms": [copy_ms] * 3, "bytes": 4e9, "flops": 0},
            {"name": "matmul", "dtype": "bfloat16", "samples_ms": [2.0] * 3, "bytes": 0, "flops": 1.6e12},
            {"name": "launch", "dtype": "", "samples_ms": [0.002] * 3, "bytes": 0, "flops": 0},
        ],
    }
    return limit_rows(reply, Row(**{**PLACE, "date": date, "gpu": gpu}))


def test_the_newest_ceilings_of_the_same_machine_and_dtype() -> None:
    rows = limits("2026-01-02", "A", 1.0) + limits("2026-01-01", "A", 4.0) + limits("2026-01-03", "B", 2.0)
    assert ceilings_of(rows, "A", "bfloat16") == Ceilings(pytest.approx(4000.0), pytest.approx(800.0))
    assert ceilings_of(rows, "B", "bfloat16") == Ceilings(pytest.approx(2000.0), pytest.approx(800.0))
    assert ceilings_of(rows, "A", "float32") is None
    assert ceilings_of(rows, "C", "bfloat16") is None


def test_limit_rows_say_how_they_were_timed() -> None:
    rows = {row.name: row for row in limits("2026-01-02", "A", 1.0)}
    assert rows["copy"].timer == "events"
    assert rows["launch"].timer == "cpu"
    assert rows["launch"].host_ms == 0.002


def test_a_step_costs_what_torch_counts() -> None:
    """A dense model with adapters in float32: torch counts its products, the attention as a whole square."""
    from torch.utils.flop_counter import FlopCounterMode

    batch, length, rank = 2, 32, 4
    model = support.add_lora(support.build_model("llama", vocab_size=512, attn_implementation="eager"), r=rank)
    ids = torch.randint(0, 512, (batch, length))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    shape = find_model("tiny")
    cost = step_cost(shape, batch, length, rank=rank, bits=16)
    square = shape.layers * 2 * batch * length**2 * shape.heads * shape.head_dim  # one whole product of attention
    counted = counter.get_total_flops() - 6 * square  # two forward, four backward
    ours = cost.flops - 3.5 * square  # half of two forward and of five backward
    # torch's backward skips the gradient of the first layer's input, which nothing before it needs
    assert ours == pytest.approx(counted, rel=0.15)
    assert ours >= counted


def test_four_bits_weigh_a_quarter_of_sixteen() -> None:
    shape = find_model("llama-8b")
    head = 2 * 2 * shape.hidden * shape.vocabulary
    sixteen, four = (step_cost(shape, 1, 128, rank=16, bits=bits).bytes - head for bits in (16, 4))
    assert sixteen == 4 * four
