"""Hot prefixes, copied to further workers before these are asked for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from sim.fleet import FleetSettings, ReplicationSettings
from sim.index import FleetIndex
from sim.requests import SimRequest
from sim.tiers import Channel


class Replication:
    """Counts which prefixes requests share, and plans the copies.

    Args:
        settings: how many copies of what.
        fleet: of the fleet.
        block_tokens: tokens per block.
    """

    def __init__(self, settings: ReplicationSettings, fleet: FleetSettings, block_tokens: int) -> None:
        self.settings = settings
        self.link = Channel(settings.bytes_per_s, 0.0)
        self._block_bytes = float(fleet.speed.kv_bytes_per_token * block_tokens)
        self._uses: Counter[int] = Counter()
        self._seen: dict[int, Sequence[int]] = {}  # last block of each prompt → the prompt

    def count(self, request: SimRequest, block_tokens: int) -> None:
        """A request arrives."""
        chunks = request.chunks[: request.prompt_tokens // block_tokens]
        if chunks:
            self._uses.update(chunks)
            self._seen[chunks[-1]] = chunks

    def copies(self, index: FleetIndex, loads: dict[int, float]) -> Iterator[tuple[int, Sequence[int]]]:
        """Yield workers and the hot prefixes that they should get; counting begins anew.

        Args:
            index: who holds what.
            loads: uncached tokens queued at each worker that is up; the least loaded get the copies.
        """
        prefixes: dict[int, Sequence[int]] = {}
        for chunks in self._seen.values():
            hot = next((at for at, chunk in enumerate(chunks) if self._uses[chunk] < self.settings.uses), len(chunks))
            if hot:
                prefixes[chunks[hot - 1]] = chunks[:hot]
        for last, prefix in prefixes.items():
            holders = index.holders(last)
            missing = self.settings.copies - len(holders)
            if not holders or missing <= 0:
                continue
            others = sorted((load, worker) for worker, load in loads.items() if worker not in holders)
            for _, worker in others[:missing]:
                yield worker, prefix
        self._uses.clear()
        self._seen.clear()

    def arrives_at(self, prefix: Sequence[int], now: float) -> float:
        """Copy a prefix; return when it is there."""
        return self.link.transfer(len(prefix) * self._block_bytes, now)
