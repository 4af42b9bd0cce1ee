"""The model of a worker against what a real vLLM 0.32 published: the same events in the same batches."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import sim
from sim.cache import CacheEvent, hash_blocks
from sim.kv_events import encode_batch, event_map
from sim.profiles import find_profile
from sim.tokens import WorkerTokenizer
from sim.worker import Request, Worker, WorkerLimits
from tests import golden

Hashes = dict[int, int]  # the captured engine's hash → ours


@pytest.fixture(scope="module")
def tokenizer() -> WorkerTokenizer:
    return WorkerTokenizer(Path(sim.__file__).parent / "data" / "tiny-model")


def make_worker(blocks: int) -> Worker:
    return Worker(WorkerLimits(blocks, golden.BLOCK_SIZE), find_profile("llama-3.1-8b/h100/1"))


def replayed(worker: Worker, recorded: golden.Recorded, prompt: list[int]) -> Iterator[list[CacheEvent]]:
    """Run one recorded request; yield the events of every step that had any."""
    output = recorded.output_ids(prompt)
    tokens = array("I", prompt + output)
    chain = hash_blocks(tokens, golden.BLOCK_SIZE, "tiny", salt=recorded.body.get("cache_salt"))
    worker.add(Request(chain, len(prompt), len(output)))
    while (step := worker.start(0.0)) is not None:
        result = worker.finish(step)
        if result.events:
            yield result.events


def renamed(event: dict[str, Any], hashes: Hashes, ours: dict[str, Any]) -> dict[str, Any]:
    """A captured event under our hashes; hashes that it mentions for the first time are learned from ``ours``."""
    if event["type"] == "BlockStored":
        hashes.update(zip(event["block_hashes"], ours["block_hashes"], strict=True))
    renamed = dict(event)
    if "block_hashes" in event:
        renamed["block_hashes"] = [hashes[block_hash] for block_hash in event["block_hashes"]]
    if event.get("parent_block_hash") is not None:
        renamed["parent_block_hash"] = hashes[event["parent_block_hash"]]
    return renamed


def assert_same(batch: list[CacheEvent], captured: golden.Frames, hashes: Hashes) -> None:
    ours = [event_map(event, golden.BLOCK_SIZE, {}) for event in batch]
    assert [event["type"] for event in ours] == [event["type"] for event in captured.events]
    theirs = [renamed(event, hashes, one) for event, one in zip(captured.events, ours, strict=True)]
    assert ours == theirs
    assert [list(event) for event in ours] == [list(event) for event in theirs]


def check(
    recordings: list[golden.Recorded], worker: Worker, prompt_of: Callable[[golden.Recorded], list[int]]
) -> Hashes:
    hashes: Hashes = {}
    for recorded in recordings:
        batches = list(replayed(worker, recorded, prompt_of(recorded)))
        assert len(batches) == len(recorded.messages)
        for batch, captured in zip(batches, recorded.messages, strict=True):
            assert_same(batch, captured, hashes)
    return hashes


def test_chats_completions_and_salts_store_what_the_engine_stored(tokenizer):
    recordings = [recorded for recorded in golden.requests() if recorded.path.startswith("/v1/")]
    hashes = check(recordings, make_worker(16_384), lambda recorded: tokenizer.encode_body(recorded.body).tolist())
    assert len(hashes) == len(set(hashes.values())) == 37


def test_a_cache_under_pressure_evicts_what_the_engine_evicted_batch_by_batch():
    *before, after_reset = golden.evictions()
    worker = make_worker(64)
    hashes = check(before, worker, lambda recorded: recorded.body["prompt"])
    assert worker.reset_cache()
    (batch,) = replayed(worker, after_reset, after_reset.body["prompt"])
    assert_same(batch, after_reset.messages[0], hashes)


def test_a_batch_has_the_bytes_that_the_engine_sent():
    recorded = golden.evictions()[4]
    worker = make_worker(64)
    for earlier in golden.evictions()[:4]:
        list(replayed(worker, earlier, earlier.body["prompt"]))
    for batch, captured in zip(replayed(worker, recorded, recorded.body["prompt"]), recorded.messages, strict=True):
        at, theirs, rank = msgspec.msgpack.decode(captured.raw[-1])
        ours = msgspec.msgpack.decode(encode_batch(batch, at, golden.BLOCK_SIZE))
        for mine, event in zip(ours[1], theirs, strict=True):
            event.update({key: mine[key] for key in ("block_hashes", "parent_block_hash") if key in event})
        assert encode_batch(batch, at, golden.BLOCK_SIZE) == msgspec.msgpack.encode([at, theirs, rank])


def test_prompts_tokenize_as_the_engine_tokenized_them(tokenizer):
    tokenize, chat, second, text, *_ = golden.requests()
    assert tokenizer.encode_body(tokenize.body).tolist() == tokenize.response["tokens"]
    for recorded in (chat, second, text):
        assert len(tokenizer.encode_body(recorded.body)) == recorded.response["usage"]["prompt_tokens"]


def test_answers_read_as_the_engine_wrote_them(tokenizer):
    chat = golden.requests()[1]
    ids = chat.output_ids(tokenizer.encode_body(chat.body).tolist())
    known = [token for token in ids if token]
    text = "".join(tokenizer.pieces(known))
    assert len(known) > 30
    assert chat.response["choices"][0]["message"]["content"].startswith(text)
