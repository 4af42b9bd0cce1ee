"""How fast workers really fetch KV from one another, learned from requests that were placed to do so.

Nobody says when KV has arrived: it is what the time to the first token exceeds the prefill of the rest by. That is the
transfer only where nothing else was in the way, so a fetch teaches something only if

- its request was the only one in prefill on its worker, from its start to its first token, for all replicas,
- the engine reports about as many cached tokens as were expected: it has fetched, and all of it,
- the transfer, as seen or as expected, takes longer than the prefill of the rest, whose prediction has errors of its
  own.

What is learned is one scale per worker for the configured ``pull.gb_s``, towards the worker: engines that find a source
by themselves do not show which one it was. Workers not yet seen have the mean of their group. Without fetches the scale
goes back to 1: a link that was slow for a while, so that nobody fetches over it any more, gets another chance.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from statistics import fmean
from time import monotonic
from typing import Final

from gateway.fleet.ledger import Fetch
from gateway.fleet.registry import Registry, Worker, configured_fetch_s
from gateway.observe.observer import Observer

_SLACK: Final = 0.1  # share of the tokens by which a report may differ from what was expected
_LEAST_GAIN: Final = 0.2  # a worker's first fetches count for more
_MAX_STEP: Final = math.log(2.0)  # one fetch is no further off than this, however odd it is
_MAX_LOG_SCALE: Final = math.log(64.0)
_FADE_EVERY_S: Final = 60.0
_FADED: Final = 0.5**0.1  # of the scale's logarithm left after that: half in ten minutes


@dataclass(slots=True)
class _Learned:
    """What is known of one worker; ``log_scale`` is the logarithm of by how much longer it takes than configured."""

    log_scale: float = 0.0
    fetches: int = 0
    seen_at: float = 0.0


class FetchRates:
    """Corrects what the registry says that fetching takes.

    Args:
        registry: the workers.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._learned: dict[Worker, _Learned] = {}
        self._fade_at = 0.0
        self._outcomes: Counter[tuple[str, str]] = Counter()
        self._measured: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._bytes: defaultdict[str, float] = defaultdict(float)
        registry.on_change(self._on_change)

    def expose(self, observer: Observer) -> None:
        """Export what was fetched, and how fast."""
        about = "Requests placed to fetch a prefix: fetched, computed instead (in part, too), or not reported."
        observer.counter("kvway_fetches_total", about, lambda: self._outcomes, ("worker", "outcome"))
        for name, about, counted in (
            ("measured", "Fetches whose transfer could be told from other work on the worker.", self._measured),
            ("seconds", "Seconds that these transfers took.", self._seconds),
            ("bytes", "KV cache that they moved, by the configured kv_bytes_per_token.", self._bytes),
        ):
            observer.counter(f"kvway_fetch_{name}_total", about, lambda counted=counted: counted, ("worker",))  # type: ignore[misc]
        about = "Bandwidth by which fetches to a worker are weighed: as configured, corrected by what was measured."
        observer.gauge("kvway_fetch_bytes_per_second", about, self._rates, ("worker",))

    def bytes_per_s(self, worker: Worker) -> float:
        """Return the bandwidth at which a worker is taken to fetch."""
        return worker.config.tiers.kv_bytes_per_token / worker.fetch_s

    def ended(self, fetch: Fetch, cached_tokens: int | None, now: float | None = None) -> None:
        """A request that was to fetch is over.

        Args:
            fetch: what it was to fetch.
            cached_tokens: of its prompt, as its engine reports; None where it does not.
            now: monotonic seconds.
        """
        worker = fetch.worker
        if worker.row < 0:
            return
        if cached_tokens is None:
            self._outcomes[worker.name, "not_reported"] += 1
        elif abs(cached_tokens - fetch.hit_tokens) > _SLACK * fetch.tokens:
            self._outcomes[worker.name, "computed" if cached_tokens < fetch.hit_tokens else "fetched"] += 1
        else:
            self._outcomes[worker.name, "fetched"] += 1
            if fetch.took_s:
                self._measure(fetch, fetch.took_s - fetch.rest_s, monotonic() if now is None else now)

    def fade(self, now: float) -> None:
        """Let what was not seen for long be forgotten; to be called before each decision where somebody could fetch."""
        if now < self._fade_at:
            return
        self._fade_at = now + _FADE_EVERY_S
        for worker, learned in self._learned.items():
            if now - learned.seen_at >= _FADE_EVERY_S:
                learned.log_scale *= _FADED
                self._write(worker, learned.log_scale)
        for group in {worker.config.pull.group for worker in self._learned}:
            self._presume(group)

    def _measure(self, fetch: Fetch, seconds: float, now: float) -> None:
        worker, size = fetch.worker, fetch.tokens * fetch.worker.config.tiers.kv_bytes_per_token
        latency_s = worker.config.pull.latency_s
        if max(seconds, fetch.seconds) < fetch.rest_s:
            return
        self._measured[worker.name] += 1
        self._seconds[worker.name] += max(0.0, seconds)
        self._bytes[worker.name] += size
        learned = self._learned.get(worker)
        if learned is None:
            learned = self._learned[worker] = _Learned(math.log(worker.fetch_s / configured_fetch_s(worker.config)))
        learned.fetches += 1
        learned.seen_at = now
        error = -_MAX_STEP  # it took no time at all: the link is faster than can be told
        if seconds > latency_s:
            error = math.log((seconds - latency_s) / (fetch.tokens * worker.fetch_s))
        step = max(_LEAST_GAIN, 1 / learned.fetches) * min(_MAX_STEP, max(-_MAX_STEP, error))
        learned.log_scale = min(_MAX_LOG_SCALE, max(-_MAX_LOG_SCALE, learned.log_scale + step))
        self._write(worker, learned.log_scale)
        self._presume(worker.config.pull.group)

    def _presume(self, group: str) -> None:
        """Give the workers of a group that have not been seen the mean of those that have; as configured if none."""
        seen = [each.log_scale for worker, each in self._learned.items() if worker.config.pull.group == group]
        mean = fmean(seen) if seen else 0.0
        for worker in self._registry.workers.values():
            if worker.config.pull.group == group and worker not in self._learned:
                self._write(worker, mean)

    def _write(self, worker: Worker, log_scale: float) -> None:
        self._registry.set_fetch_s(worker, configured_fetch_s(worker.config) * math.exp(log_scale))

    def _rates(self) -> dict[str, float]:
        workers = self._registry.workers.values()
        return {worker.name: self.bytes_per_s(worker) for worker in workers if worker.config.pull.group}

    def _on_change(self, worker: Worker, joined: bool) -> None:
        group = worker.config.pull.group
        if joined:
            if group and self._learned:
                self._presume(group)
            return
        if self._learned.pop(worker, None) is not None:
            self._presume(group)
        for counted in (self._measured, self._seconds, self._bytes):
            counted.pop(worker.name, None)
        for key in [key for key in self._outcomes if key[0] == worker.name]:
            del self._outcomes[key]
