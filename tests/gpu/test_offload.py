"""The store in host memory on real streams: right values under load, no host sync, and memory where it should be."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fastft.memory import offload
from fastft.memory.offload import HostStore, Parcel

SHAPE = (2048, 4096)
BYTES = 2048 * 4096 * 2
BUSY = 50_000_000  # cycles: some 25 ms, many times what one copy takes


@contextlib.contextmanager
def syncs_forbidden() -> Iterator[None]:
    """Any synchronizing call of PyTorch raises inside."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def filled(value: float) -> Tensor:
    """A tensor of one value, which its stream comes to write after everything before it."""
    return torch.full(SHAPE, value, device="cuda", dtype=torch.bfloat16)


def scribble() -> None:
    """Take memory of this size that is free on the current stream, three blocks at once, and overwrite it."""
    blocks = [filled(-1.0) for _ in range(3)]
    blocks.clear()


def forward(store: HostStore, count: int = 8) -> list[Parcel]:
    """Puts of 1, 2, 3, … made on a busy stream, whose memory the next layer takes at once."""
    parcels = []
    for value in range(1, count + 1):
        torch.cuda._sleep(BUSY // 10)
        x = filled(float(value))
        parcels.append(store.put(x))
        del x
        scribble()
    store.settle()
    scribble()
    return parcels


def backward(parcels: list[Parcel]) -> Tensor:
    """What came back, as one number per parcel: 0 where every element is right. [parcels]"""
    wrong = []
    while parcels:
        value = len(parcels)
        x = parcels.pop().get()
        wrong.append((x != value).sum())
        del x
        scribble()
        torch.cuda._sleep(BUSY // 10)
    return torch.stack(wrong)


def pinned_bytes(store: HostStore) -> int:
    return sum(buffer.nbytes for buffer in store._buffers if buffer.memory.is_pinned())


def test_values_survive_a_busy_stream_and_memory_that_is_taken_at_once() -> None:
    store = HostStore()
    for _ in range(3):
        assert backward(forward(store)).tolist() == [0] * 8


def test_the_same_on_another_stream() -> None:
    store = HostStore()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        wrong = backward(forward(store))
    stream.synchronize()
    assert wrong.tolist() == [0] * 8


def test_a_backward_on_another_stream_than_the_forward() -> None:
    store = HostStore()
    parcels = forward(store)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        wrong = backward(parcels)
    stream.synchronize()
    assert wrong.tolist() == [0] * 8


def test_a_prefetch_begun_on_one_stream_and_used_on_another() -> None:
    store = HostStore()
    parcels = [store.put(filled(value)) for value in (1.0, 2.0)]
    parcels.pop().get()
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        torch.cuda._sleep(BUSY)
        x = parcels.pop().get()
        wrong = (x != 1).sum()
        del x  # its memory is the default stream's, which must not have it before `other` has read it
    scribble()
    other.synchronize()
    assert wrong.item() == 0


def test_buffers_are_pinned_and_reused() -> None:
    store = HostStore()
    held = []
    for _ in range(5):
        assert backward(forward(store)).sum().item() == 0
        held.append(store.host_bytes)
        assert store.in_flight == 0
    assert held == [8 * BYTES] * 5
    assert pinned_bytes(store) == 8 * BYTES
    store.release()
    assert store.host_bytes == 0


def test_no_host_sync_once_the_buffers_are_there() -> None:
    store = HostStore()
    backward(forward(store))
    torch.cuda.synchronize()
    with syncs_forbidden():
        wrong = backward(forward(store))
    assert wrong.tolist() == [0] * 8


def test_the_host_runs_ahead_of_the_copies() -> None:
    store = HostStore()
    backward(forward(store))
    torch.cuda.synchronize()
    torch.cuda._sleep(20 * BUSY)
    parcels = forward(store)
    assert not torch.cuda.current_stream().query(), "a put or a settle waited on the host"
    backward(parcels)
    assert not torch.cuda.current_stream().query(), "a get waited on the host"


def test_a_get_starts_the_parcel_before_it() -> None:
    store = HostStore()
    parcels = [store.put(filled(value)) for value in (1.0, 2.0, 3.0)]
    parcels[2].get()
    assert [parcel.arriving for parcel in parcels] == [False, True, False]
    # Not only noted: the copy has run on its own stream, without anybody waiting for it on this one.
    arrival = parcels[1]._arrival
    assert arrival is not None
    assert arrival.copied is not None
    arrival.copied.synchronize()
    assert (arrival.tensor == 2).all()
    assert arrival.user == torch.cuda.current_stream()


def test_the_copy_back_does_not_wait_for_work_that_comes_after_it() -> None:
    """It runs beside the backward of the layer that asked for it."""
    store = HostStore()
    parcels = [store.put(filled(value)) for value in (1.0, 2.0)]
    torch.cuda.synchronize()
    parcels[1].get()
    torch.cuda._sleep(20 * BUSY)
    arrival = parcels[0]._arrival
    assert arrival is not None
    assert arrival.copied is not None
    arrival.copied.synchronize()
    assert not torch.cuda.current_stream().query()


def test_at_most_two_tensors_wait_to_leave_and_none_after_settling() -> None:
    """Counted while the device has not even begun: the peak does not depend on how fast the copies are."""
    store = HostStore()
    backward(forward(store))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    reserved = torch.cuda.memory_reserved()
    torch.cuda._sleep(20 * BUSY)
    parcels = []
    for value in range(8):
        x = filled(float(value))
        parcels.append(store.put(x))
        del x
        assert torch.cuda.memory_allocated() - before <= 2 * BYTES
    store.settle()
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.memory_reserved() <= reserved + 3 * BYTES
    assert not torch.cuda.current_stream().query()


def test_a_backward_holds_one_tensor_ahead() -> None:
    store = HostStore()
    parcels = forward(store)
    before = torch.cuda.memory_allocated()
    while parcels:
        x = parcels.pop().get()
        assert torch.cuda.memory_allocated() - before == (2 if parcels else 1) * BYTES
        del x
    assert torch.cuda.memory_allocated() == before


def test_a_buffer_is_not_overwritten_before_it_is_read() -> None:
    """The copy back is late; meanwhile the parcel dies and the next one takes its buffer."""
    store = HostStore()
    parcel = store.put(filled(1.0))
    assert parcel._lanes is not None
    with torch.cuda.stream(parcel._lanes.back):
        torch.cuda._sleep(4 * BUSY)
    first = parcel.get()
    del parcel
    second = store.put(filled(2.0)).get()
    assert store.host_bytes == BYTES, "the test needs the same buffer"
    assert (first == 1).all()
    assert (second == 2).all()


def test_memory_of_an_arrival_nobody_takes_is_not_given_away_early() -> None:
    store = HostStore()
    parcels = [store.put(filled(value)) for value in (1.0, 2.0)]
    lanes = parcels[1]._lanes
    assert lanes is not None
    store.settle()
    with torch.cuda.stream(lanes.back):
        torch.cuda._sleep(4 * BUSY)
    parcels[1].get()
    parcels.clear()  # the first one is on its way
    taken = [filled(7.0) for _ in range(4)]
    torch.cuda.synchronize()
    assert all(bool((x == 7).all()) for x in taken)


def test_a_parcel_can_be_had_twice() -> None:
    store = HostStore()
    parcels = forward(store, count=3)
    again = list(parcels)
    assert backward(parcels).sum().item() == 0
    assert backward(again).sum().item() == 0


def test_release_with_copies_under_way() -> None:
    store = HostStore()
    parcels = forward(store, count=4)
    kept = parcels[0]
    wrong = backward(parcels)
    del parcels
    store.release()
    assert store.host_bytes == BYTES
    assert (kept.get() == 1).all()
    assert wrong.sum().item() == 0
    del kept
    gc.collect()
    assert store.host_bytes == 0
    assert backward(forward(store, count=2)).sum().item() == 0


def test_a_store_that_dies_unpins_its_memory() -> None:
    store = HostStore()
    backward(forward(store, count=2))
    (memory, *_) = [buffer.memory for buffer in store._buffers]
    assert memory.is_pinned()
    del store
    gc.collect()
    assert not memory.is_pinned()


def test_refused_pinning_raises_here_and_not_in_the_next_kernel() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    buffer = offload._HostBuffer(1 << 20, device)
    with pytest.raises(RuntimeError, match=r"cannot pin 1 MiB of host memory \(.*\)\. Use level 'recompute'"):
        offload._pin(buffer.memory, device)
    assert torch.ones(3, device=device).sum().item() == 3
    assert buffer.memory.is_pinned()
