"""One timer for every timeout of the relay, instead of one or more per request."""

from __future__ import annotations

import asyncio
import time
from typing import Final, Protocol

from gateway.relay.pool import UpstreamPool

TICK_S: Final = 0.25
_AT_ONCE: Final = 100  # connections, before others have their turn on the event loop: thousands take milliseconds


class Swept(Protocol):
    """What has timeouts."""

    def sweep(self, now: float) -> None:
        """Act on whatever has taken too long by ``now``, monotonic seconds."""
        ...


class Sweeper:
    """Looks at client connections and pooled worker connections four times a second, while there are any.

    Timeouts are therefore late by up to a quarter of a second, which none of them minds.
    """

    def __init__(self, upstream: UpstreamPool) -> None:
        self._upstream = upstream
        self._watched: set[Swept] = set()
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, connection: Swept) -> None:
        """Sweep ``connection`` until it is forgotten."""
        self._watched.add(connection)
        if self._timer is None:
            self._arm()

    def forget(self, connection: Swept) -> None:
        """Leave ``connection`` alone."""
        self._watched.discard(connection)

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._sweep)

    def _sweep(self) -> None:
        self._sweep_on(list(self._watched))

    def _sweep_on(self, connections: list[Swept]) -> None:
        now = time.monotonic()
        for connection in connections[:_AT_ONCE]:
            if connection in self._watched:
                connection.sweep(now)
        if len(connections) > _AT_ONCE:
            asyncio.get_running_loop().call_soon(self._sweep_on, connections[_AT_ONCE:])
            return
        pooled = self._upstream.reap(now)
        if self._watched or pooled:
            self._arm()
        else:
            self._timer = None
