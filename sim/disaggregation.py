"""Prefill and decode apart: which requests go through both, and what the way between them takes."""

from __future__ import annotations

from sim.fleet import DisaggregationSettings, FleetSettings
from sim.requests import SimRequest
from sim.router import Router
from sim.tiers import Channel


class Disaggregation:
    """The two pools, and the link between them.

    A prompt's KV follows the prefill layer by layer: what the link has moved while the prompt was being computed need
    not be waited for. Several transfers share the link one after the other.

    Args:
        settings: of the pools.
        fleet: of the fleet.
        block_tokens: tokens per block.
    """

    def __init__(self, settings: DisaggregationSettings, fleet: FleetSettings, block_tokens: int) -> None:
        self.link = Channel(settings.bytes_per_s, settings.latency_s)
        self.transfers = 0
        self._settings = settings
        self._layers = fleet.layers
        self._kv_bytes = fleet.speed.kv_bytes_per_token
        self._block_tokens = block_tokens

    def pools(self, up: list[int]) -> tuple[list[int], list[int]]:
        """Return the prefill and the decode workers among those that are up."""
        first = self._settings.prefill_workers
        return [worker for worker in up if worker < first], [worker for worker in up if worker >= first]

    def applies(self, request: SimRequest, router: Router, prefill: list[int], decode: list[int], now: float) -> bool:
        """Return whether a request is worth two legs: both pools are there, and there is enough to compute."""
        if not prefill or not decode or self.link.down_until > now:
            return False
        if not self._settings.least_tokens:
            return True
        held = max(router.residency(request, decode, now).hits())
        return request.prompt_tokens - held >= self._settings.least_tokens

    def arrives_at(self, tokens: int, prefill_s: float, now: float) -> float:
        """Move the KV of a prompt that has just been computed; return when the decode worker has all of it.

        Args:
            tokens: tokens that the decode worker does not hold yet.
            prefill_s: how long computing the prompt took.
            now: simulated time.
        """
        self.transfers += 1
        size = float(tokens * self._kv_bytes)
        idle_s = max(0.0, min(prefill_s, now - self.link.free_at))
        ahead = min(size * (self._layers - 1) / self._layers, idle_s * self._settings.bytes_per_s)
        self.link.moved_bytes += ahead
        return self.link.transfer(size - ahead, now)
