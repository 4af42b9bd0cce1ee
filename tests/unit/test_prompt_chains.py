"""Caches bounded in bytes, and the chains of hashes kept in one."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Iterable

import pytest

from gateway.prompt.cache import ByteCache, Entry
from gateway.prompt.chains import Chains
from gateway.prompt.segments import SEGMENTS_AT_ONCE, Segment
from gateway.prompt.tokenizer import pack
from gateway.tasks import spawn
from policies.chunks import ChunkHasher


def test_a_cache_stays_within_its_bound():
    cache: ByteCache[int, Entry] = ByteCache(1000)
    for number in range(100):
        cache.put(number, Entry(90))
        assert cache.bytes <= 1000
    assert len(cache) == 11


def test_an_entry_that_was_used_stays_longer():
    cache: ByteCache[str, Entry] = ByteCache(1000)
    for name in "abcd":
        cache.put(name, Entry(250))
    cache.get("a")
    cache.put("e", Entry(250))
    assert [name for name in "abcde" if cache.get(name)] == ["a", "c", "d", "e"]


def test_an_entry_put_again_replaces_the_old_one():
    cache: ByteCache[str, Entry] = ByteCache(1000)
    cache.put("a", Entry(200))
    cache.put("a", Entry(100))
    assert (len(cache), cache.bytes) == (1, 100)


def test_an_entry_that_would_crowd_out_the_others_is_not_kept():
    cache: ByteCache[str, Entry] = ByteCache(1000)
    cache.put("a", Entry(251))
    assert cache.get("a") is None


@pytest.fixture
def hasher() -> ChunkHasher:
    return ChunkHasher(4)


def met(ids: Iterable[int]) -> Segment:
    """A segment that was met before."""
    return Segment(pack([*ids]), used=True)


def test_long_salts_take_no_more_memory_than_short_ones(hasher):
    chains = Chains(hasher, 2**20)
    tracemalloc.start()
    for number in range(200):
        chains.root("model", None, f"{number}" * 2000)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 2**20 / 16 + 20_000


@pytest.fixture
def hashed(monkeypatch) -> list[int]:
    """How many bytes of tokens were looked at, each time that some were."""
    lengths: list[int] = []
    chain = ChunkHasher.chain

    def counting_chain(self, parent, tokens):
        lengths.append(len(tokens))
        return chain(self, parent, tokens)

    monkeypatch.setattr(ChunkHasher, "chain", counting_chain)
    return lengths


async def test_a_chain_is_extended_not_recomputed(hasher, hashed):
    chains = Chains(hasher, 2**20)
    root = chains.root("m", None, None)
    segments = [met(range(start, start + 10)) for start in range(5)]
    first = await chains.hashes(root, segments[:4])
    hashed.clear()
    longer = await chains.hashes(root, segments)
    assert longer[: len(first)] == first
    assert hashed == [4 * 10]  # the new segment; nothing was left over of the 40 tokens before it


async def test_only_segments_that_were_met_before_leave_links(hasher, hashed):
    chains = Chains(hasher, 2**20)
    root = chains.root("m", None, None)
    segments = [met(range(7)), Segment(pack(range(6))), met(range(5)), Segment(pack(range(4)))]
    expected = hasher.chain(root.last, b"".join(segment.ids for segment in segments))
    in_the_first, in_the_rest = 4 * 7, 4 * (3 + 15)  # three tokens of the first are in the next chunk
    for lengths in ([in_the_first, in_the_rest], [in_the_rest], [in_the_rest]):
        hashed.clear()
        assert await chains.hashes(root, segments) == expected
        assert hashed == lengths
    for segment in segments:
        segment.used = True
    await chains.hashes(root, segments)
    hashed.clear()
    assert await chains.hashes(root, segments) == expected
    assert hashed == []


async def test_the_same_segments_after_another_beginning_are_another_chain(hasher):
    chains = Chains(hasher, 2**20)
    one, other, shared = (met(range(start, start + 4)) for start in range(3))
    root = chains.root("m", None, None)
    assert (await chains.hashes(root, [one, shared]))[1] != (await chains.hashes(root, [other, shared]))[1]


@pytest.mark.parametrize("identity", [("n", None, None), ("m", "l", None), ("m", None, "s"), ("m", None, "")])
async def test_model_adapter_and_salt_separate_chains(hasher, identity):
    chains = Chains(hasher, 2**20)
    segment = met(range(4))
    one, other = chains.root(*identity), chains.root("m", None, None)
    assert await chains.hashes(one, [segment]) != await chains.hashes(other, [segment])


async def test_hashes_are_right_when_nothing_is_kept(hasher):
    chains = Chains(hasher, 0)
    root = chains.root("m", None, None)
    segments = [met(range(7)), met(range(6))]
    expected = hasher.chain(hasher.root("m"), pack([*range(7), *range(6)]))
    assert await chains.hashes(root, segments) == await chains.hashes(root, segments) == expected


async def test_a_very_long_chain_lets_others_have_their_turn(hasher):
    chains = Chains(hasher, 2**20)
    root = chains.root("m", None, None)
    segments = [Segment(pack([number]), used=number % 500 > 0) for number in range(2 * SEGMENTS_AT_ONCE + 1)]
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = spawn(others(), "others")
    assert await chains.hashes(root, segments) == hasher.chain(hasher.root("m"), pack(range(len(segments))))
    assert turns >= 2
    task.cancel()
