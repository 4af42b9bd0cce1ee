"""Which prefixes are to be held in several failure domains, where, and how much work that may be.

What only one worker holds is lost when it dies, and computed anew by whoever is asked for it next: all of it at once,
in a fleet that has just become smaller. A copy made before is the same work at a quieter time. What it saves then and
what it costs now both grow with the prefix, so what decides between two prefixes is how often they are asked for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Generic, TypeVar

Chunk = TypeVar("Chunk", bound=Hashable)


@dataclass(frozen=True, slots=True)
class HotPrefix(Generic[Chunk]):
    """A prefix that many prompts share.

    Attributes:
        chunks: its chunks.
        uses: prompts that began with it.
        example: last chunk of one of these prompts.
    """

    chunks: Sequence[Chunk]
    uses: int
    example: Chunk


class PrefixUses(Generic[Chunk]):
    """Counts how many prompts begin with which chunks, for a while at a time."""

    def __init__(self) -> None:
        self._uses: Counter[Chunk] = Counter()
        self._prompts: dict[Chunk, Sequence[Chunk]] = {}  # by their last chunk

    def count(self, chunks: Sequence[Chunk]) -> None:
        """A prompt was asked for."""
        if chunks:
            self._uses.update(chunks)
            self._prompts[chunks[-1]] = chunks

    def take(self, least_uses: int) -> list[HotPrefix[Chunk]]:
        """Return of every prompt the longest prefix with so many uses, the most used first; counting begins anew."""
        uses, found = self._uses, dict[Chunk, HotPrefix[Chunk]]()
        for last, chunks in self._prompts.items():
            # along a chain uses never grow: every prompt with a chunk has those before it
            length = bisect_left(chunks, True, key=lambda chunk: uses[chunk] < least_uses)
            if length and (end := chunks[length - 1]) not in found:
                found[end] = HotPrefix(chunks[:length], uses[end], last)
        self._uses = Counter()
        self._prompts = {}
        return sorted(found.values(), key=lambda prefix: prefix.uses, reverse=True)


def new_homes(holders: Collection[int], domains: Sequence[Hashable], costs: Sequence[float], wanted: int) -> list[int]:
    """Return the workers that should get a copy of a prefix, none where there are enough or nothing is to be copied.

    Args:
        holders: rows of the workers that hold it. Where none does, whoever is asked for it first brings it in.
        domains: failure domain of each worker, ``[n]``.
        costs: what a copy costs on each, ``[n]``; infinite where there can be none.
        wanted: domains that are to hold it.

    Returns:
        Rows, the cheapest first, each in a domain of its own in which nobody holds the prefix.
    """
    held_in = {domains[row] for row in holders}
    chosen: list[int] = []
    if not held_in:
        return chosen
    for row in sorted(range(len(costs)), key=costs.__getitem__):
        if len(held_in) >= wanted or costs[row] == inf:
            break
        if domains[row] not in held_in:
            held_in.add(domains[row])
            chosen.append(row)
    return chosen


class Allowance:
    """Tokens that may be computed for copies: they are earned at a rate, and saved up for a while at most.

    A copy may cost more than there is, however long it be; the next one waits until that has been earned.

    Args:
        saved_s: what this many seconds earn can be saved.
        since: monotonic seconds; from then on tokens are earned.
    """

    def __init__(self, saved_s: float, since: float) -> None:
        self._saved_s = saved_s
        self._tokens = 0.0
        self._earned_at = since

    def earn(self, tokens_per_s: float, now: float) -> None:
        """Let time pass at a rate."""
        self._tokens = min(self._tokens + tokens_per_s * (now - self._earned_at), tokens_per_s * self._saved_s)
        self._earned_at = now

    def spend(self, tokens: float) -> bool:
        """Take tokens; False where nothing is left to take them from."""
        if self._tokens <= 0:
            return False
        self._tokens -= tokens
        return True

    def wait_s(self, tokens_per_s: float) -> float:
        """Return how long it takes at a rate until a token is there."""
        return max(0.0, 1 - self._tokens) / tokens_per_s
