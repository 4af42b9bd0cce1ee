"""What is known of one worker's cache: its slot in the index, and the events that fill it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import zmq
import zmq.asyncio

from gateway.events.ages import EvictionAges
from gateway.events.assembler import Assembler
from gateway.events.changes import Changes
from gateway.events.decode import BadFrames, Batch, Cleared, Event, Hash, Removed, Stored, decode_batch
from gateway.events.drops import Drops
from gateway.events.lmcache import LOWER_TIERS, DirectoryBatch
from gateway.events.subscriber import FeedStats, Subscriber
from gateway.fleet.registry import NO_SLOT, Registry, Worker
from gateway.index.base import ChunkIndex
from gateway.index.pools import SharedPools
from gateway.tasks import spawn, stop
from policies.base import Tier
from policies.chunks import ChunkHasher

log = logging.getLogger("kvway.events")

_MODEL_CHECK_S: Final = 0.5  # how often a worker's base model is compared with the one its chunks are hashed under
_RETRY_S: Final = 1.0
REFILL_S: Final = 120.0
"""How long after a start with a possibly incomplete replay requests may ask for reports."""

_LATE_REPORTS_S: Final = 60.0  # a report comes when its request leaves the engine's queue
_LATE_S: Final = 5.0  # events that were published before a reset may arrive this long after it
_AGE_S: Final = 1800.0  # what a tier stores and never removes is believed for once to twice this long


@dataclass(slots=True, frozen=True)
class FeedContext:
    """What all feeds use."""

    registry: Registry
    index: ChunkIndex
    hasher: ChunkHasher
    context: zmq.asyncio.Context
    silence_s: float
    on_slot: Callable[[], None] | None
    on_taken: Callable[[int], None] | None
    refills: bool
    pools: SharedPools
    drops: defaultdict[str, Drops]
    on_dropped: Callable[[Worker, Sequence[Hash], float], Awaitable[None]]
    on_lost: Callable[[Worker], Awaitable[None]]


class Feed:
    """One worker: its slot, and the events that fill it. It is the sink of the worker's subscriber.

    Args:
        worker: whom it follows, from now on.
        shared: what all feeds use.

    Attributes:
        slot: the worker's, once it has one; the worker is shown it once it has caught up.
        stats: counters.
        clears: how often the worker's cache was emptied as a whole.
    """

    def __init__(self, worker: Worker, shared: FeedContext) -> None:
        self.slot = NO_SLOT
        self.stats = FeedStats()
        self.clears = 0
        self._worker = worker
        self._registry = shared.registry
        self._index = shared.index
        self._hasher = shared.hasher
        self._context = shared.context
        self._silence_s = shared.silence_s
        self._on_slot = shared.on_slot
        self._on_taken = shared.on_taken
        self._refills = shared.refills
        self._pool = shared.pools.named(worker.config.pool)
        self._drops = shared.drops[worker.config.pool]
        self._on_dropped = shared.on_dropped
        self._on_lost = shared.on_lost
        self._pooled = {Tier[name.upper()] for name in worker.config.pool_tiers} - {Tier.REMOTE}
        self._reports_until = 0.0
        self._assembler: Assembler | None = None
        self._directory: tuple[int | str | None, int] = (None, 0)  # life and last batch of its LMCache server
        self._age_at = time.monotonic() + _AGE_S
        self._ages: defaultdict[Tier, EvictionAges] = defaultdict(EvictionAges)
        self._late_until = 0.0  # until then, what was announced before a reset may arrive
        self._anew = asyncio.Event()
        self._task = spawn(self._run(), f"events of {worker.name}")

    @property
    def known_blocks(self) -> int:
        """Blocks that the worker has announced and not removed, and those that link them to their beginnings."""
        return 0 if self._assembler is None else len(self._assembler)

    @property
    def orphan_blocks(self) -> int:
        """Known blocks whose parent is not known."""
        return 0 if self._assembler is None else self._assembler.orphans

    def held(self) -> dict[Tier, tuple[int, float | None]] | None:
        """See ``EventFeeds.held``."""
        assembler = self._assembler
        if assembler is None:
            return None
        return {tier: (assembler.held(tier), self._ages[tier].median_s) for tier in Tier}

    def begin_anew(self) -> None:
        """Start over with a new slot and an empty picture of the worker's cache."""
        self._anew.set()

    async def stop(self) -> None:
        """Stop listening. The slot goes on answering, without what its pool could drop unnoticed now."""
        await stop(self._task)
        self._assembler = None
        if self._pool is not None:
            for run in await self._pool.left(self):
                await self._index.remove(self.slot, run.chunks, run.tier, run.root)

    async def close(self) -> None:
        """Stop listening, and give the slot back."""
        await self.stop()
        await self._leave_slot()

    async def cleared(self) -> None:
        """See ``EventFeeds.cleared``."""
        if self._assembler is None:
            await self._index.clear(self.slot)
            return
        await self._end_in_pool()
        self._assembler.apply([Cleared()])
        await self._write(self._assembler.take())
        self._late_until = time.monotonic() + _LATE_S

    async def caught_up(self) -> None:
        """What the engine's buffer has is taken in."""
        self.stats.lag_s = 0.0  # it is old, not late
        self._show(self.slot)

    async def take(self, payloads: list[bytes]) -> None:
        """Take in batches that follow on those before."""
        assembler = self._current()
        assembler.counts_copies = time.monotonic() >= self._reports_until
        dropped: list[tuple[list[Hash], float]] = []
        for payload in payloads:
            batch = self._decode(payload)
            events = self._since_reset(batch.events) if self._late_until else batch.events
            if self._pool is None:
                assembler.apply(events)
            else:
                at = min(batch.time_s or math.inf, time.time())  # a removal dated ahead would count for long
                dropped.append(await self._apply_to_pool(assembler, events, at))
        if time.monotonic() > self._age_at:
            self._age_at = time.monotonic() + _AGE_S
            assembler.age()
        await self._write(assembler.take())
        for blocks, at in dropped:
            await self._on_dropped(self._worker, blocks, at)
        await asyncio.sleep(0)  # the memory index never suspends, and a long replay must not keep the loop to itself

    async def take_directory(self, directory: DirectoryBatch) -> bool:
        """Take in a batch of the worker's LMCache server; False if the worker's own events are not followed."""
        assembler = self._assembler
        if assembler is None:
            return False
        life, number = self._directory
        if directory.incarnation == life and directory.seq <= number:
            return True  # it was sent twice
        if isinstance(life, int) and isinstance(directory.incarnation, int) and directory.incarnation < life:
            return True  # it comes late, from a life that is over: incarnations are the times at which they began
        if life is not None and (directory.incarnation, directory.seq) != (life, number + 1):
            assembler.void(LOWER_TIERS)  # removals may be among what is missing
            await self._on_lost(self._worker)
        self._directory = directory.incarnation, directory.seq
        events, skipped = directory.events()
        self.stats.events += len(events)
        self.stats.skipped_events += skipped
        assembler.apply(events, keyed=True)
        await self._write(assembler.take())
        if self._pool is not None:
            await self._on_dropped(self._worker, _dropped_from_pool(events), time.time())
        return True

    async def dropped(self, blocks: Sequence[Hash]) -> None:
        """Another member of the worker's pool says that the pool no longer has these blocks."""
        if self._assembler is not None:
            self._assembler.drop(blocks, Tier.REMOTE)
            await self._write(self._assembler.take())

    async def forget_pool(self) -> None:
        """What the worker announced in its pool may be gone from there."""
        if self._assembler is not None:
            self._assembler.void([Tier.REMOTE])
            await self._write(self._assembler.take())

    async def joined_late(self) -> None:
        """The engine's first batches are not to be had."""
        self._current().heard_all = False

    async def begun_too_late(self) -> None:
        """What came before the first batch that is known can be had after all."""
        log.info("the replay socket answers now; events are read anew", extra={"worker": self._worker.name})
        self.begin_anew()

    async def lost(self) -> None:
        """Batches are missing for good: what was known is void."""
        log.warning("KV events were lost; the worker's residency is built anew", extra={"worker": self._worker.name})
        await self._end_in_pool()
        self._assembler = self._new_assembler(self._current().model)
        self._assembler.heard_all = False
        await self._index.clear(self.slot)
        await self._on_lost(self._worker)
        self._ask_for_reports()

    async def restarted(self) -> None:
        """The engine is another process: its residency begins in a new slot."""
        log.info("engine restarted", extra={"worker": self._worker.name})
        await self._end_in_pool()
        self._assembler = self._new_assembler(self._current().model)
        self._show(NO_SLOT)  # even if it is another replica's
        await self._take_slot()

    async def _run(self) -> None:
        while True:
            self._anew.clear()
            await self._end_in_pool()
            self._assembler = None
            await self._take_slot()
            listening = spawn(self._listen(), f"listen to {self._worker.name}")
            try:
                await self._until_anew()
            finally:
                await stop(listening)

    async def _until_anew(self) -> None:
        """Return when asked to begin anew, or when chunks are hashed under another model than the worker serves."""
        while not self._anew.is_set():
            if self._assembler is not None and self._assembler.model != self._base_model():
                log.info("worker serves another model", extra={"worker": self._worker.name})
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._anew.wait(), _MODEL_CHECK_S)

    async def _listen(self) -> None:
        config = self._worker.config.kv_events
        if config is None:
            self._show(self.slot)
            return
        while (model := self._base_model()) is None:  # noqa: ASYNC110 - the registry tells of joining, not of models
            await asyncio.sleep(_MODEL_CHECK_S)
        while True:
            await self._end_in_pool()
            self._assembler = self._new_assembler(model)
            self._ask_for_reports()
            try:
                await Subscriber(config, self, self.stats, self._context, self._silence_s).run()
            except zmq.ZMQError as error:
                log.error(
                    "cannot %s to KV events at %s: %s",
                    config.mode,
                    config.endpoint,
                    error,
                    extra={"worker": self._worker.name},
                )
            except Exception:
                log.exception("KV events could not be taken in", extra={"worker": self._worker.name})
            await asyncio.sleep(_RETRY_S)
            await self._index.clear(self.slot)

    def _new_assembler(self, model: str) -> Assembler:
        return Assembler(self._hasher, model, shared_remote=self._pool is not None)

    def _ask_for_reports(self) -> None:
        """What the engine's buffer no longer has can only be learned from requests that reuse it."""
        if self._refills:
            self._worker.refill_until = time.monotonic() + REFILL_S
            self._reports_until = self._worker.refill_until + _LATE_REPORTS_S

    async def _end_in_pool(self) -> None:
        """The present picture of the worker's cache is given up."""
        if self._pool is not None:
            await self._pool.ended(self)

    async def _apply_to_pool(
        self, assembler: Assembler, events: Sequence[Event], at: float
    ) -> tuple[list[Hash], float]:
        """Apply what was published at ``at``, less what others have dropped since; return what it drops, and when."""
        if any(type(event) is Cleared for event in events):
            await self._write(assembler.take())
            await self._end_in_pool()
        assembler.apply(events)
        if gone := self._drops.gone(_put_into_pool(events), at):
            assembler.drop(gone, Tier.REMOTE)
        return _dropped_from_pool(events), at

    def _current(self) -> Assembler:
        assert self._assembler is not None, "the subscriber runs only where there is an assembler"
        return self._assembler

    def _base_model(self) -> str | None:
        """Return the worker's base model; None while it has not said what it serves."""
        return next(iter(self._worker.models.values()), None)

    async def _take_slot(self) -> None:
        """Leave the present slot at once, so that nothing of it is believed any more; then take another."""
        await self._leave_slot()
        self.slot = await self._index.acquire_slot(self._worker.name)
        if self._on_taken is not None:
            self._on_taken(self.slot)
        if self._worker.slot == NO_SLOT:  # otherwise another replica's answers until ours has caught up
            self._show(self.slot)

    async def _leave_slot(self) -> None:
        slot, self.slot = self.slot, NO_SLOT
        self._ages.clear()
        self._late_until = 0.0
        if slot == NO_SLOT:
            return
        if self._worker.slot == slot:
            self._show(NO_SLOT)
        await self._index.release_slot(slot)

    def _show(self, slot: int) -> None:
        if self._worker.slot != slot:
            self._worker.slot = slot
            self._registry.touch()
            if self._on_slot is not None:
                self._on_slot()

    def _since_reset(self, events: list[Event]) -> list[Event]:
        """Leave out what was announced before a reset that we know of, and still was on its way."""
        kept = next((at for at, event in enumerate(events) if isinstance(event, Cleared)), None)
        if kept is None and time.monotonic() < self._late_until:
            return []
        self._late_until = 0.0
        return events[kept or 0 :]

    def _decode(self, payload: bytes) -> Batch:
        stats = self.stats
        try:
            batch = decode_batch(payload)
        except BadFrames as error:
            stats.bad_events += 1
            self._current().heard_all = False
            log.debug("bad batch: %s", error, extra={"worker": self._worker.name})
            return Batch(0.0, [])
        if self._pool is not None and self._pooled:
            for event in batch.events:
                if not isinstance(event, Cleared) and event.tier in self._pooled:
                    event.tier = Tier.REMOTE
        stats.batches += 1
        stats.events += len(batch.events)
        stats.blocks += sum([len(event.hashes) for event in batch.events if not isinstance(event, Cleared)])
        if batch.bad:
            stats.bad_events += batch.bad
            self._current().heard_all = False
        stats.skipped_events += batch.skipped
        if batch.time_s:
            stats.lag_s = max(0.0, time.time() - batch.time_s)
        return batch

    async def _write(self, changes: Changes) -> None:
        slot, index, now = self.slot, self._index, time.monotonic()
        if changes.cleared:
            self.clears += 1
            self._ages.clear()
            await index.clear(slot)
        for run in changes.stored:
            self._ages[run.tier].stored(run.chunks, now)
            await index.store(slot, run.chunks, run.tier, run.root)
        for run in changes.removed:
            self._ages[run.tier].evicted(run.chunks, now)
            await index.remove(slot, run.chunks, run.tier, run.root)
        if self._pool is not None:
            if self._current().removes_remote:
                await self._pool.removes()
            await self._pool.write(self, changes.stored, changes.removed)


def _dropped_from_pool(events: Iterable[Event]) -> list[Hash]:
    return [key for event in events if type(event) is Removed and event.tier is Tier.REMOTE for key in event.hashes]


def _put_into_pool(events: Iterable[Event]) -> list[Hash]:
    return [key for event in events if type(event) is Stored and event.tier is Tier.REMOTE for key in event.hashes]
