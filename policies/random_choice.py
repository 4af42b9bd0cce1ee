"""Any worker, each as likely as the next."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import numpy as np

from policies.base import Decision, FleetView, Residency, RoutingRequest, SeedParams, register
from policies.choose import decided


@register
class RandomChoice:
    """A random order of the workers: the first is the choice, the others are the fallbacks."""

    name: ClassVar[str] = "random"
    Params: ClassVar[type[msgspec.Struct]] = SeedParams

    def __init__(self, params: SeedParams, /) -> None:
        self._random = np.random.default_rng(params.seed)

    def decide(self, request: RoutingRequest, fleet: FleetView, residency: Residency, now: float) -> Decision:
        """Return any worker."""
        draws = self._random.random(len(fleet))
        return decided(request, residency, int(draws.argmin()), "random", draws)
