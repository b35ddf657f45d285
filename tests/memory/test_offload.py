"""What the store in host memory does with parcels and buffers, and how it orders its copies.

On the CPU a store copies at once; which stream waits for what is read off streams that only write down what they are
told. The real ones are in tests/gpu/test_offload.py.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fastft.memory import offload
from fastft.memory.offload import HostStore, Parcel

PAGE = 4096


def pages(count: float) -> Tensor:
    """A random tensor of so many pages."""
    return torch.randn(int(count * PAGE) // 4)


def put_all(store: HostStore, count: int) -> tuple[list[Tensor], list[Parcel]]:
    tensors = [pages(2) for _ in range(count)]
    return tensors, [store.put(tensor) for tensor in tensors]


# Parcels.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("shape", [(2, 3, 5), (), (0, 4), (1000, 7)])
def test_what_comes_back_is_what_was_put(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    back = HostStore().put(tensor).get()
    assert back.dtype == dtype
    assert torch.equal(back, tensor)
    assert back.data_ptr() != tensor.data_ptr() or tensor.numel() == 0


def test_parcels_do_not_share_memory() -> None:
    store = HostStore()
    tensors, parcels = put_all(store, 4)
    for tensor, parcel in reversed(list(zip(tensors, parcels, strict=True))):
        assert torch.equal(parcel.get(), tensor)


def test_each_get_returns_a_tensor_of_its_own() -> None:
    tensor = pages(1)
    parcel = HostStore().put(tensor)
    first = parcel.get()
    first.zero_()
    assert torch.equal(parcel.get(), tensor)


def test_no_graph_hangs_on_a_parcel() -> None:
    source = torch.randn(8, requires_grad=True)
    assert not HostStore().put(source * 2).get().requires_grad


def test_a_store_first_used_in_inference_mode_works_outside_of_it() -> None:
    store = HostStore()
    tensor = pages(1)
    with torch.inference_mode():
        store.put(tensor)
    back = store.put(tensor).get()
    assert torch.equal(back, tensor)
    assert not back.is_inference()
    assert [buffer.memory.is_inference() for buffer in store._buffers] == [False]


@pytest.mark.parametrize("tensor", [torch.randn(4, 6).t(), torch.empty(3, device="meta")])
def test_what_cannot_be_copied_whole_is_refused(tensor: Tensor) -> None:
    with pytest.raises(ValueError, match=rf"this one is on {tensor.device} with shape .* and strides"):
        HostStore().put(tensor)


# Prefetching.


def test_a_get_starts_the_parcel_before_it_and_no_other() -> None:
    _, parcels = put_all(HostStore(), 4)
    assert not any(parcel.arriving for parcel in parcels)
    parcels[3].get()
    assert [parcel.arriving for parcel in parcels] == [False, False, True, False]
    parcels[2].get()
    assert [parcel.arriving for parcel in parcels] == [False, True, False, False]


def test_a_parcel_that_was_had_already_is_not_started_again() -> None:
    """A graph kept after its backward must not be fetched into the next step."""
    tensors, parcels = put_all(HostStore(), 3)
    for parcel in reversed(parcels):
        parcel.get()
    for tensor, parcel in zip(tensors, parcels, strict=True):
        assert torch.equal(parcel.get(), tensor)
    assert not any(parcel.arriving for parcel in parcels)


def test_a_parcel_that_died_is_passed_over() -> None:
    tensors, parcels = put_all(HostStore(), 3)
    del parcels[1]
    assert torch.equal(parcels[1].get(), tensors[2])
    assert torch.equal(parcels[0].get(), tensors[0])


def test_two_forwards_before_a_backward_are_one_chain() -> None:
    store = HostStore()
    _, first = put_all(store, 2)
    _, second = put_all(store, 2)
    second[1].get()
    second[0].get()
    assert [parcel.arriving for parcel in first] == [False, True]


# What is added to a parcel.


def test_what_was_added_comes_back_each_as_it_was() -> None:
    store = HostStore()
    tensors, parcels = put_all(store, 2)
    more = [[torch.randn(3, 5), torch.arange(7)], [torch.randn(3, 5).bfloat16()]]
    for parcel, some in zip(parcels, more, strict=True):
        parcel.add(*some)
    assert store.in_flight == 5
    for _ in range(2):
        for parcel, tensor, some in zip(reversed(parcels), reversed(tensors), reversed(more), strict=True):
            assert torch.equal(parcel.get(), tensor)
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(parcel.added(), some, strict=True))
    del parcels, parcel
    assert store.in_flight == 0


def test_a_parcel_without_additions_has_none() -> None:
    assert HostStore().put(pages(1)).added() == []


@pytest.mark.parametrize("ahead", [True, False])
def test_what_was_added_is_fetched_with_its_parcel_or_when_that_is_asked_for(ahead: bool) -> None:
    store = HostStore()
    parcels = []
    for _ in range(3):
        parcels.append(store.put(pages(1)))
        parcels[-1].add(pages(1), pages(1), ahead=ahead)
    parcels[2].get()
    assert [one.arriving for one in parcels[2]._added] == [True, True], "begun, beside what comes first"
    assert [one.arriving for one in parcels[1]._added] == [ahead, ahead]
    assert [one.arriving for one in parcels] == [False, True, False]
    assert not any(one.arriving for one in parcels[0]._added)


def test_what_was_added_is_no_link_of_the_chain() -> None:
    """The parcel put next fetches the one put before it, whatever was added in between."""
    store = HostStore()
    first = store.put(pages(1))
    first.add(pages(1))
    store.put(pages(1)).get()
    assert first.arriving


def test_what_cannot_be_added_is_refused_before_anything_leaves() -> None:
    store = HostStore()
    parcel = store.put(pages(1))
    with pytest.raises(ValueError, match="put needs a contiguous tensor"):
        parcel.add(pages(1), torch.randn(4, 6).t())
    assert store.in_flight == 1
    assert parcel.added() == []


# Buffers.


def test_a_dead_parcels_buffer_serves_the_next() -> None:
    store = HostStore()
    for _ in range(5):
        tensors, parcels = put_all(store, 8)
        assert store.in_flight == 8
        for tensor, parcel in reversed(list(zip(tensors, parcels, strict=True))):
            assert torch.equal(parcel.get(), tensor)
        del parcels, parcel
        assert store.in_flight == 0
        assert store.host_bytes == 8 * 2 * PAGE


def test_a_living_parcels_buffer_serves_nobody_else() -> None:
    store = HostStore()
    tensor = pages(1)
    parcel = store.put(tensor)
    parcel.get()
    store.put(pages(1))
    assert torch.equal(parcel.get(), tensor)
    assert store.host_bytes == 2 * PAGE


@pytest.mark.parametrize(("size", "held"), [(1, 1), (PAGE, 1), (PAGE + 1, 2), (5 * PAGE, 5), (0, 1)])
def test_a_buffer_is_whole_pages_and_not_a_power_of_two(size: int, held: int) -> None:
    store = HostStore()
    parcel = store.put(torch.zeros(size, dtype=torch.uint8))
    assert store.host_bytes == held * PAGE
    assert parcel.get().numel() == size


def test_a_free_buffer_serves_what_is_up_to_a_third_smaller() -> None:
    for size, new in ((6, False), (4, False), (3.9, False), (3, True), (6.1, True)):
        store = HostStore()
        store.put(pages(6))
        store.put(pages(size))
        assert (store.host_bytes > 6 * PAGE) == new, size


def test_the_smallest_buffer_that_fits_is_taken() -> None:
    store = HostStore()
    held = [store.put(pages(size)) for size in (6, 4, 5)]
    del held
    held = [store.put(pages(size)) for size in (4, 5, 6)]
    assert len(held) == 3
    assert store.host_bytes == 15 * PAGE


def test_buffers_of_other_sizes_go_where_the_host_has_no_room_beside_them() -> None:
    """A plan counts what the store holds as room: what is free and does not fit must not come on top of it."""
    store, seen = HostStore(lambda held: 75 * PAGE), []
    for size in (3, 6, 3, 6, 9, 3):
        held = [store.put(pages(size)) for _ in range(8)]
        seen.append(store.host_bytes // PAGE)
        del held
    side_by_side = 8 * (3 + 6)
    assert seen == [24, side_by_side, side_by_side, side_by_side, 72, 69]
    held = [store.put(pages(9)) for _ in range(9)]
    assert store.host_bytes == 9 * 9 * PAGE, "what is in use stays"
    del held


def test_release_gives_free_memory_back_and_the_rest_with_its_parcels() -> None:
    store = HostStore()
    tensor = pages(3)
    parcel, spare = store.put(tensor), store.put(pages(2))
    del spare
    store.release()
    assert store.host_bytes == 3 * PAGE
    assert torch.equal(parcel.get(), tensor)
    del parcel
    gc.collect()
    assert store.host_bytes == 0
    assert torch.equal(store.put(tensor).get(), tensor)


def test_a_host_without_memory_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(offload.mmap, "mmap", refuse)
    with pytest.raises(RuntimeError, match=r"cannot allocate 12 KiB of host memory .*Use level 'recompute'") as caught:
        HostStore().put(pages(3))
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda store: pickle.loads(pickle.dumps(store))])
def test_a_copied_store_is_a_new_one(duplicate: Any) -> None:
    store = HostStore()
    parcel = store.put(pages(1))
    other = duplicate({"store": store})["store"]
    assert type(other) is HostStore
    assert (other.host_bytes, other.in_flight) == (0, 0)
    assert other.put(pages(1)).arriving is parcel.arriving is False


# In a graph.


class OffloadedSquare(torch.autograd.Function):
    """x², with x in the store between forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, store: HostStore) -> Tensor:
        ctx.parcel = store.put(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 2 * ctx.parcel.get() * grad, None


def test_a_backward_through_the_store_twice_and_then_no_parcel() -> None:
    store = HostStore()
    source = torch.rand(5, dtype=torch.float64, requires_grad=True)
    y = source
    for _ in range(4):
        y = OffloadedSquare.apply(y, store)
    (expected,) = torch.autograd.grad((source**16).sum(), source)
    for retain in (True, False):
        (grad,) = torch.autograd.grad(y.sum(), source, retain_graph=retain)
        torch.testing.assert_close(grad, expected)
    assert store.in_flight == 4
    del y
    assert store.in_flight == 0


# The order of copies, on streams that write down what they are told.


class FakeStream:
    """Writes its orders into a common log; its events are named after it and counted."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.events = name, log, 0

    def record_event(self) -> str:
        self.events += 1
        event = f"{self.name}{self.events}"
        self.log.append(f"{event} recorded")
        return event

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for all of {other.name}")


class FakeLanes:
    """A store whose CPU tensors go through the code for CUDA."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.main = FakeStream("main", self.log)
        self.current = self.main
        self.lanes = offload._Lanes(FakeStream("out", self.log), FakeStream("back", self.log))  # type: ignore[arg-type]
        self.store = HostStore()
        self.recorded: list[str] = []
        self.unpinned: list[str] = []

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.log.append(f"{stream.name} copies")
        yield

    def drain(self) -> list[str]:
        log = list(self.log)
        self.log.clear()
        return log


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeLanes]:
    fake = FakeLanes()
    monkeypatch.setattr(HostStore, "_lanes_of", lambda self, device: fake.lanes)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: fake.current)
    monkeypatch.setattr(torch.cuda, "stream", fake.stream)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: fake.recorded.append(stream.name))
    monkeypatch.setattr(offload, "_pin", lambda memory, device: None)
    monkeypatch.setattr(offload, "_unpin", lambda memory, last_use, process: fake.unpinned.extend(last_use))
    yield fake
    fake.store.release()
    gc.collect()


def test_a_copy_out_waits_for_what_makes_the_tensor(fake: FakeLanes) -> None:
    fake.store.put(pages(1))
    assert fake.drain() == ["out waits for all of main", "out copies", "out1 recorded"]


def test_a_third_copy_out_waits_until_the_first_is_off_the_device(fake: FakeLanes) -> None:
    parcels = [fake.store.put(pages(1)) for _ in range(2)]
    assert not [order for order in fake.drain() if order.startswith("main waits")]
    parcels.append(fake.store.put(pages(1)))
    assert fake.drain()[0] == "main waits for out1"
    parcels.append(fake.store.put(pages(1)))
    assert fake.drain()[0] == "main waits for out2"
    fake.store.settle()
    assert fake.drain() == ["main waits for out3", "main waits for out4"]
    fake.store.settle()
    assert fake.drain() == []


def test_what_is_added_together_counts_as_one_on_its_way_out(fake: FakeLanes) -> None:
    parcel = fake.store.put(pages(1))
    parcel.add(pages(1), pages(1))
    assert not [order for order in fake.drain() if order.startswith("main waits")]
    fake.store.put(pages(1))
    assert fake.drain()[0] == "main waits for out1"
    fake.store.settle()
    assert fake.drain() == ["main waits for out3", "main waits for out4"], "the last of two copies is the end of both"


def test_a_tensor_on_its_way_out_is_held_and_then_let_go(fake: FakeLanes) -> None:
    parcels, memory = [], []
    for _ in range(3):
        tensor = pages(1)
        memory.append(StorageWeakRef(tensor.untyped_storage()))
        parcels.append(fake.store.put(tensor))
        del tensor
    assert [one.expired() for one in memory] == [True, False, False]
    fake.store.settle()
    assert [one.expired() for one in memory] == [True, True, True]


def test_a_backward_lets_go_of_what_nobody_settled(fake: FakeLanes) -> None:
    tensor = pages(1)
    memory = StorageWeakRef(tensor.untyped_storage())
    parcel = fake.store.put(tensor)
    del tensor
    fake.drain()
    parcel.get()
    assert fake.drain()[0] == "main waits for out1"
    assert memory.expired()


def test_the_stream_that_uses_the_memory_waits_whoever_calls(fake: FakeLanes) -> None:
    parcel = fake.store.put(pages(1))
    fake.current = FakeStream("other", fake.log)
    fake.drain()
    fake.store.settle()
    assert fake.drain() == ["main waits for out1"]
    assert not parcel.arriving


def test_a_copy_back_waits_for_its_memory_and_its_copy_out(fake: FakeLanes) -> None:
    parcels = [fake.store.put(pages(1)) for _ in range(2)]
    fake.store.settle()
    fake.drain()
    parcels[1].get()
    assert fake.drain() == [
        "back waits for all of main",
        "back waits for out2",
        "back copies",
        "back1 recorded",
        "main waits for back1",
        # The one ahead: started, and nobody waits for it.
        "back waits for all of main",
        "back waits for out1",
        "back copies",
        "back2 recorded",
    ]
    parcels[0].get()
    assert fake.drain() == ["main waits for back2"]


def test_a_get_on_another_stream_than_the_memorys_tells_the_allocator(fake: FakeLanes) -> None:
    parcels = [fake.store.put(pages(1)) for _ in range(2)]
    parcels[1].get()
    assert fake.recorded == []
    fake.current = FakeStream("other", fake.log)
    fake.drain()
    parcels[0].get()
    assert fake.recorded == ["other"]
    assert fake.drain() == ["other waits for back2"]


def test_a_parcel_that_dies_while_it_arrives_tells_the_allocator(fake: FakeLanes) -> None:
    parcels = [fake.store.put(pages(1)) for _ in range(2)]
    parcels[1].get()
    del parcels[0]
    assert fake.recorded == ["back"]


def test_a_reused_buffer_waits_for_its_last_copy(fake: FakeLanes) -> None:
    parcel = fake.store.put(pages(1))
    parcel.get()
    del parcel
    fake.drain()
    fake.store.put(pages(1))
    assert fake.drain() == ["out waits for all of main", "out waits for back1", "out copies", "out2 recorded"]
    assert fake.store.host_bytes == PAGE


def test_release_waits_for_the_last_copy_before_it_unpins(fake: FakeLanes) -> None:
    parcels = [fake.store.put(pages(1)) for _ in range(2)]
    parcels[1].get()
    parcels[0].get()
    del parcels
    assert fake.unpinned == []
    fake.store.release()
    assert sorted(fake.unpinned) == ["back1", "back2"]


def test_a_dead_stores_memory_is_unpinned(fake: FakeLanes) -> None:
    parcel = fake.store.put(pages(1))
    fake.store = HostStore()
    assert fake.unpinned == [], "the parcel is alive"
    del parcel
    gc.collect()
    assert fake.unpinned == ["out1"]


class FakeRuntime:
    """cudart's part in pinning; refuses with code 2 where told to."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if self.status == 0:
            self.registered[address] = nbytes
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0

    def cudaGetErrorString(self, status: int) -> str:
        return "out of memory"


@pytest.fixture
def fake_runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    runtime = FakeRuntime(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return runtime


def test_a_buffer_is_pinned_while_it_lives(fake_runtime: FakeRuntime) -> None:
    buffer = offload._HostBuffer(3 * PAGE, torch.device("cpu"))
    assert fake_runtime.registered == {buffer.memory.data_ptr(): 3 * PAGE}
    assert buffer.memory.data_ptr() % PAGE == 0
    del buffer
    assert fake_runtime.registered == {}


def test_a_closed_buffer_is_unpinned_once(fake_runtime: FakeRuntime) -> None:
    buffer = offload._HostBuffer(PAGE, torch.device("cpu"))
    buffer.close()
    assert fake_runtime.registered == {}
    buffer.close()


def test_refused_pinning_names_the_size_and_the_remedy(fake_runtime: FakeRuntime) -> None:
    fake_runtime.status = 2
    with pytest.raises(RuntimeError, match=r"cannot pin 12 KiB of host memory \(out of memory\).*'recompute'"):
        offload._HostBuffer(3 * PAGE, torch.device("cpu"))
