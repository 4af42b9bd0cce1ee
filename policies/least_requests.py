"""The worker with the fewest requests in flight."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from policies.base import Decision, FleetView, NoParams, Residency, RoutingRequest, register
from policies.choose import decided, lowest


@register
class LeastRequests:
    """Requests in flight by the gateway's own count; ties: pending prefill tokens, ring."""

    name: ClassVar[str] = "least-requests"
    Params: ClassVar[type[msgspec.Struct]] = NoParams

    def __init__(self, params: NoParams, /) -> None:
        pass

    def decide(self, request: RoutingRequest, fleet: FleetView, residency: Residency, now: float) -> Decision:
        """Return the worker with the fewest requests in flight."""
        running = fleet.column("running").copy()
        row = lowest(fleet, request.key(), running, fleet.column("pending_prefill_tokens"))
        return decided(request, residency, row, "load", running)
