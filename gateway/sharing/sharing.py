"""Several replicas of the gateway that act as one, by way of Redis.

Three things go on side by side. A *beat* says that we are alive and settles who follows which worker. *Telling* sends
what has changed here, some 40 times a second and only then. *Hearing* takes in what the others tell. Without Redis
nothing of this happens, and the replica serves alone: on its own load, following every worker itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from time import monotonic
from typing import Any, Final
from uuid import uuid4

import msgspec

from gateway.config import IndexConfig
from gateway.events.feeds import EventFeeds
from gateway.events.lmcache import DirectoryBatch
from gateway.fleet.registry import Registry, Worker
from gateway.index.approximate import ApproximateCache
from gateway.index.redis import RedisIndex
from gateway.index.redis_client import UNREACHABLE
from gateway.observe.observer import Observer
from gateway.sharing import news
from gateway.sharing.ownership import Ownership, weight
from gateway.sharing.peers import SILENCE_S, Peers
from gateway.sharing.store import LIFE_S, SharingStore
from gateway.tasks import spawn, stop
from policies.chunks import ChunkHasher

log = logging.getLogger("kvway.sharing")

_BEAT_S: Final = LIFE_S / 5
_TELL_S: Final = 0.025
_WHOLE_S: Final = 1.0
_RETRY_S: Final = 0.2


class Sharing:
    """One replica among several.

    Args:
        config: where Redis is, and what the index may need.
        registry: the workers; its view gets the others' load.
        hasher: the same as for prompts.

    Attributes:
        index: the shared index.
        approximate: models of the workers without events that are ours.
        feeds: follows the workers that are ours.
        outbox: to be told of every prompt sent to a worker.
        on_written: told of requests whose KV LMCache says is written, as another replica has heard.
        up: whether Redis answers.
    """

    def __init__(self, config: IndexConfig, registry: Registry, hasher: ChunkHasher) -> None:
        self._replica = uuid4().hex[:12]
        self._store = SharingStore(config, self._replica)
        self._registry = registry
        self._chunk_tokens = hasher.chunk_tokens
        self.index = RedisIndex(config)
        self.approximate = ApproximateCache(self.index, self.index.owns)
        self.outbox = news.Outbox(self._replica, registry)
        self.feeds = EventFeeds(
            registry,
            self.index,
            hasher,
            follow_all=False,
            on_slot=self.hurry,
            on_taken=self.approximate.forget,
            refills=config.refill_share > 0,
            on_dropped=self.outbox.dropped,
            pass_on=self._pass_on,
        )
        self.on_written: Callable[[str], object] | None = None
        self.up = False
        self._ownership = Ownership(self._replica, registry, self.feeds, self.index)
        self._peers = Peers(registry, self.index, self._prefilled)
        self._alive: set[str] = set()
        self._beat_now = asyncio.Event()
        self._beats = 0  # answered in a row
        self._answered_at = -inf
        self._warned = False
        self._claimed: dict[str, int] = {}
        self._whole_at = 0.0
        self._tasks: list[asyncio.Task[Any]] = []
        registry.on_change(lambda _worker, _joined: self.hurry())

    @property
    def replicas(self) -> int:
        """How many replicas there are, as far as is known here, this one included."""
        return len(self._known())

    def rank(self, name: str) -> int:
        """Return how many replicas come before this one for ``name``; all agree on the order (rendezvous hashing)."""
        return sum(weight(replica, name) > weight(self._replica, name) for replica in self._known())

    def hurry(self) -> None:
        """Have the next beat now: something has changed that the others should know."""
        self._beat_now.set()

    def expose(self, observer: Observer) -> None:
        """Expose what is known of the other replicas as metrics."""
        observer.gauge(
            "kvway_sharing_up",
            "1 while Redis connects this replica with others, 0: it serves alone.",
            lambda: int(self.up),
        )
        observer.gauge("kvway_replicas", "Replicas that act as one with this one, itself included.", self._count)
        observer.gauge(
            "kvway_workers_followed",
            "Workers whose cache this replica follows for all.",
            lambda: self._ownership.owned,
        )

    async def start(self) -> None:
        """Join the other replicas."""
        self._tasks = [
            spawn(self._keep_beating(), "replicas: beat"),
            spawn(self._keep_telling(), "replicas: tell"),
            spawn(self._keep_hearing(), "replicas: hear"),
        ]

    def leave(self) -> None:
        """Hand our workers over to the others; what is in flight here goes on being told."""
        self.outbox.leaving = self.outbox.moved = True
        self.hurry()

    async def close(self) -> None:
        """Part with the others."""
        await stop(*self._tasks)
        if self.up:
            with suppress(*UNREACHABLE):
                await self._store.beat(self._ownership.no_claims(), life_s=0)
                last = news.News(self._replica, whole=True, loads={}, leaving=True, number=self.outbox.number)
                await self._store.tell(news.encode(last))
        await self._store.close()

    async def _keep_beating(self) -> None:
        while True:
            self._beat_now.clear()
            try:
                await self._beat()
            except UNREACHABLE as error:
                self._failed(error)
            self._peers.forget_silent(monotonic())
            if not self.up and monotonic() - self._answered_at >= LIFE_S:
                self._ownership.follow_all()
            with suppress(TimeoutError):
                async with asyncio.timeout(_BEAT_S):
                    await self._beat_now.wait()
                    await asyncio.sleep(_TELL_S)  # a fleet that joins at once is one change

    async def _beat(self) -> None:
        # Who has just met the others does not yet know whose workers are whose, and claims none.
        replicas = self._known()
        leaving = self.outbox.leaving
        claims = self._ownership.no_claims() if leaving or not self._beats else self._ownership.claims(replicas)
        self._alive, records = await self._store.beat(claims, 0.0 if leaving else LIFE_S)
        self._beats += 1
        self._answered_at = monotonic()
        if self._warned:
            self._warned = False
            log.info("connected with other replicas again")
        self.up = self.outbox.open = True
        if claims != self._claimed:  # the others should read it now
            self._claimed, self.outbox.moved = claims, True
        await self._ownership.take(records)

    async def _keep_telling(self) -> None:
        while True:
            await asyncio.sleep(_TELL_S)
            if not self.up:
                continue
            now = monotonic()
            whole = now >= self._whole_at
            message = self.outbox.take(whole)
            if message is None:
                continue
            if message.whole:
                self._whole_at = now + _WHOLE_S
            try:
                await self._store.tell(news.encode(message))
            except UNREACHABLE as error:
                self._whole_at = 0.0
                self._failed(error)

    async def _keep_hearing(self) -> None:
        while True:
            with suppress(*UNREACHABLE):
                async for message in self._store.listen(SILENCE_S):
                    await self._hear(message)
            await asyncio.sleep(_RETRY_S)

    async def _hear(self, message: bytes) -> None:
        try:
            heard = news.decode(message)
        except msgspec.DecodeError as error:
            log.warning("another replica speaks another language, perhaps another version: %s", error)
            return
        if heard.replica != self._replica:
            await (self.feeds.hear_directory(heard.directory) if heard.directory else self._hear_another(heard))
        if self.on_written is not None:
            for request_id in heard.written:
                self.on_written(request_id)

    async def _hear_another(self, heard: news.News) -> None:
        due = self._peers.due(heard)
        if await self._peers.hear(heard, monotonic()):
            self._whole_at = 0.0  # it has heard nothing of ours yet
        if due is not None and heard.number != due:
            await self.feeds.missed_drops()
        if heard.number == (due or 0):
            await self.feeds.hear_dropped(heard.dropped, heard.dropped_since)
        else:
            self.outbox.asks = True  # the answer has what is told here, and what was told before
        if heard.asks:
            self.outbox.remember(*self.feeds.drops())
        if heard.moved:
            self.hurry()

    async def _pass_on(self, batches: list[DirectoryBatch]) -> bool:
        if not self.up:
            return False
        try:
            await self._store.tell(news.encode(news.News(self._replica, whole=False, loads={}, directory=batches)))
        except UNREACHABLE as error:
            self._failed(error)
            return False
        return True

    def _known(self) -> set[str]:
        return self._alive | self._peers.replicas | {self._replica}

    def _failed(self, error: BaseException) -> None:
        self._beats = 0
        self.up = self.outbox.open = False
        self.outbox.drop()
        self.outbox.asks = True
        if not self._warned:
            self._warned = True
            log.warning("no connection with other replicas, serving alone: %s", str(error) or type(error).__name__)

    async def _prefilled(self, worker: Worker, chunks: Sequence[bytes]) -> None:
        if worker.config.kv_events is None and self._ownership.follows(worker):
            capacity = float(self._registry.fleet.kv_capacity_tokens[worker.row])
            await self.approximate.sent(worker.slot, chunks, self._chunk_tokens, capacity)

    def _count(self) -> float:
        return float(len(self._peers.replicas) + 1)
