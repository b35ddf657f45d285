"""How near the limit: the least time the machine's measured ceilings allow for a cost, over the time taken."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fastft.bench.operations.base import Cost
from fastft.bench.registry import ModelShape
from fastft.bench.results import Row
from fastft.bench.timing import quantiles

__all__ = ["Ceilings", "ceilings_of", "limit_rows", "step_cost", "with_rates"]


@dataclass(frozen=True)
class Ceilings:
    """What the machine reaches: bytes read plus written per second on the device (GB/s), products (TFLOP/s)."""

    gbps: float
    tflops: float

    def floor_ms(self, cost: Cost) -> float:
        """Milliseconds that `cost` takes at least: the longer of its arithmetic and its bytes."""
        return max(cost.flops / self.tflops / 1e9, cost.bytes / self.gbps / 1e6)


def limit_rows(reply: Mapping[str, Any], blank: Row) -> list[Row]:
    """The reply of `limit.measure` as rows; `blank` has date, commit, GPU and versions."""
    rows = []
    for limit in reply["limits"]:
        low, median, high = quantiles(limit["samples_ms"])
        row = replace(
            blank,
            kind="limit",
            name=limit["name"],
            provider="machine",
            dtype=limit["dtype"],
            ms_20=low,
            ms_50=median,
            ms_80=high,
            host_ms=median if limit["name"] == "launch" else None,
            note="wall clock" if reply["device"] == "cpu" else "",
            samples=len(limit["samples_ms"]),
            timer="cpu" if reply["device"] == "cpu" or limit["name"] == "launch" else "events",
        )
        rows.append(with_rates(row, Cost(limit["flops"], limit["bytes"]), None))
    return rows


def ceilings_of(rows: Iterable[Row], gpu: str, dtype: str) -> Ceilings | None:
    """The newest ceilings of that GPU (and dtype of products) among `rows`; None if either is missing."""
    limits = sorted((row for row in rows if row.kind == "limit" and row.gpu == gpu), key=lambda row: row.date)
    copies = [row.gbps for row in limits if row.name == "copy" and row.gbps]
    products = [row.tflops for row in limits if row.name == "matmul" and row.dtype == dtype and row.tflops]
    return Ceilings(copies[-1], products[-1]) if copies and products else None


def with_rates(row: Row, cost: Cost | None, ceilings: Ceilings | None) -> Row:
    """The row with TFLOP/s, GB/s and share of the roofline, as far as they are known."""
    if cost is None or not row.ms_50:
        return row
    return replace(
        row,
        tflops=cost.flops / row.ms_50 / 1e9 if cost.flops else None,
        gbps=cost.bytes / row.ms_50 / 1e6 if cost.bytes else None,
        roofline_share=ceilings.floor_ms(cost) / row.ms_50 if ceilings is not None else None,
    )


def step_cost(shape: ModelShape, batch: int, length: int, *, rank: int, bits: int) -> Cost:
    """What a LoRA training step cannot do without, nothing recomputed.

    Products: each projection forward and for its input's gradient (the base is frozen: no gradient of its weight), the
    adapters' three of each, causal attention (half a square; two products forward, five backward), the head twice.
    Bytes: the weights, read once forward and once backward.
    """
    tokens = batch * length
    base = 2 * 2 * tokens * shape.layer_weights
    adapters = 3 * 2 * tokens * rank * shape.adapter_widths
    attention = 7 * batch * length**2 * shape.heads * shape.head_dim
    head = 2 * 2 * tokens * shape.hidden * shape.vocabulary
    weight_bytes = shape.layers * shape.layer_weights * bits / 8 + 2 * shape.hidden * shape.vocabulary
    return Cost(shape.layers * (base + adapters + attention) + head, 2 * weight_bytes)
