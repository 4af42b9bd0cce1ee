"""Whatever fleet, whatever breaks: every request is over once, and the gateway's books are right in the end."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.base import Tier
from sim.engine import Simulation
from sim.fleet import (
    EVICTIONS,
    DisaggregationSettings,
    EvictionSettings,
    Failure,
    FleetSettings,
    GatewaySettings,
    PullSettings,
    ReplicationSettings,
    TierSettings,
)
from sim.index import Speculations
from sim.requests import SimRequest, Trace

BLOCK = 64
WORKERS = 3
LEDGER = ("pending_prefill_tokens", "pending_prefill_s", "prefilling_since", "running", "decode_tokens")

HOST = TierSettings(
    name="host", tier=Tier.HOST, capacity_tokens=20 * BLOCK, read_bytes_per_s=45e9, write_bytes_per_s=45e9
)
TIERS = (
    HOST,
    replace(HOST, name="nvme", tier=Tier.DISK, capacity_tokens=30 * BLOCK, compression=0.5, codec_bytes_per_s=10e9),
    replace(HOST, name="pool", tier=Tier.REMOTE, capacity_tokens=60 * BLOCK, shared=True),
)

fleets = st.builds(
    FleetSettings,
    workers=st.just(WORKERS),
    profile=st.just("llama-3.1-8b/h100/1"),
    capacity_tokens=st.sampled_from([27 * BLOCK, 50 * BLOCK]),
    max_running=st.sampled_from([2, 64]),
    max_batched_tokens=st.sampled_from([256, 8192]),
    tiers=st.sampled_from([(), TIERS[:1], TIERS]),
    offload=st.sampled_from(["store", "evict"]),
    eviction=st.builds(EvictionSettings, rule=st.sampled_from(EVICTIONS), tool_ttl_s=st.sampled_from([0.0, 2.0])),
    disaggregation=st.sampled_from(
        [None, DisaggregationSettings(prefill_workers=1, least_tokens=200, pull_back_s=5.0)]
    ),
    failures=st.lists(
        st.builds(
            Failure,
            at_s=st.floats(0, 4),
            down_s=st.floats(0.1, 3),
            worker=st.integers(0, WORKERS - 1),
            cold=st.booleans(),
        ),
        max_size=3,
    ).map(tuple),
    gateway=st.builds(
        GatewaySettings,
        replicas=st.integers(1, 2),
        order=st.sampled_from(["none", "fifo", "least-work", "fair"]),
        budget_tokens=st.sampled_from([1, 1000]),
    ),
    replication=st.sampled_from([None, ReplicationSettings(copies=2, uses=2, interval_s=0.5)]),
    pull=st.sampled_from([None, PullSettings(bytes_per_s=100e9, latency_s=0.0)]),
)

# session, tokens that the turn adds, answer, milliseconds of thought, whether it ends with a tool call
turns = st.lists(
    st.tuples(
        st.integers(0, 7), st.sampled_from([20, 300, 700, 1300]), st.integers(1, 60), st.integers(0, 900), st.booleans()
    ),
    min_size=4,
    max_size=25,
)


def trace_of(drawn: list[tuple[int, int, int, int, bool]], closed_loop: bool) -> Trace:
    """Sessions that share their first block and then go on with their own."""
    tokens: dict[int, int] = {}
    requests: list[SimRequest] = []
    at = 0.0
    for session, new, output, think_ms, tool_call in drawn:
        prompt = min(tokens.get(session, 0) + new, 1600)
        chunks = [0, *(1000 * (session + 1) + block for block in range(1, 100))][: (prompt + output) // BLOCK]
        requests.append(SimRequest(at, chunks, prompt, output, str(session), think_ms / 1000, tool_call=tool_call))
        tokens[session] = prompt + output
        at += think_ms / 4000
    return Trace(requests, BLOCK, closed_loop)


def run(trace: Trace, fleet: FleetSettings, name: str) -> Simulation:
    simulation = Simulation(trace, fleet, name, None, 0, None)
    result = simulation.run()
    assert result.answered.sum() + result.counters["lost"] == len(trace.requests)
    answered = result.answered
    assert (result.hit_tokens.sum(1) < result.prompt_tokens)[answered].all()
    assert (result.wait_s >= 0)[answered].all()
    assert (result.ttft_s >= result.wait_s)[answered].all()
    # both are differences of the same times, rounded
    assert (result.finish_s >= result.arrival_s + result.ttft_s - 1e-9)[answered].all()
    return simulation


@given(fleets, turns, st.booleans(), st.sampled_from(["expected-cost", "least-work", "round-robin"]))
def test_nothing_is_left_over_and_the_index_is_the_truth(fleet, drawn, closed_loop, name):
    simulation = run(trace_of(drawn, closed_loop), fleet, name)
    state = simulation.routers[0].fleet
    for column in LEDGER:
        assert not state.column(column).any()
    blocks = {0, *(1000 * session + block for session in range(1, 9) for block in range(1, 100))}
    for row, worker in enumerate(simulation.workers):
        assert not worker.running and not worker.waiting
        assert worker.cache.usage == 0
        for block in blocks:
            held = simulation.gateways.index.residency([block], 1, [row], Speculations(0.0)).tiers()[0]
            assert held[Tier.HBM] == (block in worker.cache)
            stores = worker.tiers.stores if worker.tiers is not None and block not in worker.cache else ()
            first = next((store.settings.tier for store in stores if block in store), None)
            assert [tier for tier in Tier if held[tier]] == ([first] if first else [Tier.HBM] * held[Tier.HBM])


@given(fleets, turns, st.booleans())
@settings(max_examples=settings.default.max_examples // 3)
def test_a_run_repeats(fleet, drawn, closed_loop):
    one, other = (run(trace_of(drawn, closed_loop), fleet, "random") for _ in range(2))
    for name in ("_ttft_s", "_finish_s", "_worker"):
        assert np.array_equal(getattr(one.records, name), getattr(other.records, name), equal_nan=True)
