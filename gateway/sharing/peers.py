"""What the other replicas have told: their load added to the fleet view, their prompts to the index.

News comes by pub/sub, where messages may be lost. Loads are absolute numbers and every replica repeats all of them
each second, so that a loss heals; a replica that falls silent is forgotten with everything it told.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, cast

import numpy as np

from gateway.fleet.registry import Registry, Worker
from gateway.index.base import ChunkIndex, Speculation
from gateway.sharing.news import LOAD_ROWS, NO_LOAD, Load, News, Prompt

SILENCE_S: Final = 2.5
_MAX_NUMBERS: Final = 1024

Prefilled = Callable[[Worker, Sequence[bytes]], Awaitable[None]]
"""Called with a worker and a prompt's chunks that it has prefilled for another replica."""


class _Peer:
    """One other replica."""

    __slots__ = ("heard_at", "leaving", "loads", "prompts")

    def __init__(self) -> None:
        self.heard_at = 0.0
        self.leaving = False
        self.loads: dict[str, Load] = {}
        self.prompts: dict[int, tuple[Prompt, Speculation]] = {}


class Peers:
    """Keeps ``registry.elsewhere`` and the index equal to what the others told last.

    Args:
        registry: whose view their load is added to.
        index: where their prompts count as held.
        prefilled: told when a worker has prefilled one of their prompts.
    """

    def __init__(self, registry: Registry, index: ChunkIndex, prefilled: Prefilled) -> None:
        self._registry = registry
        self._index = index
        self._prefilled = prefilled
        self._peers: dict[str, _Peer] = {}
        self._numbers: dict[str, int] = {}  # replica, also a silent one → number of its next message
        registry.on_change(lambda _worker, _joined: self._add_up(registry.workers))

    @property
    def replicas(self) -> set[str]:
        """The other replicas that are heard, without those that are leaving."""
        return {name for name, peer in self._peers.items() if not peer.leaving}

    def due(self, news: News) -> int | None:
        """Return the number that a message should have if none was lost; None: it is the first of its replica."""
        due = self._numbers.pop(news.replica, None)
        self._numbers[news.replica] = news.number + 1
        if len(self._numbers) > _MAX_NUMBERS:
            del self._numbers[next(iter(self._numbers))]
        return due

    async def hear(self, news: News, now: float) -> bool:
        """Take in what another replica tells.

        Returns:
            Whether this replica was not known before.
        """
        peer = self._peers.get(news.replica)
        is_new = peer is None
        if peer is None:
            peer = self._peers[news.replica] = _Peer()
        peer.heard_at = now
        peer.leaving = news.leaving
        self._take_loads(peer, news)
        for prompt in news.begun:
            worker = self._registry.workers.get(prompt.worker)
            if worker is not None:
                speculation = self._index.speculate(worker.slot, prompt.chunks)
                speculation.answered()  # when it really is, is not told; too little room is the safe side
                peer.prompts[prompt.number] = prompt, speculation
        for number in news.settled:
            if number in peer.prompts:
                prompt, speculation = peer.prompts.pop(number)
                worker = self._registry.workers.get(prompt.worker)
                if worker is not None:
                    await self._prefilled(worker, prompt.chunks)
                speculation.settle(now)
        gone = set(news.cancelled)
        if news.whole:
            gone |= peer.prompts.keys() - set(news.live)
        _cancel(peer, gone)
        return is_new

    def forget_silent(self, now: float) -> None:
        """Forget the replicas that have not been heard for ``SILENCE_S``."""
        silent = [name for name, peer in self._peers.items() if now - peer.heard_at > SILENCE_S]
        for name in silent:
            peer = self._peers.pop(name)
            _cancel(peer, list(peer.prompts))
            self._add_up(peer.loads)

    def _take_loads(self, peer: _Peer, news: News) -> None:
        before = peer.loads
        after = {} if news.whole else dict(before)
        for worker, load in news.loads.items():
            if any(load):
                after[worker] = load
            else:
                after.pop(worker, None)
        peer.loads = after
        if before or after:
            self._add_up({*before, *after} if news.whole else news.loads)

    def _add_up(self, names: Iterable[str]) -> None:
        """Write the sum of all replicas' loads on the workers named."""
        loads = [peer.loads for peer in self._peers.values() if peer.loads]
        registry = self._registry
        if not loads:
            registry.elsewhere = None
            return
        if registry.elsewhere is None:
            registry.elsewhere = np.zeros_like(registry.fleet.state)
            names = registry.workers
        cells = cast("memoryview[float]", registry.elsewhere.data)
        for name in names:
            worker = registry.workers.get(name)
            if worker is None:
                continue
            columns = zip(*(load.get(name, NO_LOAD) for load in loads), strict=True)
            for row, column in zip(LOAD_ROWS, columns, strict=True):
                cells[row, worker.row] = sum(column)


def _cancel(peer: _Peer, numbers: Iterable[int]) -> None:
    for number in numbers:
        if number in peer.prompts:
            peer.prompts.pop(number)[1].cancel()
