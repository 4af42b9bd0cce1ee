"""Two workers per prefix, found by two hashes, and the better of the two (DualMap).

A prefix lives on at most two workers, so that caches hold it once or twice and its load has somewhere to go. No global
index is needed: prompts that begin alike meet the same two workers at every gateway. DualMap also moves requests that
wait at an overloaded worker to their other one; here a request's worker is chosen once.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
import numpy as np

from policies.base import Decision, FleetView, Residency, RoutingRequest, register
from policies.choose import decided, first_token_seconds
from policies.ring import ring_for


class DualMapParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of ``dualmap``.

    Attributes:
        prefix_tokens: how many tokens from the beginning of the prompt make the key, in whole chunks. They must reach
            beyond what all prompts share, else everything lands on two workers, and no further than the first turn of
            a conversation, else the next one has another key.
        slo_s: a worker that holds more of the prompt than the other is preferred up to this predicted time to the
            first token, in seconds.
    """

    prefix_tokens: Annotated[int, msgspec.Meta(ge=1)] = 4096
    slo_s: Annotated[float, msgspec.Meta(gt=0)] = 5.0


@register
class DualMap:
    """Ties between the two go to the first hash."""

    name: ClassVar[str] = "dualmap"
    Params: ClassVar[type[msgspec.Struct]] = DualMapParams

    def __init__(self, params: DualMapParams, /) -> None:
        self._params = params

    def decide(self, request: RoutingRequest, fleet: FleetView, residency: Residency, now: float) -> Decision:
        """Return the one of the key's two workers that holds more of the prompt, or answers sooner."""
        first, second = self._pair(request, fleet)
        row, other = (second, first) if residency.hit(second) > residency.hit(first) else (first, second)
        ttft = first_token_seconds(request, fleet, residency, now)
        reason = "hit"
        if residency.hit(row) == residency.hit(other) or ttft[row] > self._params.slo_s:
            row, reason = min((first, second), key=ttft.item), "load"
        mapped = np.isin(np.arange(len(fleet)), (first, second))
        return decided(request, residency, row, reason, ttft, {"mapped": mapped, "ttft_s": ttft}, float(ttft[row]))

    def _pair(self, request: RoutingRequest, fleet: FleetView) -> tuple[int, int]:
        chunks = request.chunks
        count = min(-(-self._params.prefix_tokens // request.chunk_tokens), len(chunks))
        key = chunks[count - 1] if count else request.key()  # a chunk's hash depends on every chunk before it
        ring = ring_for(fleet)
        first = ring.first(key)
        others = (row for row in ring.walk(key + b"\1") if row != first)
        return first, next(others, first)
