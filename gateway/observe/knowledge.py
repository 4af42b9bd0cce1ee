"""What the gateway knows of the workers' caches, and how it came to know it, as metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Final

from gateway.events.feeds import EventFeeds
from gateway.events.subscriber import FeedStats
from gateway.index.memory import MemoryIndex
from gateway.index.publisher import Counters
from gateway.index.redis import RedisIndex
from gateway.observe.drift import DriftWatch
from gateway.observe.exposition import Values
from gateway.observe.observer import Observer

_FEED_COUNTERS: Final = {
    "batches": "Batches of KV events taken in.",
    "replayed": "Batches that came from an engine's replay buffer.",
    "events": "KV events taken in.",
    "blocks": "Blocks stored or removed by them.",
    "bad_events": "KV events that could not be read.",
    "skipped_events": "KV events of no use for prefixes.",
    "gaps": "Times that batches were missing.",
    "lost": "Times that they stayed missing, so that a worker's residency was built anew.",
    "restarts": "Engine restarts noticed by their events.",
    "resyncs": "Times that a worker's residency was built anew because predictions did not come true.",
}
_REDIS_COUNTERS: Final = {
    "errors": "Redis commands that failed.",
    "timeouts": "Decisions that waited for Redis in vain.",
    "skipped": "Decisions made without Redis, because it was known to be away.",
    "written": "Nibbles written to Redis.",
    "dropped": "Nibbles given up because too many were waiting.",
    "generations": "Times that everything was written anew.",
}


def export_knowledge(observer: Observer, feeds: EventFeeds, index: MemoryIndex | RedisIndex, drift: DriftWatch) -> None:
    """Expose the counters of the event feeds and of the index, and how far predictions are off."""

    def feed(name: str) -> Callable[[], Values]:
        return lambda: {worker: float(getattr(stats, name)) for worker, stats in feeds.stats.items()}

    for name, about in _FEED_COUNTERS.items():
        observer.counter(f"kvway_kv_{name}_total", about, feed(name), ("worker",))
    observer.gauge(
        "kvway_kv_lag_seconds",
        "From an engine's publishing to the taking in of its last batch.",
        feed("lag_s"),
        ("worker",),
    )
    observer.gauge(
        "kvway_drift_ratio",
        "Share by which predicted and reported cached tokens differed when last judged, 0 to 1.",
        lambda: drift.drifts,
        ("worker",),
    )
    observer.gauge("kvway_index_chunks", "Chunks in this process's index.", lambda: len(index))
    observer.counter("kvway_index_evicted_total", "Chunks forgotten for want of room.", lambda: index.evicted)
    if isinstance(index, RedisIndex):
        counters = index.counters

        def redis(name: str) -> Callable[[], Values]:
            return lambda: float(getattr(counters, name))

        observer.gauge("kvway_redis_up", "1 while Redis answers.", lambda: float(index.up))
        for name, about in _REDIS_COUNTERS.items():
            observer.counter(f"kvway_redis_{name}_total", about, redis(name))


assert {"lag_s", *_FEED_COUNTERS} == {each.name for each in fields(FeedStats)}
assert _REDIS_COUNTERS.keys() == {each.name for each in fields(Counters)}
