"""What workers without KV events probably hold, modelled from what was sent to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from gateway.index.base import ChunkIndex
from policies.base import Tier
from policies.recency import PrefixLru

DEFAULT_CAPACITY_TOKENS: Final = 262_144
"""For workers whose capacity is not known: about what an 8B model leaves free on a 40 GB device."""


class ApproximateCache:
    """One model of a cache per slot, written into the index as if the worker had said so.

    Args:
        index: where residency is looked up.
        is_ours: whether a slot's model is kept here; all of them by default.
    """

    def __init__(self, index: ChunkIndex, is_ours: Callable[[int], bool] = lambda _slot: True) -> None:
        self._index = index
        self._is_ours = is_ours
        self._caches: dict[int, PrefixLru[bytes]] = {}
        self._crowded: set[int] = set()  # slots that have begun to answer since `make_room`

    @property
    def is_crowded(self) -> bool:
        """Whether prompts have begun to be answered that others had to make room for."""
        return bool(self._crowded)

    def answered(self, slot: int) -> None:
        """The worker in ``slot`` has begun to answer a prompt, which has its room in the cache now."""
        if slot in self._caches:
            self._crowded.add(slot)

    async def make_room(self) -> None:
        """Forget what had to go for prompts that are being answered."""
        while self._crowded:
            slot = self._crowded.pop()
            gone = self._caches[slot].make_room(self._index.running(slot))
            if gone:
                await self._evict(slot, gone)

    async def sent(
        self, slot: int, chunks: Sequence[bytes], chunk_tokens: int, capacity_tokens: float = 0, tokens: int = 0
    ) -> None:
        """The worker in ``slot`` has served a prompt.

        Args:
            slot: its slot; nothing happens for -1.
            chunks: the prompt's chunks, from its first.
            chunk_tokens: tokens per chunk.
            capacity_tokens: size of the worker's KV cache; 0 if unknown.
            tokens: length of prompt and answer together; 0 if unknown.
        """
        if slot < 0 or not chunks or not self._is_ours(slot):
            return
        cache = self._caches.get(slot)
        if cache is None:
            self._forget_all_but_ours()
            cache = self._caches[slot] = PrefixLru(chunk_tokens)
        capacity = int(capacity_tokens or DEFAULT_CAPACITY_TOKENS)
        running = self._index.running(slot)
        new, gone = cache.ended(chunks, tokens - len(chunks) * chunk_tokens, capacity, running)
        if new:
            await self._index.store(slot, new, Tier.HBM, chunks[0])
        if gone:
            await self._evict(slot, gone)

    def _forget_all_but_ours(self) -> None:
        """Of a slot that was given back, nobody tells; where slots are shared, the same may not be ours again."""
        for slot in [slot for slot in self._caches if not self._is_ours(slot)]:
            self.forget(slot)

    async def _evict(self, slot: int, gone: Sequence[tuple[bytes, bytes]]) -> None:
        evicted: dict[bytes, list[bytes]] = {}  # by root: the index takes one chain at a time
        for chunk, root in gone:
            evicted.setdefault(root, []).append(chunk)
        for root, chain in evicted.items():
            await self._index.remove(slot, chain, None, root)

    def tokens(self, slot: int) -> int | None:
        """Return the tokens that the worker in ``slot`` probably holds; None where it has no model here."""
        cache = self._caches.get(slot)
        return None if cache is None else cache.tokens

    def forget(self, slot: int) -> None:
        """The slot has begun anew: it holds nothing."""
        self._caches.pop(slot, None)
        self._crowded.discard(slot)
