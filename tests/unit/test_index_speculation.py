from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from gateway.config import IndexConfig
from gateway.index.memory import MemoryIndex
from gateway.index.speculation import Overlay
from policies.base import Tier
from tests.residency import hits, prompt

TTL_S = 2.0


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def index(clock: Clock) -> AsyncIterator[MemoryIndex]:
    index = MemoryIndex(IndexConfig(speculative_ttl_s=TTL_S), clock)
    for name in "ab":
        await index.acquire_slot(name)
    yield index
    await index.close()


async def test_a_prompt_on_its_way_counts_as_held_in_hbm(index: MemoryIndex) -> None:
    chunks = prompt(4)
    index.speculate(1, chunks)
    assert (await index.residency(chunks, [0, 1], 1)).by_tier.tolist() == [[0] * 4, [4, 0, 0, 0]]


async def test_a_prompt_that_shares_its_beginning_sees_the_shared_part(index: MemoryIndex) -> None:
    chunks = prompt(6)
    index.speculate(0, chunks)
    assert await hits(index, [*chunks[:4], *prompt(3, seed=1)], [0]) == [4]


async def test_it_counts_while_the_request_is_in_flight_however_long(index: MemoryIndex, clock: Clock) -> None:
    chunks = prompt(2)
    index.speculate(0, chunks)
    clock.now += 1000 * TTL_S
    assert await hits(index, chunks, [0]) == [2]


async def test_it_is_forgotten_its_ttl_after_settling(index: MemoryIndex, clock: Clock) -> None:
    chunks = prompt(2)
    index.speculate(0, chunks).settle(clock.now)
    clock.now += TTL_S - 0.01
    assert await hits(index, chunks, [0]) == [2]
    clock.now += 0.01
    assert await hits(index, chunks, [0]) == [0]


async def test_it_is_forgotten_at_once_when_cancelled(index: MemoryIndex) -> None:
    chunks = prompt(2)
    index.speculate(0, chunks).cancel()
    assert await hits(index, chunks, [0]) == [0]


async def test_two_requests_with_the_same_chunks_are_counted_apart(index: MemoryIndex, clock: Clock) -> None:
    chunks = prompt(4)
    first, second = index.speculate(0, chunks), index.speculate(0, chunks[:2])
    first.cancel()
    assert await hits(index, chunks, [0]) == [2]
    second.settle(clock.now)
    clock.now += TTL_S
    assert await hits(index, chunks, [0]) == [0]


async def test_the_same_chunks_on_two_workers_are_counted_apart(index: MemoryIndex) -> None:
    chunks = prompt(4)
    first = index.speculate(0, chunks)
    index.speculate(1, chunks)
    first.cancel()
    assert await hits(index, chunks, [0, 1]) == [0, 4]


async def test_taking_back_twice_takes_back_once(index: MemoryIndex, clock: Clock) -> None:
    chunks = prompt(3)
    first = index.speculate(0, chunks)
    index.speculate(0, chunks)
    first.cancel()
    first.cancel()
    first.settle(clock.now)
    clock.now += TTL_S
    assert await hits(index, chunks, [0]) == [3]


async def test_it_adds_to_what_the_worker_is_known_to_hold(index: MemoryIndex) -> None:
    chunks = prompt(6)
    await index.store(0, chunks[:3], Tier.HOST)
    speculation = index.speculate(0, chunks[:5])
    assert (await index.residency(chunks, [0], 1)).by_tier.tolist() == [[5, 0, 0, 0]]
    speculation.cancel()
    assert (await index.residency(chunks, [0], 1)).by_tier.tolist() == [[0, 3, 0, 0]]


async def test_events_that_confirm_it_outlive_it(index: MemoryIndex, clock: Clock) -> None:
    chunks = prompt(3)
    speculation = index.speculate(0, chunks)
    await index.store(0, chunks, Tier.HBM)
    speculation.settle(clock.now)
    clock.now += TTL_S
    assert await hits(index, chunks, [0]) == [3]


@pytest.mark.parametrize("end", ["clear", "release_slot"])
async def test_a_worker_that_lost_its_cache_lost_what_was_on_its_way(index: MemoryIndex, end: str) -> None:
    chunks = prompt(3)
    speculation = index.speculate(0, chunks)
    index.speculate(1, chunks)
    await getattr(index, end)(0)
    assert await hits(index, chunks, [0, 1]) == [0, 3]
    await index.swept()
    newcomer = await index.acquire_slot("c")
    assert await hits(index, chunks, [newcomer, 1]) == [0, 3]
    speculation.cancel()
    assert await hits(index, chunks, [0, 1]) == [0, 3]


async def test_speculating_on_nobody_does_nothing(index: MemoryIndex, clock: Clock) -> None:
    chunks = prompt(2)
    for slot in (-1, 99):
        speculation = index.speculate(slot, chunks)
        assert await hits(index, chunks, [0, 1, slot]) == [0, 0, 0]
        speculation.settle(clock.now)
        speculation.cancel()


def test_speculations_are_bounded_and_the_oldest_are_forgotten(clock: Clock) -> None:
    overlay = Overlay(TTL_S, max_chunks=100, clock=clock)
    prompts = [prompt(10, seed) for seed in range(30)]
    for chunks in prompts:
        overlay.add(0, chunks)
    assert len(overlay) == 10
    assert [list(overlay.over([(0, 10)], chunks)) == [(1, 10)] for chunks in prompts] == [False] * 20 + [True] * 10


def test_a_prompt_longer_than_the_bound_is_not_speculated(clock: Clock) -> None:
    overlay = Overlay(TTL_S, max_chunks=5, clock=clock)
    overlay.add(0, prompt(5))
    overlay.add(0, prompt(6, seed=1))
    assert len(overlay) == 1


async def test_a_prompt_is_running_from_the_answers_begin_to_its_end(index: MemoryIndex, clock: Clock) -> None:
    chunks = prompt(4)
    first, second, third = (index.speculate(0, one) for one in (chunks, chunks[:2], prompt(3, seed=1)))
    assert index.running(0) == set()
    first.answered()
    first.answered()
    second.answered()
    third.answered()
    assert index.running(0) == {*chunks, *prompt(3, seed=1)}
    assert index.running(1) == set()
    first.settle(clock.now)
    third.cancel()
    assert index.running(0) == set(chunks[:2])
    second.cancel()
    first.answered()  # it was settled before
    third.answered()
    assert index.running(0) == set()


def test_nothing_stays_behind(clock: Clock) -> None:
    overlay = Overlay(TTL_S, clock=clock)
    speculations = [overlay.add(position, prompt(5, seed % 3)) for seed, position in enumerate([0, 1, 0, 2, 1, 0])]
    for number, speculation in enumerate(speculations):
        if number % 3:
            speculation.answered()
        if number % 2:
            speculation.cancel()
        else:
            speculation.settle(clock.now)
    clock.now += TTL_S
    assert overlay.over([], prompt(5)) == []
    left = overlay._masks, overlay._counts, overlay._running, overlay._live, list(overlay._settled)
    assert left == ({}, {}, {}, {}, [])
    assert overlay._n_chunks == 0
