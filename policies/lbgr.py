"""The least predicted latency, with a wait that fades by itself (LBGR).

``uncached prefill + W``: every dispatch adds its prefill to W, and W fades by a 32nd every 20 ms, so that no word from
the worker is needed. LBGR also corrects each worker by the error of past predictions (recursive least squares on
end-to-end latencies) and takes off W what is left of a request when it ends. A policy here learns of no ends; instead
the rates are those that the gateway learns per worker, and a worker with nothing in flight has no wait.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Final

import msgspec
import numpy as np

from policies.base import Decision, FleetView, Floats, Residency, RoutingRequest, register
from policies.choose import decided, lowest, prefill_of, uncached_tokens

_FADING_PER_S: Final = float(np.log(31 / 32) / 0.02)
"""Exponent per second of a decay by 31/32 every 20 ms."""


class LbgrParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of ``lbgr``.

    Attributes:
        hysteresis_s: seconds by which another worker must be better than the one chosen last.
    """

    hysteresis_s: Annotated[float, msgspec.Meta(ge=0)] = 0.001


@register
class Lbgr:
    """Ties: running, ring."""

    name: ClassVar[str] = "lbgr"
    Params: ClassVar[type[msgspec.Struct]] = LbgrParams

    def __init__(self, params: LbgrParams, /) -> None:
        self._params = params
        self._names: list[str] = []
        self._waits: Floats = np.zeros(0)
        self._faded_at = 0.0
        self._last = ""  # the worker that was chosen last

    def decide(self, request: RoutingRequest, fleet: FleetView, residency: Residency, now: float) -> Decision:
        """Return the worker with the least prediction, or the last one where that is about as good."""
        running = fleet.column("running")
        waits = np.where(running > 0, self._fade(fleet, now), 0.0)
        work = prefill_of(fleet, uncached_tokens(request, residency), residency.hit_tokens)
        predicted = work + waits
        row = lowest(fleet, request.key(), predicted, running)
        if self._last in self._names:
            last = self._names.index(self._last)
            if predicted[last] <= predicted[row] + self._params.hysteresis_s:
                row = last
        self._last = self._names[row]
        decision = decided(
            request, residency, row, None, predicted, {"wait_s": waits, "work_s": work}, float(predicted[row])
        )
        self._waits = waits.copy()
        self._waits[row] += work[row]
        return decision

    def _fade(self, fleet: FleetView, now: float) -> Floats:
        """Return what is left of the waits by now, ``[n]``; workers that are new have none."""
        if self._names != list(fleet.names):
            known = dict(zip(self._names, self._waits.tolist(), strict=True))
            self._names = list(fleet.names)
            self._waits = np.array([known.get(name, 0.0) for name in self._names])
        faded: Floats = self._waits * np.exp(_FADING_PER_S * max(0.0, now - self._faded_at))
        self._faded_at = now
        return faded
