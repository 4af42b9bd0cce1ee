"""What looking up a long prompt costs, how fast the index can be written, and how large it is.

``python -m tests.bench.index [--json] [--quick | --full]``; ``--quick`` stops at a hundred thousand chunks (about a
minute), ``--full`` adds an index of ten million (4 GB, some minutes). What KV events cost on their way into the index
is measured as by ``python -m tests.bench.events``.
The shared index is measured with a Valkey server on loopback, which allocates as the embedded one does, and two
replicas: one writes, the other asks. Each line is measured in a process of its own. With ``--json`` the last line of
output is one JSON object.

The prompt has 512 chunks (128k tokens at 256 a chunk). In the *usual* case all workers hold its first 16, the system
prompt, and eight of them hold more, down to some depth, partly in a lower tier. In the *worst* case each worker holds
it down to a depth of its own, so that nearly every chunk has other holders than the one before. Both take turns, in
several passes, and the figures are those of the best pass: a virtual machine is slower for seconds at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import random
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter

import uvloop
from redis.asyncio import Redis
from rich.console import Console
from rich.table import Table

from gateway.config import IndexConfig
from gateway.index.base import ChunkIndex
from gateway.index.memory import MemoryIndex
from gateway.index.redis import RedisIndex
from gateway.processes.__main__ import ALLOCATOR
from policies.base import Tier
from tests.bench import events
from tests.valkey import Valkey

CHUNKS = 512
SYSTEM_CHUNKS = 16
DEEP_HOLDERS = 8
CHUNK_TOKENS = 256
CHAIN = 64
"""Chunks per chain of what fills the index."""
PROMPTS = {"usual": 40, "worst": 2}
PASSES = 16  # virtual machines are slower for seconds at a time
LOOKUPS = 300  # of a pass
STORES = 200_000
QUIET_LOAD = 0.5

Figures = dict[str, float]
Holders = list[tuple[int, int, Tier]]
"""Worker, how many leading chunks it holds, and in which tier."""


def random_chain(n: int) -> list[bytes]:
    raw = os.urandom(16 * n)
    return [raw[start : start + 16] for start in range(0, 16 * n, 16)]


def usual(n_workers: int) -> Holders:
    deep = random.sample(range(n_workers), DEEP_HOLDERS)
    holders: Holders = [(worker, SYSTEM_CHUNKS, Tier.HBM) for worker in range(n_workers)]
    holders += [(worker, random.randrange(CHUNKS), Tier.HBM) for worker in deep]
    return holders + [(worker, random.randrange(CHUNKS), Tier.HOST) for worker in deep[:2]]


def worst(n_workers: int) -> Holders:
    return [(worker, random.randrange(CHUNKS + 1), Tier.HBM) for worker in range(n_workers)]


CASES: dict[str, Callable[[int], Holders]] = {"usual": usual, "worst": worst}


Written = Callable[[], Awaitable[None]]
"""Waits until what was stored can be asked for."""


async def at_once() -> None:
    """A memory index needs no waiting."""


async def fill(index: ChunkIndex, slots: list[int], n_chunks: int, written: Written) -> None:
    """Store chains of random chunks; one chunk in eight has a second holder."""
    for number in range(n_chunks // CHAIN):
        chunks = random_chain(CHAIN)
        await index.store(random.choice(slots), chunks, Tier.HBM)
        if number % 8 == 0:
            await index.store(random.choice(slots), chunks, Tier.HBM)
        if number % 256 == 0:
            await written()
    await written()


async def store_prompts(index: ChunkIndex, slots: list[int], case: str, written: Written) -> list[list[bytes]]:
    prompts = [random_chain(CHUNKS) for _ in range(PROMPTS[case])]
    for chunks in prompts:
        for worker, depth, tier in CASES[case](len(slots)):
            await index.store(slots[worker], chunks[:depth], tier, chunks[0])
    await written()
    return prompts


async def time_lookups(index: ChunkIndex, slots: list[int], prompts: list[list[bytes]]) -> Figures:
    """Return p50 and p99 of looking up a prompt, in µs."""
    times = []
    for _ in range(LOOKUPS):
        chunks = [bytes(bytearray(chunk)) for chunk in random.choice(prompts)]  # hashed anew, as a request's are
        started = perf_counter()
        await index.residency(chunks, slots, CHUNK_TOKENS)
        times.append(perf_counter() - started)
    times.sort()
    return {"p50_us": times[len(times) // 2] * 1e6, "p99_us": times[len(times) * 99 // 100] * 1e6}


async def time_stores(index: ChunkIndex, slots: list[int], written: Written) -> float:
    """Return chunks stored per second, in runs of 16 chunks from all workers in turn, until all can be asked for."""
    runs = [random_chain(16) for _ in range(STORES // 16)]
    started = perf_counter()
    for number, chunks in enumerate(runs):
        await index.store(slots[number % len(slots)], chunks, Tier.HBM)
        if number % 64 == 0:
            await asyncio.sleep(0)  # as between two reads of a socket
    await written()
    return STORES / (perf_counter() - started)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def measure_memory(n_workers: int, n_chunks: int) -> Figures:
    index = MemoryIndex(IndexConfig(max_chunks=max(IndexConfig().max_chunks, 2 * n_chunks)))
    slots = [await index.acquire_slot(f"worker-{number}") for number in range(n_workers)]
    gc.collect()
    before = resident_bytes()
    await fill(index, slots, n_chunks, at_once)
    figures = {"bytes_per_chunk": (resident_bytes() - before) / len(index)}
    figures |= await measure_speed(index, index, slots, at_once)
    await index.close()
    return figures


async def measure_redis(n_workers: int, n_chunks: int) -> Figures:
    os.environ |= ALLOCATOR
    with Valkey() as valkey:
        config = IndexConfig(url=valkey.url, max_chunks=20_000_000, timeout_s=5)
        writer, reader = RedisIndex(config), RedisIndex(config)
        async with Redis.from_url(valkey.url) as admin:
            slots = [await writer.acquire_slot(f"worker-{number}") for number in range(n_workers)]
            await reader.acquire_slot("reader")
            before = (await admin.info("memory"))["used_memory"]
            await fill(writer, slots, n_chunks, writer.flush)
            figures = {"bytes_per_chunk": ((await admin.info("memory"))["used_memory"] - before) / len(writer)}
        figures |= await measure_speed(writer, reader, slots, writer.flush)
        figures["unanswered"] = reader.counters.skipped + reader.counters.timeouts
        await writer.close()
        await reader.close()
    return figures


async def measure_speed(writer: ChunkIndex, reader: ChunkIndex, slots: list[int], written: Written) -> Figures:
    prompts = {case: await store_prompts(writer, slots, case, written) for case in CASES}
    gc.collect()
    gc.freeze()
    passes = [{case: await time_lookups(reader, slots, prompts[case]) for case in CASES} for _ in range(PASSES)]
    figures = {
        f"{case}_{name}": min(one[case][name] for one in passes) for case in CASES for name in ("p50_us", "p99_us")
    }
    return figures | {"stores_per_s": await time_stores(writer, slots, written)}


MEASURES = {"memory": measure_memory, "redis": measure_redis}
QUICK_GRID = [(8, 100_000), (64, 100_000), (1000, 100_000)]
GRID = [*QUICK_GRID, (64, 1_000_000), (1000, 1_000_000)]
FULL_GRID = [*GRID, (64, 10_000_000), (1000, 10_000_000)]
TARGET_CHUNKS = 1_000_000


def measure(backend: str, n_workers: int, n_chunks: int) -> Figures:
    return uvloop.run(MEASURES[backend](n_workers, n_chunks))


def ingestion() -> dict[str, dict[str, float]]:
    """Return for each workload of KV events and each index, blocks per second."""
    return uvloop.run(events.measure())


def targets(results: dict[tuple[str, int, int], Figures], ingested: dict[str, dict[str, float]]) -> dict[str, bool]:
    """Return for each target whether it was met, with a million chunks if that many were measured."""
    n_chunks = max(size for _, _, size in results if size <= TARGET_CHUNKS)
    memory, wide_memory = results["memory", 64, n_chunks], results["memory", 1000, n_chunks]
    redis, wide_redis = results["redis", 64, n_chunks], results["redis", 1000, n_chunks]
    prefill, decoding = (ingested[workload.title] for workload in events.WORKLOADS[:2])
    return {
        "redis_lookup_p50_0.8ms_1000_workers": wide_redis["usual_p50_us"] <= 800,
        "redis_lookup_p99_2ms_1000_workers": wide_redis["usual_p99_us"] <= 2000,
        "memory_lookup_p50_150us_1000_workers": wide_memory["usual_p50_us"] <= 150,
        "memory_events_100k_blocks_per_s_prefill": prefill["memory"] >= 100_000,
        "memory_events_100k_blocks_per_s_decoding": decoding["memory"] >= 100_000,
        "redis_events_40k_blocks_per_s_prefill": prefill["redis"] >= 40_000,
        "redis_events_40k_blocks_per_s_decoding": decoding["redis"] >= 40_000,
        "redis_stores_40k_per_s_64_workers": redis["stores_per_s"] >= 40_000,
        "memory_stores_100k_per_s_64_workers": memory["stores_per_s"] >= 100_000,
        "redis_150_bytes_per_chunk_64_workers": redis["bytes_per_chunk"] <= 150,
        "memory_120_bytes_per_chunk_64_workers": memory["bytes_per_chunk"] <= 120,
    }


def table(results: dict[tuple[str, int, int], Figures]) -> Table:
    shown = Table(title=f"a prompt of {CHUNKS} chunks", title_justify="left", caption_justify="left")
    for column in ("index", "workers", "chunks", "usual p50 µs", "p99", "worst p50 µs", "p99", "stores/s", "B/chunk"):
        shown.add_column(column, justify="left" if column == "index" else "right")
    for (backend, n_workers, n_chunks), figures in results.items():
        keys = ("usual_p50_us", "usual_p99_us", "worst_p50_us", "worst_p99_us", "stores_per_s", "bytes_per_chunk")
        shown.add_row(backend, f"{n_workers:,}", f"{n_chunks:,}", *(f"{figures[key]:,.0f}" for key in keys))
    shown.caption = (
        "In memory, a lookup costs a table access and a comparison per run of chunks stored together, almost whatever "
        "the size of the index. With Redis, a round trip, in which the server finds each chunk and sends three bytes "
        "per holder, or half a byte per worker where there are more than twelve. In both, each change of holders along "
        "the prompt costs some operations as wide as the fleet: many workers are dear in the worst case alone."
    )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.index", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--quick", action="store_true", help="measure a hundred thousand chunks alone")
    sizes.add_argument("--full", action="store_true", help="measure ten million chunks, too")
    options = parser.parse_args()
    console = Console(stderr=options.json, width=100)
    load = os.getloadavg()[0]
    results: dict[tuple[str, int, int], Figures] = {}
    grid = QUICK_GRID if options.quick else FULL_GRID if options.full else GRID
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
        for backend in MEASURES:
            for n_workers, n_chunks in grid:
                console.print(f"{backend}: {n_workers:,} workers, {n_chunks:,} chunks", style="dim", highlight=False)
                key = backend, n_workers, n_chunks
                results[key] = processes.submit(measure, *key).result()
        console.print("KV events", style="dim")
        ingested = processes.submit(ingestion).result()
    console.print(table(results))
    console.print(events.table(ingested))
    if load > QUIET_LOAD:
        console.print(f"[bold]not a quiet machine:[/bold] the load average was {load} at the start", highlight=False)
    met = targets(results, ingested)
    for target, is_met in met.items():
        console.print(f"{'yes' if is_met else 'no ':<4}{target}", highlight=False)
    if options.json:
        lines = [
            {"index": backend, "workers": n_workers, "chunks": n_chunks, **figures}
            for (backend, n_workers, n_chunks), figures in results.items()
        ]
        machine = {"python": platform.python_version(), "cores": os.cpu_count(), "load_at_start": load}
        print(json.dumps({"machine": machine, "results": lines, "blocks_per_s": ingested, "targets": met}))


if __name__ == "__main__":
    main()
