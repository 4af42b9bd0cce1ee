"""Scraping the engines' ``/metrics``: what they run, what waits, how full their KV cache is, whether they restarted."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isfinite
from typing import Final

from gateway.config import MetricsConfig
from gateway.fleet.polling import Fetcher, FetchFailed, Poller
from gateway.fleet.registry import Registry, Worker
from policies.base import COLUMNS

_MAX_TIMEOUT_S: Final = 2.0
_RUNNING: Final = COLUMNS.index("engine_running")
_WAITING: Final = COLUMNS.index("engine_waiting")
_USAGE: Final = COLUMNS.index("kv_usage")
_CAPACITY: Final = COLUMNS.index("kv_capacity_tokens")

# By the beginning of an engine's names: requests running, requests waiting, share of the KV cache in use.
_GAUGES: Final = {
    b"vllm:": (b"num_requests_running", b"num_requests_waiting", b"kv_cache_usage_perc"),
    b"sglang:": (b"num_running_reqs", b"num_queue_reqs", b"token_usage"),
}
# What follows a name: {labels} or none, the value, perhaps a time. Label values may hold any character but a line end.
_SAMPLE: Final = re.compile(rb"(?:\{(.*)\})? +(\S+)")
_CACHE_LABEL: Final = re.compile(rb'(?:^|,)(block_size|num_gpu_blocks|page_size|num_pages)="(\d+)"')
_RANK_LABEL: Final = re.compile(rb'(?:^|,)(?:engine|dp_rank)="(\d+)"')


@dataclass(slots=True)
class EngineMetrics:
    """What one scrape says; None where it says nothing. Several engines behind one endpoint are taken together.

    Attributes:
        running: requests being processed, summed.
        waiting: requests queued in the engine, summed.
        kv_usage: share of the KV cache in use, 0..1, mean.
        kv_capacity_tokens: KV cache in HBM, summed.
        block_size: tokens per block (vLLM) or page (SGLang).
        start_time_s: when the process started, Unix time; not given by servers of several processes.
        prompt_tokens: prompt tokens seen since the start, summed; it only falls when the engine restarts.
    """

    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    kv_capacity_tokens: int | None = None
    block_size: int | None = None
    start_time_s: float | None = None
    prompt_tokens: float | None = None


def parse_metrics(text: bytes, rank: int | None = None) -> EngineMetrics:
    """Read the samples this gateway uses out of a Prometheus text exposition, vLLM's or SGLang's.

    Args:
        text: the exposition.
        rank: leave out what other data-parallel ranks say.
    """
    page = _Page(b"\n" + text, rank)
    engine = b"vllm:" if b"\nvllm:" in page.text else b"sglang:"
    running, waiting, usage = [page.values(engine + name) for name in _GAUGES[engine]]
    block_size, capacity = page.cache_config(engine + b"cache_config_info")
    if engine == b"sglang:":
        page_size = page.values(b"sglang:page_size")
        block_size = block_size or (int(page_size[0]) if page_size else 0)
        capacity = int(_total(page.values(b"sglang:max_total_num_tokens")) or capacity)
    start = page.values(b"process_start_time_seconds")
    return EngineMetrics(
        running=_total(running),
        waiting=_total(waiting),
        kv_usage=sum(usage) / len(usage) if usage else None,
        kv_capacity_tokens=capacity or None,
        block_size=block_size or None,
        start_time_s=start[0] if start else None,
        prompt_tokens=_total(page.values(engine + b"prompt_tokens_total")),
    )


class _Page:
    """A text exposition after a line end, of which one data-parallel rank counts, or all do."""

    __slots__ = ("_rank", "text")

    def __init__(self, text: bytes, rank: int | None) -> None:
        self.text = text
        self._rank = rank

    def values(self, name: bytes) -> list[float]:
        """Return the finite values of all samples of a name."""
        values = []
        for _, value in self._samples(name):
            try:
                number = float(value)
            except ValueError:
                continue
            if isfinite(number):
                values.append(number)
        return values

    def cache_config(self, name: bytes) -> tuple[int, int]:
        """Return block size and tokens in all blocks, 0 while the engine writes ``None``: it profiles its memory."""
        block_size = tokens = 0
        for labels, _ in self._samples(name):
            values = {label: int(value) for label, value in _CACHE_LABEL.findall(labels)}
            block_size = values.get(b"block_size") or values.get(b"page_size") or block_size
            tokens += block_size * (values.get(b"num_gpu_blocks") or values.get(b"num_pages") or 0)
        return block_size, tokens

    def _samples(self, name: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield labels and value of each sample.

        They stand together: the page is searched up to the first and read from there, a few names in a twentieth of
        the time that parsing its thousand lines would take.
        """
        text, line = self.text, b"\n" + name
        at = text.find(line)
        while at >= 0:
            sample = _SAMPLE.match(text, at + len(line))
            if sample is None:  # a longer name that begins with this one
                at = text.find(line, at + len(line))
                continue
            labels = sample[1] or b""
            if self._rank is None or _rank_of(labels) in (None, self._rank):
                yield labels, sample[2]
            at = text.find(b"\n", sample.end())
            if not text.startswith(line, at):
                return


def _rank_of(labels: bytes) -> int | None:
    """Return the data-parallel rank that a sample is about; None if it is about none in particular."""
    found = _RANK_LABEL.search(labels)
    return None if found is None else int(found[1])


def _total(values: list[float]) -> float | None:
    return sum(values) if values else None


@dataclass(slots=True)
class _Seen:
    """Of one worker: when it was last scraped, and what tells one life of its process from the next."""

    at: float = float("-inf")
    start_time_s: float | None = None
    prompt_tokens: float | None = None


class Scraper:
    """Fills the engine columns of the ``FleetView`` and notices restarts.

    Args:
        registry: whose workers.
        fetch: asks them.
        config: times.
        on_restart: called when a worker's process is another one than at the last scrape.
        clock: monotonic seconds.

    Attributes:
        failures: failed scrapes by worker name, for workers that are still there.
        restarts: noticed restarts by worker name, likewise.
    """

    def __init__(
        self,
        registry: Registry,
        fetch: Fetcher,
        config: MetricsConfig,
        on_restart: Callable[[Worker], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._fetch = fetch
        self._config = config
        self._on_restart = on_restart
        self._clock = clock
        self._timeout_s = min(_MAX_TIMEOUT_S, config.stale_s / 2)
        self._seen: dict[Worker, _Seen] = {}
        registry.on_change(self._on_change)
        self._poller = Poller(registry, self._scrape, "scrape", config.interval_s)
        self.failures: Counter[str] = Counter()
        self.restarts: Counter[str] = Counter()

    async def start(self) -> None:
        """Begin to scrape."""
        await self._poller.start()

    async def close(self) -> None:
        """Stop scraping."""
        await self._poller.close()

    async def _scrape(self, worker: Worker) -> bool:
        seen = self._seen.setdefault(worker, _Seen())
        try:
            status, text = await self._fetch(worker, "/metrics", self._timeout_s)
            if status != 200:
                raise FetchFailed(f"/metrics answers {status}")
        except FetchFailed:
            self.failures[worker.name] += 1
            if self._clock() - seen.at > self._config.stale_s:
                self._registry.fleet.state[[_RUNNING, _WAITING, _USAGE], worker.row] = 0.0
            return False
        seen.at = self._clock()
        self._apply(worker, seen, parse_metrics(text, worker.config.data_parallel_rank))
        return True

    def _apply(self, worker: Worker, seen: _Seen, metrics: EngineMetrics) -> None:
        state, row = self._registry.fleet.state, worker.row
        state[_RUNNING, row] = metrics.running or 0.0
        state[_WAITING, row] = metrics.waiting or 0.0
        state[_USAGE, row] = min(1.0, max(0.0, metrics.kv_usage or 0.0))
        if metrics.kv_capacity_tokens and not worker.config.kv_capacity_tokens:
            state[_CAPACITY, row] = metrics.kv_capacity_tokens
        worker.block_size = metrics.block_size or worker.block_size
        restarted = _rose_anew(seen, metrics)
        seen.start_time_s, seen.prompt_tokens = metrics.start_time_s, metrics.prompt_tokens
        if restarted:
            self.restarts[worker.name] += 1
            if self._on_restart is not None:
                self._on_restart(worker)

    def _on_change(self, worker: Worker, joined: bool) -> None:
        if not joined:
            self._seen.pop(worker, None)
            self.failures.pop(worker.name, None)
            self.restarts.pop(worker.name, None)


def _rose_anew(before: _Seen, now: EngineMetrics) -> bool:
    """Whether the process is another one: it started at another time or, where it does not say, counts from zero."""
    if before.start_time_s is not None and now.start_time_s is not None:
        return before.start_time_s != now.start_time_s
    return (
        before.prompt_tokens is not None and now.prompt_tokens is not None and now.prompt_tokens < before.prompt_tokens
    )
