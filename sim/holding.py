"""Requests on their way: on a worker, or held by a gateway until the turn of their worker comes.

They are held as ``gateway.dispatch`` holds them, by the same turnstiles, and long prompts go in the same pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from policies.base import COLUMNS, FleetView
from policies.cost import prefill_seconds
from policies.order import Held, Turnstile, create_order
from policies.pieces import has_room, piece_ends
from policies.room import Ends, Room
from sim.fleet import GatewaySettings
from sim.jobs import Job
from sim.requests import SimRequest
from sim.router import Dispatch

CAPACITY: Final = COLUMNS.index("kv_capacity_tokens")
A, C = COLUMNS.index("prefill_a_s"), COLUMNS.index("prefill_c_s")

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
        ends: leading tokens of the prompt that each of its pieces covers that has yet to be computed.
        computed_tokens: tokens of the prompt that pieces have computed.
        begun_at: when the first piece was begun; -1 before.
    """

    job: Job
    replica: int
    dispatch: Dispatch
    leg: Leg
    life: int
    ends: list[int] = field(default_factory=list)
    computed_tokens: int = 0
    begun_at: float = -1.0

    def begun(self) -> tuple[float, list[int]]:
        """Return when its prefill began, and the tokens found cached then, by tier: not those that pieces computed."""
        if self.begun_at < 0:
            return self.job.started_at, self.job.hit_tokens
        hits, ours = [], self.computed_tokens
        for tokens in self.job.hit_tokens:
            hits.append(max(0, tokens - ours))
            ours = max(0, ours - tokens)
        return self.begun_at, hits


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
        fleets: the workers, as each gateway sees them.
        block_tokens: tokens per chunk id.
    """

    def __init__(self, settings: GatewaySettings, fleets: Sequence[FleetView], block_tokens: int) -> None:
        budget = settings.budget_tokens / settings.replicas
        self.makes_room = makes_room = settings.make_room and settings.order == "least-work"

        def stile() -> Turnstile:
            room = Room[int](block_tokens) if makes_room else None
            return Turnstile(create_order(settings.order, settings.order_params), budget, room)

        self._stiles = [[stile() for _ in fleet.names] for fleet in fleets]
        self._ends = [Ends[int]() for _ in fleets]
        self._fleets = fleets
        self._piece_tokens = settings.piece_tokens if settings.order == "least-work" else 0
        self._block_tokens = block_tokens
        self._turns: dict[Live, _Turn] = {}

    @property
    def waiting(self) -> bool:
        """Whether anybody is held."""
        return any(stile.waiting for stiles in self._stiles for stile in stiles)

    def admits(self, live: Live, request: SimRequest, now: float) -> bool:
        """Return whether a request, or its first piece, may go to its worker at once; else ``left`` will return it."""
        if self._piece_tokens and live.leg == "whole" and live.dispatch.source is None:
            flight = live.dispatch.flight
            cached, named = flight.prompt_tokens - flight.uncached_tokens, len(request.chunks) * self._block_tokens
            ends = piece_ends(flight.prompt_tokens, cached, self._piece_tokens, self._block_tokens)
            live.ends = [end for end in ends if end <= named]
        return self._enter(live, request, now, now, self._lost_tokens(live, request))

    def next_piece(self, live: Live, request: SimRequest, now: float) -> Iterator[Live]:
        """A piece is computed: hold the request until the turn of what follows, and yield those that may go now."""
        done = self._turns[live]
        if self._enter(live, request, done.held_at, now):
            yield live
        done.stile.leave(done)
        yield from self.release(live.replica, live.dispatch.worker, now)

    def left(self, live: Live, now: float) -> Iterator[Live]:
        """A request's prefill is over, or will not be: yield those that may go now."""
        turn = self._turns.pop(live, None)
        if turn is not None:
            self._look(live.replica, live.dispatch.worker, now)
            turn.stile.leave(turn)
            yield from self.release(live.replica, live.dispatch.worker, now)

    def ended(self, live: Live, now: float) -> Iterator[Live]:
        """A request is over: yield those that may go now, in the room that it leaves."""
        worker = live.dispatch.worker
        stile = self._look(live.replica, worker, now)
        if stile.room is not None:
            a, b, c = self._fleets[live.replica].state[A : C + 1, worker].tolist()
            stile.room.end(live, prefill_seconds(live.job.prompt_tokens, 0, a, b, c))
            yield from self.release(live.replica, worker, now)

    def look(self, now: float) -> Iterator[Live]:
        """Yield those that may go now although nobody has left their worker."""
        for replica, stiles in enumerate(self._stiles):
            for worker, stile in enumerate(stiles):
                if stile.waiting:
                    yield from self.release(replica, worker, now)

    def release(self, replica: int, worker: int, now: float) -> Iterator[Live]:
        """Yield the requests of a gateway that may go to a worker now."""
        stile = self._look(replica, worker, now)
        while isinstance(following := stile.release(), _Turn):
            self._begin(following)
            yield following.live

    def _lost_tokens(self, live: Live, request: SimRequest) -> int:
        flight, ends = live.dispatch.flight, self._ends[live.replica]
        room = self._stiles[live.replica][live.dispatch.worker].room
        if room is None:
            return 0
        return room.lost_tokens(flight.prompt_tokens, flight.uncached_tokens, request.chunks, ends)

    def _enter(self, live: Live, request: SimRequest, held_at: float, now: float, lost_tokens: int = 0) -> bool:
        flight, stile = live.dispatch.flight, self._look(live.replica, live.dispatch.worker, now)
        turn = self._turns[live] = _Turn(live, stile, request, held_at)
        turn.lost_tokens = lost_tokens
        if live.ends and not self._have_room(live):
            live.ends = []
        if live.ends:
            turn.tokens = live.ends[0] - (flight.prompt_tokens - flight.uncached_tokens)
        if not stile.enter(turn):
            return False
        self._begin(turn)
        return True

    def _have_room(self, live: Live) -> bool:
        fleet, worker = self._fleets[live.replica], live.dispatch.worker
        running, capacity = float(fleet.decode_tokens[worker]), float(fleet.kv_capacity_tokens[worker])
        return has_room(live.job.prompt_tokens, running, capacity)

    def _look(self, replica: int, worker: int, now: float) -> Turnstile:
        """Return the turnstile of a gateway before a worker, up to date."""
        stile = self._stiles[replica][worker]
        stile.look(self._fleets[replica].state.item(CAPACITY, worker), now)
        return stile

    def _begin(self, turn: _Turn) -> None:
        if turn.stile.room is not None:
            chunks = turn.live.job.chain.hashes
            turn.stile.room.begin(turn.live, chunks)
            self._ends[turn.live.replica].add(chunks)

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
