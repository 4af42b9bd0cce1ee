"""How the sources of workers are doing, as metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gateway.fleet.discovery.discovery import Discovery
from gateway.fleet.discovery.found import Reporter
from gateway.observe.exposition import Values
from gateway.observe.observer import Observer


def export_discovery(observer: Observer, discovery: Discovery) -> None:
    """Expose what each source has found, and when it was last able to."""

    def each(read: Callable[[Reporter], Any]) -> Callable[[], Values]:
        return lambda: {reporter.name: float(read(reporter)) for reporter in discovery.reporters}

    observer.gauge(
        "kvway_discovery_workers", "Workers that a source knows.", each(lambda source: len(source.workers)), ("source",)
    )
    observer.gauge(
        "kvway_discovery_refused",
        "Pods, Services that a source knows and that cannot be used; the log says why.",
        each(lambda source: len(source.refused)),
        ("source",),
    )
    observer.gauge(
        "kvway_discovery_last_success_timestamp_seconds",
        "When a source last went well, Unix time; 0: never yet.",
        each(lambda source: source.succeeded_at),
        ("source",),
    )
    observer.counter(
        "kvway_discovery_errors_total",
        "Failures of a source; what it found before still counts.",
        each(lambda source: source.errors),
        ("source",),
    )
