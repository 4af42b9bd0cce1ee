"""What the slots of this process hold: a bounded table from chunk to mask, with the speculations laid over it.

The table is a few flat dicts of bytes to int, nothing that the garbage collector would walk. A dict that grows or
compacts stalls the event loop by some 50 ns per entry, so that each is kept to about ``_SHARD_CHUNKS``; all that has
to visit every chunk does so in small steps.

In the masks a slot has a *column*. A slot that is cleared or closed loses its column at once, whatever is written
there; the column is handed out again when no mask has its bits any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from heapq import heappop, heappush
from itertools import islice
from time import monotonic
from typing import Final

from gateway.index.residency import EVERY_TIER, RowCache, all_tiers, leading_runs
from gateway.index.speculation import Overlay, SpeculativePrompt
from gateway.tasks import spawn, stop
from policies.base import N_TIERS, Residency, Tier

_SHARD_CHUNKS: Final = 131_072
_MAX_SHARDS: Final = 256
_STEP_CHUNKS: Final = 2048


class ChunkTable:
    """Chunk → mask, for the slots that were opened here. What is said of any other slot is ignored.

    Args:
        max_chunks: bound on the number of chunks; those stored first go first.
        speculative_ttl_s: how long a settled speculation counts.
        lost: called as ``lost(slot, chunk)`` for every chunk that goes otherwise than by ``remove``.
        closed: called with a closed slot once nothing of it is left.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        max_chunks: int,
        speculative_ttl_s: float,
        lost: Callable[[int, bytes], None] | None = None,
        closed: Callable[[int], None] | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        n_shards = 1
        while n_shards < _MAX_SHARDS and max_chunks > n_shards * _SHARD_CHUNKS:
            n_shards *= 2
        self._shards: list[dict[bytes, int]] = [{} for _ in range(n_shards)]
        # By the last byte of a chunk; the functions are bound here because a prompt needs one for each of its chunks.
        self._shard_of = [self._shards[byte % n_shards] for byte in range(256)]
        self._get_of = [shard.get for shard in self._shard_of]
        self._shard_limit = max_chunks // n_shards
        self._columns: dict[int, int] = {}  # slot → column
        self._owners: dict[int, int] = {}  # column → slot, until it is swept
        self._free_columns: list[int] = []
        self._retired: list[int] = []
        # Per bit, the last mask it was added to and the result. Neighbours mostly have the same holders: sharing one
        # int among them saves memory here and comparisons in `leading_runs`.
        self._additions: list[tuple[int, int]] = []
        self._rows = RowCache(lambda slot: self._columns.get(slot, -1))
        self._overlay = Overlay(speculative_ttl_s, clock=clock)
        self._sweeper: asyncio.Task[None] | None = None
        self._lost = lost
        self._closed = closed
        self.evicted = 0

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    def __contains__(self, slot: int) -> bool:
        return slot in self._columns

    def open(self, slot: int) -> None:
        """Begin to keep what ``slot`` holds: nothing, to begin with."""
        if self._free_columns:
            column = heappop(self._free_columns)
        else:
            column = len(self._owners)
            for tier in Tier:
                bit = 1 << N_TIERS * column + tier
                self._additions.append((0, bit))
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
        index = N_TIERS * column + tier
        bit = 1 << index
        before, after = self._additions[index]
        for chunk in chunks:
            shard = self._shard_of[chunk[-1]]
            mask = shard.get(chunk, 0)
            if mask is not before:
                before, after = mask, mask | bit
            if not mask and len(shard) >= self._shard_limit:
                self._evict(shard)
            shard[chunk] = after
        self._additions[index] = before, after

    def remove(self, slot: int, chunks: Sequence[bytes], tier: Tier | None) -> None:
        """``slot`` no longer holds ``chunks`` in ``tier`` (None: in any tier)."""
        column = self._columns.get(slot)
        if column is None:
            return
        unwanted = all_tiers(column) if tier is None else 1 << N_TIERS * column + tier
        for chunk in chunks:
            shard = self._shard_of[chunk[-1]]
            _take(shard, chunk, unwanted)

    def tiers(self, slot: int, chunk: bytes) -> int:
        """Return the tiers in which ``slot`` holds ``chunk``, as the four bits of a mask."""
        column = self._columns.get(slot)
        if column is None:
            return 0
        return self._get_of[chunk[-1]](chunk, 0) >> N_TIERS * column & EVERY_TIER

    def speculate(self, slot: int, chunks: Sequence[bytes]) -> SpeculativePrompt:
        """Count ``chunks``, a prompt from its beginning, as held by ``slot`` in HBM."""
        return self._overlay.add(self._columns.get(slot, -1), chunks)

    def has_any(self, slots: Sequence[int]) -> bool:
        """Return whether one of ``slots`` is open here."""
        return self._rows.rows(slots).wanted != 0

    def residency(self, chunks: Sequence[bytes], slots: Sequence[int], chunk_tokens: int) -> Residency:
        """Return the leading run that each slot holds; nothing for slots that are not open here."""
        get_of = self._get_of
        masks = (get_of[chunk[-1]](chunk, 0) for chunk in chunks)
        return leading_runs(self._overlay.over(masks, chunks), self._rows.rows(slots), chunk_tokens)

    def holders(self, chunk: bytes) -> list[int]:
        """Return the open slots that hold ``chunk`` in any tier."""
        mask = self._get_of[chunk[-1]](chunk, 0)
        return [slot for slot in self._owners_in(mask) if slot in self._columns]

    async def in_steps(self) -> AsyncIterator[list[bytes]]:
        """Yield all chunks, some at a time, and let others run in between; what is added meanwhile may be missing."""
        for shard in self._shards:
            chunks = list(shard)
            for start in range(0, len(chunks), _STEP_CHUNKS):
                yield chunks[start : start + _STEP_CHUNKS]
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
                for chunk in chunks:
                    if gone := _take(self._shard_of[chunk[-1]], chunk, unwanted):
                        self._report(chunk, gone)
            slots = {self._owners.pop(column) for column in columns}
            for column in columns:
                heappush(self._free_columns, column)
            if self._closed is not None:
                for slot in slots.difference(self._owners.values()):
                    self._closed(slot)

    def _evict(self, shard: dict[bytes, int]) -> None:
        # Several at once: finding the first entry of a dict whose first entries were deleted is a search.
        for chunk in list(islice(shard, max(1, self._shard_limit // 256))):
            self._report(chunk, shard.pop(chunk))
            self.evicted += 1

    def _report(self, chunk: bytes, mask: int) -> None:
        if self._lost is not None:
            for slot in self._owners_in(mask):
                self._lost(slot, chunk)

    def _owners_in(self, mask: int) -> list[int]:
        slots = []
        while mask:
            column = (mask.bit_length() - 1) // N_TIERS
            slots.append(self._owners[column])
            mask &= (1 << N_TIERS * column) - 1
        return slots


def _take(shard: dict[bytes, int], chunk: bytes, unwanted: int) -> int:
    """Take the ``unwanted`` bits out of a chunk's mask and return those that were there."""
    mask = shard.get(chunk, 0)
    gone = mask & unwanted
    if gone == mask:
        shard.pop(chunk, None)
    elif gone:
        shard[chunk] = mask ^ gone
    return gone
