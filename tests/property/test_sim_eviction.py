"""Rules of eviction: whatever the rule, empty blocks go first, and no block goes before those that continue it."""

from __future__ import annotations

from collections import OrderedDict
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.cache import PLAIN_USE, BlockCache, BlockChain, BlockRemoved, FreeQueue, LastUse
from sim.eviction import make_queue
from sim.fleet import EVICTIONS, EvictionSettings
from sim.profiles import find_profile

BLOCKS = 16
SIZE = 64
PROFILE = find_profile("llama-3.1-70b/h100/4")


def queue_of(rule: str, **fields: float) -> FreeQueue:
    rule_settings = EvictionSettings(rule=rule, pin_uses=3, sink_tokens=SIZE, recent_s=2.0, **fields)
    return make_queue(rule_settings, PROFILE, BLOCKS + 1, SIZE)


def serve(cache: BlockCache, chain: list[int], last_use: LastUse = PLAIN_USE) -> int:
    """Run one request over whole blocks from beginning to end; return how many blocks it found."""
    blocks = BlockChain(chain)
    hit = cache.lookup(blocks, len(chain))
    held = cache.allocate(len(chain) - len(hit), hit)
    if len(hit) < len(chain):
        cache.commit(blocks, held, len(hit), len(chain))
    cache.release(held, last_use)
    return len(hit)


# a tree: an id below 10 is a root, and what follows block b on branch c is 10·b + c
chains = st.lists(st.integers(1, 2), min_size=1, max_size=6).map(
    lambda branches: [int("".join(map(str, branches[: n + 1]))) for n in range(len(branches))]
)


@pytest.mark.parametrize("rule", EVICTIONS)
@given(served=st.lists(st.tuples(chains, st.floats(0, 2), st.floats(0, 100)), min_size=1, max_size=40))
def test_no_block_goes_before_those_that_continue_it(rule, served):
    cache = BlockCache(BLOCKS + 1, SIZE, free=queue_of(rule))
    known: set[int] = set()
    for chain, seconds, slo_deficit in served:
        cache.free.now += seconds
        assert serve(cache, chain, LastUse(slo_deficit=slo_deficit)) == len(list(takewhile(known.__contains__, chain)))
        known.update(chain)
        for event in cache.take_events():
            if isinstance(event, BlockRemoved):
                known.remove(event.hash)
                if event.hash not in chain:
                    assert not any(block // 10 == event.hash for block in known - set(chain))
        assert len(known) <= BLOCKS
        assert cache.free_blocks == BLOCKS
        assert all(block in cache for block in known)


@given(served=st.lists(chains, min_size=1, max_size=60))
def test_least_recently_used_is_what_it_says(served):
    cache = BlockCache(BLOCKS + 1, SIZE, free=queue_of("lru"))
    naive: OrderedDict[int, None] = OrderedDict()
    for chain in served:
        assert serve(cache, chain) == len(list(takewhile(naive.__contains__, chain)))
        for block in reversed(chain):
            naive[block] = None
            naive.move_to_end(block)
        while len(naive) > BLOCKS:
            naive.popitem(last=False)
        assert all(block in cache for block in naive)


def filled(queue: FreeQueue, chain: list[int], uses: int = 1, last_use: LastUse = PLAIN_USE) -> BlockCache:
    cache = BlockCache(BLOCKS + 1, SIZE, free=queue)
    for _ in range(uses):
        serve(cache, chain, last_use)
    return cache


def push(cache: BlockCache, count: int, first: int = 1000) -> None:
    """Let single-block requests pass through."""
    for block in range(first, first + count):
        serve(cache, [block])


def test_a_prefix_that_many_have_used_outlives_what_came_after_it():
    chain = [1, 11, 111]
    cache = filled(queue_of("radix"), chain, uses=3)
    push(cache, 5 * BLOCKS)
    assert all(block in cache for block in chain)
    fading = filled(queue_of("radix"), chain, uses=2)
    push(fading, 5 * BLOCKS)
    assert not any(block in fading for block in chain)


def test_sinks_outlive_the_middle_of_their_sequence():
    cache = filled(queue_of("salience"), [1, 11, 111])
    cache.free.now = 10.0
    serve(cache, list(range(500, 500 + BLOCKS - 1)))  # one sequence, that needs all room but one block's
    assert [block in cache for block in (1, 11, 111)] == [True, False, False]


def test_what_is_dear_to_recompute_outlives_what_is_cheap():
    dear = list(range(2000, 2008))
    queue = queue_of("cost", recency_weight=0.0, reuse_weight=0.0, recompute_weight=1.0)
    cache = filled(queue, dear)
    push(cache, 5 * BLOCKS)
    assert all(block in cache for block in dear)


def test_what_was_answered_too_late_goes_before_what_was_not():
    cache = filled(queue_of("cost"), [1, 11, 111])
    serve(cache, [2, 21, 211], LastUse(slo_deficit=3.0))
    push(cache, BLOCKS - 3)
    assert [block in cache for block in (1, 11, 111, 2, 21, 211)] == [True] * 3 + [False] * 3


def test_recency_wins_in_the_end():
    cache = filled(queue_of("cost", recency_s=1.0), [1, 11, 111], uses=4)
    cache.free.now = 100.0
    push(cache, BLOCKS)
    assert not any(block in cache for block in (1, 11, 111))


@pytest.mark.parametrize("rule", EVICTIONS)
def test_a_conversation_that_waits_for_a_tool_is_spared_until_its_time_is_up(rule):
    chain = [1, 11, 111]
    cache = filled(queue_of(rule, tool_ttl_s=10.0), chain, last_use=LastUse(pin_until=10.0))
    push(cache, 5 * BLOCKS)
    assert all(block in cache for block in chain)
    cache.free.now = 60.0
    push(cache, 1)
    cache.free.now = 1000.0
    push(cache, 5 * BLOCKS, first=5000)
    assert not any(block in cache for block in chain)


def test_pins_give_way_when_nothing_else_is_left():
    cache = filled(
        queue_of("lru", tool_ttl_s=10.0, tool_share=1.0), list(range(BLOCKS)), last_use=LastUse(pin_until=10.0)
    )
    assert serve(cache, [1000, 1001]) == 0
    assert 0 in cache
    assert BLOCKS - 1 not in cache
