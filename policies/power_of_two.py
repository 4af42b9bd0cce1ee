"""The less busy of two workers drawn at random (Mitzenmacher 2001): good balance without a look at all of them."""

from __future__ import annotations

from random import Random
from typing import ClassVar

import msgspec

from policies.base import Decision, FleetView, Residency, RoutingRequest, SeedParams, register
from policies.choose import decided


@register
class PowerOfTwo:
    """Requests in flight decide between the two, then pending prefill tokens, then the draw."""

    name: ClassVar[str] = "power-of-two"
    Params: ClassVar[type[msgspec.Struct]] = SeedParams

    def __init__(self, params: SeedParams, /) -> None:
        self._random = Random(params.seed)

    def decide(self, request: RoutingRequest, fleet: FleetView, residency: Residency, now: float) -> Decision:
        """Return the less busy of two random workers."""
        running, pending = fleet.column("running").copy(), fleet.column("pending_prefill_tokens")
        drawn = self._random.sample(range(len(fleet)), min(2, len(fleet)))
        row = min(drawn, key=lambda row: (running[row], pending[row]))
        return decided(request, residency, row, "load", running)
