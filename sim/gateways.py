"""The replicas of the gateway: what they hear of the workers and of each other, and when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from policies.base import Policy, Tier
from sim.batch import BatchWorker
from sim.fleet import FleetSettings
from sim.index import FleetIndex
from sim.router import Router
from sim.tiers import EVERYONE, TierChange

Schedule = Callable[[float, Callable[[Any], None], Any], None]
"""Has a callable be called with an argument at a time."""


class Gateways:
    """Replicas, each with a router of its own; the index of what events say is one for all.

    Args:
        policies: one for each of them.
        fleet: the workers, and how late news of them comes.
        block_tokens: tokens per block of the trace.
        lives: how often each worker has died; read whenever news of it arrives.
        at: schedules what is to happen.

    Attributes:
        routers: one for each of them.
        index: what the workers hold, as their events say.
        scrape_at: when the workers' metrics are read next.
    """

    def __init__(
        self, policies: Sequence[Policy], fleet: FleetSettings, block_tokens: int, lives: Sequence[int], at: Schedule
    ) -> None:
        self.index = FleetIndex(fleet.workers)
        self.scrape_at = 0.0
        self._settings = fleet.gateway
        self._lives = lives
        self._at = at
        self.routers = [
            Router(policy, fleet, FleetIndex(fleet.workers) if fleet.gateway.approximate else self.index, block_tokens)
            for policy in policies
        ]

    def tell_others(self, replica: int, news: Callable[[Router], None], now: float) -> None:
        """Let the other replicas know, in time, what one of them has done."""
        lag = self._settings.sync_lag_s
        if len(self.routers) == 1 or lag == inf:
            return
        for other, router in enumerate(self.routers):
            if other != replica:
                self._at(now + lag, news, router)

    def publish(self, row: int, changes: Sequence[TierChange], now: float) -> None:
        """Let them know, in time, how a worker's caches have changed."""
        news = (row, self._lives[row], changes)
        if self._settings.event_lag_s:
            self._at(now + self._settings.event_lag_s, self._learn, news)
        else:
            self._learn(news)

    def scrape(self, workers: Sequence[BatchWorker], until: float) -> None:
        """Read the workers' metrics if that is due before ``until``."""
        if self.scrape_at <= until:
            interval = self._settings.metrics_s
            self.scrape_at += interval * (1 + (until - self.scrape_at) // interval)
            for router in self.routers:
                router.scrape(workers)

    def lost(self, row: int, tiers: Sequence[Tier]) -> None:
        """A worker has died, and with it what these tiers held."""
        self.index.clear(row, tiers)
        for router in self.routers:
            router.lost(row)

    def _learn(self, news: tuple[int, int, Sequence[TierChange]]) -> None:
        row, life, changes = news
        gone = life != self._lives[row]
        self.index.apply([change for change in changes if not gone or change.worker == EVERYONE])
