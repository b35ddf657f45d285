"""Pieces of a large tensor, worked on by as many threads as torch has, in their order.

Each thread's torch operations run on that thread alone. torch's own way, all threads on one small operation after
another, meets at a barrier after each; where the cores are shared, one late thread makes all others wait, hundreds of
times a piece. (q4_k on two cores with other work on them: 0.2 million weights a second that way, 8 million this way.)

Autocast is a thread's own: here it is off, whatever the caller has on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

__all__ = ["in_order", "one_thread_each"]

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@contextmanager
def one_thread_each() -> Iterator[ThreadPoolExecutor]:
    """A pool of as many threads as torch has, in each of which torch uses one; torch's number is as before afterwards.

    The number is the process's. Who computes in another thread meanwhile does so with what that thread had.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            yield pool
    finally:
        torch.set_num_threads(threads)


def in_order(function: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
    """`function` of each item, in the items' order; no more than two results a thread wait to be taken."""
    waiting: deque[Future[_Result]] = deque()
    with one_thread_each() as pool:
        ahead = 2 * pool._max_workers
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
