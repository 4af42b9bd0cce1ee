"""Prompts as chunk hashes, and what an index says of them."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.index.base import ChunkIndex
from policies.chunks import ChunkHasher

_HASHER = ChunkHasher(4)


def prompt(n: int, seed: int = 0) -> list[bytes]:
    """Return ``n`` chunks of one chain; another chain for each ``seed``."""
    return _HASHER.chain(_HASHER.root("model", cache_salt=str(seed)), bytes(16 * n))


async def hits(index: ChunkIndex, chunks: Sequence[bytes], slots: Sequence[int]) -> list[int]:
    """Return the leading run of each slot, in chunks."""
    residency = await index.residency(chunks, slots, 1)
    runs: list[int] = residency.hit_tokens.tolist()
    assert residency.by_tier.sum(1).tolist() == runs
    return runs
