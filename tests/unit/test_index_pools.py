"""What one worker has put into a shared pool counts for all that read it, at the remote tier's cost."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from gateway.config import IndexConfig, WorkerConfig
from gateway.events.changes import ChunkRun
from gateway.fleet.registry import Registry, Worker
from gateway.index.memory import MemoryIndex
from gateway.index.pools import AGE_S, Pool, PooledIndex, SharedPools
from policies.base import Tier
from tests.residency import prompt

PROMPT = prompt(8)


def in_pool(chunks: list[bytes], root: bytes = PROMPT[0]) -> list[ChunkRun]:
    return [ChunkRun(Tier.REMOTE, root, chunks)]


class Rig:
    """Workers a and b read one pool, c another, d none."""

    def __init__(self, index: MemoryIndex) -> None:
        self.index, self.registry, self.pools = index, Registry(), SharedPools(index)
        self.pooled = PooledIndex(index, self.pools, self.registry)
        self.slots: list[int] = []

    async def start(self) -> None:
        for name, pool in (("a", "store"), ("b", "store"), ("c", "other"), ("d", "")):
            worker = Worker.from_config(WorkerConfig(url="http://127.0.0.1:1", name=name, pool=pool))
            worker.slot = await self.index.acquire_slot(name)
            self.registry.add(worker)
            self.slots.append(worker.slot)

    @property
    def store(self) -> Pool:
        pool = self.pools.named("store")
        assert pool is not None
        return pool

    async def tiers(self, chunks: list[bytes] = PROMPT) -> list[dict[Tier, int]]:
        """Return for a to d the chunks of the leading run, by tier."""
        rows = (await self.pooled.residency(chunks, self.slots, 1)).tiers()
        return [{tier: count for tier, count in zip(Tier, row, strict=True) if count} for row in rows]


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig(MemoryIndex(IndexConfig()))
    await rig.start()
    yield rig
    await rig.index.close()


async def test_without_anything_in_a_pool_the_index_answers_as_it_is(rig: Rig) -> None:
    await rig.index.store(rig.slots[0], PROMPT[:3], Tier.HBM)
    assert await rig.tiers() == [{Tier.HBM: 3}, {}, {}, {}]


async def test_a_pool_counts_for_its_members_and_for_nobody_else(rig: Rig) -> None:
    await rig.store.write("a", in_pool(PROMPT[:5]), [])
    assert await rig.tiers() == [{Tier.REMOTE: 5}, {Tier.REMOTE: 5}, {}, {}]


async def test_what_a_member_has_nearer_counts_there(rig: Rig) -> None:
    await rig.store.write("a", in_pool(PROMPT[:5]), [])
    await rig.index.store(rig.slots[0], PROMPT[:3], Tier.HBM)
    await rig.index.store(rig.slots[1], PROMPT[:7], Tier.HOST)
    assert await rig.tiers() == [{Tier.HBM: 3, Tier.REMOTE: 2}, {Tier.HOST: 7}, {}, {}]


async def test_members_fill_a_pool_together(rig: Rig) -> None:
    await rig.store.write("a", in_pool(PROMPT[:3]), [])
    assert (await rig.tiers())[1] == {Tier.REMOTE: 3}
    await rig.store.write("a", in_pool(PROMPT[3:6]), [])
    assert (await rig.tiers())[1] == {Tier.REMOTE: 6}


async def test_a_removal_cuts_the_run_for_all(rig: Rig) -> None:
    await rig.store.removes()
    await rig.store.write("a", in_pool(PROMPT), [])
    await rig.store.write("a", [], in_pool(PROMPT[2:3]))
    assert await rig.tiers() == [{Tier.REMOTE: 2}, {Tier.REMOTE: 2}, {}, {}]


async def test_other_tiers_of_a_member_stay_its_own(rig: Rig) -> None:
    await rig.store.write("a", [ChunkRun(Tier.HOST, PROMPT[0], PROMPT)], [ChunkRun(Tier.HBM, PROMPT[0], PROMPT)])
    assert await rig.tiers() == [{}, {}, {}, {}]


async def test_what_a_member_alone_announced_ends_with_its_life_where_the_pool_removes(rig: Rig) -> None:
    await rig.store.removes()
    await rig.store.write("a", in_pool(PROMPT[:5]), [])
    await rig.store.write("b", in_pool(PROMPT[:3]), [])
    assert await rig.store.ended("a") == in_pool(PROMPT[:5])
    assert (await rig.tiers())[0] == {Tier.REMOTE: 3}


async def test_when_a_pool_is_first_seen_to_remove_what_past_lives_announced_goes(rig: Rig) -> None:
    await rig.store.write("a", in_pool(PROMPT), [])
    await rig.store.write("b", in_pool(PROMPT[:3]), [])
    assert await rig.store.ended("a") == []
    assert (await rig.tiers())[0] == {Tier.REMOTE: 8}
    await rig.store.removes()
    assert (await rig.tiers())[0] == {Tier.REMOTE: 3}


async def test_a_pool_of_which_no_member_is_followed_any_more_is_given_up(rig: Rig) -> None:
    await rig.store.write("a", in_pool(PROMPT), [])
    await rig.store.write("b", [], [])
    await rig.store.left("a")
    assert (await rig.tiers())[0] == {Tier.REMOTE: 8}
    await rig.store.left("b")
    assert (await rig.tiers())[0] == {}


async def test_a_pool_outlives_the_slots_of_its_members(rig: Rig) -> None:
    await rig.store.write("a", in_pool(PROMPT), [])
    worker = rig.registry.workers["b"]
    await rig.index.release_slot(worker.slot)
    worker.slot = await rig.index.acquire_slot("b")
    rig.slots = [each.slot for each in rig.registry.workers.values()]
    assert (await rig.tiers())[1] == {Tier.REMOTE: 8}


async def test_what_a_pool_never_removes_is_forgotten_by_age(rig: Rig) -> None:
    now = 0.0
    pool = Pool("aging", rig.index, clock=lambda: now)
    await pool.write("a", in_pool(PROMPT), [])
    for _ in range(2):
        now += AGE_S
        await pool.write("a", in_pool(PROMPT[:2]), [])
    assert (await rig.index.residency(PROMPT, [pool.slot], 1)).hit(0) == 2


async def test_what_a_pool_forgets_it_keeps_for_no_member(rig: Rig) -> None:
    now = 0.0
    pool = Pool("aged", rig.index, max_chunks=6, clock=lambda: now)
    await pool.write("a", in_pool(PROMPT[:4]), [])
    for _ in range(2):
        now += AGE_S
        await pool.write("b", [], [])
    await pool.write("b", in_pool(prompt(9)[:7], prompt(9)[0]), [])  # too much: it begins anew
    await pool.removes()
    assert await pool.ended("a") == await pool.ended("b") == []


async def test_the_ages_of_a_pool_are_bounded(rig: Rig) -> None:
    pool = Pool("large", rig.index, max_chunks=6)
    await pool.write("a", in_pool(PROMPT), [])
    assert (await rig.index.residency(PROMPT, [pool.slot], 1)).hit(0) == 0
    await pool.write("a", in_pool(PROMPT[:4]), [])
    assert (await rig.index.residency(PROMPT, [pool.slot], 1)).hit(0) == 4


async def test_slots_of_other_replicas_count_too(rig: Rig) -> None:
    theirs = await rig.index.acquire_slot("theirs")
    await rig.index.store(theirs, PROMPT[:6], Tier.REMOTE)
    others: list[int] = []
    rig.pooled = PooledIndex(rig.index, rig.pools, rig.registry, lambda owner: others if owner == "pool:store" else [])
    await rig.store.write("a", in_pool(PROMPT[:2]), [])
    assert (await rig.tiers())[1] == {Tier.REMOTE: 2}
    others = [theirs]
    assert (await rig.tiers())[1] == {Tier.REMOTE: 6}
