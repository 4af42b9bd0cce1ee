"""What each worker's cache holds and how well it serves, as far as anybody says."""

from __future__ import annotations

import asyncio
from typing import Any

from gateway.caches.coordinator import Coordinator
from gateway.caches.engines import hit_rates
from gateway.errors import GatewayError
from gateway.events.feeds import EventFeeds
from gateway.fleet.polling import control_client
from gateway.fleet.registry import Worker
from gateway.observe.drift import DriftWatch
from gateway.relay.services import Services
from policies.base import Tier


class CacheStats:
    """Collects them on demand.

    Args:
        services: the other rooms.
        feeds: know the chunks of workers that publish events.
        drift: knows how far predictions are off.
        coordinator: LMCache's, where there is one.
    """

    def __init__(
        self, services: Services, feeds: EventFeeds, drift: DriftWatch, coordinator: Coordinator | None
    ) -> None:
        self._services = services
        self._feeds = feeds
        self._drift = drift
        self._coordinator = coordinator

    async def collect(self) -> dict[str, Any]:
        """Return ``workers``, one entry each, and ``coordinator``: None, or what it says, or its ``problem``.

        Of each worker: ``source`` (``events``, ``model``: what was sent to it, or ``elsewhere``: another replica
        follows it), ``tiers`` (tokens and chunks held, capacity in tokens, median age in seconds at which chunks are
        evicted), ``blocks`` known, ``kv_usage`` (share that running requests use), ``hit_rates`` (``predicted`` by
        kvway, and of the engine's own counters ``engine`` and ``below_hbm``) and ``drift``. None: nobody says.
        """
        workers = list(self._services.registry.workers.values())
        rows = [self._of(worker) for worker in workers]
        async with control_client() as client:
            engines = await asyncio.gather(*(hit_rates(client, worker) for worker in workers))
        for row, rates in zip(rows, engines, strict=True):
            row["hit_rates"] |= rates
        return {"workers": rows, "coordinator": await self._of_coordinator()}

    def _of(self, worker: Worker) -> dict[str, Any]:
        prompt, predicted = self._services.observer.predicted_hits().get(worker.name, (0, 0))
        source, tiers = self._held(worker)
        described = self._feeds.describe(worker)
        return {
            "worker": worker.name,
            "source": source,
            "tiers": tiers,
            "blocks": described and described["known_blocks"],
            "kv_usage": float(self._services.registry.fleet.kv_usage[worker.row]),
            "hit_rates": {"predicted": predicted / prompt} if prompt else {},
            "drift": self._drift.drifts.get(worker.name),
        }

    def _held(self, worker: Worker) -> tuple[str, dict[str, dict[str, Any]]]:
        fleet, chunk_tokens = self._services.registry.fleet, self._services.config.prompt.chunk_tokens
        capacity = int(fleet.kv_capacity_tokens[worker.row]) or None
        hbm: dict[str, Any] = {"tokens": None, "chunks": None, "capacity_tokens": capacity, "eviction_age_s": None}
        if worker.config.kv_events is None:
            tokens = self._services.approximate.tokens(worker.slot)
            return "model", {"hbm": hbm | {"tokens": tokens}}
        held = self._feeds.held(worker)
        if held is None:
            return "elsewhere", {"hbm": hbm}
        tiers = {}
        for tier, (chunks, age_s) in held.items():
            if chunks or age_s is not None or tier is Tier.HBM:
                known = {"tokens": chunks * chunk_tokens, "chunks": chunks, "eviction_age_s": age_s}
                tiers[tier.name.lower()] = (hbm if tier is Tier.HBM else dict.fromkeys(hbm)) | known
        return "events", tiers

    async def _of_coordinator(self) -> dict[str, Any] | None:
        if self._coordinator is None:
            return None
        try:
            return await self._coordinator.stats()
        except GatewayError as error:
            return {"problem": error.message}
