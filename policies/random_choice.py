"""Any worker, each as likely as the next."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import numpy as np

from policies.base import Decision, FleetView, Residency, RoutingRequest, register
from policies.choose import decided


class RandomParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of ``random``.

    Attributes:
        seed: makes the choices repeat; without it every process chooses differently.
    """

    seed: int | None = None


@register
class RandomChoice:
    """A random order of the workers: the first is the choice, the others are the fallbacks."""

    name: ClassVar[str] = "random"
    Params: ClassVar[type[msgspec.Struct]] = RandomParams

    def __init__(self, params: RandomParams, /) -> None:
        self._random = np.random.default_rng(params.seed)

    def decide(self, request: RoutingRequest, fleet: FleetView, residency: Residency, now: float) -> Decision:
        """Return any worker."""
        draws = self._random.random(len(fleet))
        return decided(request, residency, int(draws.argmin()), "random", draws)
