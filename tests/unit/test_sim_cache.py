from __future__ import annotations

from array import array

import pytest

from policies.base import Tier
from sim.cache import AllCleared, BlockCache, BlockChain, BlockRemoved, BlocksStored, Hit, hash_blocks

SIZE = 4


def chain_of(*tokens: int, **identity: str) -> BlockChain:
    return hash_blocks(array("I", tokens), SIZE, "model", **identity)


def tokens(count: int, start: int = 0) -> range:
    return range(start, start + count)


def fill(cache: BlockCache, chain: BlockChain) -> list[int]:
    """Compute a whole sequence: reuse what is cached, commit the rest."""
    hit = cache.lookup(chain, len(chain.hashes))
    blocks = cache.allocate(len(chain.hashes) - len(hit.blocks), hit)
    if len(hit.blocks) < len(chain.hashes):
        cache.commit(chain, blocks, len(hit.blocks), len(chain.hashes))
    return blocks


def held(cache: BlockCache, chain: BlockChain) -> int:
    return len(cache.lookup(chain, len(chain.hashes)))


def removed(cache: BlockCache, tier: Tier = Tier.HBM) -> list[int]:
    return [event.hash for event in cache.take_events() if isinstance(event, BlockRemoved) and event.tier == tier]


def test_a_prefix_is_found_block_by_block():
    cache = BlockCache(10, SIZE)
    fill(cache, chain_of(*tokens(12)))
    assert held(cache, chain_of(*tokens(12))) == 3
    assert held(cache, chain_of(*tokens(8), 99, 99, 99, 99)) == 2
    assert held(cache, chain_of(99, *tokens(11, 1))) == 0


def test_a_lookup_stops_at_its_limit():
    cache = BlockCache(10, SIZE)
    fill(cache, chain_of(*tokens(12)))
    assert len(cache.lookup(chain_of(*tokens(12)), 2)) == 2


@pytest.mark.parametrize("identity", [{"lora": "a"}, {"lora": "b"}, {"salt": "a"}, {"lora": "a", "salt": "a"}])
def test_adapters_and_salts_separate_equal_tokens(identity):
    cache = BlockCache(10, SIZE)
    fill(cache, chain_of(*tokens(8)))
    assert held(cache, chain_of(*tokens(8), **identity)) == 0
    fill(cache, chain_of(*tokens(8), **identity))
    assert held(cache, chain_of(*tokens(8), **identity)) == 2


def test_storing_says_parent_tokens_and_identity():
    cache = BlockCache(10, SIZE)
    chain = chain_of(*tokens(12), lora="adapter", salt="tenant")
    blocks = cache.allocate(3)
    cache.commit(chain, blocks, 0, 1)
    cache.commit(chain, blocks, 1, 3)
    first, rest = cache.take_events()
    assert first == BlocksStored(chain.hashes[:1], None, array("I", tokens(4)), "adapter", "tenant", Tier.HBM)
    assert rest == BlocksStored(chain.hashes[1:], chain.hashes[0], array("I", tokens(8, 4)), "adapter", None, Tier.HBM)


def test_freed_blocks_stay_until_they_are_needed():
    cache = BlockCache(5, SIZE)
    chain = chain_of(*tokens(16))
    cache.release(fill(cache, chain))
    assert cache.free_blocks == 4
    assert held(cache, chain) == 4
    assert removed(cache) == []


def test_eviction_takes_tails_before_heads_and_old_before_new():
    cache = BlockCache(7, SIZE)
    old, new = chain_of(*tokens(12)), chain_of(*tokens(12, 100))
    cache.release(fill(cache, old))
    cache.release(fill(cache, new))
    cache.take_events()
    cache.allocate(4)
    assert removed(cache) == [*reversed(old.hashes), new.hashes[-1]]
    assert held(cache, new) == 2


def test_a_hit_makes_blocks_young_again():
    cache = BlockCache(5, SIZE)
    first, second = chain_of(*tokens(8)), chain_of(*tokens(8, 100))
    cache.release(fill(cache, first))
    cache.release(fill(cache, second))
    cache.release(fill(cache, first))
    cache.take_events()
    cache.allocate(2)
    assert removed(cache) == [*reversed(second.hashes)]


def test_blocks_in_use_are_not_evicted():
    cache = BlockCache(4, SIZE)
    chain = chain_of(*tokens(8))
    fill(cache, chain)
    assert cache.fits(Hit(), 1)
    assert not cache.fits(Hit(), 2)
    with pytest.raises(ValueError, match="2 new blocks do not fit"):
        cache.allocate(2)
    assert held(cache, chain) == 2


def test_idle_blocks_of_a_hit_count_against_the_room():
    cache = BlockCache(4, SIZE)
    chain = chain_of(*tokens(8))
    cache.release(fill(cache, chain))
    hit = cache.lookup(chain, 2)
    assert cache.fits(hit, 1)
    assert not cache.fits(hit, 2)


def test_a_shared_block_is_free_when_its_last_user_is_done():
    cache = BlockCache(6, SIZE)
    chain = chain_of(*tokens(8))
    one, other = fill(cache, chain), fill(cache, chain)
    assert one == other
    cache.release(one)
    assert cache.free_blocks == 3
    cache.release(other)
    assert cache.free_blocks == 5


def test_blocks_that_were_never_full_are_used_again_first():
    cache = BlockCache(4, SIZE)
    chain = chain_of(*tokens(8))
    blocks = cache.allocate(3)
    cache.commit(chain, blocks, 0, 2)
    cache.release(blocks)
    cache.take_events()
    assert cache.allocate(1) == blocks[2:]
    assert removed(cache) == []


def test_equal_blocks_computed_side_by_side_are_removed_one_by_one():
    cache = BlockCache(4, SIZE)
    chain = chain_of(*tokens(4))
    blocks = cache.allocate(1) + cache.allocate(1)
    for block in blocks:
        cache.commit(chain, [block], 0, 1)
        cache.release([block])
    cache.take_events()
    cache.allocate(2)  # the unused block and the first of the two
    assert removed(cache) == [chain.hashes[0]]
    assert held(cache, chain) == 1
    cache.allocate(1)
    assert removed(cache) == [chain.hashes[0]]
    assert held(cache, chain) == 0


def test_a_reset_forgets_everything_and_says_so():
    cache = BlockCache(10, SIZE, host_blocks=10)
    chain = chain_of(*tokens(12))
    cache.release(fill(cache, chain))
    cache.take_events()
    assert cache.reset()
    assert cache.take_events() == [AllCleared()]
    assert held(cache, chain) == 0
    assert cache.free_blocks == 9


def test_a_reset_is_refused_while_a_block_is_in_use():
    cache = BlockCache(10, SIZE)
    chain = chain_of(*tokens(4))
    blocks = fill(cache, chain)
    cache.take_events()
    assert not cache.reset()
    assert cache.take_events() == []
    assert held(cache, chain) == 1
    cache.release(blocks)
    assert cache.reset()


def test_usage_is_the_share_of_blocks_in_use():
    cache = BlockCache(5, SIZE)
    assert cache.usage == 0
    blocks = cache.allocate(3)
    assert cache.usage == pytest.approx(0.75)
    cache.release(blocks)
    assert cache.usage == 0


def test_the_host_tier_keeps_what_hbm_evicts():
    cache = BlockCache(4, SIZE, host_blocks=10)
    chain = chain_of(*tokens(12))
    cache.release(fill(cache, chain))
    cache.release(cache.allocate(2))
    assert cache.lookup(chain, 3) == Hit(cache.lookup(chain, 1).blocks, host_blocks=2)
    cache.release(cache.allocate(3))
    assert cache.lookup(chain, 3) == Hit([], host_blocks=3)


def test_the_host_tier_reports_stores_and_removals_of_its_own():
    cache = BlockCache(10, SIZE, host_blocks=2)
    first, second = chain_of(*tokens(8)), chain_of(*tokens(4, 100))
    cache.release(fill(cache, first))
    hbm, host = cache.take_events()
    assert (hbm.tier, host.tier) == (Tier.HBM, Tier.HOST)
    assert (hbm.hashes, hbm.parent, hbm.tokens) == (host.hashes, host.parent, host.tokens)
    fill(cache, second)
    assert [type(event) for event in cache.take_events()] == [BlocksStored, BlockRemoved, BlocksStored]
    assert first.hashes[0] in cache.host
    assert first.hashes[1] not in cache.host


def test_the_host_tier_stores_only_what_it_does_not_hold():
    cache = BlockCache(10, SIZE, host_blocks=10)
    chain = chain_of(*tokens(16))
    blocks = cache.allocate(4)
    cache.commit(chain, blocks, 1, 2)
    cache.take_events()
    cache.commit(chain, cache.allocate(4), 0, 4)
    _, head, tail = cache.take_events()
    assert (head.hashes, head.parent) == (chain.hashes[:1], None)
    assert (tail.hashes, tail.parent) == (chain.hashes[2:], chain.hashes[1])


def test_a_run_longer_than_the_host_tier_keeps_its_head_there():
    cache = BlockCache(10, SIZE, host_blocks=2)
    chain = chain_of(*tokens(16))
    fill(cache, chain)
    assert [block_hash in cache.host for block_hash in chain.hashes] == [True, True, False, False]


def test_a_released_run_is_young_in_the_host_tier_too():
    cache = BlockCache(20, SIZE, host_blocks=4)
    first, second, third = (chain_of(*tokens(8, start)) for start in (0, 100, 200))
    cache.release(fill(cache, first))
    cache.release(fill(cache, second))
    cache.release(fill(cache, first))
    fill(cache, third)
    assert all(block_hash in cache.host for block_hash in first.hashes)
    assert not any(block_hash in cache.host for block_hash in second.hashes)


def test_hashes_without_tokens_will_do():
    cache = BlockCache(5, SIZE)
    chain = BlockChain([11, 22])
    fill(cache, chain)
    (event,) = cache.take_events()
    assert (event.hashes, list(event.tokens)) == ([11, 22], [])
    assert held(cache, BlockChain([11, 22, 33])) == 2


def test_a_cache_needs_a_block_besides_the_reserved_one():
    with pytest.raises(ValueError, match="at least 2 blocks"):
        BlockCache(1, SIZE)
