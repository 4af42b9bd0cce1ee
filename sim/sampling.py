"""Samples of every worker's load, taken at equal intervals of simulated time, and totals at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sim.batch import BatchWorker
from sim.fleet import MOST_SAMPLES
from sim.router import Router


class Samples:
    """Rows of what ``sim.results.SimResult`` has per sample and worker.

    Args:
        workers: size of the fleet.
        interval_s: simulated seconds between two samples.

    Attributes:
        due_at: when the next one is due.
    """

    def __init__(self, workers: int, interval_s: float) -> None:
        self.due_at = 0.0
        self._workers = workers
        self._interval_s = interval_s
        self._taken = 0
        self._rows: dict[str, list[Any]] = {"running": [], "waiting": [], "pending_tokens": [], "kv_usage": []}

    def check(self, until: float) -> None:
        """Refuse to fill memory with samples: ValueError where there would be too many until then."""
        if until / self._interval_s * self._workers > MOST_SAMPLES:
            raise ValueError(
                f"the simulation comes to {until:.3g} s, too long for samples of {self._workers} workers every "
                f"{self._interval_s:g} s; look for a time that is too long, or raise sample_s"
            )

    def take(self, workers: Sequence[BatchWorker], routers: Sequence[Router]) -> None:
        """Take the sample that is due."""
        rows = self._rows
        rows["running"].append([len(worker.running) for worker in workers])
        rows["waiting"].append([len(worker.waiting) for worker in workers])
        rows["kv_usage"].append([worker.cache.usage for worker in workers])
        rows["pending_tokens"].append(sum(router.fleet.pending_prefill_tokens for router in routers))
        self._taken += 1
        self.due_at = self._taken * self._interval_s

    def arrays(self) -> dict[str, Any]:
        """Return the fields of a ``SimResult``, ``[samples]`` and ``[samples, workers]``."""
        shape = (self._taken, self._workers)
        return {
            "sample_s": np.arange(self._taken) * self._interval_s,
            "running": np.array(self._rows["running"], np.int64).reshape(shape),
            "waiting": np.array(self._rows["waiting"], np.int64).reshape(shape),
            "pending_tokens": np.array(self._rows["pending_tokens"], float).reshape(shape),
            "kv_usage": np.array(self._rows["kv_usage"], float).reshape(shape),
        }


def totals(workers: Sequence[BatchWorker]) -> dict[str, float]:
    """Return what has been counted over all workers, and by tier what its links have moved and refused to copy."""
    counters = {
        "preemptions": float(sum(worker.preemptions for worker in workers)),
        "evictions": float(sum(worker.evictions for worker in workers)),
    }
    stores = {id(store): store for worker in workers if worker.tiers is not None for store in worker.tiers.stores}
    for store in stores.values():  # each shared one once
        moved = {
            "read_bytes": store.read.moved_bytes,
            "written_bytes": store.write.moved_bytes,
            "refused_blocks": float(store.refused_blocks),
        }
        for name, amount in moved.items():
            key = f"{store.settings.name}_{name}"
            counters[key] = counters.get(key, 0.0) + amount
    return counters
