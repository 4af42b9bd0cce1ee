"""A cache that is bounded in bytes: second-chance eviction, so that a hit costs one attribute store."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar


class Cached(Protocol):
    """What can be cached: it knows what it costs and whether it was used since eviction last saw it."""

    cost: int
    used: bool


class Entry:
    """Base of what is cached."""

    __slots__ = ("cost", "used")

    def __init__(self, cost: int) -> None:
        self.cost = cost
        self.used = False


K = TypeVar("K", bound=Hashable)
E = TypeVar("E", bound=Cached)


class ByteCache(Generic[K, E]):
    """Entries by key, at most ``max_bytes`` of them by their own account.

    Args:
        max_bytes: sum of the entries' costs; 0 keeps nothing.

    Attributes:
        entries: for hot loops, which look up here and mark what they find as used.
        bytes: sum of the entries' costs.
    """

    __slots__ = ("bytes", "entries", "max_bytes")

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self.entries: OrderedDict[K, E] = OrderedDict()

    def __len__(self) -> int:
        return len(self.entries)

    def get(self, key: K) -> E | None:
        """Return the entry of ``key`` and mark it as used."""
        entry = self.entries.get(key)
        if entry is not None:
            entry.used = True
        return entry

    def put(self, key: K, entry: E) -> None:
        """Keep ``entry``, at the expense of those not used since they were last looked at.

        An entry that alone would take more than a quarter of the cache is not kept.
        """
        if entry.cost > self.max_bytes // 4:
            return
        replaced = self.entries.pop(key, None)
        if replaced is not None:
            self.bytes -= replaced.cost
        self.entries[key] = entry
        self.bytes += entry.cost
        while self.bytes > self.max_bytes:
            self._evict()

    def drop(self, key: K) -> None:
        """Forget the entry of ``key``."""
        entry = self.entries.pop(key, None)
        if entry is not None:
            self.bytes -= entry.cost

    def _evict(self) -> None:
        key, entry = self.entries.popitem(last=False)
        if entry.used:
            entry.used = False
            self.entries[key] = entry
        else:
            self.bytes -= entry.cost
