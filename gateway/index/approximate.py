"""What workers without KV events probably hold, modelled from what was sent to them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from gateway.index.base import ChunkIndex
from policies.base import Tier

DEFAULT_CAPACITY_TOKENS: Final = 262_144
"""For workers whose capacity is not known: about what an 8B model leaves free on a 40 GB device."""


class ApproximateCache:
    """One LRU cache of chunks per slot, written into the index as if the worker had said so.

    As in the engines, a prompt's chunks grow old from its end: the last chunk goes first, and no chunk goes before
    those that need it.

    Args:
        index: where residency is looked up.
        is_ours: whether a slot's model is kept here; all of them by default.
    """

    def __init__(self, index: ChunkIndex, is_ours: Callable[[int], bool] = lambda _slot: True) -> None:
        self._index = index
        self._is_ours = is_ours
        self._caches: dict[int, OrderedDict[bytes, bytes]] = {}  # slot → chunk → root, least recent first

    async def sent(self, slot: int, chunks: Sequence[bytes], chunk_tokens: int, capacity_tokens: float = 0) -> None:
        """The worker in ``slot`` has prefilled a prompt.

        Args:
            slot: its slot; nothing happens for -1.
            chunks: the prompt's chunks, from its first.
            chunk_tokens: tokens per chunk.
            capacity_tokens: size of the worker's KV cache; 0 if unknown.
        """
        if slot < 0 or not chunks or not self._is_ours(slot):
            return
        root = chunks[0]
        cache = self._caches.setdefault(slot, OrderedDict())
        new = [chunk for chunk in chunks if chunk not in cache]
        cache.update(dict.fromkeys(new, root))
        make_latest = cache.move_to_end
        for chunk in reversed(chunks):
            make_latest(chunk)
        capacity = int((capacity_tokens or DEFAULT_CAPACITY_TOKENS) // chunk_tokens)
        evicted: dict[bytes, list[bytes]] = {}  # by root: the index takes one chain at a time
        while len(cache) > capacity:
            chunk, its_root = cache.popitem(last=False)
            evicted.setdefault(its_root, []).append(chunk)
        if new:
            await self._index.store(slot, new, Tier.HBM, root)
        for its_root, gone in evicted.items():
            await self._index.remove(slot, gone, None, its_root)

    def forget(self, slot: int) -> None:
        """The slot has begun anew: it holds nothing."""
        self._caches.pop(slot, None)
