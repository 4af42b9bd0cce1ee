"""The shared index: what all replicas know, in Redis or Valkey.

Every replica keeps what its own slots hold in a table, as the memory index does, answers for them from there, and
publishes it. For the slots of other replicas it asks Redis, once per decision, and waits no longer than
``index.timeout_s``; without an answer those slots hold nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence, Set
from time import monotonic
from typing import Final

from gateway.config import IndexConfig
from gateway.index.publisher import FIRST_PRIVATE_SLOT, Counters, Publisher
from gateway.index.redis_client import UNREACHABLE
from gateway.index.redis_store import TRUST_S, RedisStore, tagged
from gateway.index.residency import RowCache, leading_runs
from gateway.index.speculation import Overlay, SpeculativePrompt
from gateway.index.table import ChunkTable
from policies.base import Residency, Tier
from policies.chunks import DIGEST_BYTES

_FIRST_ALIAS: Final = 1 << 40
"""From here on, others' slots whose numbers are names of slots of ours: these have another number by now."""


class RedisIndex:
    """A ``ChunkIndex`` that replicas share.

    Slots come from Redis: no two replicas get the same one. A replica that dies leaves its slots behind, taken, until
    the index begins anew. Whoever asks for other replicas' slots sees to it that they are still those of the workers
    meant: see ``is_others`` and ``on_owners``.

    Args:
        config: URL, bounds and times.
        clock: monotonic seconds.
    """

    def __init__(self, config: IndexConfig, clock: Callable[[], float] = monotonic) -> None:
        self._timeout_s = config.timeout_s
        self._table = ChunkTable(
            config.max_chunks, config.speculative_ttl_s, lost=self._lost, closed=self._closed, clock=clock
        )
        self._store = RedisStore(config)
        # Of others' slots: those which are not ours, nor were until just now.
        self._others_rows = RowCache(self._number_among_others)
        self._others_overlay = Overlay(config.speculative_ttl_s, clock=clock)
        self._publisher = Publisher(self._store, self._table, config, self._owners_changed)
        self._on_owners: Callable[[], None] | None = None

    def __len__(self) -> int:
        """Number of chunks that our own slots hold."""
        return len(self._table)

    @property
    def counters(self) -> Counters:
        """Failures and writes since the start."""
        return self._publisher.counters

    @property
    def up(self) -> bool:
        """Whether Redis answers."""
        return self._publisher.up.is_set()

    @property
    def evicted(self) -> int:
        """Chunks forgotten because there were more than ``max_chunks``."""
        return self._table.evicted

    async def acquire_slot(self, worker: str) -> int:
        """Return a slot that no replica uses; see ``ChunkIndex``.

        While Redis is away this takes a second, and the slot is one that others will not see before it is back.
        """
        self._publisher.start()
        slot = await self._publisher.claim(worker)
        self._table.open(slot)
        return slot

    async def release_slot(self, slot: int) -> None:
        """Mask a slot at once; once it is swept here and in Redis, it is free for any replica."""
        self._table.close(slot)

    def owns(self, slot: int) -> bool:
        """Return whether ``slot`` is one of ours."""
        return slot in self._table

    def number(self, slot: int) -> int:
        """Return what other replicas call ``slot``; -1 while they do not know it."""
        return slot - _FIRST_ALIAS if slot >= _FIRST_ALIAS else self._publisher.number(slot)

    def called(self, number: int) -> int:
        """Return what another replica's slot is called here, by its number in Redis."""
        return number + _FIRST_ALIAS if self._publisher.owns(number) else number

    def is_others(self, slot: int, worker: str) -> bool:
        """Return whether ``slot`` is one that another replica has for ``worker``, as far as we know.

        A slot that is not, may be another worker's by now.
        """
        owner = self._store.owners.get(self._number_among_others(slot), "")
        return owner.partition(" ")[2] == worker and not self._publisher.is_ours(owner)

    def slots_of(self, owner: str) -> list[int]:
        """Return the slots that other replicas have for ``owner`` and keep right, as far as we know."""
        dead, is_ours = self._store.dead, self._publisher.is_ours
        return [
            self.called(number)
            for number, has_it in self._store.owners.items()
            if has_it.partition(" ")[2] == owner and number not in dead and not is_ours(has_it)
        ]

    def on_owners(self, changed: Callable[[], None]) -> None:
        """Have ``changed`` called whenever ``is_others`` may have another answer, before anybody asks ``residency``."""
        self._on_owners = changed

    def learn_owners(self) -> None:
        """Learn soon who has which slot: one is heard of that ``is_others`` does not know."""
        self._publisher.start()
        self._publisher.hear_soon()

    async def residency(self, chunks: Sequence[bytes], slots: Sequence[int], chunk_tokens: int) -> Residency:
        """Return the leading run that each slot holds; see ``ChunkIndex``."""
        self._publisher.start()
        if not chunks:
            return Residency.none(len(slots))
        masks = await self._ask(chunks) if self._others_rows.rows(slots).wanted else ()
        others = self._others_rows.rows(slots)
        if not others.wanted:
            return self._residency_of_ours(chunks, slots, chunk_tokens)
        theirs = leading_runs(self._others_overlay.over(masks, chunks), others, chunk_tokens)
        if not self._table.has_any(slots):
            return theirs
        ours = self._residency_of_ours(chunks, slots, chunk_tokens)
        return Residency(ours.hit_tokens + theirs.hit_tokens, ours.by_tier + theirs.by_tier)

    def _residency_of_ours(self, chunks: Sequence[bytes], slots: Sequence[int], chunk_tokens: int) -> Residency:
        return self._table.residency(tagged(chunks, chunks[0]), slots, chunk_tokens)

    def speculate(self, slot: int, chunks: Sequence[bytes]) -> SpeculativePrompt:
        """Count a prompt as held by ``slot``; see ``ChunkIndex``."""
        if chunks and slot in self._table:
            return self._table.speculate(slot, tagged(chunks, chunks[0]))
        return self._others_overlay.add(self._number_among_others(slot), chunks)

    def running(self, slot: int) -> Set[bytes]:
        """Return the chunks of the prompts that ``slot``, one of ours, is answering; see ``ChunkIndex``."""
        return {key[-DIGEST_BYTES:] for key in self._table.running(slot)}

    async def store(self, slot: int, chunks: Sequence[bytes], tier: Tier, root: bytes | None = None) -> None:
        """``slot``, one of ours, now holds ``chunks`` in ``tier``; see ``ChunkIndex``."""
        if chunks and slot in self._table:
            keys = tagged(chunks, root or chunks[0])
            self._table.store(slot, keys, tier)
            self._publisher.mark(slot, keys)

    async def remove(self, slot: int, chunks: Sequence[bytes], tier: Tier | None, root: bytes | None = None) -> None:
        """``slot``, one of ours, no longer holds ``chunks`` in ``tier`` (None: in any); see ``ChunkIndex``."""
        if chunks and slot in self._table:
            keys = tagged(chunks, root or chunks[0])
            self._table.remove(slot, keys, tier)
            self._publisher.mark(slot, keys)

    async def clear(self, slot: int) -> None:
        """``slot``, one of ours, holds nothing any more; see ``ChunkIndex``."""
        self._table.clear(slot)

    async def flush(self) -> None:
        """Wait until other replicas can see everything that was said here so far."""
        await self._publisher.flush()

    async def close(self) -> None:
        """Stop publishing and close the connections; our slots are not swept."""
        await self._table.stop()
        await self._publisher.stop()
        await self._store.close()

    async def _ask(self, chunks: Sequence[bytes]) -> Iterable[tuple[int, int]]:
        counters = self._publisher.counters
        time = asyncio.get_running_loop().time
        trusted_until = self._publisher.heard_at + TRUST_S
        if not self._publisher.up.is_set() or time() > trusted_until:
            counters.skipped += 1
            return ()
        try:
            async with asyncio.timeout(self._timeout_s):
                masks = await self._store.read(chunks, chunks[0])
        except TimeoutError:
            counters.timeouts += 1
            self._publisher.failed(TimeoutError(f"no answer within index.timeout_s, {self._timeout_s:g} s"))
            return ()
        except UNREACHABLE as error:
            self._publisher.failed(error)
            return ()
        if time() > trusted_until:  # read so late, perhaps, that a slot asked for was another worker's by then
            counters.timeouts += 1
            return ()
        return masks

    def _number_among_others(self, slot: int) -> int:
        if slot >= _FIRST_ALIAS:
            return slot - _FIRST_ALIAS
        return -1 if slot >= FIRST_PRIVATE_SLOT or self._publisher.owns(slot) else slot

    def _owners_changed(self, slots: set[int]) -> None:
        for slot in slots:
            self._others_overlay.forget_position(slot)
        self._others_rows.clear()
        if slots and self._on_owners is not None:
            self._on_owners()

    def _lost(self, slot: int, keys: Sequence[bytes]) -> None:
        self._publisher.mark(slot, keys)

    def _closed(self, slot: int) -> None:
        self._publisher.leave(slot)
