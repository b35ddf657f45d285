"""Which sizes fit: what a provider took at smaller sizes says what it will take at the next."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["MemoryProbe", "predicted_bytes"]

_USABLE = 0.9  # of the free memory: what the allocator and other processes take in between


class MemoryProbe:
    """What each (provider, mode) took, over one sweep in rising order of tokens."""

    def __init__(self) -> None:
        self._footprints: dict[tuple[str, str], list[tuple[int, int]]] = {}
        self._failed: dict[tuple[str, str], int] = {}

    def saw(self, provider: str, mode: str, tokens: int, footprint: int) -> None:
        """It ran, and took `footprint` bytes of the device; 0 where nobody counted."""
        if footprint:
            self._footprints.setdefault((provider, mode), []).append((tokens, footprint))

    def failed(self, provider: str, mode: str, tokens: int) -> None:
        """It ran out of memory."""
        self._failed.setdefault((provider, mode), tokens)

    def reason_to_skip(self, provider: str, mode: str, tokens: int, free: int | None) -> str:
        """Why `tokens` will not fit; empty if they may. `free`: bytes of the device; None: unknown."""
        failed = self._failed.get((provider, mode))
        if failed is not None and failed <= tokens:
            return f"out of memory at {failed} tokens already"
        need = predicted_bytes(self._footprints.get((provider, mode), []), tokens)
        if need is None or free is None or need <= _USABLE * free:
            return ""
        return f"needs about {need / 2**30:.1f} GiB; {free / 2**30:.1f} GiB are free"


def predicted_bytes(footprints: Sequence[tuple[int, int]], tokens: int) -> float | None:
    """Device memory needed for `tokens`, from (tokens, bytes) of smaller sizes; None where nothing is known.

    Along the line through the last two sizes; from a single one in proportion, which is too much where part of it is
    fixed, and so safe.
    """
    if not footprints:
        return None
    last_tokens, last_bytes = footprints[-1]
    if len(footprints) == 1 or footprints[-2][0] == last_tokens:
        return last_bytes * tokens / last_tokens
    earlier_tokens, earlier_bytes = footprints[-2]
    slope = max(0.0, (last_bytes - earlier_bytes) / (last_tokens - earlier_tokens))
    return last_bytes + slope * (tokens - last_tokens)
