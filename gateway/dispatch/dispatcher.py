"""Requests held at the gateway until the turn of their worker comes; ``policies.order`` says why and in which order.

Nothing here is per token and little per request: a request that may go at once passes without suspending.
"""

from __future__ import annotations

import asyncio
from math import ceil
from time import monotonic
from typing import Final

from gateway.config import DispatchConfig
from gateway.errors import Saturated
from gateway.fleet.ledger import Flight, Ledger
from gateway.fleet.registry import Registry, State, Worker
from gateway.observe.observer import Observer
from policies.base import COLUMNS, RoutingRequest
from policies.cost import prefill_seconds
from policies.order import Held, Turnstile, create_order
from policies.room import Ends, Room

_PENDING_TOKENS: Final = COLUMNS.index("pending_prefill_tokens")
_CAPACITY: Final = COLUMNS.index("kv_capacity_tokens")
_A, _C = COLUMNS.index("prefill_a_s"), COLUMNS.index("prefill_c_s")
_TICK_S: Final = 0.02
"""While requests are held, prefills whose end cannot be seen are presumed done, and room is looked for, this often."""
_TIMED_PREFILLS: Final = 16
"""Answers that are not streamed are held only where so many prefills were seen: the end of theirs is presumed from
the worker's speed, and a speed that is only configured may be far below what it can do."""


class _Turn(Held):
    """A request, or a piece of it, at its worker's turnstile."""

    __slots__ = ("chunks", "flight", "is_piece", "line", "waiter")

    def __init__(self, flight: Flight, line: _Line, request: RoutingRequest, held_at: float, piece_tokens: int) -> None:
        tokens = piece_tokens or flight.uncached_tokens
        super().__init__(flight.prefill_s, tokens, held_at, request.priority, request.session or "")
        self.chunks = request.chunks
        self.flight = flight
        self.is_piece = piece_tokens > 0
        self.line = line
        self.waiter: asyncio.Future[bool] | None = None


class _Line:
    __slots__ = ("stile", "worker")

    def __init__(self, worker: Worker, stile: Turnstile) -> None:
        self.worker = worker
        self.stile = stile


class Dispatcher:
    """Holds requests in front of every worker of a registry.

    Args:
        registry: whose workers; those that stop being ready give back what is held for them.
        ledger: where the requests are counted, and what says that a prefill is done.
        config: order and bounds.

    Attributes:
        held: requests that had to wait, ever.
        held_s: seconds that they waited, together.
        refused: requests turned away because too many were held.
    """

    def __init__(self, registry: Registry, ledger: Ledger, config: DispatchConfig) -> None:
        self.held = 0
        self.held_s = 0.0
        self.refused = 0
        self._registry = registry
        self._ledger = ledger
        self._config = config
        self._lines: dict[Worker, _Line] = {}
        self._turns: dict[Flight, _Turn] = {}
        self._makes_room = config.make_room and config.order == "least-work"
        self._ends = Ends[bytes]()
        self._waiting = 0
        self._ticking = False
        ledger.on_left = self._left
        if self._makes_room:
            ledger.on_ended = self._ended
        registry.on_change(self._on_change)
        registry.on_state(self._on_state)

    def holds(self, worker: Worker, streamed: bool) -> bool:
        """Return whether a request may have to wait for its turn."""
        return streamed or self._ledger.timed(worker) >= _TIMED_PREFILLS

    async def turn(self, flight: Flight, request: RoutingRequest, piece_tokens: int = 0) -> bool:
        """Wait until a request may go to its worker, and start its flight.

        A long prompt may go in pieces. Its turn for a piece leaves its flight held, and lasts until it comes here
        again, or ends: nobody takes its place meanwhile who would not have taken it of the whole request.

        Args:
            flight: counted as held; its work is what is left of the prompt.
            request: its priority and whose it is.
            piece_tokens: uncached tokens of a piece, where one is to go; 0: the request itself.

        Returns:
            False where the worker has stopped being ready meanwhile: another has to be chosen.

        Raises:
            Saturated: too many are held for this worker.
        """
        now = monotonic()
        if not self.holds(flight.worker, flight.streamed):
            flight.start(now)
            return True
        line = self._lines.get(flight.worker) or self._open(flight.worker, request.chunk_tokens)
        piece = self._turns.get(flight)  # the one before, which is done
        turn = _Turn(flight, line, request, now if piece is None else piece.held_at, piece_tokens)
        if piece is None and line.stile.room is not None:
            prompt_tokens, uncached_tokens = flight.prompt_tokens, flight.uncached_tokens
            turn.lost_tokens = line.stile.room.lost_tokens(prompt_tokens, uncached_tokens, request.chunks, self._ends)
        self._look(line, now)
        if piece is None and line.stile.waiting >= self._config.max_held and line.worker.row >= 0:
            self.refused += 1
            raise Saturated(
                f"{line.stile.waiting} requests are waiting for worker {line.worker.name} (dispatch.max_held).",
                retry_after_s=max(1, ceil(line.stile.waiting_s)),
            )
        self._turns[flight] = turn
        if line.stile.enter(turn):
            self._go(turn, now)
        else:
            turn.waiter = asyncio.get_running_loop().create_future()
        if piece is not None:
            piece.line.stile.leave(piece)
            self._release(piece.line)
        if turn.waiter is None or turn.waiter.done():
            return True
        self.held += 1
        self._waiting += 1
        self._tick()
        try:
            return await turn.waiter
        finally:
            self._waiting -= 1
            self.held_s += monotonic() - now

    def waiting(self, worker: Worker) -> tuple[int, float]:
        """Return how many requests are held for a worker, and the seconds of prefill that they are."""
        line = self._lines.get(worker)
        return (line.stile.waiting, line.stile.waiting_s) if line is not None else (0, 0.0)

    def expose(self, observer: Observer) -> None:
        """Export what is held and was."""

        def of_lines(attribute: str) -> dict[str, float]:
            return {worker.name: getattr(line.stile, attribute) for worker, line in self._lines.items()}

        observer.gauge("kvway_held_requests", "Held until their turn.", lambda: of_lines("waiting"), ("worker",))
        observer.gauge(
            "kvway_held_prefill_seconds", "Prefill that is held.", lambda: of_lines("waiting_s"), ("worker",)
        )
        observer.gauge(
            "kvway_released_prefill_tokens",
            "Uncached tokens let through whose prefill is not done.",
            lambda: of_lines("outstanding_tokens"),
            ("worker",),
        )
        observer.gauge(
            "kvway_worker_crowded",
            "1 while conversations that have lost their context wait for room.",
            lambda: {
                worker.name: float(line.stile.room.crowded)
                for worker, line in self._lines.items()
                if line.stile.room is not None
            },
            ("worker",),
        )
        observer.counter("kvway_held_requests_total", "Requests that had to wait.", lambda: self.held)
        observer.counter("kvway_held_seconds_total", "Time that they waited.", lambda: self.held_s)
        observer.counter("kvway_queue_full_total", "Requests refused because too many waited.", lambda: self.refused)

    def _left(self, flight: Flight) -> None:
        turn = self._turns.pop(flight, None)
        if turn is not None:
            if self._makes_room:
                self._look(turn.line, monotonic())
            turn.line.stile.leave(turn)
            self._release(turn.line)

    def _ended(self, flight: Flight) -> None:
        """A request is over: where somebody waits for room, this leaves some."""
        line = self._lines.get(flight.worker)
        if line is not None and line.stile.room is not None:
            a, b, c = self._registry.fleet.state[_A : _C + 1, line.worker.row].tolist()
            self._look(line, monotonic())
            line.stile.room.end(flight, prefill_seconds(flight.prompt_tokens, 0, a, b, c))
            self._release(line)

    def _look(self, line: _Line, now: float) -> None:
        """Bring a turnstile's budget and its room up to date."""
        line.stile.budget_tokens = self._budget(line.worker)
        if self._makes_room and line.worker.row >= 0:
            line.stile.look(self._registry.fleet.state.item(_CAPACITY, line.worker.row), now)

    def _release(self, line: _Line) -> None:
        if not line.stile.waiting:
            return
        now = monotonic()
        self._look(line, now)
        while (turn := line.stile.release()) is not None:
            assert isinstance(turn, _Turn) and turn.waiter is not None
            self._go(turn, now)
            if not turn.waiter.done():  # else its client has left, and it is about to leave too
                turn.waiter.set_result(True)

    def _go(self, turn: _Turn, now: float) -> None:
        if turn.line.stile.room is not None:
            turn.line.stile.room.begin(turn.flight, turn.chunks)
            self._ends.add(turn.chunks)
        if not turn.is_piece:
            turn.flight.start(now)

    def _budget(self, worker: Worker) -> float:
        """Return this gateway's part of the budget, which replicas share by what each has for the worker."""
        budget, elsewhere = self._config.budget_tokens, self._registry.elsewhere
        if elsewhere is None or worker.row < 0:
            return budget
        theirs = elsewhere.item(_PENDING_TOKENS, worker.row)
        ours = self._registry.fleet.state.item(_PENDING_TOKENS, worker.row)
        return budget * ours / (ours + theirs) if theirs > 0 else budget

    def _tick(self) -> None:
        if not self._ticking and self._waiting:
            self._ticking = True
            asyncio.get_running_loop().call_later(_TICK_S, self._ticked)

    def _ticked(self) -> None:
        self._ticking = False
        self._ledger.advance(monotonic())
        for line in self._lines.values():
            if line.stile.room is not None and line.stile.room.crowded:
                self._release(line)
        self._tick()

    def _give_back(self, worker: Worker) -> None:
        line = self._lines.get(worker)
        for turn in line.stile.queue() if line is not None else ():
            assert line is not None and isinstance(turn, _Turn) and turn.waiter is not None
            line.stile.leave(turn)
            self._turns.pop(turn.flight, None)
            if not turn.waiter.done():
                turn.waiter.set_result(False)

    def _open(self, worker: Worker, chunk_tokens: int) -> _Line:
        order = create_order(self._config.order, self._config.params)
        room = Room[bytes](chunk_tokens) if self._makes_room else None
        line = _Line(worker, Turnstile(order, self._config.budget_tokens, room))
        if worker.row >= 0:
            self._lines[worker] = line
        return line

    def _on_state(self, worker: Worker) -> None:
        if worker.state is not State.READY:
            self._give_back(worker)

    def _on_change(self, worker: Worker, joined: bool) -> None:
        if not joined:
            self._give_back(worker)
            self._lines.pop(worker, None)
