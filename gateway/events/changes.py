"""What has changed in a worker's cache, in terms of chunks."""

from __future__ import annotations

from typing import NamedTuple

from policies.base import Tier


class ChunkRun(NamedTuple):
    """Chunks whose chains begin with the same chunk, ``root``."""

    tier: Tier
    root: bytes
    chunks: list[bytes]


class Changes(NamedTuple):
    """What to do to the index, in this order: clear, store, remove."""

    cleared: bool
    stored: list[ChunkRun]
    removed: list[ChunkRun]


def runs_of(pending: dict[Tier, dict[bytes, bytes]]) -> list[ChunkRun]:
    """Group chunks by tier and chain, and empty ``pending``."""
    runs = []
    for tier, chunks in pending.items():
        chains: dict[bytes, list[bytes]] = {}
        for chunk, root in chunks.items():
            chains.setdefault(root, []).append(chunk)
        runs += [ChunkRun(tier, root, members) for root, members in chains.items()]
        chunks.clear()
    return runs
