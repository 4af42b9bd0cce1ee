"""The same worker for the same session, by consistent hashing."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from policies.base import Decision, FleetView, NoParams, Residency, RoutingRequest, register
from policies.choose import decided, lowest
from policies.ring import ring_for


@register
class Session:
    """Hashes the session header or field; a request without one goes to the least busy worker."""

    name: ClassVar[str] = "session"
    Params: ClassVar[type[msgspec.Struct]] = NoParams

    def __init__(self, params: NoParams, /) -> None:
        pass

    def decide(self, request: RoutingRequest, fleet: FleetView, residency: Residency, now: float) -> Decision:
        """Return the session's worker."""
        pending = fleet.column("pending_prefill_tokens").copy()
        if request.session is None:
            row = lowest(fleet, request.key(), pending, fleet.column("running"))
            return decided(request, residency, row, "load", pending)
        key = request.session.encode("utf-8", "surrogatepass")
        row = ring_for(fleet).first(key)
        return decided(request, residency, row, "session", pending)
