"""What is in flight where, counted by this gateway at dispatch and released by what it sees.

Uncached prefill tokens count from dispatch to the first output byte; context tokens from then to the end. Polled
engine metrics correct these numbers (``fleet.metrics``); they do not drive them.

A worker is taken to prefill one prompt after another, in the order in which they went there. An engine that batches
several prompts finishes them together: the first then seems slow and the others instant, but the sum of their times is
right. A request that is held at the gateway until its turn counts like one that waits in the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Final, cast

import msgspec

from gateway.fleet.registry import Registry, Worker
from policies.base import COLUMNS

_PENDING_TOKENS: Final = COLUMNS.index("pending_prefill_tokens")
_PENDING_S: Final = COLUMNS.index("pending_prefill_s")
_SINCE: Final = COLUMNS.index("prefilling_since")
_RUNNING: Final = COLUMNS.index("running")
_DECODE_TOKENS: Final = COLUMNS.index("decode_tokens")

PrefillObserver = Callable[[Worker, int, int, float], None]
"""Called with a worker, new tokens, cached tokens, and the seconds their prefill took there."""
DepartureObserver = Callable[["Flight"], None]
"""Called with a request whose prefill is done, or will not be."""


class Fetch(msgspec.Struct):
    """A prefix that a request's worker is to fetch from another one, before it computes the rest of the prompt.

    Attributes:
        worker: which fetches.
        tokens: how many.
        seconds: that this is expected to take.
        hit_tokens: prompt tokens that it will not have to compute, those that it holds itself included.
        idle: nothing was being prefilled there, for any replica, when the request was sent.
        rest_s: seconds that the prefill of the others is expected to take.
        took_s: seconds from the start of both to the first token, 0 where anything else was in prefill there meanwhile.
    """

    worker: Worker
    tokens: int
    seconds: float
    hit_tokens: int
    idle: bool
    rest_s: float = 0.0
    took_s: float = 0.0


class _Account:
    """What one worker owes while it belongs to the registry.

    A worker that leaves has its account closed: flights still on it count nowhere any more, also if a worker of the
    same name, or the very same one, joins later and gets an account of its own.
    """

    __slots__ = ("alone", "held", "open", "prefilling", "start_known", "started_s", "timed", "worker")

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.open = worker.row >= 0
        self.held = 0  # requests counted here that have not gone to the worker yet
        self.prefilling: dict[Flight, None] = {}  # the others, in the order in which they went
        self.alone = False  # whether there has been but one of them since there were none
        self.started_s = 0.0  # their prefill together
        self.start_known = False  # whether ``prefilling_since`` was seen, not presumed
        self.timed = 0  # prefills whose start and end were seen


class Flight:
    """One request on one worker. Call ``end`` when the request is over, however it went; twice is harmless.

    ``fetch`` is what its worker has to fetch first; that is part of its ``prefill_s``.
    """

    __slots__ = (
        "_account",
        "_ledger",
        "fetch",
        "prefill_s",
        "prompt_tokens",
        "stage",
        "streamed",
        "uncached_tokens",
        "worker",
    )

    HELD, PREFILL, DECODE, ENDED = range(4)

    def __init__(
        self,
        ledger: Ledger,
        account: _Account,
        prompt_tokens: int,
        uncached_tokens: int,
        prefill_s: float,
        now: float,
        streamed: bool,
        held: bool,
    ) -> None:
        self._ledger = ledger
        self._account = account
        self.worker = account.worker
        self.prompt_tokens = prompt_tokens
        self.uncached_tokens = uncached_tokens
        self.prefill_s = prefill_s
        self.streamed = streamed
        self.fetch: Fetch | None = None
        self.stage = Flight.HELD if held else Flight.PREFILL

    def start(self, now: float) -> None:
        """The request goes to its worker now; only for one that was held."""
        if self.stage == Flight.HELD:
            self.stage = Flight.PREFILL
            self._ledger._start(self, self._account, now, was_held=True)

    def shrink(self, uncached_tokens: int, prefill_s: float) -> None:
        """So much is left for a held request: the rest of its prefill is done, or a flight of its own."""
        if self.stage == Flight.HELD:
            self._ledger._shrink(self, self._account, uncached_tokens, prefill_s)
            self.uncached_tokens, self.prefill_s = uncached_tokens, prefill_s

    def first_byte(self, now: float) -> None:
        """The worker began to answer: its prefill of this prompt is done."""
        if self.stage == Flight.PREFILL:
            self._ledger._leave_prefill(self, self._account, now, seen=self.streamed)
            self.stage = Flight.DECODE
            self._ledger._enter_decode(self, self._account)

    def end(self, now: float) -> None:
        """The request is over."""
        if self.stage == Flight.ENDED:
            return
        if self.stage != Flight.DECODE:
            self._ledger._leave_prefill(self, self._account, now, seen=False)
        decoding, self.stage = self.stage == Flight.DECODE, Flight.ENDED
        self._ledger._leave(self, self._account, decoding)


class Ledger:
    """In-flight accounting for a registry's workers, written straight into its ``FleetView``.

    Args:
        registry: whose workers and view.
        on_prefill: told how long each prefill took, where both its start and its end were seen.

    Attributes:
        in_flight: requests dispatched and not yet ended, those on workers that have left included.
        on_left: told of every request whose prefill ends, however that comes about.
        on_ended: told of every request that is over.
    """

    def __init__(self, registry: Registry, on_prefill: PrefillObserver | None = None) -> None:
        self._registry = registry
        self._on_prefill = on_prefill
        self._accounts: dict[Worker, _Account] = {}
        self._presumed: list[tuple[float, int, Flight]] = []
        self._dispatched = 0
        # The view's cells: single ones are read and written through a memoryview in a third of numpy's time.
        self._cells = cast("memoryview[float]", registry.fleet.state.data)
        self.in_flight = 0
        self.on_left: DepartureObserver | None = None
        self.on_ended: DepartureObserver | None = None
        registry.on_change(self._on_change)

    def dispatch(
        self,
        worker: Worker,
        prompt_tokens: int,
        uncached_tokens: int,
        prefill_s: float,
        now: float,
        streamed: bool = True,
        held: bool = False,
    ) -> Flight:
        """Count a request on ``worker``.

        Args:
            worker: where it goes.
            prompt_tokens: length of its prompt.
            uncached_tokens: tokens the worker has to prefill.
            prefill_s: seconds that this is expected to take there.
            now: monotonic seconds.
            streamed: whether the first byte comes with the first token. An answer that is not streamed comes when it
                is complete; its prefill is taken to be done when its time is up, see ``advance``.
            held: whether it waits at the gateway; ``Flight.start`` says that it goes on.
        """
        account = self._accounts.get(worker) or self._open(worker)
        flight = Flight(self, account, prompt_tokens, uncached_tokens, prefill_s, now, streamed, held)
        self.in_flight += 1
        if account.open:
            state, row = self._cells, worker.row
            state[_PENDING_TOKENS, row] += uncached_tokens
            state[_PENDING_S, row] += prefill_s
            state[_RUNNING, row] += 1
            if held:
                account.held += 1
            else:
                self._start(flight, account, now)
        return flight

    def timed(self, worker: Worker) -> int:
        """Return of how many prefills on a worker start and end were seen."""
        account = self._accounts.get(worker)
        return account.timed if account is not None else 0

    def advance(self, now: float) -> None:
        """Move on the unstreamed requests whose prefill must be done by ``now``. Call it before a decision."""
        while self._presumed and self._presumed[0][0] <= now:
            flight = heappop(self._presumed)[2]
            if flight.stage == Flight.PREFILL:  # most have ended
                flight.first_byte(now)

    def _start(self, flight: Flight, account: _Account, now: float, was_held: bool = False) -> None:
        if not account.open:
            return
        account.held -= was_held
        state, row = self._cells, account.worker.row
        account.alone = not account.prefilling
        if account.alone:
            state[_SINCE, row] = now
            account.start_known = True
        account.prefilling[flight] = None
        account.started_s += flight.prefill_s
        if not flight.streamed:
            self._dispatched += 1
            done_at = max(now + flight.prefill_s, state[_SINCE, row] + account.started_s)
            heappush(self._presumed, (done_at, self._dispatched, flight))

    def _shrink(self, flight: Flight, account: _Account, uncached_tokens: int, prefill_s: float) -> None:
        if account.open:
            state, row = self._cells, account.worker.row
            state[_PENDING_TOKENS, row] += uncached_tokens - flight.uncached_tokens
            state[_PENDING_S, row] = max(0.0, state[_PENDING_S, row] + prefill_s - flight.prefill_s)

    def _leave_prefill(self, flight: Flight, account: _Account, now: float, seen: bool) -> None:
        if account.open:
            if flight.stage == Flight.HELD:
                account.held -= 1
            else:
                self._finish_prefill(flight, account, now, seen)
            state, row = self._cells, account.worker.row
            if account.prefilling or account.held:
                state[_PENDING_TOKENS, row] -= flight.uncached_tokens
                state[_PENDING_S, row] = max(0.0, state[_PENDING_S, row] - flight.prefill_s)
            else:  # exact zeros, whatever rounding has left
                state[_PENDING_TOKENS, row] = state[_PENDING_S, row] = 0.0
        if self.on_left is not None:
            self.on_left(flight)

    def _finish_prefill(self, flight: Flight, account: _Account, now: float, seen: bool) -> None:
        state, row = self._cells, account.worker.row
        prefilling = account.prefilling
        took = now - state[_SINCE, row]
        was_head = next(iter(prefilling)) is flight
        del prefilling[flight]
        if seen and account.start_known:
            account.timed += 1
            if flight.fetch is not None:  # the time is not that of its prefill
                elsewhere = self._registry.elsewhere
                if account.alone and flight.fetch.idle and (elsewhere is None or not elsewhere[_PENDING_S, row]):
                    flight.fetch.took_s = took
            elif self._on_prefill is not None:
                cached_tokens = flight.prompt_tokens - flight.uncached_tokens
                self._on_prefill(account.worker, flight.uncached_tokens, cached_tokens, took)
        if not prefilling:
            account.started_s = state[_SINCE, row] = 0.0
            return
        account.started_s -= flight.prefill_s
        if seen or was_head:
            state[_SINCE, row] = now
            account.start_known = seen

    def _enter_decode(self, flight: Flight, account: _Account) -> None:
        if account.open:
            self._cells[_DECODE_TOKENS, account.worker.row] += flight.prompt_tokens

    def _leave(self, flight: Flight, account: _Account, decoding: bool) -> None:
        self.in_flight -= 1
        if account.open:
            state, row = self._cells, account.worker.row
            state[_RUNNING, row] -= 1
            if decoding:
                state[_DECODE_TOKENS, row] -= flight.prompt_tokens
        if self.on_ended is not None:
            self.on_ended(flight)

    def _open(self, worker: Worker) -> _Account:
        account = _Account(worker)
        if account.open:
            self._accounts[worker] = account
        return account

    def _on_change(self, worker: Worker, joined: bool) -> None:
        self._cells = cast("memoryview[float]", self._registry.fleet.state.data)
        account = None if joined else self._accounts.pop(worker, None)
        if account is not None:
            account.open = False
            account.prefilling.clear()
