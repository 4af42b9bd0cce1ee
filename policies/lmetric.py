"""The product of uncached tokens and batch size, the least of which wins (LMetric).

``P × B`` needs no weights: a worker with a long queue must save as much prefill as that queue is longer. The paper does
not settle whether P holds the uncached tokens of the queue as well; both readings are here.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from policies.base import Decision, FleetView, Residency, RoutingRequest, register
from policies.choose import decided, lowest, uncached_tokens


class LMetricParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of ``lmetric``.

    Attributes:
        queued: whether P counts the uncached tokens queued at the worker besides the request's own.
    """

    queued: bool = True


@register
class LMetric:
    """B is one more than the requests in flight, so that idle workers differ by P. Ties: running, pending, ring."""

    name: ClassVar[str] = "lmetric"
    Params: ClassVar[type[msgspec.Struct]] = LMetricParams

    def __init__(self, params: LMetricParams, /) -> None:
        self._params = params

    def decide(self, request: RoutingRequest, fleet: FleetView, residency: Residency, now: float) -> Decision:
        """Return the worker with the least product."""
        pending, running = fleet.column("pending_prefill_tokens"), fleet.column("running")
        tokens = uncached_tokens(request, residency) + (pending if self._params.queued else 0.0)
        batch = running + 1.0
        costs = tokens * batch
        row = lowest(fleet, request.key(), costs, running, pending)
        return decided(request, residency, row, None, costs, {"tokens": tokens, "batch": batch})
