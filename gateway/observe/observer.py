"""Counts and logs what happens to requests. ``finish`` is on the request path: a few look-ups and one line."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import BinaryIO, Final

from gateway import __version__
from gateway.config import LogConfig
from gateway.fleet.registry import Registry, Worker
from gateway.observe.drift import Accuracy
from gateway.observe.exposition import Exposition, Histogram, Values, family, label_text
from gateway.observe.logs import RequestLog
from gateway.observe.record import RequestRecord

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_DECISION_SECONDS: Final = (5e-05, 1e-04, 2e-04, 5e-04, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)
_MAX_SERIES: Final = 10_000  # pairs of model and worker; beyond, they are counted together as "other"
_OTHER: Final = ("other", "other")
_MAX_REASONS: Final = 100  # of decisions; a package's policy may make up any number of them


class _Series:
    """What is counted for one model on one worker."""

    __slots__ = (
        "cached_tokens",
        "checked",
        "duration",
        "labels",
        "outcomes",
        "output_tokens",
        "overpredicted",
        "predicted_tokens",
        "prompt_tokens",
        "ttft",
        "underpredicted",
    )

    def __init__(self, model: str, worker: str) -> None:
        self.labels = label_text(model=model, worker=worker)
        self.outcomes: dict[tuple[str, int], int] = {}
        self.ttft = Histogram(_SECONDS)
        self.duration = Histogram(_SECONDS)
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.predicted_tokens = 0
        self.cached_tokens = 0
        self.checked = 0
        self.overpredicted = 0
        self.underpredicted = 0


_HISTOGRAMS: Final = (
    ("kvway_ttft_seconds", "From request to first byte, streams only.", "ttft"),
    ("kvway_request_duration_seconds", "From request to end.", "duration"),
)
_COUNTERS: Final = (
    ("kvway_prompt_tokens_total", "Prompt tokens of routed requests.", "prompt_tokens"),
    ("kvway_output_tokens_total", "Output tokens, where the engine reported them.", "output_tokens"),
    ("kvway_predicted_hit_tokens_total", "Prompt tokens expected in the worker's cache.", "predicted_tokens"),
    ("kvway_cached_tokens_total", "Prompt tokens found in the cache, where the engine reported them.", "cached_tokens"),
    ("kvway_checked_requests_total", "Requests whose prediction could be held against the engine's report.", "checked"),
    ("kvway_overpredicted_tokens_total", "Predicted minus reported cached tokens, where positive.", "overpredicted"),
    ("kvway_underpredicted_tokens_total", "Reported minus predicted cached tokens, where positive.", "underpredicted"),
)


class Observer:
    """Metrics and the request log.

    A worker's series go when it leaves the registry, so that pods that come and go do not pile up.

    Args:
        registry: whose workers may appear as labels.
        config: whether and how requests are logged.
        stream: where request lines go; default standard error.

    Attributes:
        on_finish: each is given every request that is over, after it was counted.
    """

    def __init__(self, registry: Registry, config: LogConfig, stream: BinaryIO | None = None) -> None:
        self._registry = registry
        self._log = RequestLog(config.format, stream) if config.requests else None
        self._series: dict[tuple[str, str], _Series] = {}
        self._decision = Histogram(_DECISION_SECONDS)
        self._decisions: Counter[str] = Counter()
        self._retries: Counter[tuple[str, str]] = Counter()
        self._resumptions: Counter[tuple[str, str]] = Counter()
        self._exposition = Exposition()
        self.on_finish: list[Callable[[RequestRecord], None]] = []
        registry.on_change(self._on_change)
        build = (__version__, platform.python_version())
        self.gauge("kvway_build_info", "Version of kvway and of Python.", lambda: {build: 1}, ("version", "python"))
        self.counter(
            "kvway_decisions_total", "Routed requests by the policy's reason.", lambda: self._decisions, ("reason",)
        )
        self.counter(
            "kvway_retries_total",
            "Attempts that failed on a worker and were made elsewhere.",
            lambda: self._retries,
            ("worker", "kind"),
        )
        self.counter(
            "kvway_resumptions_total",
            "Streams cut mid-way: resumed or failed, by what cut them; refused, by why they could not be continued.",
            lambda: self._resumptions,
            ("outcome", "reason"),
        )

    def finish(self, record: RequestRecord) -> None:
        """Count and log a request that is over."""
        series = self._series.get((record.model, record.worker)) or self._open(record)
        outcome = (record.outcome, record.status)
        series.outcomes[outcome] = series.outcomes.get(outcome, 0) + 1
        series.duration.observe(record.ended_at - record.received_at)
        if record.stream and record.first_byte_at:
            series.ttft.observe(record.first_byte_at - record.received_at)
        if record.routed_at:
            self._decision.observe(record.routed_at - record.received_at)
            if record.worker:
                known = record.reason in self._decisions or len(self._decisions) < _MAX_REASONS
                self._decisions[record.reason if known else "other"] += 1
        predicted = record.predicted_hit_tokens
        series.prompt_tokens += record.prompt_tokens
        series.predicted_tokens += predicted
        if record.output_tokens is not None:
            series.output_tokens += record.output_tokens
        if record.cached_tokens is not None:
            series.cached_tokens += record.cached_tokens
            series.checked += 1
            if predicted > record.cached_tokens:
                series.overpredicted += predicted - record.cached_tokens
            else:
                series.underpredicted += record.cached_tokens - predicted
        if self._log is not None:
            self._log.write(record)
        for take in self.on_finish:
            take(record)

    def accuracy(self) -> dict[str, Accuracy]:
        """Return how predictions compared with reports since the start, by worker."""
        sums: dict[str, Accuracy] = {}
        for (_, worker), each in self._series.items():
            counts = (each.checked, each.cached_tokens, each.overpredicted, each.underpredicted)
            sums[worker] = Accuracy(*map(sum, zip(sums.get(worker, Accuracy()), counts, strict=True)))
        return sums

    def predicted_hits(self) -> dict[str, tuple[int, int]]:
        """Return prompt tokens since the start, and how many of them were expected in the cache, by worker."""
        sums: dict[str, tuple[int, int]] = {}
        for (_, worker), each in self._series.items():
            prompt, predicted = sums.get(worker, (0, 0))
            sums[worker] = prompt + each.prompt_tokens, predicted + each.predicted_tokens
        return sums

    def retried(self, worker: str, kind: str) -> None:
        """Count an attempt that failed on ``worker`` and is made elsewhere; ``kind`` as in ``Health.failed``."""
        self._retries[worker, kind] += 1

    def resumption(self, outcome: str, reason: str) -> None:
        """Count what became of a stream that its worker cut: ``resumed``, ``failed`` or ``refused``."""
        self._resumptions[outcome, reason] += 1

    def gauge(self, name: str, about: str, read: Callable[[], Values], labels: Sequence[str] = ()) -> None:
        """Expose a gauge that ``read`` returns at each scrape (see ``Exposition.add``)."""
        self._exposition.add("gauge", name, about, read, labels)

    def counter(self, name: str, about: str, read: Callable[[], Values], labels: Sequence[str] = ()) -> None:
        """Expose a counter that someone else keeps; its name ends in ``_total`` (see ``Exposition.add``)."""
        self._exposition.add("counter", name, about, read, labels)

    def render(self) -> bytes:
        """Return all metrics in the Prometheus text format (``exposition.CONTENT_TYPE``)."""
        return self._exposition.render(self._families())

    def _open(self, record: RequestRecord) -> _Series:
        key = (record.model, record.worker)
        if len(self._series) >= _MAX_SERIES:
            key = _OTHER
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = _Series(*key)
        return series

    def _families(self) -> Iterable[str]:
        series = self._series.values()
        yield from family(
            "counter",
            "kvway_requests_total",
            "Requests by how they ended; client_gone: the client left first.",
            (
                f'kvway_requests_total{{{each.labels},outcome="{outcome}",status="{status}"}} {count}'
                for each in series
                for (outcome, status), count in each.outcomes.items()
            ),
        )
        for name, about, attribute in _HISTOGRAMS:
            buckets = chain.from_iterable(getattr(each, attribute).samples(name, each.labels) for each in series)
            yield from family("histogram", name, about, buckets)
        for name, about, attribute in _COUNTERS:
            totals = (f"{name}{{{each.labels}}} {getattr(each, attribute)}" for each in series)
            yield from family("counter", name, about, totals)
        name = "kvway_decision_seconds"
        yield from family("histogram", name, "From request to routing decision.", self._decision.samples(name, ""))

    def _on_change(self, worker: Worker, joined: bool) -> None:
        if joined:
            return
        # All that are gone, not this one alone: a request may have ended after its worker left.
        present = {"", _OTHER[1], *self._registry.workers}
        self._series = {pair: counted for pair, counted in self._series.items() if pair[1] in present}
        self._retries = Counter({pair: count for pair, count in self._retries.items() if pair[0] in present})
