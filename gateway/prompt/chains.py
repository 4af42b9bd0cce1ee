"""Chunk hashes of token sequences that begin alike: a chain is extended, not recomputed.

A ``Link`` is the state of a chain after one segment: its last hash, and the tokens after the last whole chunk. Links
are found by the link before them and the segment, both named by numbers that are never used again, so the hashes of
one prefix cannot be taken for those of another. Links are kept of segments that were met before: most new ones never
come again, and to keep a link takes longer than to hash the tokens of a message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import count
from typing import Final

import msgspec

from gateway.prompt.cache import ByteCache
from gateway.prompt.segments import SEGMENTS_AT_ONCE, Segment
from policies.chunks import DIGEST_BYTES, ChunkHasher

_LINK_OVERHEAD: Final = 400  # bytes of Python objects per link
_HASH_OVERHEAD: Final = 50  # and per hash
_BYTES_PER_CHARACTER: Final = 4  # of a text, at most


class Link(msgspec.Struct, gc=False):
    """State of a chain. As there are many, the garbage collector is kept from walking them.

    Attributes:
        last: hash of the last whole chunk, or the chain's root.
        hashes: chunks that were completed by the segment of this link.
        tail: packed tokens after the last whole chunk.
        cost: bytes of memory that it takes.
        used: see ``cache.Cached``.
        number: names this link; never used for another one.
    """

    last: bytes
    hashes: tuple[bytes, ...] = ()
    tail: bytes = b""
    cost: int = _LINK_OVERHEAD
    used: bool = False
    number: int = msgspec.field(default_factory=count().__next__)


class Chains:
    """Chains of segments.

    Args:
        hasher: hashes chunks.
        max_bytes: bound on the links that are kept.
    """

    def __init__(self, hasher: ChunkHasher, max_bytes: int) -> None:
        self.hasher = hasher
        self._links: ByteCache[tuple[int, int], Link] = ByteCache(max_bytes)
        self._roots: ByteCache[tuple[str, str | None, str | None], Link] = ByteCache(max_bytes // 16)

    def root(self, model: str, lora: str | None, cache_salt: str | None) -> Link:
        """Return the beginning of all chains of a model, adapter and salt."""
        key = (model, lora, cache_salt)
        link = self._roots.get(key)
        if link is None:
            names = sum([len(name) for name in key if name])  # clients choose their salts
            link = Link(self.hasher.root(model, lora, cache_salt), cost=_LINK_OVERHEAD + _BYTES_PER_CHARACTER * names)
            self._roots.put(key, link)
        return link

    async def hashes(self, root: Link, segments: Sequence[Segment]) -> list[bytes]:
        """Return the hashes of all whole chunks of the segments' tokens; suspends where there are very many."""
        hashes: list[bytes] = []
        if len(segments) <= SEGMENTS_AT_ONCE:
            self.follow(root, segments, hashes)
            return hashes
        link = root
        for start in range(0, len(segments), SEGMENTS_AT_ONCE):
            link = self.follow(link, segments[start : start + SEGMENTS_AT_ONCE], hashes)
            await asyncio.sleep(0)
        return hashes

    def follow(self, link: Link, segments: Sequence[Segment], hashes: list[bytes]) -> Link:
        """Return the link behind the segments, and append their hashes to ``hashes``."""
        for number, segment in enumerate(segments):
            if not segment.used:  # new, so that no link leads on from here
                link = self._extend(link, b"".join([each.ids for each in segments[number:]]))
                hashes += link.hashes
                return link
            link = self._next(link, segment)
            hashes += link.hashes
        return link

    def _next(self, link: Link, segment: Segment) -> Link:
        key = (link.number, segment.number)
        following = self._links.entries.get(key)
        if following is None:
            following = self._extend(link, segment.ids)
            self._links.put(key, following)
        else:
            following.used = True
        return following

    def _extend(self, link: Link, ids: bytes) -> Link:
        tokens = link.tail + ids
        hashes = self.hasher.chain(link.last, tokens)
        if not hashes:
            return Link(link.last, (), tokens, _LINK_OVERHEAD + len(tokens))
        tail = tokens[len(hashes) * self.hasher.chunk_bytes :]
        cost = _LINK_OVERHEAD + len(hashes) * (DIGEST_BYTES + _HASH_OVERHEAD) + len(tail)
        return Link(hashes[-1], tuple(hashes), tail, cost)
