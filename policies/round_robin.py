"""Every worker in its turn, whatever it holds and however busy it is."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import numpy as np

from policies.base import Decision, FleetView, NoParams, Residency, RoutingRequest, register
from policies.choose import decided


@register
class RoundRobin:
    """One turn per model; a retry goes to whoever is next."""

    name: ClassVar[str] = "round-robin"
    Params: ClassVar[type[msgspec.Struct]] = NoParams

    def __init__(self, params: NoParams, /) -> None:
        self._turns: dict[str, int] = {}

    def decide(self, request: RoutingRequest, fleet: FleetView, residency: Residency, now: float) -> Decision:
        """Return the worker whose turn it is."""
        n = len(fleet)
        row = self._turns.get(request.model, 0) % n
        self._turns[request.model] = row + 1
        turns_away = (np.arange(n) - row) % n
        return decided(request, residency, row, "turn", turns_away)
