"""Replicas of a shared index, and the conditions that tests wait for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count
from typing import Any

from gateway.config import IndexConfig
from gateway.index.redis import RedisIndex
from tests.residency import hits, prompt

Replica = Callable[..., RedisIndex]
"""Builds one more replica of an index; takes settings of ``IndexConfig``."""

_WITHIN_S = 30
_namespaces = count()


@contextlib.asynccontextmanager
async def two_indexes(url: str, **settings: Any) -> AsyncIterator[tuple[RedisIndex, RedisIndex]]:
    """Two replicas' views of one index."""
    namespace = f"topology-{next(_namespaces)}"
    config = IndexConfig.model_validate({"url": url, "namespace": namespace, "timeout_s": 2} | settings)
    indexes = RedisIndex(config), RedisIndex(config)
    yield indexes
    for index in indexes:
        await index.close()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(_WITHIN_S):
        while not await condition():
            await asyncio.sleep(0.01)


async def says(index: RedisIndex, chunks: list[bytes], slot: int, expected: int) -> bool:
    return await hits(index, chunks, [slot]) == [expected]


async def is_up(index: RedisIndex) -> bool:
    return index.up


async def is_down(index: RedisIndex) -> bool:
    return not index.up


async def began(index: RedisIndex, generations: int) -> bool:
    return index.counters.generations == generations


async def all_seen(index: RedisIndex, slot: int, n_chunks: int, chains: range) -> None:
    """Wait until ``slot`` is known to hold so much of each chain."""

    async def seen() -> bool:
        return all([await hits(index, prompt(n_chunks, seed), [slot]) == [n_chunks] for seed in chains])

    await until(seen)
