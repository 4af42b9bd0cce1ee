"""Requests on their way: on a worker, or held by a gateway until the turn of their worker comes.

They are held as ``gateway.dispatch`` holds them, by the same turnstiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from policies.order import Held, Turnstile, create_order
from sim.fleet import GatewaySettings
from sim.jobs import Job
from sim.requests import SimRequest
from sim.router import Dispatch

Leg = Literal["whole", "prefill", "decode"]


@dataclass(slots=True, eq=False)
class Live:
    """A request on a worker, or on its way to one.

    Attributes:
        job: what the worker has of it.
        replica: the gateway that sent it.
        dispatch: how it is counted there.
        leg: all of it, its prefill, or what comes after a prefill elsewhere.
        life: the worker's, when it was sent.
    """

    job: Job
    replica: int
    dispatch: Dispatch
    leg: Leg
    life: int


class _Turn(Held):
    __slots__ = ("live", "stile")

    def __init__(self, live: Live, stile: Turnstile, request: SimRequest, now: float) -> None:
        flight = live.dispatch.flight
        super().__init__(flight.prefill_s, flight.uncached_tokens, now, request.priority, request.session or "")
        self.live = live
        self.stile = stile


class Holding:
    """The turnstiles of every gateway before every worker.

    Args:
        settings: of the gateways, which share a worker's budget evenly.
        workers: how many there are.
    """

    def __init__(self, settings: GatewaySettings, workers: int) -> None:
        budget = settings.budget_tokens / settings.replicas
        self._stiles = [
            [Turnstile(create_order(settings.order, settings.order_params), budget) for _ in range(workers)]
            for _ in range(settings.replicas)
        ]
        self._turns: dict[Live, _Turn] = {}

    def admits(self, live: Live, request: SimRequest, now: float) -> bool:
        """Return whether a request may go to its worker at once; else ``left`` will return it."""
        stile = self._stiles[live.replica][live.dispatch.worker]
        turn = self._turns[live] = _Turn(live, stile, request, now)
        return stile.enter(turn)

    def left(self, live: Live) -> Iterator[Live]:
        """A request's prefill is over, or will not be: yield those that may go now."""
        turn = self._turns.pop(live, None)
        if turn is not None:
            turn.stile.leave(turn)
            while isinstance(following := turn.stile.release(), _Turn):
                yield following.live

    def give_up(self, worker: int) -> list[Live]:
        """Return what is held for a worker that has died, and hold it no longer."""
        given_up: list[Live] = []
        for stiles in self._stiles:
            for turn in stiles[worker].queue():
                assert isinstance(turn, _Turn)
                stiles[worker].leave(turn)
                del self._turns[turn.live]
                given_up.append(turn.live)
        return given_up
