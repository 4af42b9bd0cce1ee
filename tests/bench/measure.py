"""What is measured: one workload against one router, once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tests.bench.client import LoadGenerator, Samples
from tests.bench.fast_upstream import CHUNKS_PER_STREAM
from tests.bench.rig import Usage
from tests.bench.testbed import Target
from tests.bench.workloads import LONG, SHORT, Prompts, request_source

Figures = dict[str, float]

CLOSED_LOOP_WARMUP_S = 0.5
OPEN_LOOP_WARMUP_S = 1.0


@dataclass(frozen=True)
class Workload:
    """A kind of traffic.

    Attributes:
        loop: closed keeps ``concurrency`` requests in flight, which saturates; open starts ``per_second`` on a clock.
        seconds: length of one run.
        fields: added to every request's body.
    """

    name: str
    title: str
    prompts: Prompts
    loop: Literal["closed", "open"]
    seconds: float
    concurrency: int = 0
    per_second: float = 0.0
    fields: dict[str, object] = field(default_factory=dict)

    @property
    def streams(self) -> bool:
        return "stream" in self.fields


STREAM: dict[str, object] = {"stream": True}
PACED_STREAM: dict[str, object] = {"stream": True, "seed": 20}

WORKLOADS = (
    Workload("short_json", "short chats, JSON, saturated", SHORT, "closed", 3.0, concurrency=32),
    Workload("long_json", "8k-token chats, JSON, saturated", LONG, "closed", 3.0, concurrency=32),
    Workload("short_sse", "short chats, 64-chunk SSE, saturated", SHORT, "closed", 3.0, concurrency=64, fields=STREAM),
    Workload("long_sse", "8k-token chats, 64-chunk SSE, saturated", LONG, "closed", 3.0, concurrency=64, fields=STREAM),
    Workload("paced_sse", "short chats, 250 paced streams/s", SHORT, "open", 4.0, per_second=250, fields=PACED_STREAM),
    Workload("short_latency", "short chats, JSON, 100/s", SHORT, "open", 6.0, per_second=100),
    Workload("long_latency", "8k-token chats, JSON, 100/s", LONG, "open", 6.0, per_second=100),
)


def run(workload: Workload, target: Target, number: int, pace: float) -> Figures:
    """Warm up, measure, and return the figures of round ``number``; ``pace`` shortens the run.

    Raises:
        WrongAnswer: the router did not pass on what the upstream answered.
    """
    source = request_source(workload.prompts, number, workload.fields)
    seconds = workload.seconds * pace
    with LoadGenerator(target.address) as load:
        if workload.loop == "closed":
            load.closed_loop(source, workload.concurrency, CLOSED_LOOP_WARMUP_S)
            target.meter.start()
            samples = load.closed_loop(source, workload.concurrency, seconds)
        else:
            load.open_loop(source, workload.per_second, OPEN_LOOP_WARMUP_S)
            target.meter.start()
            samples = load.open_loop(source, workload.per_second, seconds)
        usage = target.meter.usage()
    return _figures(workload, samples, usage)


def _figures(workload: Workload, samples: Samples, usage: Usage) -> Figures:
    units = CHUNKS_PER_STREAM if workload.streams else 1
    passed = (samples.answers + samples.answers_after_the_end) * units
    figures = {
        "cpu_us": usage.router_s / passed * 1e6,
        "router_share": usage.router_s / usage.seconds,
        "load_share": usage.load_s / usage.seconds,
        "others_share": usage.others_s / usage.seconds,
    }
    if workload.loop == "closed":
        return {"rate": samples.answers * units / samples.seconds, **figures}
    times = samples.chunk_delays if workload.streams else samples.latencies
    return {"p50_ms": percentile(times, 0.5) * 1e3, "p99_ms": percentile(times, 0.99) * 1e3, **figures}


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]
