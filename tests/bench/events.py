"""How fast KV events get from a worker's socket into the index: decode, assemble, write.

``python -m tests.bench.events [--json]``. Every block of a workload is stored once and removed once, as in an engine
whose cache is full, a prompt's last block first; both count. The rate is per second that a core worked, so that other
programs on the machine disturb it less; with Redis, the time until other replicas can see the outcome is added in full.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter, process_time

import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from gateway.config import IndexConfig
from gateway.events.assembler import Assembler
from gateway.events.decode import decode_batch
from gateway.index.base import ChunkIndex
from gateway.index.memory import MemoryIndex
from gateway.index.redis import RedisIndex
from policies.chunks import ChunkHasher
from tests.valkey import Valkey

CHUNK_TOKENS = 256
PROMPT_TOKENS = 8192
TOKENS = 1_000_000
VOCABULARY = range(150_000)
ROUNDS = 3
BATCHES_AT_ONCE = 64


@dataclass(frozen=True)
class Workload:
    """How an engine announces its blocks: tokens of one, blocks in an event, events in a batch."""

    title: str
    block_size: int
    blocks: int
    events: int

    def payloads(self) -> list[bytes]:
        """Return the batches of some prompts, stored and later removed."""
        stored, removed = [], []
        for _ in range(TOKENS // PROMPT_TOKENS):
            stores = list(self._stores())
            hashes = [block for event in reversed(stores) for block in reversed(event["block_hashes"])]
            removals = [
                {"type": "BlockRemoved", "block_hashes": [one], "medium": "GPU", "group_idx": 0} for one in hashes
            ]
            stored += self._batches(stores)
            removed += self._batches(removals)
        return stored + removed

    def _stores(self) -> Iterator[dict]:
        parent = None
        for _ in range(0, PROMPT_TOKENS, self.block_size * self.blocks):
            hashes = [random.getrandbits(64) for _ in range(self.blocks)]
            yield {
                "type": "BlockStored",
                "block_hashes": hashes,
                "parent_block_hash": parent,
                "token_ids": random.choices(VOCABULARY, k=self.block_size * self.blocks),
                "block_size": self.block_size,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": [None] * self.blocks,
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
            parent = hashes[-1]

    def _batches(self, events: list[dict]) -> list[bytes]:
        starts = range(0, len(events), self.events)
        return [msgspec.msgpack.encode([1.5, events[start : start + self.events], 0]) for start in starts]


WORKLOADS = (
    Workload("vLLM, prefill: 32 blocks of 16 tokens an event", 16, 32, 1),
    Workload("vLLM, decoding: one block of 16 tokens a batch", 16, 1, 1),
    Workload("SGLang: one page of 64 tokens an event", 64, 1, 32),
    Workload("LMCache: one chunk of 256 tokens an event", 256, 1, 32),
)


async def blocks_per_s(workload: Workload, index: ChunkIndex) -> float:
    """Return the best of some rounds."""
    payloads = workload.payloads()
    n_blocks = 2 * (TOKENS // PROMPT_TOKENS) * (PROMPT_TOKENS // workload.block_size)
    rates = []
    for _ in range(ROUNDS):
        slot = await index.acquire_slot("bench")
        assembler = Assembler(ChunkHasher(CHUNK_TOKENS), "model")
        started = process_time()
        for at in range(0, len(payloads), BATCHES_AT_ONCE):
            for payload in payloads[at : at + BATCHES_AT_ONCE]:
                assembler.apply(decode_batch(payload).events)
            changes = assembler.take()
            for run in changes.stored:
                await index.store(slot, run.chunks, run.tier, run.root)
            for run in changes.removed:
                await index.remove(slot, run.chunks, run.tier, run.root)
            await asyncio.sleep(0)
        seconds = process_time() - started
        if isinstance(index, RedisIndex):
            waiting = perf_counter()
            await index.flush()
            seconds += perf_counter() - waiting
        rates.append(n_blocks / seconds)
        assert len(assembler) == 0
        await index.release_slot(slot)
    return max(rates)


async def measure() -> dict[str, dict[str, float]]:
    results: dict[str, dict[str, float]] = {}
    with Valkey() as valkey:
        for name, index in (
            ("memory", MemoryIndex(IndexConfig())),
            ("redis", RedisIndex(IndexConfig(backend="redis", url=valkey.url))),
        ):
            for workload in WORKLOADS:
                results.setdefault(workload.title, {})[name] = await blocks_per_s(workload, index)
            await index.close()
    return results


def table(results: dict[str, dict[str, float]]) -> Table:
    shown = Table("blocks stored or removed per second", title=f"KV events, chunks of {CHUNK_TOKENS} tokens")
    for name in ("memory", "redis"):
        shown.add_column(name, justify="right")
    for title, rates in results.items():
        shown.add_row(title, *(f"{rate:,.0f}" for rate in rates.values()))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    arguments = parser.parse_args()
    results = uvloop.run(measure())
    Console(stderr=arguments.json).print(table(results))
    if arguments.json:
        print(json.dumps({"chunk_tokens": CHUNK_TOKENS, "blocks_per_s": results}))


if __name__ == "__main__":
    main()
