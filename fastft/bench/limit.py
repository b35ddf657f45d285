"""The machine's own ceilings, which every other figure is held against. Runs in a worker.

copy: a large copy on the device, bytes read plus bytes written. matmul: a large square product of random numbers,
sustained, since a GPU clocks down under load. launch: what it costs the host to issue the smallest operation.
h2d, d2h: pinned memory to the device and back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["measure"]

_SUSTAINED_SECONDS = 1.0
_LAUNCHES = 200


def measure(request: Mapping[str, Any]) -> dict[str, Any]:
    """Measure all ceilings.

    Args:
        request: `dtype` of the product ("bfloat16"), `samples` of each.

    Returns:
        The device's facts, and `limits`: a list of `name`, `dtype` ("" where it plays no part), `samples_ms`, and
        `bytes` and `flops` of one sample.
    """
    import torch

    from fastft.bench.machine import device_facts

    facts = device_facts()
    dtype, samples, on_gpu = getattr(torch, request["dtype"]), int(request["samples"]), facts["device"] == "cuda"
    limits = [_copy(facts, samples), _matmul(facts, dtype, samples), _launch(facts, samples)]
    if on_gpu:
        limits += [_transfer("h2d", samples), _transfer("d2h", samples)]
    return {"status": "ok", **facts, "limits": limits}


def _timed(facts: Mapping[str, Any], call: Callable[[], object], samples: int) -> list[float]:
    """Milliseconds of `call`, `samples` times, after two untimed ones."""
    from fastft.bench.timing import EventTimer, WallTimer

    call(), call()
    if facts["device"] == "cpu":
        return WallTimer([call], lambda: None).sample(samples)
    return EventTimer(call, 1, lambda: None, kind="events", note="", l2_bytes=facts["l2_bytes"]).sample(samples)


def _limit(
    name: str, samples_ms: list[float], *, nbytes: float = 0, flops: float = 0, dtype: str = ""
) -> dict[str, Any]:
    return {"name": name, "dtype": dtype, "samples_ms": samples_ms, "bytes": nbytes, "flops": flops}


def _copy(facts: Mapping[str, Any], samples: int) -> dict[str, Any]:
    import torch

    on_gpu = facts["device"] == "cuda"
    size = min(2**30, facts["free_bytes"] // 8) if on_gpu else 2**26
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=facts["device"])
    target = torch.empty_like(source)
    return _limit("copy", _timed(facts, lambda: target.copy_(source), samples), nbytes=2 * size)


def _matmul(facts: Mapping[str, Any], dtype: Any, samples: int) -> dict[str, Any]:
    import torch

    size = 8192 if facts["device"] == "cuda" else 512
    left, right = (torch.randn(size, size, device=facts["device"], dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)

    def product() -> object:
        return torch.mm(left, right, out=out)

    until = time.perf_counter() + (_SUSTAINED_SECONDS if facts["device"] == "cuda" else 0.0)
    while time.perf_counter() < until:
        for _ in range(5):
            product()
        torch.cuda.synchronize()
    name = str(dtype).removeprefix("torch.")
    return _limit("matmul", _timed(facts, product, samples), flops=2 * size**3, dtype=name)


def _launch(facts: Mapping[str, Any], samples: int) -> dict[str, Any]:
    """Host milliseconds of one in-place addition to one number, autograd off."""
    import torch

    number = torch.zeros(1, device=facts["device"])
    times = []
    with torch.no_grad():
        for _ in range(samples + 2):
            start = time.perf_counter()
            for _ in range(_LAUNCHES):
                number.add_(1)
            times.append((time.perf_counter() - start) * 1e3 / _LAUNCHES)
            if facts["device"] == "cuda":
                torch.cuda.synchronize()
    return _limit("launch", times[2:])


def _transfer(direction: str, samples: int) -> dict[str, Any]:
    import torch

    from fastft.bench.machine import device_facts

    size = 2**28
    host = torch.randint(0, 256, (size,), dtype=torch.uint8).pin_memory()
    device = host.cuda()
    target, source = (device, host) if direction == "h2d" else (host, device)
    samples_ms = _timed(device_facts(), lambda: target.copy_(source, non_blocking=True), samples)
    return _limit(direction, samples_ms, nbytes=size)
