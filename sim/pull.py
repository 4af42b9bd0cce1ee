"""KV that workers fetch from one another, over a link that each of them has to the network."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from policies.pull import PullLinks
from sim.batch import BatchWorker
from sim.fleet import FleetSettings, PullSettings
from sim.tiers import Channel


def make_links(settings: FleetSettings) -> PullLinks | None:
    """Return what policies know of the links: all workers are of one group. None where nothing is fetched."""
    if settings.pull is None:
        return None
    n = settings.workers
    s_per_token = settings.speed.kv_bytes_per_token / settings.pull.bytes_per_s
    return PullLinks(np.zeros(n, np.int64), np.full(n, s_per_token), np.full(n, settings.pull.latency_s))


def held_and_given(workers: Sequence[BatchWorker], source: int, target: int, hashes: Sequence[int]) -> tuple[int, int]:
    """Return how many leading blocks of a prompt the target has in HBM, and how many the source."""
    return workers[target].held_blocks(hashes), workers[source].held_blocks(hashes)


class Pulls:
    """The links of all workers, one way in and one way out each; transfers over one way go one after the other.

    A fetch begins when its request reaches the worker and passes beside the requests that are there; with its last
    block it joins the queue. The source keeps what it gives.

    Args:
        settings: of the links.
        fleet: of the fleet.
        block_tokens: tokens per block.

    Attributes:
        count: fetches so far.
        moved_bytes: by all of them.
    """

    def __init__(self, settings: PullSettings, fleet: FleetSettings, block_tokens: int) -> None:
        self.count = 0
        self.moved_bytes = 0.0
        self._block_bytes = float(fleet.speed.kv_bytes_per_token * block_tokens)
        self._in, self._out = (
            [Channel(settings.bytes_per_s, settings.latency_s) for _ in range(fleet.workers)] for _ in range(2)
        )

    def fetch(
        self, workers: Sequence[BatchWorker], source: int, target: int, hashes: Sequence[int], now: float
    ) -> tuple[Sequence[int], float]:
        """Begin to fetch what one worker has in HBM of a prompt and another has not.

        Returns:
            The prompt's leading blocks that the target will hold, and when; at once where there is nothing to fetch.
        """
        held, given = held_and_given(workers, source, target, hashes)
        if given <= held:
            return hashes[:held], now
        size = (given - held) * self._block_bytes
        self.count += 1
        self.moved_bytes += size
        return hashes[:given], max(way.transfer(size, now) for way in (self._out[source], self._in[target]))

    def counters(self) -> dict[str, float]:
        """Return what has been moved."""
        return {"pulls": float(self.count), "pulled_bytes": self.moved_bytes}
