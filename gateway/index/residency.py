"""From the masks of a prompt's chunks to how much of it each worker holds.

A *mask* is an int with four bits per position, one per tier: bit ``4·position + tier`` is set if whoever sits at
``position`` (a slot, or a table's column) holds the chunk in ``tier``.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np

from policies.base import N_TIERS, Residency, Tier

EVERY_TIER: Final = (1 << N_TIERS) - 1
_LOWER_TIERS: Final = EVERY_TIER ^ (1 << Tier.HBM)
_FEW_BITS: Final = 12
"""Up to so many bits are cheaper to visit one by one than to unpack into an array (2 to 20 µs, by width)."""
_FEW_ROWS: Final = 24
"""Up to so many rows are cheaper to return as lists than as arrays."""


def all_tiers(position: int) -> int:
    """Return the mask of everything that ``position`` may hold."""
    return EVERY_TIER << N_TIERS * position


class Rows:
    """Which positions the rows of a result stand for; derived once per set of workers, used for many prompts.

    Args:
        positions: one position per row; -1 for a worker that holds nothing.
    """

    __slots__ = ("below", "everyone", "row_of", "starts", "wanted", "zeros")

    def __init__(self, positions: Sequence[int]) -> None:
        width = max(positions, default=-1) + 1
        # One position more than there are: it holds nothing, and so is what -1 reads.
        self.row_of = np.array([width if position < 0 else position for position in positions], np.int64)
        self.starts = (N_TIERS * self.row_of).tolist() if len(positions) <= _FEW_ROWS else None
        self.zeros = bytes(8 * N_TIERS * (width + 1))
        self.everyone = np.zeros(N_TIERS * (width + 1), np.int64)  # the bits of `wanted`
        self.everyone[N_TIERS * self.row_of] = 1
        self.everyone[N_TIERS * width :] = 0
        packed = np.packbits(self.everyone.astype(np.uint8), bitorder="little")
        self.wanted = int.from_bytes(packed.tobytes(), "little")
        self.below = self.wanted * _LOWER_TIERS


class RowCache:
    """Remembers the ``Rows`` of the lists of slots it was given, for as long as slots keep their positions."""

    _MAX_LISTS: Final = 64

    def __init__(self, position_of: Callable[[int], int]) -> None:
        self._position_of = position_of
        self._rows: dict[int, tuple[Sequence[int], Rows]] = {}

    def rows(self, slots: Sequence[int]) -> Rows:
        """Return the rows for ``slots``, found again by the identity of the list."""
        known = self._rows.get(id(slots))
        if known is not None:
            return known[1]
        if len(self._rows) >= self._MAX_LISTS:
            self._rows.clear()
        rows = Rows([self._position_of(slot) for slot in slots])
        self._rows[id(slots)] = slots, rows  # holds the list: its id is not given to another one
        return rows

    def clear(self) -> None:
        """Forget everything: some slot changed its position."""
        self._rows.clear()


def leading_runs(masks: Iterable[tuple[int, int]], rows: Rows, chunk_tokens: int) -> Residency:
    """Return the leading run that each row holds, by the fastest tier of each chunk.

    A run may change tier from chunk to chunk; it ends at the first chunk held in no tier. The cost follows the number
    of times that the holders change along the prompt, not its length nor, but for the width of a mask, the fleet's.

    Args:
        masks: the chunks' masks in order, as (mask, number of chunks that have it); read only as far as somebody's
            run goes.
        rows: the rows of the result.
        chunk_tokens: tokens per chunk.
    """
    if not rows.wanted:
        return Residency.none(len(rows.row_of))
    tokens = array("q", rows.zeros)  # per position and tier
    # `running` has bit 4·position set while that position's run lasts; `fastest` has one bit per such position, that
    # of the tier which counts. Whoever leaves a tier after k chunks is credited k there, whoever enters it is debited
    # k: so a run is paid for only where it changes. Before the first chunk all are said to be in HBM, for nothing.
    running = fastest = rows.wanted
    seen = 0
    for mask, length in masks:
        held = mask & running  # in HBM
        if held != fastest:
            missing = running ^ held
            if fastest is running and not mask & rows.below:  # all were in HBM, and those who remain still are
                left, entered, running = missing, 0, held
            else:
                lower = mask & missing * _LOWER_TIERS
                tier = 0
                while lower:
                    tier += 1
                    found = lower >> tier & missing
                    if found:
                        held |= found << tier
                        missing ^= found
                        lower &= missing * _LOWER_TIERS
                running ^= missing
                changed = held ^ fastest
                left, entered = changed & fastest, changed & held
            if seen:
                _credit(tokens, left, seen, rows)
                if entered:
                    _credit(tokens, entered, -seen, rows)
            fastest = held
            if not running:
                break
        seen += length * chunk_tokens
    _credit(tokens, fastest, seen, rows)
    if rows.starts is not None:
        return Residency.of_lists([tokens[start : start + N_TIERS].tolist() for start in rows.starts])
    by_tier = np.frombuffer(tokens, np.int64).reshape(-1, N_TIERS).take(rows.row_of, 0)
    flat = by_tier.reshape(-1)
    halves = flat[::2] + flat[1::2]  # numpy is slow to sum rows of four
    return Residency(halves[::2] + halves[1::2], by_tier)


def _credit(tokens: array[int], bits: int, amount: int, rows: Rows) -> None:
    """Add ``amount`` wherever ``bits`` has a bit."""
    if bits & (bits - 1) and bits.bit_count() > _FEW_BITS:
        _credit_many(tokens, bits, amount, rows)
        return
    while bits:
        last = bits.bit_length() - 1
        tokens[last] += amount
        bits ^= 1 << last


def _credit_many(tokens: array[int], bits: int, amount: int, rows: Rows) -> None:
    total = np.frombuffer(tokens, np.int64)
    others = bits ^ rows.wanted
    if others.bit_count() <= _FEW_BITS:
        total += rows.everyone * amount
        _credit(tokens, others & rows.wanted, -amount, rows)
        _credit(tokens, others & bits, amount, rows)
    else:
        packed = np.frombuffer(bits.to_bytes((len(tokens) + 7) // 8, "little"), np.uint8)
        total += np.unpackbits(packed, count=len(tokens), bitorder="little").astype(np.int64) * amount
