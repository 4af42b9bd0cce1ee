"""No replica takes a slot for a worker's that is another worker's by now."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from itertools import count

import pytest
import redis

from gateway.config import IndexConfig, WorkerConfig
from gateway.events.feeds import EventFeeds
from gateway.fleet.registry import NO_SLOT, Registry, Worker
from gateway.index.redis import RedisIndex
from gateway.index.redis_store import LEASE_S
from gateway.sharing.ownership import Ownership
from gateway.sharing.store import Record
from policies.base import Tier
from policies.chunks import ChunkHasher
from tests.events_rig import until
from tests.residency import hits, prompt
from tests.valkey import Valkey

WORKERS = [f"worker-{number}" for number in range(6)]
CHAINS = {name: prompt(3, seed) for seed, name in enumerate(WORKERS)}
_namespaces = count()


class Follower:
    """A replica that follows workers: it claims slots, and each holds the chain of its worker."""

    def __init__(self, config: IndexConfig) -> None:
        self.index = RedisIndex(config)
        self.slots: dict[str, int] = {}

    async def follow(self, worker: str) -> int:
        """Give ``worker`` a slot, and return its number in Redis."""
        slot = self.slots[worker] = await self.index.acquire_slot(worker)
        await self.index.store(slot, CHAINS[worker], Tier.HBM)
        await self.index.flush()
        return self.index.number(slot)

    async def restart(self, worker: str) -> int:
        """The worker has restarted: it has another slot."""
        await self.index.release_slot(self.slots[worker])
        return await self.follow(worker)


class Reader:
    """A replica that follows nobody, and knows of the others what it is told."""

    def __init__(self, config: IndexConfig) -> None:
        self.index = RedisIndex(config)
        self.registry = Registry()
        for name in WORKERS:
            self.registry.add(Worker.from_config(WorkerConfig(url="http://127.0.0.1:1", name=name)))
        feeds = EventFeeds(self.registry, self.index, ChunkHasher(4), follow_all=False)
        self.ownership = Ownership("reader", self.registry, feeds, self.index)

    async def told(self, numbers: Mapping[str, int]) -> None:
        """Hear which slots the workers have, be it true or not."""
        await self.ownership.take({name: Record("follower", number, 1.0) for name, number in numbers.items()})

    async def own(self, worker: str) -> None:
        """Follow a worker, and wait for its slot."""
        await self.ownership.take({worker: Record("reader", -1, 1.0)})
        await until(lambda: self.registry.workers[worker].slot != NO_SLOT)

    async def takes_for(self, worker: str) -> set[str]:
        """Return whose chains ``worker`` is believed to hold."""
        shown = self.registry.workers[worker]  # its slot may become another one at every await
        return {name for name, chain in CHAINS.items() if await hits(self.index, chain, [shown.slot]) == [3]}

    async def knows(self, worker: str) -> bool:
        return await self.takes_for(worker) == {worker}


@pytest.fixture
async def config(valkey: Valkey) -> IndexConfig:
    return IndexConfig(url=valkey.url, namespace=f"slots-{next(_namespaces)}", timeout_s=2)


@pytest.fixture
async def reader(config: IndexConfig) -> AsyncIterator[Reader]:
    reader = Reader(config)
    yield reader
    await reader.index.close()


@pytest.fixture
async def follower(config: IndexConfig) -> AsyncIterator[Follower]:
    follower = Follower(config)
    yield follower
    await follower.index.close()


async def test_a_slot_is_shown_as_soon_as_redis_confirms_whose_it_is(follower: Follower, reader: Reader) -> None:
    number = await follower.follow("worker-0")
    await reader.told({"worker-0": number, "worker-1": number})
    await until(lambda: reader.knows("worker-0"))
    assert reader.registry.workers["worker-1"].slot == NO_SLOT


async def test_a_slot_given_to_another_worker_is_no_longer_its_former_owners(
    follower: Follower, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.index.redis_store.FREED_S", 0)
    numbers = {"worker-0": await follower.follow("worker-0")}
    await reader.told(numbers)
    await until(lambda: reader.knows("worker-0"))
    await follower.index.release_slot(follower.slots["worker-0"])
    await follower.index.flush()
    assert await follower.follow("worker-1") == numbers["worker-0"]
    await until(lambda: reader.registry.workers["worker-0"].slot == NO_SLOT)
    await reader.told(numbers)  # late news
    assert await reader.takes_for("worker-0") == set()


async def test_a_freed_slot_is_given_out_again_only_when_nobody_can_mistake_it(
    follower: Follower, valkey: Valkey, config: IndexConfig
) -> None:
    number = await follower.follow("worker-0")
    await follower.index.release_slot(follower.slots["worker-0"])
    await follower.index.flush()
    assert await follower.follow("worker-1") != number
    with redis.Redis.from_url(valkey.url) as admin:
        assert admin.zscore(f"{config.namespace}:{{slots}}:leases", str(number)) > admin.time()[0] * 1000 + 5000


async def test_a_slot_that_was_freed_before_the_clock_went_back_is_free_in_time(
    follower: Follower, valkey: Valkey, config: IndexConfig
) -> None:
    number = await follower.follow("worker-0")
    await follower.index.release_slot(follower.slots["worker-0"])
    await follower.index.flush()
    key = f"{config.namespace}:{{slots}}:leases"
    with redis.Redis.from_url(valkey.url) as admin:
        admin.zincrby(key, 3_600_000, str(number))  # the clock goes back by an hour
        await until(lambda: admin.zscore(key, str(number)) < (admin.time()[0] + 1 + LEASE_S) * 1000)


async def test_who_has_not_heard_of_owners_for_long_reads_nothing(
    follower: Follower, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    await reader.told({"worker-0": await follower.follow("worker-0")})
    await until(lambda: reader.knows("worker-0"))
    skipped = reader.index.counters.skipped
    monkeypatch.setattr("gateway.index.redis.TRUST_S", 0)
    assert await reader.takes_for("worker-0") == set()
    assert reader.index.counters.skipped == skipped + len(WORKERS)
    monkeypatch.undo()
    await until(lambda: reader.knows("worker-0"))


async def test_an_answer_that_may_be_of_the_slots_next_owner_is_not_believed(
    follower: Follower, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.index.redis_store.FREED_S", 0.6)
    monkeypatch.setattr("gateway.index.redis.TRUST_S", 0.3)
    monkeypatch.setattr("gateway.index.publisher._RENEW_S", 0.02)
    number = await follower.follow("worker-0")
    await reader.told({"worker-0": number})
    await until(lambda: reader.knows("worker-0"))
    read = reader.index._store.read

    async def read_late(chunks: Sequence[bytes], root: bytes) -> Iterator[tuple[int, int]]:
        await follower.index.release_slot(follower.slots["worker-0"])
        await follower.index.flush()
        await asyncio.sleep(0.7)
        assert await follower.follow("worker-1") == number
        return await read(chunks, root)

    monkeypatch.setattr(reader.index._store, "read", read_late)
    assert await hits(reader.index, CHAINS["worker-1"], [number]) == [0]
    assert reader.index.counters.timeouts == 1
    assert reader.index.up


async def test_our_own_slots_are_not_taken_for_others_that_redis_calls_the_same(
    config: IndexConfig, valkey: Valkey, follower: Follower, reader: Reader
) -> None:
    number = await follower.follow("worker-0")
    own = await reader.index.acquire_slot("worker-5")
    await reader.index.store(own, CHAINS["worker-5"], Tier.HBM)
    with redis.Redis.from_url(valkey.url) as admin:  # ours is given away while we are cut off
        admin.hset(f"{config.namespace}:{{slots}}:owners", str(own), "follower.9 worker-1")
    await until(lambda: reader.index.number(own) not in (own, number))
    await reader.told({"worker-0": number, "worker-1": own})
    await until(lambda: reader.knows("worker-0"))

    async def worker_1_holds_nothing() -> bool:  # once the index has begun anew, as the server forgot whose slot it was
        return await reader.takes_for("worker-1") == set()

    await until(worker_1_holds_nothing)


async def test_anothers_slot_is_known_although_one_of_ours_had_its_number_before(
    config: IndexConfig, valkey: Valkey, follower: Follower, reader: Reader
) -> None:
    own = await reader.index.acquire_slot("worker-5")
    await reader.index.store(own, CHAINS["worker-5"], Tier.HBM)
    slots = f"{config.namespace}:{{slots}}"
    with redis.Redis.from_url(valkey.url) as admin:
        admin.hset(f"{slots}:owners", str(own), "follower.9 nobody")
        await until(lambda: reader.index.number(own) not in (own, -1))
        admin.hdel(f"{slots}:owners", str(own))
        admin.zrem(f"{slots}:leases", str(own))
    number = await follower.follow("worker-0")
    assert number == own
    await reader.told({"worker-0": number})
    await until(lambda: reader.knows("worker-0"))
    assert await hits(reader.index, CHAINS["worker-5"], [own]) == [3]
    assert reader.index.slots_of("worker-0") == [reader.registry.workers["worker-0"].slot]


async def test_no_slot_stays_behind_however_often_a_worker_goes_and_comes_back(reader: Reader) -> None:
    worker = reader.registry.workers["worker-0"]
    await reader.own("worker-0")
    retained = worker.slot
    await reader.told({"worker-0": -1})
    assert worker.slot == retained  # the next owner has none yet
    reader.ownership.follow_all()  # Redis is away, and says so to nobody
    await until(lambda: worker.slot not in (retained, NO_SLOT))
    last = worker.slot
    await reader.told({"worker-0": -1})
    assert [reader.index.owns(slot) for slot in (retained, last)] == [False, True]


@pytest.mark.parametrize("seed", range(2))
async def test_whatever_happens_no_worker_is_believed_to_hold_what_another_holds(
    config: IndexConfig, valkey: Valkey, reader: Reader, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    # Times are a hundredth of what they are: slots are given out again all the time.
    monkeypatch.setattr("gateway.index.redis_store.LEASE_S", 0.2)
    monkeypatch.setattr("gateway.index.redis_store.FREED_S", 0.1)
    monkeypatch.setattr("gateway.index.redis.TRUST_S", 0.05)
    monkeypatch.setattr("gateway.index.publisher._RENEW_S", 0.02)
    chance = random.Random(seed)
    numbers: dict[str, int] = {}
    followers = [Follower(config) for _ in range(2)]
    told: dict[str, int] = {}
    believed = 0
    with redis.Redis.from_url(valkey.url) as admin:
        for _ in range(150):
            worker, which = chance.choice(WORKERS), chance.randrange(2)
            action = chance.choices(["restart", "die", "flush", "tell", "wait"], [30, 3, 1, 30, 30])[0]
            if action == "restart" and worker in followers[which].slots:
                numbers[worker] = await followers[which].restart(worker)
            elif action == "restart":
                numbers[worker] = await followers[which].follow(worker)
            elif action == "die":  # its slots stay behind
                await followers[which].index.close()
                followers[which] = Follower(config)
            elif action == "flush":
                admin.flushall()
            elif action == "tell":
                told |= chance.choice([numbers, {worker: numbers.get(worker, -1)}])
                await reader.told(told)
            else:
                await asyncio.sleep(chance.choice([0.001, 0.03]))
            for name in chance.sample(WORKERS, 2):
                taken = await reader.takes_for(name)
                assert taken <= {name}
                believed += len(taken)
    for follower in followers:
        await follower.index.close()
    assert believed > 20
