"""Prompts on their way count as cached where they were sent, until the worker's own events say so.

Without this, the second of two requests with the same new prompt would not know that the first has just been sent to
a worker that will hold it in a moment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from itertools import groupby, repeat, takewhile
from math import inf
from time import monotonic
from typing import Final

from policies.base import N_TIERS, Tier
from policies.recency import Prefixes

MAX_CHUNKS: Final = 1_000_000
"""Bound on the chunks of all speculations together; beyond it the oldest are forgotten."""


class SpeculativePrompt:
    """One prompt sent to one position; see ``gateway.index.base.Speculation``."""

    __slots__ = ("_overlay", "chunks", "forget_at", "position", "running")

    def __init__(self, overlay: Overlay, position: int, chunks: Sequence[bytes]) -> None:
        self._overlay = overlay
        self.position = position
        self.chunks = chunks
        self.forget_at = inf
        self.running = False

    def answered(self) -> None:
        """The worker has begun to answer: the prompt has its room in the cache."""
        self._overlay.run(self)

    def settle(self, now: float) -> None:
        """The worker has prefilled the prompt: its own events should confirm it before the TTL is over."""
        self._overlay.settle(self, now)

    def cancel(self) -> None:
        """The prompt did not reach its prefill."""
        self._overlay.forget(self)


class Overlay:
    """The masks of all speculations, to be laid over the masks of an index with the same positions.

    A prompt is speculated from its first chunk on, so whoever misses a chunk here will miss all that follow it. And a
    chunk's hash determines all the chunks before it: each chunk is counted once per chunk that follows it and once per
    prompt that ends there, so that a prompt like another costs no more than the chunks in which they differ.

    Args:
        ttl_s: seconds from settling to forgetting.
        max_chunks: bound on the chunks of all speculations together.
        clock: monotonic seconds, the clock of the ``now`` that ``settle`` is given.
    """

    def __init__(self, ttl_s: float, max_chunks: int = MAX_CHUNKS, clock: Callable[[], float] = monotonic) -> None:
        self._ttl_s = ttl_s
        self._max_chunks = max_chunks
        self._clock = clock
        self._masks: dict[bytes, int] = {}
        self._counts: dict[int, dict[bytes, int]] = {}  # position → chunk → what keeps it there
        self._running: dict[int, Prefixes[bytes]] = {}  # position → prompts that it is answering
        self._live: dict[SpeculativePrompt, None] = {}  # oldest first
        self._settled: deque[SpeculativePrompt] = deque()
        self._n_chunks = 0

    def __len__(self) -> int:
        return len(self._live)

    def add(self, position: int, chunks: Sequence[bytes]) -> SpeculativePrompt:
        """Count ``chunks`` as held in HBM by ``position``; a negative position stands for nobody."""
        self._expire()
        if position < 0 or len(chunks) > self._max_chunks:
            return SpeculativePrompt(self, position, ())
        while self._n_chunks + len(chunks) > self._max_chunks:
            self.forget(next(iter(self._live)))
        masks, counts = self._masks, self._counts.setdefault(position, {})
        bit = 1 << N_TIERS * position + Tier.HBM
        for chunk in reversed(chunks):
            count = counts.get(chunk, 0)
            counts[chunk] = count + 1
            if count:
                break
            masks[chunk] = masks.get(chunk, 0) | bit
        speculation = SpeculativePrompt(self, position, chunks)
        self._live[speculation] = None
        self._n_chunks += len(chunks)
        return speculation

    def running(self, position: int) -> Set[bytes]:
        """Return the chunks of the prompts that ``position`` is answering."""
        running = self._running.get(position)
        return frozenset() if running is None else running.chunks()

    def run(self, speculation: SpeculativePrompt) -> None:
        """``speculation`` is being answered, until it is settled or taken back."""
        if speculation in self._live and speculation.forget_at == inf and not speculation.running:
            speculation.running = True
            self._running.setdefault(speculation.position, Prefixes()).add(speculation.chunks)

    def settle(self, speculation: SpeculativePrompt, now: float) -> None:
        """Forget ``speculation`` once its time to live is over, counted from ``now``."""
        if speculation in self._live and speculation.forget_at == inf:
            speculation.forget_at = now + self._ttl_s
            self._run_no_more(speculation)
            self._settled.append(speculation)

    def forget(self, speculation: SpeculativePrompt) -> None:
        """Take ``speculation`` back; does nothing if that has happened already."""
        if speculation not in self._live:
            return
        del self._live[speculation]
        self._run_no_more(speculation)
        self._n_chunks -= len(speculation.chunks)
        masks, counts = self._masks, self._counts[speculation.position]
        bit = 1 << N_TIERS * speculation.position + Tier.HBM
        for chunk in reversed(speculation.chunks):
            count = counts[chunk]
            if count > 1:
                counts[chunk] = count - 1
                break
            del counts[chunk]
            if rest := masks[chunk] ^ bit:
                masks[chunk] = rest
            else:
                del masks[chunk]
        if not counts:
            del self._counts[speculation.position]

    def _run_no_more(self, speculation: SpeculativePrompt) -> None:
        if speculation.running:
            speculation.running = False
            running = self._running[speculation.position]
            running.remove(speculation.chunks)
            if not running.chunks():
                del self._running[speculation.position]

    def forget_position(self, position: int) -> None:
        """Take back everything that ``position`` was said to hold: its worker's cache is gone."""
        if position not in self._counts:
            return
        for speculation in [one for one in self._live if one.position == position]:
            self.forget(speculation)

    def over(self, masks: Iterable[tuple[int, int]], chunks: Sequence[bytes]) -> Iterable[tuple[int, int]]:
        """Return the masks of ``chunks``, as ``leading_runs`` takes them, with the speculations laid over them."""
        self._expire()
        if not chunks or chunks[0] not in self._masks:
            return masks
        return _laid_over(iter(masks), takewhile(bool, map(self._masks.get, chunks, repeat(0))))

    def _expire(self) -> None:
        settled = self._settled
        if settled:
            now = self._clock()
            while settled and settled[0].forget_at <= now:
                self.forget(settled.popleft())


def _laid_over(masks: Iterator[tuple[int, int]], speculated: Iterable[int]) -> Iterator[tuple[int, int]]:
    mask = left = 0
    for added, same in groupby(speculated):
        n = len(list(same))
        while n:
            if not left:
                mask, left = next(masks, (0, n))
            length = min(n, left)
            yield mask | added, length
            n -= length
            left -= length
    if left:
        yield mask, left
    yield from masks
