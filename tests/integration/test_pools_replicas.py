"""A shared pool whose members are followed by two replicas: what it drops, none believes it to have."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import msgspec
import pytest
import redis

from gateway.config import IndexConfig, KvEventsConfig, WorkerConfig
from gateway.events.lmcache import BadDirectoryEvents
from gateway.fleet.registry import NO_SLOT, Registry, Worker
from gateway.index.pools import PooledIndex
from gateway.sharing.ownership import first_choice
from gateway.sharing.sharing import Sharing
from policies.chunks import ChunkHasher
from tests.events_rig import MODEL, Publisher, batch, chunks_of, removed, stored, tokens, until
from tests.valkey import Valkey

CHUNK = 4
PROMPT, OTHER = tokens(8), tokens(8, start=500)
_namespaces = count()


class Replica:
    """A replica without requests: the workers' events, and what it believes them to hold."""

    def __init__(self, config: IndexConfig) -> None:
        self.registry, self.hasher = Registry(), ChunkHasher(CHUNK)
        self.sharing = Sharing(config, self.registry, self.hasher)
        self.feeds = self.sharing.feeds
        index = self.sharing.index
        self.pooled = PooledIndex(index, self.feeds.pools, self.registry, index.slots_of)

    @property
    def name(self) -> str:
        return self.sharing._replica

    async def start(self) -> None:
        await self.feeds.start()
        await self.sharing.start()

    async def close(self) -> None:
        await self.sharing.close()
        await self.feeds.close()
        await self.sharing.index.close()

    def follows(self, name: str) -> bool:
        return self.feeds.follows(self.registry.workers[name])

    async def held(self, ids: list[int]) -> list[int]:
        """Return the leading tokens that each worker is believed to hold or to reach in the pool."""
        slots = [worker.slot for worker in self.registry.workers.values()]
        return (await self.pooled.residency(chunks_of(self.hasher, ids), slots, CHUNK)).hit_tokens.tolist()


class Deployment:
    """Two replicas; worker a is the first one's to follow, b the second one's, once that is there."""

    def __init__(self, url: str) -> None:
        config = IndexConfig(backend="redis", url=url, namespace=f"pools-{next(_namespaces)}", timeout_s=1)
        self.replicas = one, other = Replica(config), Replica(config)
        self.started: list[Replica] = []
        self.engines: dict[str, Publisher] = {}
        names = [one.name, other.name]
        self.a, self.b = (
            next(name for name in (f"{stem}{number}" for number in count()) if first_choice(name, names) == replica)
            for stem, replica in zip("ab", names, strict=True)
        )
        for name in (self.a, self.b):
            self.engines[name] = engine = Publisher()
            events = KvEventsConfig(endpoint=engine.endpoint, replay_endpoint=engine.replay_endpoint)
            config_of = WorkerConfig(
                url="http://127.0.0.1:1", name=name, models=(MODEL,), kv_events=events, pool="store"
            )
            for replica in self.replicas:
                replica.registry.add(Worker.from_config(config_of))

    async def start(self, *replicas: Replica) -> None:
        for replica in replicas:
            await replica.start()
        self.started += replicas
        await until(self.is_settled, within_s=30)

    def is_settled(self) -> bool:
        """Whether each worker is followed by one replica, the right one, and has a slot in all."""
        both = len(self.started) == 2 and not any(replica.sharing.outbox.leaving for replica in self.started)
        for name, at in ((self.a, 0), (self.b, 1)):
            following = [replica for replica in self.started if replica.follows(name)]
            if len(following) != 1 or (both and following != [self.replicas[at]]):
                return False
        return all(worker.slot != NO_SLOT for each in self.started for worker in each.registry.workers.values())

    async def publish(self, name: str, *events: Any) -> float:
        """Have an engine publish a batch; returns when."""
        now = time.time()
        await self.engines[name].publish(payload=batch(*events, at=now))
        return now

    def all_heard(self, at: float) -> bool:
        """Whether every replica has heard of the removal published at ``at``."""
        return all(at in [dropped.at for dropped in replica.feeds.drops()[0]] for replica in self.replicas)

    async def hold(self, ids: list[int], expected: int) -> None:
        """Wait until every replica believes every worker to hold so many tokens, or to reach them in the pool."""

        async def so() -> bool:
            return all([await replica.held(ids) == [expected] * 2 for replica in self.started])

        await until(so)

    async def close(self) -> None:
        for replica in self.replicas:
            await replica.close()
        for engine in self.engines.values():
            await engine.close()


@pytest.fixture
async def pool(valkey: Valkey) -> AsyncIterator[Deployment]:
    deployment = Deployment(valkey.url)
    yield deployment
    await deployment.close()


def in_pool(hashes: list[Any], ids: list[int] = PROMPT) -> dict[str, Any]:
    return stored(hashes, ids, medium="EXTERNAL")


def out_of_pool(hashes: list[Any]) -> dict[str, Any]:
    return removed(hashes, medium="EXTERNAL")


async def tell_directory(replica: Replica, name: str, seq: int, kind: str, ids: list[int]) -> dict[str, int]:
    """Tell a replica what the LMCache server of a worker has done to its chunks of ``ids``, which are in the pool."""
    entries = [
        {
            "key": {"chunk_hash_hex": str(ids[start])},
            "token_ids": ids[start : start + CHUNK],
            "token_offset": start,
        }
        for start in range(0, len(ids), CHUNK)
    ]
    batch = {"instance_id": name, "incarnation": 1, "seq": seq, "event_type": kind, "entries": entries}
    pooled = {"tier": "l2", "backend": "valkey", "shared": True}
    return await replica.feeds.take_directory(msgspec.json.encode({"batches": [batch | pooled]}))


async def test_lmcache_servers_may_tell_any_replica(pool: Deployment) -> None:
    await pool.start(*pool.replicas)
    one, other = pool.replicas
    for seq in range(1, 9):
        ids = tokens(4, start=100 * seq)
        assert await tell_directory(one, pool.b, seq, "store", ids) == {"batches": 1, "ignored": 0}
    for seq in range(1, 9):
        await pool.hold(tokens(4, start=100 * seq), 4)
    assert await tell_directory(one, pool.a, 1, "store", PROMPT) == {"batches": 1, "ignored": 0}
    await pool.hold(PROMPT, 8)
    await tell_directory(other, pool.a, 2, "delete", PROMPT[:4])
    await pool.hold(PROMPT, 0)
    assert await tell_directory(other, "nobody", 1, "store", PROMPT) == {"batches": 0, "ignored": 1}
    with pytest.raises(BadDirectoryEvents, match="token ids"):
        await tell_directory(other, pool.a, 3, "store", [-1])


@pytest.mark.parametrize("hashes", [[1, 2, 3, (1 << 64) - 1], [bytes([n]) * 32 for n in range(4)]])
async def test_what_a_member_elsewhere_drops_is_gone_everywhere(pool: Deployment, hashes: list[Any]) -> None:
    await pool.start(*pool.replicas)
    await pool.publish(pool.a, in_pool(hashes), in_pool([11, 12, 13, 14], OTHER))
    await pool.hold(PROMPT, 8)
    await pool.publish(pool.b, out_of_pool(hashes[2:]))
    await pool.hold(PROMPT, 4)
    await pool.hold(OTHER, 8)


async def test_the_pool_follows_a_worker_to_another_replica(pool: Deployment) -> None:
    one, other = pool.replicas
    await pool.start(one, other)
    await pool.publish(pool.b, in_pool([1, 2, 3, 4]))
    await pool.hold(PROMPT, 8)
    await pool.publish(pool.a, out_of_pool([3, 4]))
    await pool.hold(PROMPT, 4)
    other.sharing.leave()
    await until(lambda: one.follows(pool.b) and not other.follows(pool.b), within_s=30)
    await pool.hold(PROMPT, 4)  # b's replay tells of blocks that a has said to be gone
    await pool.publish(pool.b, in_pool([21, 22], OTHER[:4]))
    await pool.hold(OTHER, 4)
    await pool.publish(pool.b, out_of_pool([1, 2, 21, 22]))
    await pool.hold(PROMPT, 0)
    await pool.hold(OTHER, 0)


async def test_both_replicas_believe_what_is_in_the_pool_whoever_says_so(pool: Deployment) -> None:
    rng = random.Random(1)
    one, other = pool.replicas
    await pool.start(one, other)
    prompts = [tokens(8, start=100 * number) for number in range(1, 5)]
    blocks = [(2 * number, 2 * number + 1) for number in range(4)]
    announced: set[tuple[str, int]] = set()  # by whom, since the pool dropped it last
    for step in range(40):
        if step == 20:
            other.sharing.leave()
            await until(lambda: one.follows(pool.b) and not other.follows(pool.b), within_s=30)
        number, name = rng.randrange(4), rng.choice([pool.a, pool.b])
        both = {(name, block) for block in blocks[number]}
        if not both & announced:
            await pool.publish(name, in_pool([*blocks[number]], prompts[number]))
            announced |= both
        else:
            dropped = rng.choice(blocks[number])
            at = await pool.publish(name, out_of_pool([dropped]))
            await until(lambda at=at: pool.all_heard(at))  # who stores again sooner is not believed
            announced -= {(pool.a, dropped), (pool.b, dropped)}
        first, second = ({(pool.a, block), (pool.b, block)} & announced for block in blocks[number])
        await pool.hold(prompts[number], 0 if not first else 8 if second else 4)


async def test_a_replica_that_joins_is_told_what_was_dropped_before(pool: Deployment) -> None:
    one, other = pool.replicas
    await pool.start(one)
    await pool.publish(pool.b, in_pool([1, 2, 3, 4]))
    await pool.hold(PROMPT, 8)
    await pool.publish(pool.a, out_of_pool([3, 4]))
    await pool.hold(PROMPT, 4)
    await pool.start(other)
    assert other.follows(pool.b)
    await pool.publish(pool.b, in_pool([21, 22, 23, 24], OTHER))  # behind what is replayed
    await pool.hold(OTHER, 8)
    await pool.hold(PROMPT, 4)


async def test_a_replica_that_misses_a_removal_begins_the_pool_anew(pool: Deployment, valkey: Valkey) -> None:
    await pool.start(*pool.replicas)
    await pool.publish(pool.a, in_pool([1, 2, 3, 4]))
    await pool.hold(PROMPT, 8)
    await pool.publish(pool.b, out_of_pool([4]))
    await pool.hold(PROMPT, 4)
    with contextlib.closing(redis.Redis.from_url(valkey.url)) as admin:
        admin.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    await pool.publish(pool.b, out_of_pool([1]))
    await pool.hold(PROMPT, 0)
    await pool.publish(pool.a, stored([31, 32, 33, 34], OTHER), in_pool([31, 32, 33, 34], OTHER))
    await pool.hold(OTHER, 8)
