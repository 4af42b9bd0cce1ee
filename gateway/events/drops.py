"""What was said to be gone from a shared pool, and when.

A member's announcements may be heard after another's removal that is newer: a replay tells of what the pool has
dropped since. Both have the times at which engines published them, so that the later one counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from gateway.events.decode import Hash

MAX_BLOCKS: Final = 16_384


class Dropped(msgspec.Struct, array_like=True):
    """Blocks that a pool no longer has.

    Attributes:
        pool: its name.
        at: when that was published, Unix seconds.
        blocks: their hashes, as its members call them (``Hash``, which is no type of msgspec's). None: whatever was
            announced before may be gone.
    """

    pool: str
    at: float
    blocks: list[Any] | None


class Drops:
    """The last removals from one pool.

    Args:
        max_blocks: that are remembered.

    Attributes:
        since: all removals since then are remembered, Unix seconds; 0: all there were, as far as is known.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self.since = 0.0
        self._max_blocks = max_blocks
        self._at: dict[Hash, float] = {}

    def add(self, blocks: Iterable[Hash], at: float) -> list[Hash]:
        """Remember a removal; return the blocks of which it is the last one known."""
        latest = [key for key in blocks if self._at.get(key, -1.0) < at]
        for key in latest:
            self._at.pop(key, None)  # to the end
            self._at[key] = at
        while len(self._at) > self._max_blocks:
            self.since = max(self.since, self._at.pop(next(iter(self._at))))
        return latest

    def gone(self, blocks: Sequence[Hash], at: float) -> list[Hash]:
        """Return the blocks that were dropped, or may have been, after they were announced at ``at``."""
        if at < self.since:
            return list(blocks)
        return [key for key in blocks if self._at.get(key, -1.0) > at]

    def told(self, pool: str) -> list[Dropped]:
        """Return all that is remembered, for a replica that has not heard it."""
        by_time: dict[float, list[Hash]] = {}
        for key, at in self._at.items():
            by_time.setdefault(at, []).append(key)
        return [Dropped(pool, at, blocks) for at, blocks in by_time.items()]
