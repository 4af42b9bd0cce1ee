"""Prefill and decode apart: which requests go through both, and what the way between them takes."""

from __future__ import annotations

from policies.disaggregation import apart_cost_s, whole_cost_s
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
        """Return whether a request is worth two legs: both pools are there, there is enough to compute, and it pays."""
        settings = self._settings
        if not prefill or not decode or self.link.down_until > now or settings.policy == "never":
            return False
        if settings.least_tokens:
            held = max(router.residency(request, decode, now).hits())
            if request.prompt_tokens - held < settings.least_tokens:
                return False
        if settings.policy == "always":
            return True
        here, there = router.prospect(request, decode, now), router.prospect(request, prefill, now)
        wait_s = max(0.0, self.link.free_at - now)
        transfer_s = wait_s + settings.latency_s + request.prompt_tokens * self._kv_bytes / settings.bytes_per_s
        return apart_cost_s(there, transfer_s) < whole_cost_s(here, settings.interference)

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
