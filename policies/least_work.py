"""The worker that would have the fewest tokens left to prefill once it had this request as well."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from policies.base import Decision, FleetView, NoParams, Residency, RoutingRequest, register
from policies.choose import decided, lowest, uncached_tokens


@register
class LeastWork:
    """Pending uncached tokens plus the request's own; ties: running, ring."""

    name: ClassVar[str] = "least-work"
    Params: ClassVar[type[msgspec.Struct]] = NoParams

    def __init__(self, params: NoParams, /) -> None:
        pass

    def decide(self, request: RoutingRequest, fleet: FleetView, residency: Residency, now: float) -> Decision:
        """Return the worker with the least work, this request's included."""
        work = fleet.column("pending_prefill_tokens") + uncached_tokens(request, residency)
        row = lowest(fleet, request.key(), work, fleet.column("running"))
        return decided(request, residency, row, None, work)
