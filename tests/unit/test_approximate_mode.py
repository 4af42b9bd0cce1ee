"""Without events, a model of what was sent comes close to what events say: by the hit rate that the fleet then has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sim.engine import simulate
from sim.fleet import FleetSettings, GatewaySettings
from sim.generators import Agents
from sim.requests import Trace
from sim.trace import read_trace

SHORTFALL = 0.05


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


@pytest.mark.parametrize(
    ("name", "requests", "workers", "capacity_tokens"),
    [
        ("mooncake_conversation.jsonl.gz", 2000, 4, 461_376),
        ("claude_code_sessions.jsonl.gz", 400, 4, 800_000),
    ],
)
def test_recorded_traffic_finds_as_much_cached_as_with_events(
    name: str, requests: int, workers: int, capacity_tokens: int
) -> None:
    folder = Path(os.environ.get("KVWAY_TRACES", Path(__file__).parents[3] / "shared" / "traces"))
    if not (folder / name).exists():
        pytest.skip(f"no {name} in {folder}; set KVWAY_TRACES to the directory of traces")
    trace = read_trace(folder / name)
    fitting = [request for request in trace.requests if request.prompt_tokens < capacity_tokens // 2]
    trace.requests = fitting[:requests]
    with_events, without = hit_rates(trace, workers, capacity_tokens)
    assert without >= (1 - SHORTFALL) * with_events
