"""The least predicted time to the first token among the workers that hold most of the prompt (llm-d's latency scorer).

Only workers with a hit of ``hit_threshold`` are candidates, unless the best of them would take ``max_gap_s`` longer
than the best of all. With an SLO, the worker that meets it with the least to spare is taken, so that room is kept for
requests that need more of it. Now and then a request explores.

llm-d predicts with regression trees trained on the requests of the last minutes. Here the prediction is the prefill
queued, the prompt's own, and reload, all at the rates that the gateway learns per worker; time per output token is not
predicted, so that the SLO is one of the first token alone.
"""

from __future__ import annotations

from random import Random
from typing import Annotated, ClassVar

import msgspec
import numpy as np

from policies.base import Decision, FleetView, Floats, Residency, RoutingRequest, Seed, register
from policies.choose import decided, first_token_seconds, hit_share, lowest

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class PredictedLatencyParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of ``predicted-latency``.

    Attributes:
        hit_threshold: cached share of the prompt that makes a worker sticky.
        max_gap_s: seconds that the best sticky worker may be slower than the best of all.
        slo_s: time to the first token that requests are to meet; without it the least predicted one wins.
        explore: share of the requests that go to any worker, whatever it predicts.
        seed: makes the exploration repeat; without it every process explores differently.
    """

    hit_threshold: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.8
    max_gap_s: Annotated[float, msgspec.Meta(ge=0)] = 5.0
    slo_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    explore: Share = 0.01
    seed: Seed | None = None


@register
class PredictedLatency:
    """Ties: running, ring."""

    name: ClassVar[str] = "predicted-latency"
    Params: ClassVar[type[msgspec.Struct]] = PredictedLatencyParams

    def __init__(self, params: PredictedLatencyParams, /) -> None:
        self._params = params
        self._random = Random(params.seed)

    def decide(self, request: RoutingRequest, fleet: FleetView, residency: Residency, now: float) -> Decision:
        """Return the worker that is predicted to answer soonest, or, with an SLO, just in time."""
        ttft = first_token_seconds(request, fleet, residency, now)
        sticky = hit_share(request, residency) >= self._params.hit_threshold
        stays = bool(sticky.any()) and bool(ttft[sticky].min() - ttft.min() <= self._params.max_gap_s)
        costs = self._fit(ttft)
        if stays:
            costs = np.where(sticky, costs, costs + costs.max() + 1.0)  # the others behind all of them
        if self._random.random() < self._params.explore:
            row, reason = self._random.randrange(len(fleet)), "explore"
        else:
            row, reason = lowest(fleet, request.key(), costs, fleet.column("running")), None
        terms = {"sticky": sticky, "ttft_s": ttft}
        return decided(request, residency, row, reason, costs, terms, float(ttft[row]))

    def _fit(self, ttft: Floats) -> Floats:
        """Return what to minimise, at least 0: time to spare where the SLO is met, behind it time beyond the SLO."""
        slo_s = self._params.slo_s
        if slo_s is None:
            return ttft
        return np.where(ttft <= slo_s, slo_s - ttft, ttft)
