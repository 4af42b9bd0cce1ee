"""Which workers get requests: active probes, and ejection of those that fail.

A worker is ejected by ``failures`` consecutive bad probes or failed requests, and comes back by good probes. Two kinds
of evidence are told apart. A worker that refuses connections, or answers its probe with an error, is out whatever else
happens. One that is silent, or that fails requests, may only be suffering from too much load, and ejecting it would
hand that load to the others: *panic mode* keeps such workers in once too few of their peers are left. And where
nobody is left, the registry offers the ejected ones all the same.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from gateway.config import HealthConfig
from gateway.fleet.polling import Fetcher, FetchFailed, Poller
from gateway.fleet.registry import Registry, State, Worker

log = logging.getLogger("kvway.fleet")


@dataclass(slots=True)
class _Standing:
    """What is known of one worker. Times are on the clock of ``Health``."""

    failed_requests: int = 0  # in a row
    failed_probes: int = 0
    good_probes: int = 0  # in a row, since it was ejected
    hold_s: float = 0.0  # how long the last ejection lasts at least
    held_until: float = 0.0
    returned_at: float = float("-inf")


class Health:
    """Sets the state of a registry's workers.

    Args:
        registry: whose workers.
        fetch: asks them.
        config: thresholds and times.
        clock: monotonic seconds.

    Attributes:
        ejections: how often, by worker name and kind of failure, for workers that are still there.
    """

    def __init__(
        self, registry: Registry, fetch: Fetcher, config: HealthConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._registry = registry
        self._fetch = fetch
        self._config = config
        self._clock = clock
        self._standings: dict[Worker, _Standing] = {worker: _Standing() for worker in registry.workers.values()}
        registry.on_change(self._on_change)
        self._probes = Poller(registry, self._probe, "probe", config.interval_s)
        self.ejections: Counter[tuple[str, str]] = Counter()

    async def start(self) -> None:
        """Begin to probe."""
        await self._probes.start()

    async def close(self) -> None:
        """Stop probing."""
        await self._probes.close()

    def failed(self, worker: Worker, kind: str) -> None:
        """A request failed through a fault of the worker.

        Args:
            worker: which one.
            kind: ``connect``, ``reset``, ``header_timeout``, ``bad_status`` …; a label of metrics. Not for what is no
                fault: 4xx, 429, a 503 that says "try another", a client that left, a long generation.
        """
        standing = self._standings.get(worker)
        if standing is None:
            return
        standing.failed_requests += 1
        if standing.failed_requests >= self._config.failures and worker.state is State.READY:
            standing.failed_requests = 0  # in panic mode, count anew
            if self._can_be_spared(worker):
                self._eject(worker, standing, kind)

    def answered(self, worker: Worker, status: int) -> None:
        """A request was answered; of the statuses only those that say that something is broken are a fault."""
        if status < 500:
            self.succeeded(worker)
        elif status != 503:  # it is at its limit, and well
            self.failed(worker, "bad_status")

    def succeeded(self, worker: Worker) -> None:
        """A request was answered: the worker is alive, whatever its probes say."""
        standing = self._standings.get(worker)
        if standing is not None:
            standing.failed_requests = standing.failed_probes = 0

    async def _probe(self, worker: Worker) -> bool:
        try:
            status, _ = await self._fetch(worker, self._config.path, self._config.timeout_s)
        except FetchFailed as failure:
            kind = "probe_timeout" if failure.timed_out else "probe_connect"
        else:
            if 200 <= status < 300:
                self._probe_succeeded(worker)
                return True
            kind = "probe_status"
        self._probe_failed(worker, kind)
        return False

    def _probe_succeeded(self, worker: Worker) -> None:
        standing = self._standings.get(worker)
        if standing is None:
            return
        standing.failed_probes = 0
        if worker.state is State.STARTING:
            self._registry.set_state(worker, State.READY)
            log.info("worker is ready", extra={"worker": worker.name})
        elif worker.state is State.EJECTED:
            standing.good_probes += 1
            now = self._clock()
            if standing.good_probes >= self._config.successes and now >= standing.held_until:
                standing.failed_requests = 0
                standing.returned_at = now
                self._registry.set_state(worker, State.READY)
                log.info("worker is back", extra={"worker": worker.name})

    def _probe_failed(self, worker: Worker, kind: str) -> None:
        standing = self._standings.get(worker)
        if standing is None:
            return
        standing.good_probes = 0
        standing.failed_probes += 1
        if standing.failed_probes < self._config.failures:
            return
        if worker.state is State.STARTING or (
            worker.state is State.READY and (kind != "probe_timeout" or self._can_be_spared(worker))
        ):
            self._eject(worker, standing, kind)

    def _can_be_spared(self, worker: Worker) -> bool:
        """Whether enough workers of the same models would be left; if not, this is panic mode.

        Workers that prefill do not make up for those that decode, nor the other way round.
        """
        prefills = worker.config.role == "prefill"
        peers = [
            other
            for other in self._registry.workers.values()
            if other.state in (State.READY, State.EJECTED)
            and (other.config.role == "prefill") == prefills
            and not other.models.keys().isdisjoint(worker.models)
        ]
        left = sum(other.state is State.READY and other is not worker for other in peers)
        return left >= self._config.panic_share * len(peers)

    def _eject(self, worker: Worker, standing: _Standing, kind: str) -> None:
        now = self._clock()
        config = self._config
        soon = now - standing.returned_at < config.ejection_max_s
        standing.hold_s = min(2 * standing.hold_s if soon else config.interval_s, config.ejection_max_s)
        standing.held_until = now + standing.hold_s
        standing.good_probes = 0
        self.ejections[worker.name, kind] += 1
        self._registry.set_state(worker, State.EJECTED)
        log.warning("worker is ejected", extra={"worker": worker.name, "kind": kind, "hold_s": standing.hold_s})

    def _on_change(self, worker: Worker, joined: bool) -> None:
        if joined:
            self._standings[worker] = _Standing()
            return
        self._standings.pop(worker, None)
        for key in [key for key in self.ejections if key[0] == worker.name]:
            del self.ejections[key]
