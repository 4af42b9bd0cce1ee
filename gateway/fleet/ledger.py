"""What is in flight where, counted by this gateway at dispatch and released by what it sees.

Uncached prefill tokens count from dispatch to the first output byte; context tokens from then to the end. Polled
engine metrics correct these numbers (``fleet.metrics``); they do not drive them.
"""

from __future__ import annotations

from gateway.fleet.registry import Registry, Worker


class Flight:
    """One request on one worker. Call ``end`` exactly when the request is over, however it went; twice is harmless."""

    __slots__ = (
        "_ledger",
        "dispatched_at",
        "prefill_s",
        "prompt_tokens",
        "stage",
        "uncached_tokens",
        "worker",
    )

    PREFILL, DECODE, ENDED = range(3)

    def __init__(
        self,
        ledger: Ledger,
        worker: Worker,
        prompt_tokens: int,
        uncached_tokens: int,
        prefill_s: float,
        now: float,
    ) -> None:
        self._ledger = ledger
        self.worker = worker
        self.prompt_tokens = prompt_tokens
        self.uncached_tokens = uncached_tokens
        self.prefill_s = prefill_s
        self.dispatched_at = now
        self.stage = Flight.PREFILL

    def first_byte(self, now: float) -> None:
        """The worker began to answer: its prefill of this prompt is done."""
        if self.stage == Flight.PREFILL:
            self.stage = Flight.DECODE
            self._ledger._prefilled(self, now)
            self._ledger._add(self.worker, "decode_tokens", self.prompt_tokens)

    def end(self, now: float) -> None:
        """The request is over."""
        if self.stage == Flight.ENDED:
            return
        if self.stage == Flight.PREFILL:
            self._ledger._prefilled(self, now)
        else:
            self._ledger._add(self.worker, "decode_tokens", -self.prompt_tokens)
        self.stage = Flight.ENDED
        self._ledger._add(self.worker, "running", -1)
        self._ledger.in_flight -= 1


class Ledger:
    """In-flight accounting for a registry's workers, written straight into its ``FleetView``."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.in_flight = 0

    def dispatch(
        self, worker: Worker, prompt_tokens: int, uncached_tokens: int, prefill_s: float, now: float
    ) -> Flight:
        """Count a request on ``worker``.

        Args:
            worker: where it goes.
            prompt_tokens: length of its prompt.
            uncached_tokens: tokens the worker has to prefill.
            prefill_s: seconds that this is expected to take there.
            now: monotonic seconds.
        """
        flight = Flight(self, worker, prompt_tokens, uncached_tokens, prefill_s, now)
        self.in_flight += 1
        row = worker.row
        if row >= 0:
            fleet = self._registry.fleet
            if fleet.pending_prefill_tokens[row] <= 0:
                fleet.prefilling_since[row] = now
            fleet.pending_prefill_tokens[row] += uncached_tokens
            fleet.pending_prefill_s[row] += prefill_s
            fleet.running[row] += 1
        return flight

    def _prefilled(self, flight: Flight, now: float) -> None:
        row = flight.worker.row
        if row < 0:
            return
        fleet = self._registry.fleet
        pending = fleet.pending_prefill_tokens
        pending[row] = max(0.0, pending[row] - flight.uncached_tokens)
        fleet.pending_prefill_s[row] = max(0.0, fleet.pending_prefill_s[row] - flight.prefill_s)
        fleet.prefilling_since[row] = now if pending[row] > 0 else 0.0

    def _add(self, worker: Worker, column: str, amount: float) -> None:
        if worker.row >= 0:
            values = self._registry.fleet.column(column)
            values[worker.row] = max(0.0, values[worker.row] + amount)
