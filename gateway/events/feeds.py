"""A slot in the index for every worker, filled from the worker's KV cache events."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import zmq
import zmq.asyncio

from gateway.events.decode import Hash
from gateway.events.drops import Dropped, Drops
from gateway.events.feed import Feed, FeedContext
from gateway.events.lmcache import DirectoryBatch, decode_directory
from gateway.events.subscriber import SILENCE_S, FeedStats
from gateway.fleet.registry import Registry, Worker
from gateway.index.base import ChunkIndex
from gateway.index.pools import SharedPools
from gateway.tasks import spawn
from policies.base import Tier
from policies.chunks import ChunkHasher

_MAX_SOCKETS: Final = 16_384


class EventFeeds:
    """Gives each incarnation of a worker a slot, and fills it from the worker's events where it publishes them.

    Args:
        registry: whose workers are followed as they join and leave.
        index: what they hold goes there.
        hasher: the same as for prompts.
        silence_s: seconds without a message after which an engine's replay buffer is asked.
        follow_all: follow every worker; otherwise those that ``follow`` names, while other replicas follow the rest.
        on_slot: called when a followed worker has another slot.
        on_taken: called with every slot that is taken, before anything is in it.
        refills: after a start or a loss, let requests ask the engine for what it holds (``Worker.refill_until``).
        on_dropped: called with whatever the members followed here say to be gone from their pools.
        pass_on: tells other replicas what LMCache's servers of their workers say; returns whether that was possible.

    Attributes:
        pools: the remote tiers that workers share, as their events tell of them.
    """

    def __init__(
        self,
        registry: Registry,
        index: ChunkIndex,
        hasher: ChunkHasher,
        silence_s: float = SILENCE_S,
        *,
        follow_all: bool = True,
        on_slot: Callable[[], None] | None = None,
        on_taken: Callable[[int], None] | None = None,
        refills: bool = False,
        on_dropped: Callable[[Dropped], None] | None = None,
        pass_on: Callable[[list[DirectoryBatch]], Awaitable[bool]] | None = None,
    ) -> None:
        context = zmq.asyncio.Context()
        context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self.pools = SharedPools(index)
        self._drops: defaultdict[str, Drops] = defaultdict(Drops)
        self._on_dropped = on_dropped
        self._pass_on = pass_on
        self._shared = FeedContext(
            registry,
            index,
            hasher,
            context,
            silence_s,
            on_slot,
            on_taken,
            refills,
            self.pools,
            self._drops,
            self._member_dropped,
            self._member_lost,
        )
        self._follow_all = follow_all
        self._feeds: dict[Worker, Feed] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def stats(self) -> dict[str, FeedStats]:
        """Counters per worker; those of a worker that left are gone."""
        return {worker.name: feed.stats for worker, feed in self._feeds.items()}

    def describe(self, worker: Worker) -> dict[str, Any] | None:
        """Return a worker's counters, and how many of its blocks are known; None if it publishes no events."""
        feed = self._feeds.get(worker)
        if feed is None or worker.config.kv_events is None:
            return None
        return asdict(feed.stats) | {"known_blocks": feed.known_blocks, "orphan_blocks": feed.orphan_blocks}

    def held(self, worker: Worker) -> dict[Tier, tuple[int, float | None]] | None:
        """Return a worker's chunks by tier, and how old they become there: a median in seconds, None if none went.

        None if it publishes no events, or another replica follows them.
        """
        feed = self._feeds.get(worker)
        return None if feed is None else feed.held()

    async def start(self) -> None:
        """Follow the workers that are there, and those that join later."""
        registry = self._shared.registry
        registry.on_change(self._changed)
        for worker in registry.workers.values():
            self._changed(worker, True)

    async def close(self) -> None:
        """Stop listening and give the slots back; those that other replicas read go on answering them."""
        self._closed = True
        feeds, self._feeds = list(self._feeds.values()), {}
        ends = (feed.close() if self._follow_all else feed.stop() for feed in feeds)
        await asyncio.gather(*ends, *self._closing)
        self._shared.context.destroy(linger=0)

    def restarted(self, worker: Worker) -> None:
        """A worker's process is another one: give it a new slot. Restarts that its events show need no such call."""
        if (feed := self._feeds.get(worker)) is not None:
            feed.begin_anew()

    def clears(self, worker: Worker) -> int:
        """Return how often a worker's cache was emptied, to compare with later."""
        feed = self._feeds.get(worker)
        return 0 if feed is None else feed.clears

    async def cleared(self, worker: Worker, clears: int) -> bool:
        """A worker's engine has emptied its cache at our request: what it announced before is void.

        Its events will say so, too; but engines send them with their next step, which may be long in coming.

        Args:
            worker: whose.
            clears: what ``clears`` returned before the request.

        Returns:
            False if its events are not followed here.
        """
        feed = self._feeds.get(worker)
        if feed is None:
            return False
        if feed.clears == clears:
            await feed.cleared()
        return True

    async def take_directory(self, body: bytes) -> dict[str, int]:
        """Take in what LMCache's servers tell their coordinator: of each worker that has an instance's name.

        Returns:
            ``batches`` taken in, or passed on where other replicas follow the workers, and ``ignored`` ones: of workers
            that are not known, not followed by anybody we can reach, or publish no events of their own.

        Raises:
            BadDirectoryEvents: the body cannot be read.
        """
        batches, elsewhere, taken = decode_directory(body), [], 0
        for directory in batches:
            worker = self._shared.registry.workers.get(directory.instance_id)
            if worker is not None and not self.follows(worker):
                directory.events()  # raises here, where the server hears of it
                elsewhere.append(directory)
            elif worker is not None:
                taken += await self._feeds[worker].take_directory(directory)
        if elsewhere and self._pass_on is not None and await self._pass_on(elsewhere):
            taken += len(elsewhere)
        return {"batches": taken, "ignored": len(batches) - taken}

    async def hear_directory(self, batches: Iterable[DirectoryBatch]) -> None:
        """Take in what another replica passes on, of the workers that are followed here."""
        for directory in batches:
            worker = self._shared.registry.workers.get(directory.instance_id)
            if worker is not None and self.follows(worker):
                await self._feeds[worker].take_directory(directory)

    def resync(self, worker: Worker) -> bool:
        """Predictions for a worker do not come true: read it anew. False if it has no events, or not here."""
        feed = self._feeds.get(worker)
        if feed is None or worker.config.kv_events is None:
            return False
        feed.stats.resyncs += 1
        feed.begin_anew()
        return True

    def follow(self, worker: Worker) -> None:
        """Follow a worker, unless that is done already.

        A slot that it has from another replica goes on answering until the new one has caught up by replay.
        """
        if worker not in self._feeds and not self._closed:
            self._feeds[worker] = Feed(worker, self._shared)

    async def unfollow(self, worker: Worker) -> int:
        """Stop following a worker and return the slot it has here. The caller releases it when another one answers."""
        feed = self._feeds.pop(worker)
        await feed.stop()
        return feed.slot

    def follows(self, worker: Worker) -> bool:
        """Return whether a worker is followed here."""
        return worker in self._feeds

    def drops(self) -> tuple[list[Dropped], dict[str, float]]:
        """Return the removals from pools that are remembered, and since when these are all, by pool."""
        removing = [name for name in self._drops if self._removes(name)]
        told = [dropped for name in removing for dropped in self._drops[name].told(name)]
        return told, {name: self._drops[name].since for name in removing}

    async def hear_dropped(self, told: Iterable[Dropped], since: Mapping[str, float]) -> None:
        """Take in what another replica tells of pools.

        Args:
            told: what is gone.
            since: where that is all it remembers: since when these are all removals, by pool.
        """
        for name, at in since.items():
            if at and not self._removes(name):  # otherwise we have heard what it has
                await self._begin_anew(name, at)
        latest: defaultdict[str, list[Hash]] = defaultdict(list)
        for dropped in told:
            if dropped.blocks is None:
                await self._begin_anew(dropped.pool, dropped.at)
            else:
                latest[dropped.pool] += self._drops[dropped.pool].add(dropped.blocks, dropped.at)
        for name, blocks in latest.items():
            await self._take_out(name, blocks)

    async def missed_drops(self) -> None:
        """What another replica has told is lost: the pools that remove begin anew."""
        for name in list(self._drops):
            if self._removes(name):
                await self._begin_anew(name, time.time())

    async def _member_dropped(self, member: Worker, blocks: Sequence[Hash], at: float) -> None:
        """A member of a pool says what the pool dropped: the others that announced it do not have it either."""
        name = member.config.pool
        latest = self._drops[name].add(blocks, at)
        if latest and self._on_dropped is not None:
            self._on_dropped(Dropped(name, at, latest))
        await self._take_out(name, latest, member)

    async def _member_lost(self, member: Worker) -> None:
        """Events of a member are missing for good. Where it has a pool that removes, removals may be among them."""
        name, now = member.config.pool, time.time()
        if self._removes(name):
            if self._on_dropped is not None:
                self._on_dropped(Dropped(name, now, None))
            await self._begin_anew(name, now)

    def _removes(self, name: str) -> bool:
        pool = self.pools.named(name)
        return pool is not None and pool.removing

    async def _take_out(self, name: str, blocks: Sequence[Hash], known_by: Worker | None = None) -> None:
        """Take blocks from what the members of a pool have announced there."""
        pool = self.pools.named(name)
        if pool is None or not blocks:
            return
        await pool.removes()
        for worker, feed in list(self._feeds.items()):
            if worker is not known_by and worker.config.pool == name:
                await feed.dropped(blocks)

    async def _begin_anew(self, name: str, at: float) -> None:
        """Whatever was announced in a pool before ``at`` may be gone."""
        pool = self.pools.named(name)
        if pool is None:
            return
        self._drops[name].since = max(self._drops[name].since, at)
        await pool.removes()
        for worker, feed in list(self._feeds.items()):
            if worker.config.pool == name:
                await feed.forget_pool()
        await pool.clear()

    def _changed(self, worker: Worker, joined: bool) -> None:
        if self._closed:
            return
        if joined:
            if self._follow_all:
                self.follow(worker)
        elif (feed := self._feeds.pop(worker, None)) is not None:
            closing = spawn(feed.close(), f"close events of {worker.name}")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
