"""A shared pool that two replicas fill from the workers that each of them follows."""

from __future__ import annotations

import asyncio

import pytest

from gateway.config import IndexConfig, WorkerConfig
from gateway.events.changes import ChunkRun
from gateway.fleet.registry import Registry, Worker
from gateway.index.pools import PooledIndex, SharedPools
from gateway.index.redis import RedisIndex
from policies.base import Tier
from tests.events_rig import until
from tests.residency import prompt
from tests.valkey import Valkey

PROMPT = prompt(8)


class Replica:
    """One replica: its index, its pools, and a worker of its own that reads the pool."""

    def __init__(self, url: str) -> None:
        self.index = RedisIndex(IndexConfig(backend="redis", url=url, timeout_s=1))
        self.pools, self.registry = SharedPools(self.index), Registry()
        self.pooled = PooledIndex(self.index, self.pools, self.registry, self.index.slots_of)

    async def join(self, name: str) -> None:
        worker = Worker.from_config(WorkerConfig(url="http://127.0.0.1:1", name=name, pool="store"))
        worker.slot = await self.index.acquire_slot(name)
        self.registry.add(worker)
        self.slots = [worker.slot]

    async def announce(self, n: int) -> None:
        pool = self.pools.named("store")
        assert pool is not None
        await pool.write("a", [ChunkRun(Tier.REMOTE, PROMPT[0], PROMPT[:n])], [])

    async def held(self) -> int:
        return (await self.pooled.residency(PROMPT, self.slots, 1)).hit(0)


@pytest.mark.parametrize(("mine", "theirs"), [(0, 5), (3, 5), (6, 5)])
async def test_what_any_replica_knows_of_a_pool_counts(mine: int, theirs: int) -> None:
    with Valkey() as valkey:
        one, other = Replica(valkey.url), Replica(valkey.url)
        try:
            await one.join("a")
            await other.join("b")
            if mine:
                await one.announce(mine)
            await other.announce(theirs)
            await other.index.flush()

            async def all_known() -> bool:
                return await one.held() == max(mine, theirs)

            await until(all_known)
        finally:
            await one.index.close()
            await other.index.close()


async def test_a_pool_that_two_members_fill_at_once_has_one_slot_and_all_of_it() -> None:
    with Valkey() as valkey:
        one, other = Replica(valkey.url), Replica(valkey.url)
        try:
            await one.join("a")
            await other.join("b")
            pool = one.pools.named("store")
            assert pool is not None
            halves = [[ChunkRun(Tier.REMOTE, PROMPT[0], chunks)] for chunks in (PROMPT[:4], PROMPT[4:])]
            await asyncio.gather(*(pool.write("a", half, []) for half in halves))
            assert await one.held() == 8
            await pool.write("a", [], halves[0])
            await one.index.flush()
            assert await one.held() == 0
            await until(lambda: len(other.index.slots_of(pool.owner)) == 1)
            assert await other.held() == 0
        finally:
            await one.index.close()
            await other.index.close()


async def test_what_a_replica_knew_of_a_pool_ends_with_its_lease() -> None:
    with Valkey() as valkey:
        one, other = Replica(valkey.url), Replica(valkey.url)
        try:
            await one.join("a")
            await other.join("b")
            await one.announce(8)
            await one.index.flush()

            async def held_by_other(count: int) -> bool:
                return await other.held() == count

            await until(lambda: held_by_other(8))
            await one.index.close()  # nobody takes over its slots
            await until(lambda: held_by_other(0))
        finally:
            await one.index.close()
            await other.index.close()
