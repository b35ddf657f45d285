"""The machine's ceilings, measured on this CPU: figures that are there and add up."""

from __future__ import annotations

from fastft.bench.limit import measure


def test_each_ceiling_has_its_samples_and_its_work() -> None:
    reply = measure({"dtype": "float32", "samples": 3})
    assert reply["status"] == "ok"
    limits = {limit["name"]: limit for limit in reply["limits"]}
    assert set(limits) >= {"copy", "matmul", "launch"}
    for limit in limits.values():
        assert len(limit["samples_ms"]) == 3
        assert min(limit["samples_ms"]) > 0
    assert limits["copy"]["bytes"] == 2 * 2**26 or reply["device"] == "cuda"  # read and written
    assert limits["matmul"]["flops"] == 2 * 512**3 or reply["device"] == "cuda"
    assert limits["matmul"]["dtype"] == "float32"
    assert limits["launch"]["samples_ms"][0] < limits["copy"]["samples_ms"][0]
