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
    decoding: bool = False


class Ledger:
    """In-flight accounting, written into a ``FleetView`` whose rows stay the same.

    Args:
        fleet: the workers.
    """

    def __init__(self, fleet: FleetView) -> None:
        self._cells = cast("memoryview[float]", fleet.state.data)
        self._prefilling: Sequence[dict[Flight, None]] = [{} for _ in fleet.names]  # in order of dispatch

    def dispatch(self, row: int, prompt_tokens: int, uncached_tokens: int, prefill_s: float, now: float) -> Flight:
        """Count a request on a worker; ``prefill_s`` is how long its prefill is expected to take there."""
        flight = Flight(row, prompt_tokens, uncached_tokens, prefill_s)
        cells, prefilling = self._cells, self._prefilling[row]
        if not prefilling:
            cells[_SINCE, row] = now
        prefilling[flight] = None
        cells[_PENDING_TOKENS, row] += uncached_tokens
        cells[_PENDING_S, row] += prefill_s
        cells[_RUNNING, row] += 1
        return flight

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

    def _leave_prefill(self, flight: Flight, now: float, seen: bool) -> None:
        cells, row, prefilling = self._cells, flight.row, self._prefilling[flight.row]
        was_head = next(iter(prefilling)) is flight
        del prefilling[flight]
        if not prefilling:
            cells[_PENDING_TOKENS, row] = cells[_PENDING_S, row] = cells[_SINCE, row] = 0.0
            return
        cells[_PENDING_TOKENS, row] -= flight.uncached_tokens
        cells[_PENDING_S, row] = max(0.0, cells[_PENDING_S, row] - flight.prefill_s)
        if seen or was_head:
            cells[_SINCE, row] = now
