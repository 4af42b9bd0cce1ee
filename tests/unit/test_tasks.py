"""Background tasks end when they are told to."""

from __future__ import annotations

import asyncio

from gateway.tasks import spawn, stop


async def test_a_task_that_misses_its_cancellation_is_cancelled_again() -> None:
    cancelled = 0

    async def miss_one() -> None:
        nonlocal cancelled
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                cancelled += 1
                if cancelled > 1:
                    raise

    task = spawn(miss_one(), "miss one")
    await asyncio.sleep(0)
    await stop(task, None)
    assert task.cancelled()
