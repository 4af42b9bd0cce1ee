"""A worker's ``/metrics`` under vLLM's names, and one of its own.

Times are seconds of the wall, as somebody outside measures them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sim.clock import WorkerClock
from sim.generation import Generation
from sim.worker import Request, Worker

_TTFT_BUCKETS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_ITL_BUCKETS: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_BUCKETS: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0),
    *(50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class WorkerMetrics(Collector):
    """Counts what happens and, when scraped, reads the rest from the worker itself.

    Args:
        worker: whose metrics these are.
        clock: the worker's clock.
        model: label ``model_name``.
        adapters: LoRA adapters it serves.
    """

    def __init__(self, worker: Worker, clock: WorkerClock, model: str, adapters: Sequence[str] = ()) -> None:
        self._worker = worker
        self._clock = clock
        self._model = model
        self._adapters = adapters
        self._started_at = time.time()
        self._prompt_tokens = dict.fromkeys(("local_compute", "local_cache_hit", "external_kv_transfer"), 0)
        self._output_tokens = 0
        self._behind_s = 0.0
        self._ends = dict.fromkeys(("stop", "length", "abort", "error", "repetition"), 0)
        self._rejections = dict.fromkeys(("max_num_queued_reqs", "max_num_queued_tokens"), 0)
        self._registry = CollectorRegistry()
        self._ttft = self._histogram("time_to_first_token_seconds", "Time to first token", _TTFT_BUCKETS)
        self._itl = self._histogram("inter_token_latency_seconds", "Inter-token latency", _ITL_BUCKETS)
        self._queue = self._histogram("request_queue_time_seconds", "Time spent waiting", _REQUEST_BUCKETS)
        self._e2e = self._histogram("e2e_request_latency_seconds", "Request latency", _REQUEST_BUCKETS)
        self._registry.register(self)

    def exposition(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def rejected(self) -> None:
        """A request was refused because too many were queued."""
        self._rejections["max_num_queued_reqs"] += 1

    def fell_behind(self, seconds: float) -> None:
        """The machine was too busy: a step begins so much later than it should, by the worker's clock."""
        self._behind_s += seconds / self._clock.speed

    def emitted(self, generation: Generation, at: float) -> None:
        """A sequence has one token more, at a moment of the worker's clock."""
        self._output_tokens += 1
        request = generation.request
        if request.generated > 1:
            self._itl.observe((at - generation.emitted_at) / self._clock.speed)
            return
        self._ttft.observe(max(0.0, at - generation.arrived_at) / self._clock.speed)
        self._queue.observe(max(0.0, request.started_at - generation.arrived_at) / self._clock.speed)
        there = max(request.cached_tokens, min(request.remote_tokens, request.prompt_tokens - 1))
        self._prompt_tokens["local_compute"] += request.prompt_tokens - there
        self._prompt_tokens["local_cache_hit"] += request.cached_tokens - request.host_tokens
        self._prompt_tokens["external_kv_transfer"] += request.host_tokens + there - request.cached_tokens

    def ended(self, generation: Generation, reason: str, at: float) -> None:
        """A sequence is over: ``stop``, ``length`` or ``abort``."""
        self._ends[reason] += 1
        self._e2e.observe(max(0.0, at - generation.arrived_at) / self._clock.speed)

    def collect(self) -> Iterator[Metric]:
        """Yield gauges and counters as they stand."""
        yield GaugeMetricFamily("process_start_time_seconds", "Start time of the process", self._started_at)
        yield CounterMetricFamily(
            "kvway_worker_behind_seconds", "Time for which a busy machine kept it", self._behind_s
        )
        yield from self._queues()
        yield from self._cache()
        yield from self._requests()
        if self._adapters:
            yield self._adapters_in_use()
        sleep = {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
        yield self._gauge("engine_sleep_state", "Engine sleep state", sleep, "sleep_state")

    def _queues(self) -> Iterator[Metric]:
        worker, now = self._worker, self._clock.now()
        loading = sum(1 for request in worker.running if request.ready_at > now)
        yield self._gauge("num_requests_running", "Requests in the batch", len(worker.running) - loading)
        yield self._gauge("num_requests_waiting", "Requests waiting", len(worker.waiting) + loading)
        reasons = {"capacity": len(worker.waiting), "deferred": loading}
        yield self._gauge("num_requests_waiting_by_reason", "Requests waiting, by reason", reasons, "reason")
        stages = {"waiting_to_start": 0, "in_progress": loading, "completed_waiting": 0}
        yield self._gauge("num_requests_kv_fetch_by_stage", "Requests that load KV", stages, "stage")

    def _cache(self) -> Iterator[Metric]:
        worker, counters = self._worker, self._worker.counters
        yield self._gauge("kv_cache_usage_perc", "KV cache usage, 0 to 1", worker.cache.usage)
        yield self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache", counters.prefix_queries)
        yield self._counter("prefix_cache_hits", "Tokens found in the prefix cache", counters.prefix_hits)
        yield self._counter("external_prefix_cache_queries", "Tokens looked up in lower tiers", counters.host_queries)
        yield self._counter("external_prefix_cache_hits", "Tokens found in lower tiers", counters.host_hits)
        limits = worker.limits
        config = {
            "block_size": limits.block_size,
            "num_gpu_blocks": limits.num_blocks,
            "kv_cache_size_tokens": limits.num_blocks * limits.block_size,
            "num_cpu_blocks": limits.host_blocks or None,
            "enable_prefix_caching": limits.prefix_caching,
        }
        info = GaugeMetricFamily("vllm:cache_config_info", "Cache configuration", labels=["engine", *config])
        info.add_metric(["0", *map(str, config.values())], 1)
        yield info
        if limits.host_blocks:
            loaded = counters.host_hits * worker.profile.kv_bytes_per_token
            yield self._counter("kv_offload_load_bytes", "Bytes loaded from the host tier", loaded)
            usage = len(worker.cache.host) / limits.host_blocks
            yield self._gauge("kv_offload_cpu_cache_usage_perc", "Host tier usage, 0 to 1", usage)

    def _requests(self) -> Iterator[Metric]:
        sources = self._prompt_tokens
        cached = sources["local_cache_hit"] + sources["external_kv_transfer"]
        yield self._counter("prompt_tokens", "Prompt tokens", sum(sources.values()))
        yield self._counter("prompt_tokens_by_source", "Prompt tokens by source", sources, "source")
        yield self._counter("prompt_tokens_cached", "Cached prompt tokens", cached)
        yield self._counter("generation_tokens", "Output tokens", self._output_tokens)
        yield self._counter("num_preemptions", "Preemptions", self._worker.counters.preemptions)
        yield self._counter("request_success", "Requests that ended, by how", self._ends, "finished_reason")
        yield self._counter("admission_rejections", "Requests refused", self._rejections, "reason")
        yield self._counter("nixl_num_failed_transfers", "KV transfers that failed", 0)
        yield self._counter("nixl_num_kv_expired_reqs", "KV transfers nobody fetched in time", 0)

    def _adapters_in_use(self) -> Metric:
        def names(requests: Iterable[Request]) -> str:
            return ",".join(sorted({request.chain.lora for request in requests if request.chain.lora}))

        labels = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
        info = GaugeMetricFamily("vllm:lora_requests_info", "Adapters in use", labels=labels)
        values = [str(len(self._adapters)), names(self._worker.running), names(self._worker.waiting)]
        info.add_metric(values, time.time())
        return info

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        whole = Histogram(f"vllm:{name}", text, ("model_name", "engine"), buckets=buckets, registry=self._registry)
        return whole.labels(self._model, "0")

    def _gauge(self, name: str, text: str, value: float | Mapping[str, float], label: str = "") -> Metric:
        return self._fill(GaugeMetricFamily(f"vllm:{name}", text, labels=self._labels(label)), value)

    def _counter(self, name: str, text: str, value: float | Mapping[str, float], label: str = "") -> Metric:
        return self._fill(CounterMetricFamily(f"vllm:{name}", text, labels=self._labels(label)), value)

    def _labels(self, label: str) -> list[str]:
        return ["model_name", "engine", label] if label else ["model_name", "engine"]

    def _fill(
        self, family: GaugeMetricFamily | CounterMetricFamily, value: float | Mapping[str, float]
    ) -> GaugeMetricFamily | CounterMetricFamily:
        if isinstance(value, Mapping):
            for name, one in value.items():
                family.add_metric([self._model, "0", name], one)
        else:
            family.add_metric([self._model, "0"], value)
        return family
