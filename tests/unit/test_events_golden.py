"""The recorded events, replayed: after every message the index must say what the engine's own cache held."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from gateway.config import IndexConfig
from gateway.events.assembler import Assembler
from gateway.events.decode import decode_batch, parse_publication
from gateway.index.memory import MemoryIndex
from policies.base import Residency, Tier
from policies.chunks import ChunkHasher
from tests import golden
from tests.events_rig import MODEL, chunks_of

Prompt = tuple[list[int], str | None]


class EngineCache:
    """What vLLM held, straight from its events: the hash of every live block, and what each hash stands for."""

    def __init__(self) -> None:
        self.live: set[int] = set()
        self.known: dict[tuple[object, tuple[int, ...]], int] = {}  # (parent or salt, tokens) → hash

    def follow(self, message: golden.Frames) -> None:
        for event in message.events:
            hashes = event.get("block_hashes", [])
            if event["type"] == "BlockStored":
                assert not self.live.intersection(hashes), "these recordings have no second copies"
                self.live.update(hashes)
                parent = event["parent_block_hash"]
                for number, block in enumerate(hashes):
                    ids = event["token_ids"][number * golden.BLOCK_SIZE : (number + 1) * golden.BLOCK_SIZE]
                    salt = (event["extra_keys"][number] or [None])[0]
                    self.known[salt if parent is None else parent, tuple(ids)] = block
                    parent = block
            elif event["type"] == "BlockRemoved":
                self.live.difference_update(hashes)
            else:
                self.live.clear()

    def held_tokens(self, ids: list[int], salt: str | None) -> int:
        """Return the tokens of the longest live chain that begins the prompt."""
        at: object = salt
        for start in range(0, len(ids), golden.BLOCK_SIZE):
            at = self.known.get((at, tuple(ids[start : start + golden.BLOCK_SIZE])))
            if at not in self.live:
                return start
        return len(ids) // golden.BLOCK_SIZE * golden.BLOCK_SIZE


def prompts_with_known_ids(requests: list[golden.Recorded]) -> list[Prompt]:
    tokenized = [(request.response["tokens"], None) for request in requests if request.path == "/tokenize"]
    given = [
        (request.body["prompt"], request.body.get("cache_salt"))
        for request in requests
        if isinstance(request.body.get("prompt"), list)
    ]
    return tokenized + given


def conversations_in_events(requests: list[golden.Recorded]) -> Iterator[Prompt]:
    """Yield every stored block's whole context: requests given as text, and what was generated."""
    contexts: dict[int, Prompt] = {}
    for event in (event for request in requests for message in request.messages for event in message.events):
        if event["type"] == "BlockStored":
            parent = event["parent_block_hash"]
            ids, salt = contexts[parent] if parent else ([], (event["extra_keys"][0] or [None])[0])
            ids = ids + event["token_ids"]
            contexts[event["block_hashes"][-1]] = (ids, salt)
            contexts |= {
                block: (ids[: len(ids) - golden.BLOCK_SIZE * after], salt)
                for after, block in enumerate(reversed(event["block_hashes"]))
            }
            yield ids, salt


class Replay:
    """A recording, message by message, into an index and into the naive engine."""

    def __init__(self, recording: str, chunk_tokens: int) -> None:
        self.requests = {"requests": golden.requests, "evictions": golden.evictions}[recording]()
        self.prompts = [*prompts_with_known_ids(self.requests), *conversations_in_events(self.requests)]
        self.chunk_tokens = chunk_tokens
        self.hasher = ChunkHasher(chunk_tokens)
        self.assembler, self.engine = Assembler(self.hasher, MODEL), EngineCache()
        self.index = MemoryIndex(IndexConfig())

    async def answers(self) -> AsyncIterator[tuple[Residency, int]]:
        """Yield, after every message and for every prompt, its residency and the tokens that the engine holds of it."""
        slot = await self.index.acquire_slot("worker")
        for message in (message for request in self.requests for message in request.messages):
            self.assembler.apply(decode_batch(parse_publication(message.raw)[1]).events)
            changes = self.assembler.take()
            if changes.cleared:
                await self.index.clear(slot)
            for run in changes.stored:
                await self.index.store(slot, run.chunks, run.tier, run.root)
            for run in changes.removed:
                await self.index.remove(slot, run.chunks, run.tier, run.root)
            self.engine.follow(message)
            for ids, salt in self.prompts:
                chunks = chunks_of(self.hasher, ids, salt=salt)
                residency = await self.index.residency(chunks, [slot], self.chunk_tokens)
                yield residency, self.engine.held_tokens(ids, salt)


@pytest.mark.parametrize("recording", ["requests", "evictions"])
@pytest.mark.parametrize("chunk_tokens", [32, 64, 256])
async def test_after_every_message_the_index_says_what_the_engine_held(recording, chunk_tokens):
    replay = Replay(recording, chunk_tokens)
    hits = 0
    async for residency, held in replay.answers():
        whole_chunks = held // chunk_tokens * chunk_tokens
        assert residency.hit_tokens.tolist() == [whole_chunks]
        assert residency.by_tier[0, Tier.HBM] == whole_chunks
        hits += whole_chunks > 0
    assert hits > 50
    assert len(replay.assembler) == len(replay.engine.live)


@pytest.mark.parametrize("recording", ["requests", "evictions"])
@pytest.mark.parametrize("chunk_tokens", [16, 48])
async def test_where_blocks_do_not_divide_chunks_the_index_is_less_than_a_block_too_high(recording, chunk_tokens):
    async for residency, held in Replay(recording, chunk_tokens).answers():
        assert held // chunk_tokens * chunk_tokens <= residency.hit_tokens[0] < held + golden.BLOCK_SIZE


def test_the_recordings_evict_reset_and_salt():
    events = [event for request in golden.evictions() for message in request.messages for event in message.events]
    assert sum(event["type"] == "BlockRemoved" for event in events) > 100
    assert sum(event["type"] == "AllBlocksCleared" for event in events) == 1
    assert any(request.body.get("cache_salt") for request in golden.requests())


def test_the_same_ids_with_and_without_a_salt_are_not_shared():
    hasher = ChunkHasher(golden.BLOCK_SIZE)
    assembler = Assembler(hasher, MODEL)
    for request in golden.requests():
        for message in request.messages:
            assembler.apply(decode_batch(message.raw[2]).events)
    stored = {chunk for run in assembler.take().stored for chunk in run.chunks}
    salted, plain = (request for request in golden.requests() if isinstance(request.body.get("prompt"), list))
    assert salted.body["prompt"] == plain.body["prompt"]
    salted_chunks = chunks_of(hasher, salted.body["prompt"], salt=salted.body["cache_salt"])
    plain_chunks = chunks_of(hasher, plain.body["prompt"])
    assert not set(salted_chunks) & set(plain_chunks)
    assert stored >= {*salted_chunks, *plain_chunks}
