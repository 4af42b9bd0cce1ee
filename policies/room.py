"""When a conversation that has lost its context goes on: what keeps caches from being worn out.

Where the contexts of a worker exceed its HBM, whoever comes back finds its own evicted, computes it anew, and evicts
what the next one would have come back to: in the end the worker does little else. Operating systems call it thrashing,
and let fewer programs take part at a time (the working set rule of Denning, 1968). So here: while a worker's prefill is
busy most of the time, a conversation that has lost its context waits until it fits beside those that run and those
that have just paused. They find theirs, and end sooner. New conversations do not wait: it would bring nothing back.

All of it is a matter of seconds of prefill. Where a worker has time to spare, computing a context again delays nobody,
and all go on at once. A context that pauses is kept room for twice as long as computing it takes: longer, and those
that wait lose more by it than it can save. For the same reason nobody waits for room for longer than a multiple of its
own prefill.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from heapq import heappop, heappush
from math import exp
from typing import Final, Generic, TypeVar

from policies.recency import Prefixes

Chunk = TypeVar("Chunk", bytes, int)

MAX_ENDS: Final = 65_536  # prompts remembered
BUSY: Final = 0.6  # share of the time that a worker prefills: above, it is crowded
AVERAGED_S: Final = 120.0  # over which that is averaged: a burst is no crowd
KEPT: Final = 2.0  # how long a context that pauses is kept room for, relative to its prefill from nothing
PATIENCE: Final = 5.0  # how long a conversation waits for room at most, relative to its prefill


class Ends(Generic[Chunk]):
    """Where prompts ended: tells a conversation that goes on from a new one, whether or not any of it is cached."""

    def __init__(self) -> None:
        self._ends: OrderedDict[Chunk, None] = OrderedDict()

    def add(self, chunks: Sequence[Chunk]) -> None:
        """Remember a prompt by its last whole chunk, which stands for all before it."""
        if not chunks:
            return
        self._ends[chunks[-1]] = None
        self._ends.move_to_end(chunks[-1])
        if len(self._ends) > MAX_ENDS:
            self._ends.popitem(last=False)

    def half_known(self, chunks: Sequence[Chunk]) -> bool:
        """Return whether at least the first half of a prompt was all of an earlier one."""
        half = max(0, len(chunks) - 1) // 2
        return any(chunk in self._ends for chunk in reversed(chunks[half:]))


def is_lost(prompt_tokens: int, uncached_tokens: int, chunks: Sequence[Chunk], ends: Ends[Chunk]) -> bool:
    """Return whether a worker has to compute half of a prompt or more although as much of it was computed before."""
    return 2 * uncached_tokens >= prompt_tokens and ends.half_known(chunks)


class Room(Generic[Chunk]):
    """The contexts on one worker that are in use or were a moment ago, and how busy its prefill is.

    Args:
        chunk_tokens: tokens per chunk.

    Attributes:
        crowded: whether conversations that have lost their context wait until they fit.
    """

    def __init__(self, chunk_tokens: int) -> None:
        self.crowded = False
        self._chunk_tokens = chunk_tokens
        self._busy = 0.0  # share of the time
        self._capacity_tokens = 0.0
        self._now = 0.0
        self._kept: Prefixes[Chunk] = Prefixes()  # what these two are made of
        self._running: dict[Hashable, Sequence[Chunk]] = {}
        self._paused: dict[Chunk, tuple[Sequence[Chunk], float]] = {}  # last chunk → all, and until when
        self._expiries: list[tuple[float, Chunk]] = []

    def look(self, capacity_tokens: float, prefilling: bool, now: float) -> None:
        """Take note of how things are. Call it before they change.

        Args:
            capacity_tokens: of the worker's HBM; 0, unknown, always has room.
            prefilling: whether it has been prefilling since the last look.
            now: monotonic seconds.
        """
        self._busy = prefilling + (self._busy - prefilling) * exp((self._now - now) / AVERAGED_S)
        self._capacity_tokens, self._now = capacity_tokens, now
        self.crowded = self._busy > BUSY and capacity_tokens > 0
        while self._expiries and self._expiries[0][0] <= now:
            until, chunk = heappop(self._expiries)
            if chunk in self._paused and self._paused[chunk][1] == until:
                self._forget(chunk)

    def begin(self, request: Hashable, chunks: Sequence[Chunk]) -> None:
        """A request goes to the worker; once more, for its next piece, is harmless."""
        if request in self._running:
            return
        self._running[request] = chunks
        self._kept.add(chunks)
        before = next((chunk for chunk in reversed(chunks) if chunk in self._paused), None)
        if before is not None:
            self._forget(before)

    def end(self, request: Hashable, prefill_s: float) -> None:
        """A request is over, or was never begun here.

        Args:
            request: as it began.
            prefill_s: seconds of its prefill, were nothing of it cached.
        """
        chunks = self._running.pop(request, None)
        if not chunks:
            return
        last, until = chunks[-1], self._now + KEPT * prefill_s
        if last in self._paused:
            self._forget(last)
        self._paused[last] = (chunks, until)
        heappush(self._expiries, (until, last))

    def lost_tokens(self, prompt_tokens: int, uncached_tokens: int, chunks: Sequence[Chunk], ends: Ends[Chunk]) -> int:
        """Return what a prompt will take of HBM if its context is lost, else 0.

        Args:
            prompt_tokens: length of the prompt.
            uncached_tokens: tokens of it that the worker has to compute.
            chunks: its whole chunks.
            ends: of the prompts that have gone to any worker.
        """
        return self.tokens_beside(chunks) if is_lost(prompt_tokens, uncached_tokens, chunks, ends) else 0

    def tokens_beside(self, chunks: Sequence[Chunk]) -> int:
        """Return how much of HBM a prompt will take that those in use or just paused do not share with it."""
        kept = self._kept.chunks()
        return sum(chunk not in kept for chunk in chunks) * self._chunk_tokens

    def fits(self, tokens: int, held_at: float, work_s: float) -> bool:
        """Return whether a conversation that has lost its context may go on now.

        Args:
            tokens: of HBM that it will take.
            held_at: since when it waits, in the seconds of ``look``.
            work_s: seconds of its prefill.
        """
        if not self.crowded or not self._running or self._now - held_at >= PATIENCE * work_s:
            return True
        kept, room = self._kept.chunks(), self._capacity_tokens / self._chunk_tokens
        while len(kept) > room and self._paused:  # the first that paused has been evicted
            self._forget(next(iter(self._paused)))
        return len(kept) + tokens / self._chunk_tokens <= room

    def _forget(self, last: Chunk) -> None:
        chunks, _ = self._paused.pop(last)
        self._kept.remove(chunks)
