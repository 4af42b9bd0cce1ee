"""Several paged caches, their events over a wire that loses, repeats and reorders, and one index.

Whenever a worker's stream is complete, residency is exactly the cache's, in chunks and by tier. After a loss that the
engine's buffer cannot make good, it is never more than the cache's once the gap is noticed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import IndexConfig, KvEventsConfig
from gateway.events.assembler import Assembler
from gateway.events.decode import Event, Removed, Stored, decode_batch
from gateway.events.subscriber import FeedStats, Subscriber
from gateway.index.memory import MemoryIndex
from policies.base import N_TIERS, Tier
from policies.chunks import TOKEN_BYTES, ChunkHasher
from tests.events_rig import CLEARED, MODEL, batch, chunks_of, removed, stored
from tests.property.test_assembler import CHUNK, LENGTH, PROMPTS, SALTS, PagedCache, PagedWorker

MEDIA = {Tier.HBM: "GPU", Tier.HOST: "CPU_PINNED", Tier.DISK: "DISK", Tier.REMOTE: "EXTERNAL", None: None}
N_WORKERS = 2
BUFFER = 3


def on_the_wire(event: Event) -> dict[str, Any]:
    """Return an event as an engine publishes it."""
    if isinstance(event, Stored):
        ids = [int.from_bytes(event.tokens[at : at + 4], "little") for at in range(0, len(event.tokens), TOKEN_BYTES)]
        keys: list[list[str] | None] = [[event.salt] if event.salt else None, *[None] * (len(event.hashes) - 1)]
        return stored(event.hashes, ids, event.parent, MEDIA[event.tier], extra_keys=keys)
    if isinstance(event, Removed):
        return removed(event.hashes, MEDIA[event.tier])
    return CLEARED


class Engine(PagedWorker):
    """A cache, and what its process has published: a batch per change, the last ones of which can be replayed."""

    def restart(self) -> None:
        self.cache = PagedCache()
        self.published: deque[tuple[int, bytes]] = deque(maxlen=BUFFER)
        self.next = 0
        self.unsent: list[tuple[int, bytes]] = []

    def see(self, events: Sequence[Event]) -> None:
        message = self.next, batch(*map(on_the_wire, events))
        self.next += 1
        self.published.append(message)
        self.unsent.append(message)

    def run(self, prompt: tuple[int, ...], salt: str | None) -> list[int]:
        """Return the leading run that the cache holds, in chunks by fastest tier."""
        run = [0] * N_TIERS
        for end in range(CHUNK, LENGTH + 1, CHUNK):
            tiers = self.cache.chunk_tiers(prompt[:end], salt, self.size)
            if not tiers:
                break
            run[min(tiers)] += 1
        return run


class Follower(Subscriber):
    """A subscriber whose sockets are an engine's lists, and its sink: what a feed does."""

    def __init__(self, engine: Engine, index: MemoryIndex) -> None:
        config = KvEventsConfig(endpoint="tcp://engine:1", replay_endpoint="tcp://engine:2")
        super().__init__(config, self, FeedStats(), zmq.asyncio.Context.instance())
        self.engine = engine
        self.index = index
        self.slot = -1
        self.began: int | None = None  # number of the first batch since what was known was void

    async def start(self) -> None:
        await self.begin()
        self.slot = await self.index.acquire_slot("worker")

    async def begin(self) -> None:
        self.assembler = Assembler(self.engine.hasher, MODEL)
        self.began = None

    async def deliver(self, messages: Sequence[tuple[int, bytes]]) -> None:
        for number, payload in messages:
            await self._follow(number, payload)
        await self._hand_over()

    @property
    def complete(self) -> bool:
        return self.began == 0 or (self.began is None and not self.engine.next)

    async def _ask(self, endpoint: str, first: int) -> AsyncGenerator[tuple[int, bytes], None]:
        for message in list(self.engine.published):
            if message[0] >= first:
                yield message

    async def _append(self, number: int, payload: bytes) -> None:
        if self.began is None:
            self.began = number
        await super()._append(number, payload)

    async def take(self, payloads: list[bytes]) -> None:
        for payload in payloads:
            decoded = decode_batch(payload)
            assert not decoded.bad
            self.assembler.apply(decoded.events)
        changes = self.assembler.take()
        if changes.cleared:
            await self.index.clear(self.slot)
        for run in changes.stored:
            await self.index.store(self.slot, run.chunks, run.tier, run.root)
        for run in changes.removed:
            await self.index.remove(self.slot, run.chunks, run.tier, run.root)

    async def joined_late(self) -> None:
        self.assembler.heard_all = False

    async def lost(self) -> None:
        await self.begin()
        self.assembler.heard_all = False
        await self.index.clear(self.slot)

    async def restarted(self) -> None:
        await self.begin()
        await self.index.release_slot(self.slot)
        self.slot = await self.index.acquire_slot("worker")

    async def begun_too_late(self) -> None:
        raise AssertionError("the buffer is never silent")

    async def caught_up(self) -> None:
        raise AssertionError("only `run` says so")


class Fleet:
    def __init__(self, block_sizes: Sequence[int]) -> None:
        self.index = MemoryIndex(IndexConfig())
        self.hasher = ChunkHasher(CHUNK)
        self.followers = [Follower(Engine(size), self.index) for size in block_sizes]

    async def send(self, follower: Follower, how: str) -> None:
        """Put what an engine has published on the wire."""
        messages, follower.engine.unsent = follower.engine.unsent, []
        if how == "lose":
            return
        if how == "lose one" and len(messages) > 1:
            del messages[-2]
        elif how == "swap" and len(messages) > 1:
            messages[-2:] = messages[:-3:-1]
        elif how == "repeat":
            messages += messages[-1:]
        await follower.deliver(messages)
        if messages and messages[-1][0] == follower.engine.next - 1:
            await self.check(follower)

    async def check(self, follower: Follower) -> None:
        engine = follower.engine
        for prompt in PROMPTS:
            for salt in SALTS:
                chunks = chunks_of(self.hasher, prompt, salt=salt)
                known = (await self.index.residency(chunks, [follower.slot], 1)).tiers()[0]
                if follower.complete:
                    assert known == engine.run(prompt, salt)
                else:
                    assert sum(known) <= sum(engine.run(prompt, salt))


PICK = st.integers(0, 30)
TIER = st.sampled_from(Tier)
CHANGES = st.one_of(
    st.tuples(
        st.just(PagedWorker.store),
        st.integers(0, len(PROMPTS) - 1),
        st.sampled_from(SALTS),
        st.integers(0, 3),
        st.integers(1, LENGTH),
        TIER,
        st.none() | PICK,
    ),
    st.tuples(st.just(PagedWorker.store), st.integers(0, 6), st.none(), st.just(0), st.just(LENGTH), TIER, st.none()),
    st.tuples(st.just(PagedWorker.remove), PICK, st.integers(1, 6), st.none() | TIER),
    st.tuples(st.just(PagedWorker.remove), PICK, st.integers(1, 2), st.just(Tier.HBM)),
    st.tuples(st.just(PagedWorker.name), PICK, TIER),
    st.tuples(st.just(PagedWorker.clear)),
    st.tuples(st.just(Engine.restart)),
)
HOW = st.sampled_from(["whole"] * 4 + ["wait"] * 3 + ["lose"] * 2 + ["lose one", "swap", "repeat"])
STEPS = st.lists(st.tuples(st.integers(0, N_WORKERS - 1), CHANGES, HOW), min_size=12, max_size=60)


async def play(block_sizes: Sequence[int], steps: Sequence[tuple[int, tuple[Any, ...], str]]) -> None:
    fleet = Fleet(block_sizes)
    for follower in fleet.followers:
        await follower.start()
    for number, (change, *arguments), how in steps:
        follower = fleet.followers[number]
        call: Callable[..., None] = change
        call(follower.engine, *arguments)
        if change is Engine.restart:
            await follower._catch_up()  # as with every new connection
        elif how != "wait":
            await fleet.send(follower, how)
    for follower in fleet.followers:
        await follower._catch_up()  # as after a silence
        await fleet.check(follower)
    await fleet.index.close()


@given(st.lists(st.sampled_from([1, 2, 4, 8, 12]), min_size=N_WORKERS, max_size=N_WORKERS), STEPS)
def test_residency_is_the_caches_while_nothing_is_lost_and_never_more(block_sizes, steps):
    asyncio.run(play(block_sizes, steps))
