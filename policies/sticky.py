"""Where most of the prompt is cached, until that is saturated: llm-d's default since August 2026.

Workers that hold nearly the whole prompt are the only candidates, unless the least loaded of them would take
``max_gap_s`` longer over its queue than the least loaded of the others.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
import numpy as np

from policies.base import Decision, FleetView, Residency, RoutingRequest, register
from policies.choose import decided, hit_share, lowest, uncached_tokens


class StickyParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of ``sticky``.

    Attributes:
        hit_threshold: cached share of the prompt that makes a worker sticky.
        max_gap_s: seconds of queue that staying may cost more than leaving. Too little collapses into duplicating
            contexts and evicting others.
        peak_tokens_per_s: what a worker prefills at best, to turn queued tokens into seconds: the engine's largest
            step (``max-num-batched-tokens``) over the time that it takes.
        balance: what decides among the candidates: ``work``, uncached tokens queued and the request's own, where
            prefill is the bottleneck; ``requests`` in flight where decode is.
    """

    hit_threshold: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.8
    max_gap_s: Annotated[float, msgspec.Meta(ge=0)] = 18.0
    peak_tokens_per_s: Annotated[float, msgspec.Meta(gt=0)] = 15_928.0
    balance: Literal["work", "requests"] = "work"


@register
class Sticky:
    """Ties: running, pending prefill tokens, ring."""

    name: ClassVar[str] = "sticky"
    Params: ClassVar[type[msgspec.Struct]] = StickyParams

    def __init__(self, params: StickyParams, /) -> None:
        self._params = params

    def decide(self, request: RoutingRequest, fleet: FleetView, residency: Residency, now: float) -> Decision:
        """Return the least loaded sticky worker, or the least loaded of all."""
        pending, running = fleet.column("pending_prefill_tokens").copy(), fleet.column("running").copy()
        queue_s = pending / self._params.peak_tokens_per_s
        sticky = hit_share(request, residency) >= self._params.hit_threshold
        stays = bool(sticky.any())
        if stays and not sticky.all():
            stays = bool(queue_s[sticky].min() - queue_s[~sticky].min() <= self._params.max_gap_s)
        costs = running if self._params.balance == "requests" else pending + uncached_tokens(request, residency)
        if stays:
            costs = np.where(sticky, costs, costs + costs.max() + 1.0)  # the others behind all of them
        row = lowest(fleet, request.key(), costs, running, pending)
        return decided(request, residency, row, None, costs, {"sticky": sticky, "queue_s": queue_s})
