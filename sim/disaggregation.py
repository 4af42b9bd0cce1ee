"""Prefill and decode apart: which requests go through both, and what the way between them takes."""

from __future__ import annotations

import numpy as np

from policies.base import Floats
from policies.disaggregation import Comparison, Weights, choose_pair, compare, decoding_cost_s
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
        self._weights = Weights(
            interference=settings.interference, itl_weight=settings.itl_weight, read_s=fleet.speed.decode_d2_s
        )

    def pools(self, up: list[int]) -> tuple[list[int], list[int]]:
        """Return the prefill and the decode workers among those that are up."""
        first = self._settings.prefill_workers
        return [worker for worker in up if worker < first], [worker for worker in up if worker >= first]

    def prefill_worker(
        self, request: SimRequest, router: Router, prefill: list[int], decode: list[int], now: float
    ) -> int | None:
        """Return where a request's prompt is computed; None: where it is decoded.

        It is worth two legs where both pools are there, there is enough to compute, and it pays.
        """
        settings = self._settings
        if not prefill or not decode or self.link.down_until > now or settings.policy == "never":
            return None
        if settings.least_tokens:
            held = max(router.residency(request, decode, now).hits())
            if request.prompt_tokens - held < settings.least_tokens:
                return None
        comparison = self._compare(request, router, prefill, decode, now)
        if settings.policy == "break-even" and not comparison.pays:
            return None
        pair = choose_pair(comparison, router.asked(request), router.view(prefill), comparison.apart_s)
        return prefill[pair[0]] if pair is not None else None

    def decode_worker(self, request: SimRequest, router: Router, decode: list[int], now: float) -> int:
        """Return where a request is decoded whose prompt has been computed."""
        here = router.prospects(request, decode, now, self._weights)
        return decode[int(decoding_cost_s(here, self._transfer_s(request, here.held_tokens, now)).argmin())]

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

    def _compare(
        self, request: SimRequest, router: Router, prefill: list[int], decode: list[int], now: float
    ) -> Comparison:
        there = router.prospects(request, prefill, now, self._weights)
        here = router.prospects(request, decode, now, self._weights)
        transfer_s = np.broadcast_to(self._transfer_s(request, here.held_tokens, now), (len(prefill), len(decode)))
        return compare(there, here, transfer_s, self._weights.interference)

    def _transfer_s(self, request: SimRequest, held_tokens: Floats, now: float) -> Floats:
        """Return what moving the rest of a prompt to workers that hold some of it would take, ``[m]``."""
        settings = self._settings
        before_s = max(0.0, self.link.free_at - now) + settings.latency_s
        return before_s + (request.prompt_tokens - held_tokens) * (self._kv_bytes / settings.bytes_per_s)
