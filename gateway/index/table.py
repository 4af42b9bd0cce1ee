"""What the slots of this process hold, with the speculations laid over it.

In the masks a slot has a *column*. A slot that is cleared or closed loses its column at once, whatever is written
there; the column is handed out again when no mask has its bits any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence, Set
from heapq import heappop, heappush
from time import monotonic
from typing import Final

from gateway.index.residency import EVERY_TIER, RowCache, all_tiers, leading_runs
from gateway.index.runs import RunTable
from gateway.index.speculation import Overlay, SpeculativePrompt
from gateway.tasks import spawn, stop
from policies.base import N_TIERS, Residency, Tier

_STEP_CHUNKS: Final = 2048


class ChunkTable:
    """Chunk → mask, for the slots that were opened here. What is said of any other slot is ignored.

    Args:
        max_chunks: bound on the number of chunks; those stored first go first.
        speculative_ttl_s: how long a settled speculation counts.
        lost: called as ``lost(slot, chunks)`` for all chunks that go otherwise than by ``remove``.
        closed: called with a closed slot once nothing of it is left.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        max_chunks: int,
        speculative_ttl_s: float,
        lost: Callable[[int, Sequence[bytes]], None] | None = None,
        closed: Callable[[int], None] | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._runs = RunTable(max_chunks, self._evict)
        self._columns: dict[int, int] = {}  # slot → column
        self._owners: dict[int, int] = {}  # column → slot, until it is swept
        self._free_columns: list[int] = []
        self._retired: list[int] = []
        self._rows = RowCache(lambda slot: self._columns.get(slot, -1))
        self._overlay = Overlay(speculative_ttl_s, clock=clock)
        self._sweeper: asyncio.Task[None] | None = None
        self._lost = lost
        self._closed = closed
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._runs)

    def __contains__(self, slot: int) -> bool:
        return slot in self._columns

    def open(self, slot: int) -> None:
        """Begin to keep what ``slot`` holds: nothing, to begin with."""
        column = heappop(self._free_columns) if self._free_columns else len(self._owners)
        self._columns[slot] = column
        self._owners[column] = slot
        self._rows.clear()

    def close(self, slot: int) -> None:
        """Forget ``slot``: at once for whoever asks, by and by in the table."""
        column = self._columns.pop(slot, None)
        if column is not None:
            self._retire(column)

    def clear(self, slot: int) -> None:
        """``slot`` holds nothing any more: at once for whoever asks, by and by in the table."""
        column = self._columns.get(slot)
        if column is not None:
            self._retire(column)
            self.open(slot)

    def store(self, slot: int, chunks: Sequence[bytes], tier: Tier) -> None:
        """``slot`` now holds ``chunks`` in ``tier``."""
        column = self._columns.get(slot)
        if column is None:
            return
        self._runs.set(chunks, 1 << N_TIERS * column + tier)

    def remove(self, slot: int, chunks: Sequence[bytes], tier: Tier | None) -> None:
        """``slot`` no longer holds ``chunks`` in ``tier`` (None: in any tier)."""
        column = self._columns.get(slot)
        if column is None:
            return
        self._runs.clear(chunks, all_tiers(column) if tier is None else 1 << N_TIERS * column + tier)

    def tiers(self, slot: int, chunk: bytes) -> int:
        """Return the tiers in which ``slot`` holds ``chunk``, as the four bits of a mask."""
        column = self._columns.get(slot)
        if column is None:
            return 0
        return self._runs.mask(chunk) >> N_TIERS * column & EVERY_TIER

    def speculate(self, slot: int, chunks: Sequence[bytes]) -> SpeculativePrompt:
        """Count ``chunks``, a prompt from its beginning, as held by ``slot`` in HBM."""
        return self._overlay.add(self._columns.get(slot, -1), chunks)

    def running(self, slot: int) -> Set[bytes]:
        """Return the chunks of the prompts that ``slot`` is answering."""
        return self._overlay.running(self._columns.get(slot, -1))

    def has_any(self, slots: Sequence[int]) -> bool:
        """Return whether one of ``slots`` is open here."""
        return self._rows.rows(slots).wanted != 0

    def residency(self, chunks: Sequence[bytes], slots: Sequence[int], chunk_tokens: int) -> Residency:
        """Return the leading run that each slot holds; nothing for slots that are not open here."""
        masks = self._overlay.over(self._runs.masks(chunks), chunks)
        return leading_runs(masks, self._rows.rows(slots), chunk_tokens)

    def holders(self, chunk: bytes) -> list[int]:
        """Return the open slots that hold ``chunk`` in any tier."""
        return [slot for slot in self._owners_in(self._runs.mask(chunk)) if slot in self._columns]

    async def in_steps(self) -> AsyncIterator[list[bytes]]:
        """Yield all chunks, some at a time, and let others run in between; what is added meanwhile may be missing."""
        for chunks in self._runs.in_steps(_STEP_CHUNKS):
            yield chunks
            await asyncio.sleep(0)

    async def swept(self) -> None:
        """Wait until nothing is left of what was cleared or closed so far."""
        if self._sweeper is not None:
            await asyncio.wait((self._sweeper,))

    async def stop(self) -> None:
        """End the sweeping."""
        await stop(self._sweeper)

    def _retire(self, column: int) -> None:
        self._overlay.forget_position(column)
        self._rows.clear()
        self._retired.append(column)
        if self._sweeper is None or self._sweeper.done():
            self._sweeper = spawn(self._sweep(), "sweep the index")

    async def _sweep(self) -> None:
        while self._retired:
            columns, self._retired = self._retired, []
            unwanted = 0
            for column in columns:
                unwanted |= all_tiers(column)
            async for chunks in self.in_steps():
                cleared = 0
                for chunk in chunks:
                    run, gone = self._runs.clear_run(chunk, unwanted)
                    if gone:
                        self._report(run, gone)
                        cleared += len(run)
                    if cleared >= _STEP_CHUNKS:
                        await asyncio.sleep(0)
                        cleared = 0
            slots = {self._owners.pop(column) for column in columns}
            for column in columns:
                heappush(self._free_columns, column)
            if self._closed is not None:
                for slot in slots.difference(self._owners.values()):
                    self._closed(slot)

    def _evict(self, chunks: Sequence[bytes], mask: int) -> None:
        self.evicted += len(chunks)
        self._report(chunks, mask)

    def _report(self, chunks: Sequence[bytes], mask: int) -> None:
        if self._lost is not None:
            for slot in self._owners_in(mask):
                self._lost(slot, chunks)

    def _owners_in(self, mask: int) -> list[int]:
        slots = []
        while mask:
            column = (mask.bit_length() - 1) // N_TIERS
            slots.append(self._owners[column])
            mask &= (1 << N_TIERS * column) - 1
        return slots
