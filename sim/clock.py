"""The clock of a worker that runs as a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class WorkerClock:
    """Seconds of a worker's clock, which runs ``speed`` times faster than the wall."""

    def __init__(self, speed: float) -> None:
        self.speed = speed
        self._loop = asyncio.get_running_loop()

    def now(self) -> float:
        """Return the time."""
        return self._loop.time() * self.speed

    def call_at(self, moment: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        """Call ``call`` at a moment of this clock."""
        return self._loop.call_at(moment / self.speed, call)
