"""What a gateway knows of the workers' caches: chunk ids instead of hashes, otherwise as ``gateway.index`` keeps it.

A mask holds four bits per worker, one per tier. Prompts on their way count as held where they were sent.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Final

import numpy as np

from policies.base import N_TIERS, Residency, Tier
from policies.recency import Prefixes, PrefixLru
from sim.tiers import EVERYONE, TierChange

SMALL_FLEET: Final = 24
"""Up to so many workers, lists are cheaper to build and to go through than arrays."""


class FleetIndex:
    """Who holds which chunk in which tier.

    Args:
        workers: size of the fleet.
    """

    def __init__(self, workers: int) -> None:
        self._masks: dict[int, int] = {}
        self._hbm_bits = sum(1 << N_TIERS * worker for worker in range(workers))

    def _bits(self, worker: int, tier: Tier) -> int:
        return (self._hbm_bits if worker == EVERYONE else 1 << N_TIERS * worker) << tier

    def store(self, worker: int, chunks: Sequence[int], tier: Tier) -> None:
        """A worker, or everyone, holds these chunks in a tier."""
        bits, masks = self._bits(worker, tier), self._masks
        for chunk in chunks:
            masks[chunk] = masks.get(chunk, 0) | bits

    def remove(self, worker: int, chunks: Sequence[int], tier: Tier) -> None:
        """A worker, or everyone, holds these chunks in a tier no more."""
        kept, masks = ~self._bits(worker, tier), self._masks
        for chunk in chunks:
            if mask := masks.get(chunk, 0) & kept:
                masks[chunk] = mask
            else:
                masks.pop(chunk, None)

    def apply(self, changes: Iterable[TierChange]) -> None:
        """Caches have changed."""
        for change in changes:
            if change.stored:
                self.store(change.worker, change.hashes, change.tier)
            else:
                self.remove(change.worker, change.hashes, change.tier)

    def clear(self, worker: int, tiers: Sequence[Tier] = tuple(Tier)) -> None:
        """A worker has lost everything that it held in these tiers."""
        lost = sum(1 << N_TIERS * worker + tier for tier in tiers)
        kept = {chunk: mask & ~lost for chunk, mask in self._masks.items()}
        self._masks = {chunk: mask for chunk, mask in kept.items() if mask}

    def holders(self, chunk: int) -> list[int]:
        """Return the workers that hold a chunk in HBM."""
        return _workers(self._masks.get(chunk, 0) & self._hbm_bits)

    def residency(
        self, chunks: Sequence[int], block_tokens: int, workers: Sequence[int], speculation: Speculations
    ) -> Residency:
        """Return how many leading tokens each of ``workers`` holds, by the fastest tier of each chunk.

        While all that still hold everything do so in HBM, their tokens are counted once for all of them.
        """
        in_hbm = dict.fromkeys(workers, 0)
        below: dict[int, list[int]] = {}  # tokens by tier, of those workers that have any below HBM
        hbm_bits = self._hbm_bits
        alive = sum([1 << N_TIERS * worker for worker in workers])
        common = 0
        stored, sent = self._masks, speculation.masks
        for chunk in chunks:
            mask = stored.get(chunk, 0) | sent.get(chunk, 0)
            held = (mask | mask >> 1 | mask >> 2 | mask >> 3) & hbm_bits
            lost = alive & ~held
            if lost:
                for worker in _workers(lost):
                    in_hbm[worker] += common
                alive &= held
                if not alive:
                    break
            common += block_tokens
            for worker in _workers(alive & ~mask):
                nibble = mask >> N_TIERS * worker & 0b1111
                in_hbm[worker] -= block_tokens
                below.setdefault(worker, [0] * N_TIERS)[(nibble & -nibble).bit_length() - 1] += block_tokens
        for worker in _workers(alive):
            in_hbm[worker] += common
        return _residency(in_hbm, below)


def _residency(in_hbm: dict[int, int], below: dict[int, list[int]]) -> Residency:
    if len(in_hbm) <= SMALL_FLEET:
        nothing = [0] * N_TIERS
        return Residency.of_lists([[hbm, *below.get(worker, nothing)[1:]] for worker, hbm in in_hbm.items()])
    by_tier = np.zeros((len(in_hbm), N_TIERS), np.int64)
    by_tier[:, Tier.HBM] = list(in_hbm.values())
    if below:
        for row, worker in enumerate(in_hbm):
            if worker in below:
                by_tier[row, 1:] = below[worker][1:]
    return Residency(by_tier.sum(1), by_tier)


def _workers(bits: int) -> list[int]:
    workers = []
    while bits:
        low = bits & -bits
        workers.append((low.bit_length() - 1) // N_TIERS)
        bits ^= low
    return workers


@dataclass(slots=True, eq=False)
class Sent:
    """A prompt on its way to a worker."""

    worker: int
    chunks: Sequence[int]
    running: bool = False


class Speculations:
    """Prompts that count as held by the workers they were sent to, as ``gateway.index.speculation`` has them.

    Args:
        ttl_s: how long that holds once the worker has begun to answer.

    Attributes:
        masks: chunk → HBM bits of the workers that it was sent to.
    """

    def __init__(self, ttl_s: float) -> None:
        self.masks: dict[int, int] = {}
        self._ttl_s = ttl_s
        # worker → chunk → chunks after it and prompts that end there
        self._counts: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._running: defaultdict[int, Prefixes[int]] = defaultdict(Prefixes)
        self._settled: deque[tuple[float, Sent]] = deque()

    def add(self, worker: int, chunks: Sequence[int]) -> Sent:
        """A prompt is sent to a worker. A chunk stands for all before it: what two prompts share is counted once."""
        masks, counts, bit = self.masks, self._counts[worker], 1 << N_TIERS * worker + Tier.HBM
        for chunk in reversed(chunks):
            count = counts.get(chunk, 0)
            counts[chunk] = count + 1
            if count:
                break
            masks[chunk] = masks.get(chunk, 0) | bit
        return Sent(worker, chunks)

    def running(self, worker: int) -> Set[int]:
        """Return the chunks of the prompts that a worker is answering."""
        return self._running[worker].chunks()

    def run(self, sent: Sent) -> None:
        """The worker begins to answer: the prompt has its room in the cache, until it is taken back."""
        sent.running = True
        self._running[sent.worker].add(sent.chunks)

    def settle(self, sent: Sent, now: float) -> None:
        """The worker answers: soon its events say what it holds."""
        self._settled.append((now + self._ttl_s, sent))

    def advance(self, now: float) -> None:
        """Forget what was settled long enough ago."""
        while self._settled and self._settled[0][0] <= now:
            self.forget(self._settled.popleft()[1])

    def forget_worker(self, worker: int) -> None:
        """Take back what was sent to a worker and is settled: its cache is gone."""
        for _, sent in self._settled:
            if sent.worker == worker:
                self.forget(sent)

    def forget(self, sent: Sent) -> None:
        """Take a prompt back; twice is harmless."""
        if sent.running:
            sent.running = False
            self._running[sent.worker].remove(sent.chunks)
        masks, counts = self.masks, self._counts[sent.worker]
        bit = 1 << N_TIERS * sent.worker + Tier.HBM
        chunks, sent.chunks = sent.chunks, ()
        for chunk in reversed(chunks):
            count = counts[chunk]
            if count > 1:
                counts[chunk] = count - 1
                break
            del counts[chunk]
            if rest := masks[chunk] ^ bit:
                masks[chunk] = rest
            else:
                del masks[chunk]


class ApproximateCaches:
    """What workers without events probably hold: per worker an LRU model of what was dispatched to it.

    Args:
        index: where it is written.
        capacity: tokens that a worker's HBM holds.
        chunk_tokens: tokens per chunk.
    """

    def __init__(self, index: FleetIndex, capacity: int, chunk_tokens: int) -> None:
        self._index = index
        self._capacity = capacity
        self._chunk_tokens = chunk_tokens
        self._caches: dict[int, PrefixLru[int]] = {}

    def ended(self, worker: int, chunks: Sequence[int], tokens: int, running: Set[int]) -> None:
        """A worker has served a prompt of these whole chunks; prompt and answer have so many tokens.

        ``running``: chunks of the prompts that it is answering.
        """
        cache = self._caches.get(worker)
        if cache is None:
            cache = self._caches[worker] = PrefixLru(self._chunk_tokens)
        new, gone = cache.ended(chunks, tokens - len(chunks) * self._chunk_tokens, self._capacity, running)
        self._index.store(worker, new, Tier.HBM)
        self._index.remove(worker, [chunk for chunk, _ in gone], Tier.HBM)

    def answered(self, worker: int, running: Set[int]) -> None:
        """A worker has begun to answer one of the prompts of these chunks; what it took room from is gone."""
        cache = self._caches.get(worker)
        if cache is not None:
            self._index.remove(worker, [chunk for chunk, _ in cache.make_room(running)], Tier.HBM)

    def clear(self, worker: int) -> None:
        """The worker has begun anew."""
        self._caches.pop(worker, None)
