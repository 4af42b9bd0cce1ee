"""Requests that begin alike and come at once go to one worker, and spill over to the next (llm-d's burst co-location).

When a prefix is new, no index knows of it before the first request is through, and every scorer spreads a burst of it
over the fleet, so that each worker prefills it. llm-d holds requests for a short window and places groups together.
Here nothing is held: whoever comes within the window of the last one with its prefix follows that one.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Annotated, ClassVar, Final

import msgspec

from policies.base import Decision, FleetView, Residency, RoutingRequest, register
from policies.choose import decided, first_token_seconds, lowest

_MAX_BURSTS: Final = 10_000


class BurstColocationParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of ``burst-colocation``.

    Attributes:
        window_s: a burst ends when none of its requests has come for so many seconds.
        max_per_worker: requests of a burst that one worker gets before the next one does.
        prefix_tokens: how many tokens from the beginning of the prompt a burst has in common, in whole chunks.
    """

    window_s: Annotated[float, msgspec.Meta(gt=0)] = 0.1
    max_per_worker: Annotated[int, msgspec.Meta(ge=1)] = 8
    prefix_tokens: Annotated[int, msgspec.Meta(ge=1)] = 1024


class _Burst:
    __slots__ = ("count", "last_at", "worker")

    def __init__(self) -> None:
        self.worker = ""
        self.count = 0
        self.last_at = 0.0


@register
class BurstColocation:
    """A burst's first request, and any other one, goes where it is answered soonest. Ties: running, ring."""

    name: ClassVar[str] = "burst-colocation"
    Params: ClassVar[type[msgspec.Struct]] = BurstColocationParams

    def __init__(self, params: BurstColocationParams, /) -> None:
        self._params = params
        self._bursts: OrderedDict[bytes, _Burst] = OrderedDict()  # by prefix, longest quiet first

    def decide(self, request: RoutingRequest, fleet: FleetView, residency: Residency, now: float) -> Decision:
        """Return the burst's worker, or the one with the least predicted time to the first token."""
        ttft = first_token_seconds(request, fleet, residency, now)
        burst = self._burst(request, now)
        if burst.worker in fleet.names and burst.count < self._params.max_per_worker:
            row, reason = fleet.names.index(burst.worker), "burst"
        else:
            row, reason = lowest(fleet, request.key(), ttft, fleet.column("running")), None
            burst.worker, burst.count = fleet.names[row], 0
        burst.count += 1
        return decided(request, residency, row, reason, ttft, {"ttft_s": ttft}, float(ttft[row]))

    def _burst(self, request: RoutingRequest, now: float) -> _Burst:
        """Return the burst that the request belongs to, a new one where none is under way."""
        while self._bursts:
            oldest = next(iter(self._bursts.values()))
            if now - oldest.last_at <= self._params.window_s and len(self._bursts) < _MAX_BURSTS:
                break
            self._bursts.popitem(last=False)
        chunks = request.chunks
        count = min(-(-self._params.prefix_tokens // request.chunk_tokens), len(chunks))
        key = chunks[count - 1] if count else request.key()
        burst = self._bursts.setdefault(key, _Burst())
        burst.last_at = now
        self._bursts.move_to_end(key)
        return burst
