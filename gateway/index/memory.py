"""The embedded index: everything in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from heapq import heappop, heappush
from itertools import count
from time import monotonic

from gateway.config import IndexConfig
from gateway.index.speculation import SpeculativePrompt
from gateway.index.table import ChunkTable
from policies.base import Residency, Tier


class MemoryIndex:
    """A ``ChunkIndex`` that no other replica sees and that ends with the process. It never suspends.

    Args:
        config: bounds and times.
        clock: monotonic seconds.
    """

    def __init__(self, config: IndexConfig, clock: Callable[[], float] = monotonic) -> None:
        self._free: list[int] = []
        self._new = count()
        self._table = ChunkTable(config.max_chunks, config.speculative_ttl_s, closed=self._give_back, clock=clock)

    def __len__(self) -> int:
        """Number of chunks known."""
        return len(self._table)

    @property
    def evicted(self) -> int:
        """Chunks forgotten because there were more than ``max_chunks``."""
        return self._table.evicted

    async def acquire_slot(self, worker: str) -> int:
        """Return the lowest slot that is not in use; see ``ChunkIndex``."""
        slot = heappop(self._free) if self._free else next(self._new)
        self._table.open(slot)
        return slot

    async def release_slot(self, slot: int) -> None:
        """Mask a slot at once, sweep it in the background, then give it out again."""
        self._table.close(slot)

    async def residency(self, chunks: Sequence[bytes], slots: Sequence[int], chunk_tokens: int) -> Residency:
        """Return the leading run that each slot holds; see ``ChunkIndex``."""
        return self._table.residency(chunks, slots, chunk_tokens)

    def speculate(self, slot: int, chunks: Sequence[bytes]) -> SpeculativePrompt:
        """Count a prompt as held by ``slot``; see ``ChunkIndex``."""
        return self._table.speculate(slot, chunks)

    def running(self, slot: int) -> Set[bytes]:
        """Return the chunks of the prompts that ``slot`` is answering; see ``ChunkIndex``."""
        return self._table.running(slot)

    async def store(self, slot: int, chunks: Sequence[bytes], tier: Tier, root: bytes | None = None) -> None:
        """``slot`` now holds ``chunks`` in ``tier``; see ``ChunkIndex``."""
        self._table.store(slot, chunks, tier)

    async def remove(self, slot: int, chunks: Sequence[bytes], tier: Tier | None, root: bytes | None = None) -> None:
        """``slot`` no longer holds ``chunks`` in ``tier`` (None: in any); see ``ChunkIndex``."""
        self._table.remove(slot, chunks, tier)

    async def clear(self, slot: int) -> None:
        """``slot`` holds nothing any more; see ``ChunkIndex``."""
        self._table.clear(slot)

    async def swept(self) -> None:
        """Wait until what was cleared or released so far has left the table."""
        await self._table.swept()

    async def close(self) -> None:
        """End background work."""
        await self._table.stop()

    def _give_back(self, slot: int) -> None:
        heappush(self._free, slot)
