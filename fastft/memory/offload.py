"""Activations kept in host memory between a layer's forward and its backward.

A layer's input is needed in its forward and again in its backward, a whole model later. Meanwhile it can lie in host
memory: the copy out runs beside the layer's own forward, the copy back beside the backward of the layer after it, each
on a stream of its own, and the host never waits.

    parcel = store.put(x)      # at the start of a layer's forward; x must not be written to afterwards
    store.settle()             # once, when the first layer that does not put is about to run, or the loss
    x = parcel.get()           # in its backward; starts the copy back of the parcel put just before this one

What the same layer makes on the way and wants back with x is added to its parcel, and comes back beside it:

    parcel.add(output, statistics)
    output, statistics = parcel.added()

Three things keep memory in hand.

- A tensor on its way out is held by the store until the stream that computes has been told to wait for its copy; from
  then on its memory is free for that stream, in stream order. `record_stream` would need no holding, but it frees
  memory when the *host* finds the copy done, and the host runs many layers ahead: the peak would depend on timing. At
  most two calls' tensors are on their way out, and one parcel's on their way back ahead of time: those are more in the
  forward until `settle`, and in the backward.
- Host buffers have the exact size, in pages. torch's own pinned memory is rounded up to a power of two.
- A parcel's buffer returns to the pool when the parcel dies, with the event of the last copy that used it, and the next
  copy into it waits for that event on its stream. Steps of equal shape pin nothing after the first; steps of other
  shapes keep their buffers side by side, as far as the host has room.

Not for use while a CUDA graph is captured: a replayed copy would not know whose buffer it writes.
"""

from __future__ import annotations

import collections
import contextlib
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastft.memory.budget import format_bytes

__all__ = ["HostStore", "Parcel"]

_PAGE = 4096
_MOST_LEAVING = 2  # calls of `put` and `add` whose copies may be unfinished: one runs, one waits
_MOST_SLACK = 1.5  # a free buffer of up to so many times the size asked for will do
_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process


class _Lanes(NamedTuple):
    """The two copy streams of a CUDA device: both directions can run at once."""

    out: torch.cuda.Stream
    back: torch.cuda.Stream


class _Leaving(NamedTuple):
    """Tensors that are being copied out, and the stream that uses their memory afterwards."""

    tensors: tuple[Tensor, ...]
    copied: torch.cuda.Event
    user: torch.cuda.Stream


class _Arrival(NamedTuple):
    """A tensor that is being copied back: memory of stream `user`, complete after `copied` (both None on the CPU)."""

    tensor: Tensor
    copied: torch.cuda.Event | None
    user: torch.cuda.Stream | None


class HostStore:
    """Host memory for activations, with the streams that fill and empty it.

    One per model. Every thread may use it (autograd runs a backward in a thread per device). CPU tensors are accepted
    and copied, so that code which uses a store can be tested without a GPU. A copied or pickled store is a new, empty
    one: parcels belong to a graph, which is not copied either.
    """

    def __init__(self, limit: Callable[[int], int] | None = None) -> None:
        """
        Args:
            limit: the most host bytes that are to be held, given how many are; asked when a buffer is to be made.
                Free buffers that do not fit go first; those in use stay, so that it may be passed.
        """
        self._lock = threading.Lock()
        self._limit = limit
        self._lanes: dict[torch.device, _Lanes] = {}
        self._leaving: collections.deque[_Leaving] = collections.deque()
        self._free: list[_HostBuffer] = []
        # Where dying parcels leave their buffers. Appending is atomic: a parcel may die in any thread, lock or no lock.
        self._returned: collections.deque[_HostBuffer] = collections.deque()
        self._buffers: weakref.WeakSet[_HostBuffer] = weakref.WeakSet()
        self._parcels: weakref.WeakSet[Parcel] = weakref.WeakSet()
        self._latest: weakref.ref[Parcel] | None = None

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory held now, in use or free (pinned, but for those of CPU tensors)."""
        return sum(buffer.nbytes for buffer in self._buffers)

    @property
    def in_flight(self) -> int:
        """How many parcels are alive."""
        return len(self._parcels)

    def put(self, tensor: Tensor) -> Parcel:
        """Start copying `tensor` to host memory.

        The caller may drop `tensor` at once, but nobody may write to it until the copy is done. It is kept from being
        freed until the second `put` after this one, `settle` or a `get`.

        Args:
            tensor: contiguous, of any shape and dtype, on a CUDA device or the CPU.

        Raises:
            ValueError: it is not contiguous, or on another kind of device.
            RuntimeError: the host has no memory to pin.
        """
        with self._lock:
            (parcel,) = self._send((tensor,), self._latest)
            self._latest = weakref.ref(parcel)
            return parcel

    def _send(self, tensors: Sequence[Tensor], previous: weakref.ref[Parcel] | None) -> list[Parcel]:
        """A parcel for each tensor, on its way out; they leave together."""
        for tensor in tensors:
            if tensor.device.type not in ("cpu", "cuda") or not tensor.is_contiguous():
                raise ValueError(
                    f"put needs a contiguous tensor on a CUDA device or the CPU; this one is on {tensor.device} with "
                    f"shape {tuple(tensor.shape)} and strides {tensor.stride()}. Pass tensor.contiguous()."
                )
        while len(self._leaving) >= _MOST_LEAVING:
            self._retire_oldest()
        parcels = []
        for tensor in (t.detach() for t in tensors):
            lanes = self._lanes_of(tensor.device)
            buffer = self._take_buffer(tensor.nbytes, tensor.device, pinned=lanes is not None)
            parcel = Parcel(self, tensor, buffer, lanes, previous)
            parcels.append(parcel)
            self._parcels.add(parcel)
            if lanes is None:
                parcel._host.copy_(tensor)
                continue
            lanes.out.wait_stream(torch.cuda.current_stream(tensor.device))
            if buffer.last_use:
                lanes.out.wait_event(buffer.last_use[0])
            with torch.cuda.stream(lanes.out):
                parcel._host.copy_(tensor, non_blocking=True)
            parcel._copied = lanes.out.record_event()
            buffer.last_use.append(parcel._copied)
        last = parcels[-1]
        if last._copied is not None:  # the lane is first come, first served: the last copy's end is everyone's
            user = torch.cuda.current_stream(last._device)
            self._leaving.append(_Leaving(tuple(tensors), last._copied, user))
        return parcels

    def settle(self) -> None:
        """Let go of the tensors on their way out: their streams wait for the copies, the host does not.

        Call it when no further `put` follows in this forward; else up to two calls' tensors stay on the device until
        the backward's first `get`.
        """
        with self._lock:
            self._settle()

    def release(self) -> None:
        """Give the free host memory back, after the copies that use it; for the end of training.

        Parcels that are alive stay good, and their memory goes with the last of them. The store can be used again.
        """
        with self._lock:
            self._settle()
            self._collect_returned()
            # Parcels still alive return their buffers to the old deque, which nobody empties: it goes with the last.
            self._returned = collections.deque()
            for buffer in self._free:
                buffer.close()
            self._free.clear()

    def _settle(self) -> None:
        while self._leaving:
            self._retire_oldest()

    def _retire_oldest(self) -> None:
        leaving = self._leaving.popleft()
        leaving.user.wait_event(leaving.copied)

    def _lanes_of(self, device: torch.device) -> _Lanes | None:
        if device.type == "cpu":
            return None
        if device not in self._lanes:
            self._lanes[device] = _Lanes(out=torch.cuda.Stream(device), back=torch.cuda.Stream(device))
        return self._lanes[device]

    def _collect_returned(self) -> None:
        while self._returned:
            self._free.append(self._returned.popleft())

    def _take_buffer(self, nbytes: int, device: torch.device, *, pinned: bool) -> _HostBuffer:
        """The smallest free buffer that holds `nbytes` without much waste, or a new one."""
        size = max(-(-nbytes // _PAGE), 1) * _PAGE
        self._collect_returned()
        fitting = [b for b in self._free if b.pinned == pinned and size <= b.nbytes <= size * _MOST_SLACK]
        if fitting:
            buffer = min(fitting, key=lambda b: b.nbytes)  # the first of equals: free the longest, its copies are done
            self._free.remove(buffer)
            return buffer
        if self._free and self._limit is not None:
            limit = self._limit(self.host_bytes)
            while self._free and self.host_bytes + size > limit:
                self._free.pop(0).close()
        buffer = _HostBuffer(size, device if pinned else None)
        self._buffers.add(buffer)
        return buffer

    def __deepcopy__(self, memo: dict[int, Any]) -> HostStore:
        return HostStore(self._limit)

    def __reduce__(self) -> tuple[type[HostStore], tuple[Callable[[int], int] | None]]:
        return HostStore, (self._limit,)


class Parcel:
    """A tensor in host memory, for as long as somebody (a graph's node) holds the parcel."""

    def __init__(
        self,
        store: HostStore,
        like: Tensor,
        buffer: _HostBuffer,
        lanes: _Lanes | None,
        previous: weakref.ref[Parcel] | None,
    ) -> None:
        self._arrival: _Arrival | None = None
        self._lanes = lanes
        self._buffer = buffer
        self._home = store._returned
        self._store = store
        self._device = like.device
        self._host = buffer.memory[: like.nbytes].view(like.dtype).view(like.shape)
        self._copied: torch.cuda.Event | None = None
        self._previous = previous
        self._waiting = True  # nobody has asked for it, ahead of time or otherwise
        self._added: list[Parcel] = []
        self._added_ahead = True

    @property
    def arriving(self) -> bool:
        """Whether the copy back was started ahead of `get`."""
        return self._arrival is not None

    def add(self, *tensors: Tensor, ahead: bool = True) -> None:
        """Start copying further tensors of the same layer to host memory, as `put` does; `added` brings them back.

        Args:
            tensors: as for `put`, at least one, all on the parcel's device; not to be written to either.
            ahead: whether they come back ahead of time together with the parcel, or only when it is asked for.

        Raises:
            ValueError: as `put`.
            RuntimeError: as `put`.
        """
        with self._store._lock:
            self._added += self._store._send(tensors, None)
            self._added_ahead = ahead

    def added(self) -> list[Tensor]:
        """What `add` was given, in order, each as `get` returns it.

        Raises:
            torch.OutOfMemoryError: the device has no room for it.
        """
        return [parcel.get() for parcel in self._added]

    def get(self) -> Tensor:
        """The tensor, on its device, to be used on the current stream; no host sync.

        Then the copies back of what was added are started, and that of the parcel put just before this one, if nobody
        asked for that one yet: a backward wants them in reverse order. Each call returns a tensor of its own.

        Raises:
            torch.OutOfMemoryError: the device has no room for it.
        """
        with self._store._lock:
            self._store._settle()
            arrival = self._arrival or self._copy_back()
            self._arrival = None
            if arrival.copied is not None:
                current = torch.cuda.current_stream(self._device)
                current.wait_event(arrival.copied)
                if arrival.user != current:
                    arrival.tensor.record_stream(current)
            self._fetch_added()
            previous = None if self._previous is None else self._previous()
            if previous is not None and previous._waiting:
                previous._arrival = previous._copy_back()
                if previous._added_ahead:
                    previous._fetch_added()
            return arrival.tensor

    def _fetch_added(self) -> None:
        for parcel in self._added:
            if parcel._waiting:
                parcel._arrival = parcel._copy_back()

    def _copy_back(self) -> _Arrival:
        self._waiting = False
        if self._lanes is None:
            return _Arrival(self._host.clone(), None, None)
        assert self._copied is not None
        # Allocated for the stream that will use it. What that stream did before with the same memory must be over, and
        # so must the copy out.
        user = torch.cuda.current_stream(self._device)
        tensor = torch.empty_like(self._host, device=self._device)
        back = self._lanes.back
        back.wait_stream(user)
        back.wait_event(self._copied)
        with torch.cuda.stream(back):
            tensor.copy_(self._host, non_blocking=True)
        copied = back.record_event()
        self._buffer.last_use.append(copied)
        return _Arrival(tensor, copied, user)

    def __del__(self) -> None:
        if self._arrival is not None and self._lanes is not None:
            # Nobody waits for this copy: the allocator must, before it gives the memory to another tensor.
            self._arrival.tensor.record_stream(self._lanes.back)
        self._home.append(self._buffer)


class _HostBuffer:
    """Whole pages of host memory, pinned if there is a (CUDA) device, and the event of the last copy that used them."""

    def __init__(self, nbytes: int, device: torch.device | None) -> None:
        self.nbytes = nbytes
        self.pinned = device is not None
        self.last_use: collections.deque[torch.cuda.Event] = collections.deque(maxlen=1)
        try:
            pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise RuntimeError(_no_memory("allocate", nbytes, str(error))) from error
        # Huge pages are pinned in a fraction of the time. A fork copies pinned pages at once, not when they are written
        # to, and no data-loading worker wants them.
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            if hasattr(mmap, advice):
                with contextlib.suppress(OSError):
                    pages.madvise(getattr(mmap, advice))
        with torch.inference_mode(False):  # an inference tensor could not be written to outside of that mode
            self.memory = torch.frombuffer(pages, dtype=torch.uint8)
        if device is not None:
            _pin(self.memory, device)
            # The callback holds the memory, so that it is unpinned before it is freed.
            self._unpin = weakref.finalize(self, _unpin, self.memory, self.last_use, os.getpid())
            self._unpin.atexit = False  # CUDA may be gone by then, and the driver unpins what a process leaves behind

    def close(self) -> None:
        """Unpin once the last copy is done. Waits for it; the memory goes with the object."""
        if self.pinned:
            self._unpin()


def _pin(memory: Tensor, device: torch.device) -> None:
    with torch.cuda.device(device):
        runtime = torch.cuda.cudart()
        status = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, _REGISTER_PORTABLE)
        if int(status) == 0:
            return
        # The runtime remembers the refusal until somebody asks: let it be this kernel that is blamed for it.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=device)
    raise RuntimeError(_no_memory("pin", memory.nbytes, str(runtime.cudaGetErrorString(status))))


def _unpin(memory: Tensor, last_use: collections.deque[torch.cuda.Event], process: int) -> None:
    if process != os.getpid():  # a forked child: pinned is what its parent has
        return
    for event in last_use:
        event.synchronize()
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def _no_memory(what: str, nbytes: int, reason: str) -> str:
    return (
        f"Offloading cannot {what} {format_bytes(nbytes)} of host memory ({reason}). Use level 'recompute' for more "
        "layers, a smaller batch or shorter rows, or allow the process more (locked) host memory."
    )
