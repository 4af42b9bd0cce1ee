"""Conditions of shared indexes that tests wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from gateway.index.redis import RedisIndex
from tests.residency import hits

Replica = Callable[..., RedisIndex]
"""Builds one more replica of an index; takes settings of ``IndexConfig``."""

_WITHIN_S = 15


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(_WITHIN_S):
        while not await condition():
            await asyncio.sleep(0.01)


async def says(index: RedisIndex, chunks: list[bytes], slot: int, expected: int) -> bool:
    return await hits(index, chunks, [slot]) == [expected]


async def is_down(index: RedisIndex) -> bool:
    return not index.up


async def began(index: RedisIndex, generations: int) -> bool:
    return index.counters.generations == generations
