"""The pieces of long prompts that are on workers, each a request of its gateway's own (``policies.pieces``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from sim.cache import BlockChain
from sim.holding import Live
from sim.jobs import Job
from sim.ledger import Flight
from sim.requests import Trace
from sim.router import Router

BETWEEN_S = 0.01
"""Seconds from a worker's answer to what follows of the same prompt there."""


@dataclass(slots=True, eq=False)
class _Piece:
    job: Job
    whole: Live
    flight: Flight


class Pieces:
    """What is under way, by the numbers of its jobs, which no request has.

    Args:
        trace: the requests.
        routers: the gateways, where pieces are counted.
    """

    def __init__(self, trace: Trace, routers: Sequence[Router]) -> None:
        self._trace = trace
        self._routers = routers
        self._under_way: dict[int, _Piece] = {}
        self._numbers = count(len(trace.requests))

    def __contains__(self, number: int) -> bool:
        return number in self._under_way

    def begin(self, live: Live, now: float) -> Job:
        """Return the next piece of a request, counted by itself from now on."""
        number, end = next(self._numbers), live.ends.pop(0)
        chunks = self._trace.requests[live.job.number].chunks[: end // self._trace.block_tokens]
        job = Job(number, BlockChain(chunks), end, 1, end, arrived_at=live.job.arrived_at)
        flight = self._routers[live.replica].piece(live.dispatch, end, now)
        self._under_way[number] = _Piece(job, live, flight)
        return job

    def end(self, number: int, now: float) -> Live:
        """A piece is computed: return the request that it is of."""
        piece = self._under_way.pop(number)
        job, live, ledger = piece.job, piece.whole, self._routers[piece.whole.replica].ledger
        if live.begun_at < 0:
            live.begun_at = job.started_at
        live.computed_tokens += job.prompt_tokens - sum(job.hit_tokens)
        ledger.first_byte(piece.flight, now)
        ledger.end(piece.flight, now)
        return live

    def lose(self, number: int, now: float) -> Live:
        """A piece is gone with its worker: return the request that it is of."""
        piece = self._under_way.pop(number)
        self._routers[piece.whole.replica].ledger.end(piece.flight, now)
        return piece.whole
