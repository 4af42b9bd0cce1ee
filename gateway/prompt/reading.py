"""What became of a conversation's texts: where its next request has the same ones, nothing is looked up again."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from gateway.prompt.chains import Chains, Link
from gateway.prompt.plan import Pieces
from gateway.prompt.segments import Segment, SegmentCache
from policies.chunks import TOKEN_BYTES, ChunkHasher


class Reading:
    """What became of a conversation's texts.

    Attributes:
        cache: where its segments are from.
        root: of its chain.
        texts: of its segments.
        parts: packed ids of each segment.
        ends: how many bytes of ids there are up to the end of each segment.
        hashes: of all whole chunks.
    """

    __slots__ = ("cache", "ends", "hashes", "parts", "root", "texts")

    def __init__(self, cache: SegmentCache, root: Link) -> None:
        self.cache = cache
        self.root = root
        self.texts: Sequence[Pieces] = []
        self.parts: list[bytes] = []
        self.ends: list[int] = []
        self.hashes: list[bytes] = []

    @property
    def tokens(self) -> int:
        """How many tokens there are."""
        return self.ends[-1] // TOKEN_BYTES if self.ends else 0

    def common(self, texts: Sequence[Pieces]) -> int:
        """Return how many leading texts are the same."""
        known, most = self.texts, min(len(self.texts), len(texts))
        # mostly all but the last message, and what asks for the answer
        start = most - 2 if most > 1 and known[: most - 2] == texts[: most - 2] else 0
        return next((at for at in range(start, most) if known[at] != texts[at]), most)

    async def going_on(self, texts: Sequence[Pieces], n_common: int, added: list[Segment], chains: Chains) -> Reading:
        """Return the reading of ``texts``, the first ``n_common`` of which are ours and the others became ``added``.

        Suspends where there are very many and none is ours.
        """
        reading = Reading(self.cache, self.root)
        reading.texts = texts
        reading.ends = ends = self.ends[:n_common]
        end = ends[-1] if ends else 0
        new = [segment.ids for segment in added]
        for ids in new:
            end += len(ids)
            ends.append(end)
        reading.parts = self.parts[:n_common] + new
        if n_common:
            reading.hashes = self._hashes_on(reading, n_common, chains.hasher)
        else:
            reading.hashes = await chains.hashes(self.root, added)
        return reading

    def _hashes_on(self, reading: Reading, n_common: int, hasher: ChunkHasher) -> list[bytes]:
        """Return the hashes of ``reading``, whose first ``n_common`` segments are ours."""
        hashes = self.hashes[: self.ends[n_common - 1] // hasher.chunk_bytes]
        hashed = len(hashes) * hasher.chunk_bytes
        first = bisect_right(reading.ends, hashed)  # of the segments, the first that ends after that
        rest = reading.parts[first:]
        if rest:
            start = reading.ends[first - 1] if first else 0
            rest[0] = rest[0][hashed - start :]
        hashes += hasher.chain(hashes[-1] if hashes else self.root.last, b"".join(rest))
        return hashes
