"""The timer behind the relay's timeouts."""

from __future__ import annotations

import asyncio

from gateway.config import TimeoutsConfig
from gateway.relay.pool import UpstreamPool
from gateway.relay.sweeper import Sweeper


class Connection:
    """Notes when it is swept, and tells."""

    def __init__(self, swept: list[Connection], done: asyncio.Event) -> None:
        self._swept = swept
        self._done = done

    def sweep(self, now: float) -> None:
        self._swept.append(self)
        self._done.set()


async def test_many_connections_are_swept_once_each_and_others_have_their_turn_in_between() -> None:
    sweeper, swept, begun = Sweeper(UpstreamPool(TimeoutsConfig())), list[Connection](), asyncio.Event()
    connections = [Connection(swept, begun) for _ in range(1000)]
    for connection in connections:
        sweeper.watch(connection)
    await begun.wait()
    assert len(swept) < len(connections)
    left = next(connection for connection in connections if connection not in swept)
    sweeper.forget(left)
    while len(swept) < len(connections) - 1:
        await asyncio.sleep(0)
    assert set(swept) == set(connections) - {left}
    for connection in connections:
        sweeper.forget(connection)
