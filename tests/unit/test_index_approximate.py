from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from gateway.config import IndexConfig
from gateway.index.approximate import DEFAULT_CAPACITY_TOKENS, ApproximateCache
from gateway.index.memory import MemoryIndex
from tests.residency import hits, prompt

CHUNK = 256


@pytest.fixture
async def index() -> AsyncIterator[MemoryIndex]:
    index = MemoryIndex(IndexConfig())
    await index.acquire_slot("w")
    yield index
    await index.close()


@pytest.fixture
def cache(index: MemoryIndex) -> ApproximateCache:
    return ApproximateCache(index)


async def test_what_was_sent_is_held(index: MemoryIndex, cache: ApproximateCache) -> None:
    await cache.sent(0, prompt(5), CHUNK, 10 * CHUNK)
    assert await hits(index, prompt(7), [0]) == [5]


async def test_the_least_recently_sent_goes_first_and_from_its_end(index: MemoryIndex, cache: ApproximateCache) -> None:
    first, second = prompt(6, seed=1), prompt(6, seed=2)
    await cache.sent(0, first, CHUNK, 10 * CHUNK)
    await cache.sent(0, second, CHUNK, 10 * CHUNK)
    assert await hits(index, first, [0]) == [4]
    assert await hits(index, second, [0]) == [6]
    await cache.sent(0, first[:2], CHUNK, 10 * CHUNK)
    await cache.sent(0, prompt(4, seed=3), CHUNK, 10 * CHUNK)
    assert await hits(index, first, [0]) == [2]
    assert await hits(index, second, [0]) == [4]


async def test_prompts_being_answered_leave_less_room_and_those_that_wait_do_not(
    index: MemoryIndex, cache: ApproximateCache
) -> None:
    await cache.sent(0, prompt(6, seed=1), CHUNK, 10 * CHUNK)
    on_its_way = index.speculate(0, prompt(6, seed=2))
    await cache.sent(0, prompt(1, seed=3), CHUNK, 10 * CHUNK)
    assert await hits(index, prompt(6, seed=1), [0]) == [6]
    on_its_way.answered()
    await cache.sent(0, prompt(1, seed=3), CHUNK, 10 * CHUNK)
    assert await hits(index, prompt(6, seed=1), [0]) == [3]
    on_its_way.cancel()
    await cache.sent(0, prompt(6, seed=4), CHUNK, 10 * CHUNK)
    assert await hits(index, prompt(6, seed=1), [0]) == [3]


async def test_a_prompt_that_begins_to_be_answered_makes_room_before_any_ends(
    index: MemoryIndex, cache: ApproximateCache
) -> None:
    await cache.sent(0, prompt(6, seed=1), CHUNK, 10 * CHUNK)
    index.speculate(0, prompt(6, seed=2)).answered()
    cache.answered(0)
    cache.answered(1)  # of which nothing is known
    assert cache.is_crowded
    await cache.make_room()
    assert not cache.is_crowded
    assert await hits(index, prompt(6, seed=1), [0]) == [4]
    cache.answered(0)
    cache.forget(0)
    await cache.make_room()


async def test_a_shared_beginning_outlives_the_prompts_that_share_it(
    index: MemoryIndex, cache: ApproximateCache
) -> None:
    system = prompt(4)
    for seed in range(1, 20):
        await cache.sent(0, system + prompt(3, seed), CHUNK, 10 * CHUNK)
    assert await hits(index, system, [0]) == [4]
    assert await hits(index, system + prompt(3, 18), [0]) == [7]
    assert await hits(index, system + prompt(3, 17), [0]) == [4]
    assert len(index) == 10


async def test_a_prompt_larger_than_the_cache_leaves_its_beginning(index: MemoryIndex, cache: ApproximateCache) -> None:
    await cache.sent(0, prompt(30), CHUNK, 10 * CHUNK)
    assert await hits(index, prompt(30), [0]) == [10]


async def test_a_smaller_capacity_takes_effect_with_the_next_prompt(
    index: MemoryIndex, cache: ApproximateCache
) -> None:
    await cache.sent(0, prompt(10), CHUNK, 20 * CHUNK)
    await cache.sent(0, prompt(1, seed=1), CHUNK, 4 * CHUNK)
    assert await hits(index, prompt(10), [0]) == [3]


async def test_an_unknown_capacity_is_bounded_all_the_same(index: MemoryIndex, cache: ApproximateCache) -> None:
    n = DEFAULT_CAPACITY_TOKENS // CHUNK
    await cache.sent(0, prompt(n + 500), CHUNK)
    assert len(index) == n


async def test_workers_have_caches_of_their_own(index: MemoryIndex, cache: ApproximateCache) -> None:
    other = await index.acquire_slot("v")
    await cache.sent(0, prompt(3), CHUNK, 4 * CHUNK)
    await cache.sent(other, prompt(4, seed=1), CHUNK, 4 * CHUNK)
    assert await hits(index, prompt(3), [0, other]) == [3, 0]


async def test_a_forgotten_slot_begins_empty(index: MemoryIndex, cache: ApproximateCache) -> None:
    await cache.sent(0, prompt(3), CHUNK)
    await index.clear(0)
    cache.forget(0)
    await cache.sent(0, prompt(2), CHUNK)
    assert await hits(index, prompt(3), [0]) == [2]


async def test_nothing_is_modelled_without_a_slot_or_without_chunks(
    index: MemoryIndex, cache: ApproximateCache
) -> None:
    await cache.sent(-1, prompt(3), CHUNK)
    await cache.sent(0, [], CHUNK)
    assert len(index) == 0


async def test_models_of_slots_that_are_no_longer_ours_are_forgotten(index: MemoryIndex) -> None:
    ours = {0, await index.acquire_slot("another")}
    cache = ApproximateCache(index, ours.__contains__)
    await cache.sent(0, prompt(5), CHUNK)
    cache.answered(0)
    ours.discard(0)
    await cache.sent(1, prompt(5), CHUNK)
    assert (cache.tokens(0), cache.tokens(1), cache.is_crowded) == (None, 5 * CHUNK, False)
