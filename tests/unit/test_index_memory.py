from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest

from gateway.config import IndexConfig
from gateway.index.memory import MemoryIndex
from policies.base import Tier
from tests.residency import hits, prompt


@pytest.fixture
async def index() -> AsyncIterator[MemoryIndex]:
    index = MemoryIndex(IndexConfig())
    yield index
    await index.close()


def at_once(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that must not suspend."""
    try:
        work.send(None)
    except StopIteration as stop:
        return stop.value
    work.close()
    raise AssertionError("suspended")


def test_the_memory_index_never_suspends() -> None:
    async def everything() -> int:
        index = MemoryIndex(IndexConfig())
        chunks = prompt(4)
        slot = at_once(index.acquire_slot("w"))
        at_once(index.store(slot, chunks, Tier.HBM))
        at_once(index.remove(slot, chunks[3:], Tier.HBM))
        found = at_once(index.residency(chunks, [slot], 1)).hit_tokens[0]
        at_once(index.clear(slot))
        at_once(index.release_slot(slot))
        await index.close()
        return int(found)

    assert asyncio.run(everything()) == 3


async def test_slots_are_handed_out_lowest_first(index: MemoryIndex) -> None:
    assert [await index.acquire_slot("w") for _ in range(4)] == [0, 1, 2, 3]
    await index.release_slot(2)
    await index.release_slot(1)
    assert await index.acquire_slot("w") == 4  # 1 and 2 are not swept yet
    await index.swept()
    assert [await index.acquire_slot("w") for _ in range(3)] == [1, 2, 5]


async def test_a_released_slot_holds_nothing_at_once_and_nothing_when_it_comes_again(index: MemoryIndex) -> None:
    chunks, slots = prompt(3), [0]
    await index.acquire_slot("w")
    await index.store(0, chunks, Tier.HBM)
    assert await hits(index, chunks, slots) == [3]
    await index.release_slot(0)
    assert await hits(index, chunks, slots) == [0]
    await index.store(0, chunks, Tier.HBM)  # an event that was still on its way
    await index.swept()
    assert len(index) == 0
    assert await index.acquire_slot("w") == 0
    assert await hits(index, chunks, slots) == [0]


async def test_a_cleared_slot_holds_only_what_is_stored_afterwards(index: MemoryIndex) -> None:
    chunks = prompt(6)
    slot, other = await index.acquire_slot("a"), await index.acquire_slot("b")
    await index.store(slot, chunks, Tier.HBM)
    await index.store(other, chunks[:5], Tier.HBM)
    await index.clear(slot)
    assert await hits(index, chunks, [slot, other]) == [0, 5]
    await index.store(slot, chunks[:2], Tier.HBM)
    await index.swept()
    assert await hits(index, chunks, [slot, other]) == [2, 5]
    assert len(index) == 5


async def test_a_removed_inner_chunk_cuts_the_run_there_and_storing_it_again_restores_it(index: MemoryIndex) -> None:
    chunks = prompt(8)
    slot = await index.acquire_slot("w")
    await index.store(slot, chunks, Tier.HBM)
    await index.remove(slot, chunks[3:4], Tier.HBM, chunks[0])
    assert await hits(index, chunks, [slot]) == [3]
    await index.store(slot, chunks[3:4], Tier.HBM, chunks[0])
    assert await hits(index, chunks, [slot]) == [8]


async def test_a_gpu_removal_leaves_the_host_copy(index: MemoryIndex) -> None:
    chunks = prompt(4)
    slot = await index.acquire_slot("w")
    await index.store(slot, chunks, Tier.HBM)
    await index.store(slot, chunks[:3], Tier.HOST)
    await index.remove(slot, chunks[1:], Tier.HBM, chunks[0])
    assert (await index.residency(chunks, [slot], 1)).by_tier.tolist() == [[1, 2, 0, 0]]


async def test_a_removal_without_a_tier_removes_from_all(index: MemoryIndex) -> None:
    chunks = prompt(2)
    slot = await index.acquire_slot("w")
    for tier in Tier:
        await index.store(slot, chunks, tier)
    await index.remove(slot, chunks, None)
    assert await hits(index, chunks, [slot]) == [0]
    assert len(index) == 0


async def test_workers_with_the_same_chunks_are_independent(index: MemoryIndex) -> None:
    chunks = prompt(4)
    one, other = await index.acquire_slot("a"), await index.acquire_slot("b")
    await index.store(one, chunks, Tier.HBM)
    await index.store(other, chunks, Tier.HBM)
    await index.remove(one, chunks[2:], Tier.HBM, chunks[0])
    assert await hits(index, chunks, [one, other]) == [2, 4]


async def test_a_thousand_holders_of_a_system_prompt_are_all_known(index: MemoryIndex) -> None:
    chunks = prompt(16)
    slots = [await index.acquire_slot(f"w{number}") for number in range(1000)]
    for slot in slots:
        await index.store(slot, chunks, Tier(slot % 4))
    residency = await index.residency(chunks, slots, 256)
    assert set(residency.hit_tokens.tolist()) == {16 * 256}
    assert residency.by_tier.argmax(1).tolist() == [slot % 4 for slot in slots]


async def test_unknown_slots_hold_nothing(index: MemoryIndex) -> None:
    chunks = prompt(2)
    slot = await index.acquire_slot("w")
    await index.store(slot, chunks, Tier.HBM)
    await index.store(77, chunks, Tier.HBM)
    assert await hits(index, chunks, [-1, 77, slot]) == [0, 0, 2]


async def test_chunks_that_nobody_holds_take_no_memory(index: MemoryIndex) -> None:
    chunks = prompt(10)
    slot = await index.acquire_slot("w")
    await index.store(slot, chunks, Tier.HBM)
    await index.store(slot, chunks, Tier.HOST)
    await index.remove(slot, chunks, Tier.HBM)
    assert len(index) == 10
    await index.remove(slot, chunks, Tier.HOST)
    assert len(index) == 0


async def test_the_index_is_bounded_and_what_was_stored_first_goes_first() -> None:
    index = MemoryIndex(IndexConfig(max_chunks=1000))
    slot = await index.acquire_slot("w")
    prompts = [prompt(100, seed) for seed in range(15)]
    for chunks in prompts:
        await index.store(slot, chunks, Tier.HBM)
        assert len(index) <= 1000
    assert index.evicted >= 500
    assert [(await hits(index, chunks, [slot]))[0] for chunks in prompts[:5]] == [0] * 5
    assert [(await hits(index, chunks, [slot]))[0] for chunks in prompts[6:]] == [100] * 9


async def test_a_large_index_is_bounded_as_a_whole() -> None:
    index = MemoryIndex(IndexConfig(max_chunks=300_000))
    slot = await index.acquire_slot("w")
    for start in range(0, 400_000, 1000):
        await index.store(
            slot, [(number * 2654435761 % 2**64).to_bytes(16) for number in range(start, start + 1000)], Tier.HBM
        )
    assert 290_000 < len(index) <= 300_000


async def test_sweeping_lets_others_run() -> None:
    index = MemoryIndex(IndexConfig())
    slot = await index.acquire_slot("w")
    for seed in range(30):
        await index.store(slot, prompt(1000, seed), Tier.HBM)
    await index.release_slot(slot)
    turns = 0
    while len(index):
        await asyncio.sleep(0)
        turns += 1
    assert turns > 10


async def test_several_slots_are_swept_in_one_go(index: MemoryIndex) -> None:
    slots = [await index.acquire_slot("w") for _ in range(8)]
    for slot in slots:
        await index.store(slot, prompt(50, slot), Tier.HBM)
        await index.store(slot, prompt(50), Tier.HBM)
    for slot in slots[1:]:
        await index.release_slot(slot)
    await index.swept()
    assert len(index) == 50
    assert await hits(index, prompt(50), slots) == [50, 0, 0, 0, 0, 0, 0, 0]


async def test_a_list_of_slots_is_right_after_its_slots_changed_hands(index: MemoryIndex) -> None:
    chunks, slots = prompt(2), [0, 1]
    await index.acquire_slot("a")
    await index.store(0, chunks, Tier.HBM)
    assert await hits(index, chunks, slots) == [2, 0]
    await index.acquire_slot("b")
    await index.store(1, chunks, Tier.HBM)
    await index.clear(0)
    assert await hits(index, chunks, slots) == [0, 2]
