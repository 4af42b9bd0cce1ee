"""The cache of token ids: only new text is encoded, and only once."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from gateway.prompt.segments import SegmentCache
from gateway.prompt.tokenizer import pack

LONG = "long enough for a thread"


class CountingEncoder:
    """Encodes a text to the code points of its characters, and counts how often."""

    inline_chars = 20
    loop_chars = 60

    def __init__(self) -> None:
        self.encoded: list[str] = []
        self.threads: set[int] = set()

    def encode(self, texts):
        self.encoded += texts
        self.threads.add(threading.get_ident())
        return [pack([ord(char) for char in text]) for text in texts]


@pytest.fixture
def executor():
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture
def encoder() -> CountingEncoder:
    return CountingEncoder()


@pytest.fixture
def cache(encoder, executor) -> SegmentCache:
    return SegmentCache(encoder, 2**20, executor)


async def test_only_new_text_is_encoded(cache, encoder):
    first = await cache.get(["ab", "cd"])
    second = await cache.get(["ab", "cd", "ef", "ef"])
    assert encoder.encoded == ["ab", "cd", "ef"]
    assert second[:2] == first
    assert [segment.ids for segment in second] == [pack(map(ord, text)) for text in ("ab", "cd", "ef", "ef")]


async def test_long_new_text_is_not_encoded_on_the_event_loop(cache, encoder):
    for texts in (["x" * 21], ["a" * 16, "b" * 15, "c" * 15, "d" * 15]):
        segments = await cache.get(texts)
        assert encoder.threads.isdisjoint({threading.get_ident()})
        assert await cache.get(texts) == segments


async def test_others_get_their_turn_while_texts_are_encoded_on_the_event_loop(cache, encoder):
    texts = ["a" * 9, "b" * 11, "c" * 20, "d" * 15]
    running = asyncio.ensure_future(cache.get(texts))
    await asyncio.sleep(0)
    assert encoder.encoded == texts[:2]
    first, *_, last = await cache.get(["a" * 9, "c" * 20, "d" * 15])  # another request, which comes in between
    segments = await running
    assert encoder.threads == {threading.get_ident()}
    assert sorted(encoder.encoded) == ["a" * 9, "b" * 11, "c" * 20, "d" * 15]
    assert [segment.ids for segment in segments] == [pack(map(ord, text)) for text in texts]
    assert (segments[0], segments[3]) == (first, last)


async def test_the_same_text_is_encoded_once_for_all_who_wait_for_it(cache, encoder):
    results = await asyncio.gather(*(cache.get([LONG, "other"]) for _ in range(8)))
    assert sorted(encoder.encoded) == sorted([LONG, "other"])
    assert all(result == results[0] for result in results)


async def test_one_who_stops_waiting_does_not_disturb_the_others(cache, encoder):
    impatient = asyncio.ensure_future(cache.get([LONG]))
    await asyncio.sleep(0)
    patient = asyncio.ensure_future(cache.get([LONG]))
    await asyncio.sleep(0)
    impatient.cancel()
    [segment] = await patient
    assert segment.ids == pack(map(ord, LONG))
    assert encoder.encoded == [LONG]


async def test_a_failure_reaches_everyone_who_waits_and_is_not_remembered(cache, encoder, monkeypatch):
    def fail(texts):
        raise ValueError("no")

    monkeypatch.setattr(encoder, "encode", fail)
    results = await asyncio.gather(*(cache.get([LONG]) for _ in range(3)), return_exceptions=True)
    assert [str(result) for result in results] == ["no"] * 3
    monkeypatch.undo()
    assert len(await cache.get([LONG])) == 1
    assert [len(segment) for segment in await cache.get([LONG])] == [len(LONG)]


async def test_without_memory_everything_is_encoded_each_time(encoder, executor):
    cache = SegmentCache(encoder, 0, executor)
    for _ in range(2):
        [segment] = await cache.get(["ab"])
        assert len(segment) == 2
    assert encoder.encoded == ["ab", "ab"]


async def test_a_text_is_known_in_pieces_once_it_was_met_whole(cache, encoder):
    whole = await cache.get(["abc", "x"])
    assert await cache.get([("a", "b", "c"), "x"]) == whole
    assert (await cache.get([("a", "b", "c"), ("d", "", "e")]))[0] is whole[0]
    assert encoder.encoded == ["abc", "x", "de"]
