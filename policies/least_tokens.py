"""The worker with the fewest tokens waiting to be prefilled: load counted in what makes requests wait."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from policies.base import Decision, FleetView, NoParams, Residency, RoutingRequest, register
from policies.choose import decided, lowest


@register
class LeastTokens:
    """Uncached prompt tokens dispatched whose first byte has not arrived; ties: running, ring."""

    name: ClassVar[str] = "least-tokens"
    Params: ClassVar[type[msgspec.Struct]] = NoParams

    def __init__(self, params: NoParams, /) -> None:
        pass

    def decide(self, request: RoutingRequest, fleet: FleetView, residency: Residency, now: float) -> Decision:
        """Return the worker with the fewest pending uncached tokens."""
        pending = fleet.column("pending_prefill_tokens").copy()
        row = lowest(fleet, request.key(), pending, fleet.column("running"))
        return decided(request, residency, row, "load", pending)
