"""Hot prefixes, copied to further workers before these are asked for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from policies.replication import PrefixUses, new_homes
from sim.fleet import FleetSettings, ReplicationSettings
from sim.index import FleetIndex
from sim.requests import SimRequest
from sim.tiers import Channel


class Replication:
    """Counts which prefixes requests share, and plans the copies as the gateway does; every worker is a domain.

    Args:
        settings: how many copies of what.
        fleet: of the fleet.
        block_tokens: tokens per block.
    """

    def __init__(self, settings: ReplicationSettings, fleet: FleetSettings, block_tokens: int) -> None:
        self.settings = settings
        self.link = Channel(settings.bytes_per_s, 0.0)
        self._block_bytes = float(fleet.speed.kv_bytes_per_token * block_tokens)
        self._uses: PrefixUses[int] = PrefixUses()

    def count(self, request: SimRequest, block_tokens: int) -> None:
        """A request arrives."""
        self._uses.count(request.chunks[: request.prompt_tokens // block_tokens])

    def copies(self, index: FleetIndex, loads: dict[int, float]) -> Iterator[tuple[int, Sequence[int]]]:
        """Yield workers and the hot prefixes that they should get; counting begins anew.

        Args:
            index: who holds what.
            loads: uncached tokens queued at each worker that is up; the least loaded get the copies.
        """
        workers, costs = list(loads), list(loads.values())
        row_of = {worker: row for row, worker in enumerate(workers)}
        for prefix in self._uses.take(self.settings.uses):
            holders = [row_of[worker] for worker in index.holders(prefix.chunks[-1])]
            for row in new_homes(holders, workers, costs, self.settings.copies):
                yield workers[row], prefix.chunks

    def arrives_at(self, prefix: Sequence[int], now: float) -> float:
        """Copy a prefix; return when it is there."""
        return self.link.transfer(len(prefix) * self._block_bytes, now)

    def counters(self) -> dict[str, float]:
        """Return what has been moved."""
        return {"replicated_bytes": self.link.moved_bytes}
