"""How long rows are made, so that CUDA graphs see few shapes.

A graph serves one shape (graphs.py). Batches that are not packed have another length at every step; once their padding
is left out they are one row of real tokens, to which a document of no consequence can be added at the end. Two kinds of
rows are made longer so:

    short ones    to the longest there was, where the device takes less time over all of that than the host needs to
                  launch an eager row of however few tokens: one shape for all. What is kept between the passes is what
                  the longest row keeps anyway.
    packed ones   to the next of few lengths: packing fills rows nearly.

The lengths depend on the batches alone, so equal runs make equal rows.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

import torch

from fastft.kernels.backend import next_power_of_2
from fastft.memory.captures import fills, pays

__all__ = ["RowLengths", "alike_length"]

_LAST_ROWS = 16  # by which lengths are said to vary
_PAUSE = 64  # steps without another try where a row could not be replayed


def alike_length(tokens: int) -> int:
    """The next of few lengths for a row of so many tokens: more by a sixteenth or 127 at most."""
    step = max(128, next_power_of_2(tokens) // 32)
    return -(-tokens // step) * step


class RowLengths:
    """The rows of one model; its graphs say what they are for."""

    def __init__(self) -> None:
        self.weights = 0  # elements of the weights of a layer that can be replayed
        self._barred = False  # whether a layer of the last step could not be, of whatever length
        self._pause = 0  # steps for which rows are left alone
        self._rows: deque[int] = deque(maxlen=_LAST_ROWS)  # real tokens of the last batches that were not packed
        self._varies = False  # whether they vary
        self._longest = 0  # what short rows are made

    def begin(self) -> None:
        """A training forward begins."""
        self._pause = _PAUSE if self._barred else max(0, self._pause - 1)
        if self._barred:  # rows as long as that are not replayed: shorter ones may be
            self._longest = 0
        self._barred = False

    def bar(self) -> None:
        """A layer of this forward cannot be replayed, of whatever length."""
        self._barred = True

    def forget(self) -> None:
        """As at the start, but for the model's weights."""
        self._rows.clear()
        self._varies, self._longest, self._pause = False, 0, 0

    def sees(self, tokens: int) -> None:
        """A batch that is not packed has so many real tokens.

        Lengths vary when none is more than half of the last ones, and no longer when all of these are the same: an odd
        batch at the end of an epoch makes no difference.
        """
        self._rows.append(tokens)
        most = max(Counter(self._rows).values())
        self._varies = 2 * most <= len(self._rows) or (self._varies and most < _LAST_ROWS)

    def fills(self, tokens: int, device: torch.device) -> bool:
        """Whether a batch of so many real tokens is to be a row as long as the longest."""
        return self._varies and self._worth(fills, alike_length(tokens), device)

    def length(self, tokens: int, packed: bool, device: torch.device) -> int:
        """How long a row of so many tokens is to be made; its own length: not at all.

        Args:
            tokens: of the row.
            packed: whether rows are filled with documents; else a row is what a batch's real tokens are.
            device: theirs.
        """
        alike = alike_length(tokens)
        if self.fills(tokens, device) or (packed and self._worth(fills, alike, device)):
            self._longest = max(self._longest, alike)
            return self._longest
        return alike if packed and self._worth(pays, alike, device) else tokens

    def _worth(self, test: Callable[[float, torch.device], bool], tokens: int, device: torch.device) -> bool:
        if not self._open() or device.type != "cuda":
            return False
        return test(2.0 * tokens * self.weights, device)

    def _open(self) -> bool:
        return self.weights > 0 and not self._barred and self._pause == 0
