"""A weighted sum of scores between 0 and 1, as llm-d and the Gateway API Inference Extension combine scorers.

The default is the blend of prefix, queue and KV usage by 3 : 2 : 2, the strongest of the published rules for agents.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Annotated, ClassVar, Final

import msgspec
import numpy as np

from policies.base import Decision, FleetView, Floats, Residency, RoutingRequest, register
from policies.choose import decided, hit_share, lowest

Weight = Annotated[float, msgspec.Meta(ge=0)]

_MAX_WORKERS: Final = 16_384  # beyond, who was given a cold request longest ago is forgotten


class WeightedParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of ``weighted``: the scorers' weights.

    Attributes:
        prefix: cached share of the prompt.
        queue: requests in flight by the gateway's own count, 1 for the worker with the fewest, 0 for the most.
        kv_usage: free share of the KV cache as the engine last reported.
        tokens: uncached tokens pending, 1 for the worker with the fewest, 0 for the most.
        no_hit_lru: when nobody holds any of the prompt: 1 for the worker that was given such a prompt longest ago, 0
            for the last one, so that new prefixes spread over the caches; else the same for all.
    """

    prefix: Weight = 3.0
    queue: Weight = 2.0
    kv_usage: Weight = 2.0
    tokens: Weight = 0.0
    no_hit_lru: Weight = 0.0


@register
class Weighted:
    """Ties: running, pending prefill tokens, ring."""

    name: ClassVar[str] = "weighted"
    Params: ClassVar[type[msgspec.Struct]] = WeightedParams

    def __init__(self, params: WeightedParams, /) -> None:
        self._params = params
        self._cold: OrderedDict[str, int] = OrderedDict()  # worker → number of the last cold request it was given
        self._number = 0

    def decide(self, request: RoutingRequest, fleet: FleetView, residency: Residency, now: float) -> Decision:
        """Return the worker with the highest score."""
        running, pending = fleet.column("running"), fleet.column("pending_prefill_tokens")
        cold = not residency.hit_tokens.any()
        scores = {
            "prefix": hit_share(request, residency),
            "queue": _fewest(running),
            "kv_usage": 1.0 - fleet.column("kv_usage").clip(0.0, 1.0),
            "tokens": _fewest(pending),
            "no_hit_lru": self._longest_ago(fleet.names) if cold else np.ones(len(fleet)),
        }
        costs = -sum((getattr(self._params, scorer) * score for scorer, score in scores.items()), np.zeros(len(fleet)))
        row = lowest(fleet, request.key(), costs, running, pending)
        if cold:
            self._sent_cold(fleet.names[row])
        return decided(request, residency, row, None, costs, scores)

    def _longest_ago(self, names: Sequence[str]) -> Floats:
        """Return 1 for whoever was given a cold request longest ago, or never, down to 0 for the last one."""
        last = np.array([self._cold.get(name, 0) for name in names])
        ranks = np.unique(last, return_inverse=True)[1].reshape(-1)
        return _fewest(ranks.astype(np.float64))

    def _sent_cold(self, name: str) -> None:
        self._number += 1
        self._cold.pop(name, None)
        self._cold[name] = self._number
        if len(self._cold) > _MAX_WORKERS:
            self._cold.popitem(last=False)


def _fewest(loads: Floats) -> Floats:
    """Return 1 for the least load down to 0 for the most; 1 for all where they are equal."""
    spread = loads.max() - loads.min()
    return (loads.max() - loads) / spread if spread > 0 else np.ones(len(loads))
