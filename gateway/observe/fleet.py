"""The fleet's own numbers as metrics: read at each scrape from where they are kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gateway.fleet.health import Health
from gateway.fleet.ledger import Ledger
from gateway.fleet.metrics import Scraper
from gateway.fleet.registry import Registry, State
from gateway.observe.exposition import Values
from gateway.observe.observer import Observer

_COLUMNS: Final = (
    ("pending_prefill_tokens", "Uncached prompt tokens dispatched by this gateway and not yet prefilled."),
    ("running", "Requests of this gateway on the worker."),
    ("decode_tokens", "Context tokens of this gateway's requests past their first byte."),
    ("engine_running", "Requests the engine runs, all gateways together, as last scraped."),
    ("engine_waiting", "Requests waiting in the engine, as last scraped."),
    ("kv_usage", "Share of the engine's KV cache in use, as last scraped."),
    ("kv_capacity_tokens", "Size of the engine's KV cache."),
    ("prefill_b_s", "Seconds of prefill per uncached token, as learned."),
)


def export_fleet(observer: Observer, registry: Registry, ledger: Ledger, health: Health, scraper: Scraper) -> None:
    """Expose state and load of every worker, ejections and scrapes."""

    def column(name: str) -> Callable[[], Values]:
        return lambda: dict(zip(registry.fleet.names, registry.fleet.column(name).tolist(), strict=True))

    def states() -> Values:
        return {
            (worker.name, state.value): float(worker.state is state)
            for worker in registry.workers.values()
            for state in State
        }

    observer.gauge("kvway_in_flight_requests", "Requests on workers now.", lambda: ledger.in_flight)
    observer.gauge("kvway_worker_state", "1 for the state a worker is in.", states, ("worker", "state"))
    for name, about in _COLUMNS:
        observer.gauge(f"kvway_worker_{name}", about, column(name), ("worker",))
    observer.counter(
        "kvway_ejections_total", "Ejections by kind of failure.", lambda: health.ejections, ("worker", "kind")
    )
    observer.counter("kvway_scrape_failures_total", "Failed scrapes.", lambda: scraper.failures, ("worker",))
    observer.counter("kvway_worker_restarts_total", "Restarts seen by scraping.", lambda: scraper.restarts, ("worker",))
