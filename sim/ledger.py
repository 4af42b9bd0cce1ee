"""What is in flight where, counted exactly as ``gateway.fleet.ledger`` counts it; a test holds the two together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast

from policies.base import COLUMNS, FleetView

_PENDING_TOKENS: Final = COLUMNS.index("pending_prefill_tokens")
_PENDING_S: Final = COLUMNS.index("pending_prefill_s")
_SINCE: Final = COLUMNS.index("prefilling_since")
_RUNNING: Final = COLUMNS.index("running")
_DECODE_TOKENS: Final = COLUMNS.index("decode_tokens")


@dataclass(slots=True, eq=False)
class Flight:
    """One request on one worker."""

    row: int
    prompt_tokens: int
    uncached_tokens: int
    prefill_s: float
    held: bool = False
    decoding: bool = False


class Ledger:
    """In-flight accounting, written into a ``FleetView`` whose rows stay the same.

    Args:
        fleet: the workers.
    """

    def __init__(self, fleet: FleetView) -> None:
        self._cells = cast("memoryview[float]", fleet.state.data)
        self._prefilling: Sequence[dict[Flight, None]] = [{} for _ in fleet.names]  # in the order in which they went
        self._held = [0] * len(fleet.names)

    def dispatch(
        self, row: int, prompt_tokens: int, uncached_tokens: int, prefill_s: float, now: float, held: bool = False
    ) -> Flight:
        """Count a request on a worker.

        Args:
            row: the worker.
            prompt_tokens: length of its prompt.
            uncached_tokens: tokens to prefill.
            prefill_s: how long that is expected to take there.
            now: simulated seconds.
            held: whether it waits at the gateway; ``start`` says that it goes on.
        """
        flight = Flight(row, prompt_tokens, uncached_tokens, prefill_s, held)
        cells = self._cells
        cells[_PENDING_TOKENS, row] += uncached_tokens
        cells[_PENDING_S, row] += prefill_s
        cells[_RUNNING, row] += 1
        if held:
            self._held[row] += 1
        else:
            self._prefill(flight, now)
        return flight

    def start(self, flight: Flight, now: float) -> None:
        """A request that was held goes to its worker."""
        if flight.held:
            flight.held = False
            self._held[flight.row] -= 1
            self._prefill(flight, now)

    def shrink(self, flight: Flight, uncached_tokens: int, prefill_s: float) -> None:
        """So much is left for a held request: the rest of its prefill is done, or a flight of its own."""
        cells = self._cells
        cells[_PENDING_TOKENS, flight.row] += uncached_tokens - flight.uncached_tokens
        cells[_PENDING_S, flight.row] = max(0.0, cells[_PENDING_S, flight.row] + prefill_s - flight.prefill_s)
        flight.uncached_tokens, flight.prefill_s = uncached_tokens, prefill_s

    def first_byte(self, flight: Flight, now: float) -> None:
        """The prefill is done."""
        self._leave_prefill(flight, now, seen=True)
        flight.decoding = True
        self._cells[_DECODE_TOKENS, flight.row] += flight.prompt_tokens

    def end(self, flight: Flight, now: float) -> None:
        """The request is over, answered or not."""
        cells, row = self._cells, flight.row
        if flight.decoding:
            cells[_DECODE_TOKENS, row] -= flight.prompt_tokens
        else:
            self._leave_prefill(flight, now, seen=False)
        cells[_RUNNING, row] -= 1

    def _prefill(self, flight: Flight, now: float) -> None:
        prefilling = self._prefilling[flight.row]
        if not prefilling:
            self._cells[_SINCE, flight.row] = now
        prefilling[flight] = None

    def _leave_prefill(self, flight: Flight, now: float, seen: bool) -> None:
        cells, row, prefilling = self._cells, flight.row, self._prefilling[flight.row]
        if flight.held:
            flight.held = False
            self._held[row] -= 1
        else:
            was_head = next(iter(prefilling)) is flight
            del prefilling[flight]
            if not prefilling:
                cells[_SINCE, row] = 0.0
            elif seen or was_head:
                cells[_SINCE, row] = now
        if prefilling or self._held[row]:
            cells[_PENDING_TOKENS, row] -= flight.uncached_tokens
            cells[_PENDING_S, row] = max(0.0, cells[_PENDING_S, row] - flight.prefill_s)
        else:
            cells[_PENDING_TOKENS, row] = cells[_PENDING_S, row] = 0.0
