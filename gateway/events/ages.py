"""How old chunks become before a worker evicts them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Final

_ONE_IN: Final = 16  # chunks that are watched; a hash's last byte is as good as chance
_MAX_WATCHED: Final = 16_384
_AGES: Final = 256


class EvictionAges:
    """Watches a sample of one tier's chunks from being stored to being evicted.

    A worker whose eviction age is below the pause between two turns of a conversation loses conversations.
    """

    __slots__ = ("_ages", "_since")

    def __init__(self) -> None:
        self._since: dict[bytes, float] = {}
        self._ages: deque[float] = deque(maxlen=_AGES)

    @property
    def median_s(self) -> float | None:
        """Median age of those evicted last, in seconds; None while none was."""
        return median(self._ages) if self._ages else None

    def stored(self, chunks: Iterable[bytes], now: float) -> None:
        """Chunks have come; ``now`` in seconds of any clock."""
        for chunk in chunks:
            if not chunk[-1] % _ONE_IN:
                self._since[chunk] = now
        while len(self._since) > _MAX_WATCHED:
            del self._since[next(iter(self._since))]

    def evicted(self, chunks: Iterable[bytes], now: float) -> None:
        """Chunks have gone for want of room."""
        for chunk in chunks:
            if not chunk[-1] % _ONE_IN and (since := self._since.pop(chunk, None)) is not None:
                self._ages.append(now - since)
