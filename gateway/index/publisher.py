"""Keeps Redis equal to what this replica's slots hold.

The table is the truth about our slots; Redis has a copy for the other replicas. So what waits to be written is not a
list of changes but, per slot, a set of chunks whose nibble may differ there: the nibble is read from the table when its
turn comes. Changes to the same chunk merge, nothing is lost while Redis is away, and writing twice does no harm.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from math import inf
from typing import Any, Final
from uuid import uuid4

from gateway.config import IndexConfig
from gateway.index.redis_client import ON_THE_MOVE, TIMED_OUT, UNREACHABLE
from gateway.index.redis_store import LEASE_S, RedisStore
from gateway.index.table import ChunkTable
from gateway.tasks import spawn, stop

log = logging.getLogger("kvway.index")

FIRST_PRIVATE_SLOT: Final = 1 << 20
"""Slots from here on were given out while Redis was away: its number for them, if any, is another one."""

_RENEW_S: Final = LEASE_S / 10
_FIRST_RETRY_S: Final = 0.02
_CLAIM_TIMEOUT_S: Final = 1.0
_BATCH_CHUNKS: Final = 4096


@dataclass(slots=True)
class Counters:
    """What happened between this replica and Redis.

    Attributes:
        errors: commands that failed.
        timeouts: decisions that waited for Redis in vain.
        skipped: decisions made without asking it, because it was known to be away.
        written: nibbles written.
        dropped: nibbles given up because too many were waiting; a new generation makes up for them.
        generations: new generations that began since the start, in each of which everything was written anew.
    """

    errors: int = 0
    timeouts: int = 0
    skipped: int = 0
    written: int = 0
    dropped: int = 0
    generations: int = 0


class Publisher:
    """Claims slots in Redis, holds their leases, and writes what they hold.

    Args:
        store: the commands.
        table: what our slots hold.
        config: ``max_chunks`` bounds what waits to be written, ``ttl_s`` says how often everything is written again.
        owners_changed: called when ``owns`` has another answer for some slot, and with the slots that have another
            owner in Redis than before.

    Attributes:
        up: set while Redis answers.
        heard_at: when Redis was last asked who has which slot, and answered; seconds by the event loop's clock.
    """

    def __init__(
        self, store: RedisStore, table: ChunkTable, config: IndexConfig, owners_changed: Callable[[set[int]], None]
    ) -> None:
        self._store = store
        self._table = table
        self._max_waiting = config.max_chunks
        self._rewrite_s = max(1.0, config.ttl_s) / 2
        self._owners_changed = owners_changed
        self._claimed_by = f"{uuid4().hex[:12]}."  # whoever we claim a slot for
        self._claims = count()
        self._private = count(FIRST_PRIVATE_SLOT)
        self._owners: dict[int, str] = {}  # our slots, until nothing is left of them in Redis → owner
        self._numbers: dict[int, int] = {}  # our slots → number in Redis, where they have one
        self._claiming = asyncio.Lock()
        self._leaving: set[int] = set()
        self._waiting: dict[int, set[bytes]] = {}  # slot → keys to be written
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._fewer_wait = asyncio.Event()
        self._rewrite_wanted = asyncio.Event()
        self._begin_generation = False
        self._renew_now = asyncio.Event()
        self._away = False
        self._tasks: list[asyncio.Task[Any]] = []
        self.up = asyncio.Event()
        self.heard_at = -inf
        self.counters = Counters()

    def start(self) -> None:
        """Start the background tasks, unless they run already."""
        if not self._tasks:
            self._tasks = [
                spawn(self._keep_leases(), "keep the leases of index slots"),
                spawn(self._write(), "write the index to Redis"),
                spawn(self._rewrite(), "rewrite the index to Redis"),
            ]

    async def stop(self) -> None:
        """End the background tasks and the leases."""
        await stop(*self._tasks)
        if self.up.is_set() and self._numbers:
            with suppress(*UNREACHABLE):
                await self._store.abandon(self._numbers.values())

    def owns(self, slot: int) -> bool:
        """Return whether ``slot`` is ours, or was and has not been swept from Redis yet."""
        return slot in self._owners

    def is_ours(self, owner: str) -> bool:
        """Return whether an owner, as Redis knows it, is of this replica."""
        return owner.startswith(self._claimed_by)

    def number(self, slot: int) -> int:
        """Return the number of ``slot`` in Redis; -1 while it has none."""
        return self._numbers.get(slot, -1) if slot in self._owners else slot

    async def claim(self, worker: str) -> int:
        """Return a slot for ``worker``: within a second, and a private one if Redis is away."""
        owner = f"{self._claimed_by}{next(self._claims)} {worker}"  # another for each claim: freeing twice is harmless
        number = None
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLAIM_TIMEOUT_S):
                await self.up.wait()
        async with self._claiming:  # a fleet that joins at once should not crowd out everything else
            if self.up.is_set():
                try:
                    number = await self._claim(owner)
                except UNREACHABLE as error:
                    self.failed(error)
        slot = next(self._private) if number is None or number in self._owners else number
        if number is not None:
            self._numbers[slot] = number
        self._owners[slot] = owner
        self._owners_changed(set())
        return slot

    def mark(self, slot: int, keys: Iterable[bytes]) -> None:
        """What ``slot`` holds of ``keys`` may differ in Redis."""
        if slot not in self._numbers or self._begin_generation:
            return  # it will be written whole
        waiting = self._waiting.setdefault(slot, set())
        waiting.update(keys)
        self._idle.clear()
        self._work.set()
        if len(waiting) > self._max_waiting:
            self.counters.dropped += sum(map(len, self._waiting.values()))
            self._waiting.clear()
            self._begin_generation = True

    def leave(self, slot: int) -> None:
        """``slot`` is closed and swept from the table: free it once Redis has nothing of it either."""
        self._leaving.add(slot)
        self._idle.clear()
        self._work.set()

    def hear_soon(self) -> None:
        """Learn now who has which slot: something has changed."""
        self._renew_now.set()

    async def flush(self) -> None:
        """Wait until Redis has everything."""
        await self._table.swept()
        await self._idle.wait()

    def failed(self, error: BaseException) -> None:
        """Redis did not answer: nobody asks it again before a lease could be renewed."""
        self.counters.errors += 1
        if not self._away:
            self._away = True
            log.warning("the shared index is out of reach: %s", str(error) or type(error).__name__)
        if self.up.is_set():
            self.up.clear()
            self._renew_now.set()

    async def _keep_leases(self) -> None:
        pause = _FIRST_RETRY_S
        loop = asyncio.get_running_loop()
        rewrite_at = loop.time() + self._rewrite_s
        while True:
            self._renew_now.clear()
            try:
                await self._renew()
            except UNREACHABLE as error:
                self.failed(error)
                pause = min(2 * pause, _RENEW_S)
            else:
                if self._away and self.up.is_set():  # since the last renewal, nobody has waited in vain
                    self._away = False
                    log.info("the shared index answers again")
                self.up.set()
                pause = _RENEW_S
            if loop.time() >= rewrite_at:  # half of the TTL is over
                rewrite_at += self._rewrite_s
                self._rewrite_wanted.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._renew_now.wait()
                    pause = _FIRST_RETRY_S

    async def _renew(self) -> None:
        begin, self._begin_generation = self._begin_generation, False
        owners = {number: self._owners[slot] for slot, number in self._numbers.items()}
        generation = self._store.generation
        asked_at = asyncio.get_running_loop().time()
        try:
            lost, changed = await self._store.renew(owners, begin)
        except BaseException:
            self._begin_generation |= begin
            raise
        # Until the next await, nobody sees the masks of the new generation with the owners of the one before.
        self.heard_at = asked_at
        # A slot is lost if its lease ran out while Redis could not be reached, and a new generation gave it away.
        gone = [slot for slot, number in self._numbers.items() if number in lost]
        for slot in gone:
            del self._numbers[slot]
            self._waiting.pop(slot, None)
        if self._store.generation == generation and not self._leaving.issuperset(gone):
            # The server has forgotten who had it, perhaps for want of memory: whoever gets it would have what we wrote.
            self._begin_generation = True
            self._renew_now.set()
        if changed:
            self._owners_changed(changed)
        if self._store.generation != generation:
            self.counters.generations += generation > 0
            self._rewrite_wanted.set()
        for slot in self._owners.keys() - self._numbers.keys() - self._leaving:
            owner = self._owners.get(slot, "")
            number = await self._claim(owner)
            if slot in self._owners:
                self._numbers[slot] = number
                self._rewrite_wanted.set()
            else:  # it was released meanwhile
                await self._store.free(number, owner)

    async def _claim(self, owner: str) -> int:
        number = await self._store.claim(owner)
        if number < 0:
            raise ConnectionError("another generation has begun")
        return number

    async def _rewrite(self) -> None:
        while True:
            await self._rewrite_wanted.wait()
            self._rewrite_wanted.clear()
            async for keys in self._table.in_steps():
                for key in keys:
                    for slot in self._table.holders(key):
                        self.mark(slot, (key,))
                while sum(map(len, self._waiting.values())) >= _BATCH_CHUNKS:  # what changes should not wait for long
                    self._fewer_wait.clear()
                    await self._fewer_wait.wait()

    async def _write(self) -> None:
        while True:
            await self._work.wait()
            await self.up.wait()
            try:
                await self._write_some()
                await self._free_left()
            except UNREACHABLE as error:
                # What timed out may still arrive, after what is written next: but then under the old generation's keys.
                self._begin_generation |= isinstance(error, TIMED_OUT)
                if type(error) in ON_THE_MOVE:
                    self.counters.errors += 1
                else:
                    self.failed(error)
                await asyncio.sleep(_FIRST_RETRY_S)  # it may be this write alone that fails
                continue
            if not self._waiting and not self._leaving:
                self._work.clear()
                self._idle.set()

    async def _write_some(self) -> None:
        batch: dict[int, list[bytes]] = {}
        room = _BATCH_CHUNKS
        while self._waiting and room:
            slot = next(iter(self._waiting))
            waiting = self._waiting.pop(slot)
            batch[slot] = [waiting.pop() for _ in range(min(room, len(waiting)))]
            room -= len(batch[slot])
            if waiting:
                self._waiting[slot] = waiting  # behind the others
        self._fewer_wait.set()
        keys_by_nibble: dict[tuple[int, int], list[bytes]] = {}
        for slot, keys in batch.items():
            for key in keys:
                keys_by_nibble.setdefault((self._numbers[slot], self._table.tiers(slot, key)), []).append(key)
        try:
            await self._store.write(keys_by_nibble)
        except BaseException:
            for slot, keys in batch.items():
                self.mark(slot, keys)
            raise
        self.counters.written += _BATCH_CHUNKS - room

    async def _free_left(self) -> None:
        for slot in list(self._leaving):
            if slot in self._waiting:
                continue
            if slot in self._numbers:
                await self._store.free(self._numbers[slot], self._owners[slot])
                self._numbers.pop(slot, None)
            self._leaving.discard(slot)
            del self._owners[slot]
            self._owners_changed(set())
