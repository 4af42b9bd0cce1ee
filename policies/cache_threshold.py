"""The best match when the fleet is balanced and the match is good, else the shortest queue or the smallest cache.

The rule and the numbers of SGLang's model gateway (``cache_aware``).
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Final

import msgspec
import numpy as np

from policies.base import Decision, FleetView, Floats, Residency, RoutingRequest, register
from policies.choose import decided, hit_share, lowest, uncached_tokens

_MAX_WORKERS: Final = 16_384  # beyond, the caches' sizes are counted from zero again


class CacheThresholdParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of ``cache-threshold``.

    Attributes:
        cache_threshold: a match is good when it is more than this share of the prompt.
        balance_abs: the fleet is unbalanced when the busiest worker has more requests in flight than the least busy
            one by more than this …
        balance_rel: … and by more than this factor.
    """

    cache_threshold: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    balance_abs: Annotated[float, msgspec.Meta(ge=0)] = 32
    balance_rel: Annotated[float, msgspec.Meta(ge=1)] = 1.1


@register
class CacheThreshold:
    """A cache's size is what was sent there uncached, up to its capacity where that is known. Ties: running, ring."""

    name: ClassVar[str] = "cache-threshold"
    Params: ClassVar[type[msgspec.Struct]] = CacheThresholdParams

    def __init__(self, params: CacheThresholdParams, /) -> None:
        self._params = params
        self._cached_tokens: dict[str, float] = {}

    def decide(self, request: RoutingRequest, fleet: FleetView, residency: Residency, now: float) -> Decision:
        """Return the best match or the smallest cache, in an unbalanced fleet the least busy worker."""
        running, match = fleet.column("running").copy(), hit_share(request, residency)
        cached = np.array([self._cached_tokens.get(name, 0.0) for name in fleet.names])
        most, least = running.max(), running.min()
        costs: Floats
        if most - least > self._params.balance_abs and most > self._params.balance_rel * least:
            costs, reason = running, "load"
        elif match.max() > self._params.cache_threshold:
            costs, reason = -match, "hit"
        else:
            costs, reason = cached, "room"
        row = lowest(fleet, request.key(), costs, running)
        self._sent(fleet, row, int(uncached_tokens(request, residency)[row]))
        terms = {"running": running, "match": match, "cached_tokens": cached}
        return decided(request, residency, row, reason, costs, terms)

    def _sent(self, fleet: FleetView, row: int, tokens: int) -> None:
        if len(self._cached_tokens) >= _MAX_WORKERS:
            self._cached_tokens.clear()
        name, capacity = fleet.names[row], float(fleet.column("kv_capacity_tokens")[row])
        cached = self._cached_tokens.get(name, 0.0) + tokens
        self._cached_tokens[name] = min(cached, capacity) if capacity > 0 else cached
