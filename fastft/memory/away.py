"""How much of an offloaded layer goes to host memory, and what that costs.

x always goes. Attention's output with its statistics, or all of the attention half that level *lean* keeps, can go too
(autograd/host_layer.py): then the backward has less to make again. A copy is free as long as the link to the host keeps
up with the layer's own work, so what decides is the layer's operations for each byte that would cross, against what the
device does while a byte crosses. A longer row has more operations a byte (attention), a wider layer too (products).

Beyond what it delays, a byte costs the memory traffic of its copies, and each tensor the host's time to send it. Time
is in floating-point operations, as in costs.py.
"""

from __future__ import annotations

from fastft.autograd.layer_call import Away
from fastft.memory.planner import LevelCost

__all__ = ["AWAY", "STATISTIC", "goes_away", "late", "offload_cost"]

AWAY: tuple[Away, ...] = ("input", "attention", "half")  # from the least to the most
STATISTIC = 4  # bytes of a float32 per row and head
_LINK_OPERATIONS = 12e3  # done while a byte crosses to host memory (H200: 650e12 over 50e9 a second; fewer elsewhere)
_HOST_COPY_OPERATIONS = 600  # a byte to host memory and back slows the products beside it by as much (H200: ~1 ms/GB)
_HOST_LAUNCH_OPERATIONS = 3e11  # offload's streams and events cost the host half a millisecond a layer
_BUSY_OPERATIONS = 1.5e12  # of a layer's forward: beyond, the device is busy and the host's time hidden (H200: 2.5 ms)
_ONCE_OPERATIONS = 3e10  # attention's emptied graph and two more copies cost the host 50 microseconds
_LATE_FROM = 65536  # tokens a row: attention takes many times as long as its output's way back, which need not be early


def goes_away(
    *,
    tokens: int,
    longest: int,
    hidden: int,
    query: int,
    key_value: int,
    heads: int,
    intermediate: int,
    compute_bytes: int,
    stream_bytes: int,
) -> Away:
    """How much of an offloaded layer goes to host memory beside x, instead of being made again.

    The most that stays hidden behind the layer's own forward, and saves more time than it costs.

    Args:
        tokens: in a batch.
        longest: length of a row, or of the longest document.
        hidden: width of the residual stream.
        query: heads · head_dim.
        key_value: key/value heads · head_dim.
        heads: query heads.
        intermediate: columns of gate, up.
        compute_bytes: element size of the products' dtype.
        stream_bytes: element size of the residual stream.
    """
    stream = stream_bytes * hidden  # a token, as all that follows
    output = compute_bytes * query + STATISTIC * heads
    half = compute_bytes * (query + 2 * key_value) + stream  # Q, K, V, h
    attention = 2.0 * longest * query
    products = 4.0 * hidden * (query + key_value)  # of the attention half
    forward = products + 6.0 * hidden * intermediate + attention
    if forward < _LINK_OPERATIONS * (stream + output):
        return "input"
    if tokens * (attention - _HOST_COPY_OPERATIONS * output) < _ONCE_OPERATIONS:
        return "input"
    if late(longest) or forward < _LINK_OPERATIONS * (stream + output + half):
        return "attention"
    return "attention" if tokens * (products - _HOST_COPY_OPERATIONS * half) < _ONCE_OPERATIONS else "half"


def late(longest: int) -> bool:
    """Whether rows are so long that one tensor less on the device matters more than waiting for it."""
    return longest >= _LATE_FROM


def offload_cost(
    away: Away,
    *,
    longest: int,
    stream: int,
    further: int,
    backward: int,
    forward: int,
    operations: float,
    attention: float,
    products: float,
    busy: float,
) -> LevelCost:
    """What one layer costs at level offload.

    Args:
        away: what of it goes to host memory.
        longest: length of a row.
        stream: bytes of x.
        further: bytes that go beside x.
        backward: bytes of a backward that finds all this on the device.
        forward: bytes of a forward beside x.
        operations: of a layer that makes everything again from x.
        attention: of these, attention's.
        products: of these, those of the attention half's products.
        busy: operations of the forward's products, by which the host's time is hidden or not.
    """
    # A backward has x, and x and what else is there of the layer before, on their way back; a forward, x and what goes
    # beside it, on their way out.
    arriving = 2 * stream + (0 if late(longest) else further)
    seconds = operations + _HOST_COPY_OPERATIONS * (stream + further)
    if busy < _BUSY_OPERATIONS:
        seconds += _HOST_LAUNCH_OPERATIONS
    if away != "input":
        seconds += _ONCE_OPERATIONS - attention
    if away == "half":
        seconds += _ONCE_OPERATIONS - products
    return LevelCost(0, max(backward + arriving, forward + stream + further), stream + further, seconds)
