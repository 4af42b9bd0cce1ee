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
from gateway.fleet.polling import FetchFailed, Poller, control_client, fetch
from gateway.fleet.registry import Registry, Worker
from policies.base import COLUMNS

_MAX_TIMEOUT_S: Final = 2.0
_RUNNING: Final = COLUMNS.index("engine_running")
_WAITING: Final = COLUMNS.index("engine_waiting")
_USAGE: Final = COLUMNS.index("kv_usage")
_CAPACITY: Final = COLUMNS.index("kv_capacity_tokens")

_RUNNING_NAMES: Final = (b"vllm:num_requests_running", b"sglang:num_running_reqs")
_WAITING_NAMES: Final = (b"vllm:num_requests_waiting", b"sglang:num_queue_reqs")
_USAGE_NAMES: Final = (b"vllm:kv_cache_usage_perc", b"sglang:token_usage")
_PROMPT_NAMES: Final = (b"vllm:prompt_tokens_total", b"sglang:prompt_tokens_total")
_CACHE_CONFIG_NAMES: Final = (b"vllm:cache_config_info", b"sglang:cache_config_info")
# What follows a name: {labels} or none, the value, perhaps a time. Label values may hold any character but a line end.
_SAMPLE: Final = re.compile(rb"(?:\{(.*)\})? +(\S+)")
_CACHE_LABEL: Final = re.compile(rb'(?:^|,)(block_size|num_gpu_blocks|page_size|num_pages)="(\d+)"')
_RANK_LABEL: Final = re.compile(rb'[{,](?:engine|dp_rank)="(\d+)"')


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
    if rank is not None:
        text = b"\n".join(line for line in text.split(b"\n") if _rank_of(line) in (None, rank))
    text = b"\n" + text
    block_size, capacity = _cache_config(text)
    usage = _values(text, *_USAGE_NAMES)
    page_size = _values(text, b"sglang:page_size")
    start = _values(text, b"process_start_time_seconds")
    return EngineMetrics(
        running=_total(_values(text, *_RUNNING_NAMES)),
        waiting=_total(_values(text, *_WAITING_NAMES)),
        kv_usage=sum(usage) / len(usage) if usage else None,
        kv_capacity_tokens=int(_total(_values(text, b"sglang:max_total_num_tokens")) or capacity) or None,
        block_size=block_size or (int(page_size[0]) if page_size else None),
        start_time_s=start[0] if start else None,
        prompt_tokens=_total(_values(text, *_PROMPT_NAMES)),
    )


def _cache_config(text: bytes) -> tuple[int, int]:
    """Return block size and tokens in all blocks, 0 as long as the engine writes ``None``: it profiles its memory."""
    block_size = tokens = 0
    for labels, _ in _samples(text, *_CACHE_CONFIG_NAMES):
        values = {name: int(value) for name, value in _CACHE_LABEL.findall(labels)}
        block_size = values.get(b"block_size") or values.get(b"page_size") or block_size
        tokens += block_size * (values.get(b"num_gpu_blocks") or values.get(b"num_pages") or 0)
    return block_size, tokens


def _rank_of(line: bytes) -> int | None:
    """Return the data-parallel rank that a sample is about; None if it is about none in particular."""
    found = _RANK_LABEL.search(line)
    return None if found is None else int(found[1])


def _values(text: bytes, *names: bytes) -> list[float]:
    """Return the finite values of all samples of these names."""
    values = []
    for _, value in _samples(text, *names):
        try:
            number = float(value)
        except ValueError:
            continue
        if isfinite(number):
            values.append(number)
    return values


def _samples(text: bytes, *names: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield labels and value of each sample. Searching for a few names beats parsing a thousand lines 20 to 1."""
    for name in names:
        line = b"\n" + name
        at = text.find(line)
        while at >= 0:
            at += len(line)
            sample = _SAMPLE.match(text, at)  # None: a longer name that begins with this one
            if sample is not None:
                yield sample[1] or b"", sample[2]
            at = text.find(line, at)


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
        config: MetricsConfig,
        on_restart: Callable[[Worker], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._config = config
        self._on_restart = on_restart
        self._clock = clock
        self._timeout_s = min(_MAX_TIMEOUT_S, config.stale_s / 2)
        self._seen: dict[Worker, _Seen] = {}
        self._client = control_client()
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
        await self._client.aclose()

    async def _scrape(self, worker: Worker) -> bool:
        seen = self._seen.setdefault(worker, _Seen())
        try:
            status, text = await fetch(self._client, worker, "/metrics", self._timeout_s)
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
