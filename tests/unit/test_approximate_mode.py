"""Without events, a model of what was sent comes close to what events say: by the hit rate that the fleet then has.

A block that is evicted a moment sooner sends a later request another way, and everything after it. So where caches are
small for their traffic, hit rates of runs with the same settings are some 4 % apart once requests arrive up to a second
later. What is compared is the mean of several runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean

import pytest

from sim.engine import simulate
from sim.fleet import FleetSettings, GatewaySettings
from sim.generators import Agents
from sim.requests import Trace
from sim.trace import read_trace

SHORTFALL = 0.05
CAPACITIES = (300_000, 461_376, 700_000, 1_000_000)


def hit_rates(trace: Trace, workers: int, capacity_tokens: int) -> tuple[float, float]:
    """Return the hit rates with events and without."""
    with_events, without = (
        simulate(
            trace,
            FleetSettings(
                workers=workers, capacity_tokens=capacity_tokens, gateway=GatewaySettings(approximate=approximate)
            ),
        )
        for approximate in (False, True)
    )
    assert with_events.counters["evictions"] > 500, "nothing was evicted: the cache is too large to tell"
    return with_events.hit_rate(), without.hit_rate()


# With the smaller cache, prompts of running requests fill most of it.
@pytest.mark.parametrize("capacity_tokens", [120_000, 160_000])
@pytest.mark.parametrize("seed", [0, 1])
def test_agents_find_as_much_cached_as_with_events(seed: int, capacity_tokens: int) -> None:
    trace = Agents(sessions=40, turns=12, spread_s=100).trace(seed)
    with_events, without = hit_rates(trace, workers=4, capacity_tokens=capacity_tokens)
    assert without >= (1 - SHORTFALL) * with_events


def recorded(name: str, requests: int, capacity_tokens: int) -> Trace:
    folder = Path(os.environ.get("KVWAY_TRACES", Path(__file__).parents[3] / "shared" / "traces"))
    if not (folder / name).exists():
        pytest.skip(f"no {name} in {folder}; set KVWAY_TRACES to the directory of traces")
    trace = read_trace(folder / name)
    fitting = [request for request in trace.requests if request.prompt_tokens < capacity_tokens // 2]
    trace.requests = fitting[:requests]
    return trace


def conversations(requests: int, capacity_tokens: int, seed: int = 0) -> Trace:
    """Return the Mooncake conversations, each request up to a second late."""
    trace, random = recorded("mooncake_conversation.jsonl.gz", requests, capacity_tokens), Random(seed)
    late = [replace(request, arrival_s=request.arrival_s + random.random()) for request in trace.requests]
    trace.requests = sorted(late, key=lambda request: request.arrival_s)
    return trace


def assert_close(pairs: Iterable[tuple[float, float]]) -> None:
    """``pairs`` are hit rates with events and without."""
    with_events, without = map(fmean, zip(*pairs, strict=True))
    assert without >= (1 - SHORTFALL) * with_events


@pytest.mark.slow
def test_recorded_agents_find_as_much_cached_as_with_events() -> None:
    trace = recorded("claude_code_sessions.jsonl.gz", 400, 800_000)
    assert_close([hit_rates(trace, 4, 800_000)])


@pytest.mark.slow
def test_recorded_conversations_find_as_much_cached_as_with_events_over_small_caches_and_large_ones() -> None:
    assert_close([hit_rates(conversations(1000, capacity), 4, capacity) for capacity in CAPACITIES])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("capacity_tokens", "requests"), [*[(capacity, 2000) for capacity in CAPACITIES], (461_376, 4000)]
)
def test_recorded_conversations_find_as_much_cached_as_with_events_in_caches_of_any_size(
    capacity_tokens: int, requests: int
) -> None:
    traces = [conversations(requests, capacity_tokens, seed) for seed in range(6)]
    assert_close([hit_rates(trace, 4, capacity_tokens) for trace in traces])
