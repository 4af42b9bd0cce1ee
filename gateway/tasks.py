"""Background tasks that cannot vanish."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Final

log = logging.getLogger("kvway")

_CANCEL_AGAIN_S: Final = 0.5

_running: set[asyncio.Task[Any]] = set()


def spawn(work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
    """Start ``work`` as a task, keep a reference until it ends, and log its failure with ``name``."""
    task = asyncio.get_running_loop().create_task(work, name=name)
    _running.add(task)
    task.add_done_callback(_ended)
    return task


def _ended(task: asyncio.Task[Any]) -> None:
    _running.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("background task %s failed", task.get_name(), exc_info=error)


async def stop(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel tasks and wait until they have ended; None and finished tasks are fine."""
    live = {task for task in tasks if task is not None and not task.done()}
    while live:
        for task in live:
            task.cancel()
        # Cancelled just as a connection fails, a client library may raise that failure instead: then once more.
        _, live = await asyncio.wait(live, timeout=_CANCEL_AGAIN_S)
