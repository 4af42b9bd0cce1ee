"""A simulated fleet: every request is served once, as fast as the profile says, and equal seeds give equal runs."""

from __future__ import annotations

import os
from math import inf
from pathlib import Path
from random import Random

import numpy as np
import pytest

from gateway.config import Config
from policies.base import PolicyError, Tier
from sim.engine import simulate
from sim.fleet import EvictionSettings, FleetSettings, GatewaySettings
from sim.profiles import PROFILES, find_profile
from sim.requests import SimRequest, Trace
from sim.results import SimResult
from sim.trace import read_trace

BLOCK = 64
TRACES = Path(os.environ.get("KVWAY_TRACES", Path(__file__).parents[3] / "shared" / "traces"))


def conversations(sessions: int = 12, turns: int = 5, closed_loop: bool = False, seed: int = 1) -> Trace:
    """Conversations over a system prompt of two blocks that all of them share; answers become part of prompts."""
    random, requests = Random(seed), []
    for session in range(sessions):
        tokens, at = 2 * BLOCK + random.randrange(1, 400), random.uniform(0, 5)
        for _ in range(turns):
            output = random.randrange(1, 200)
            chunks = [0, 1, *(1000 * (session + 1) + block for block in range(2, (tokens + output) // BLOCK))]
            requests.append(SimRequest(at, chunks, tokens, output, session=f"s{session}", think_s=0.5))
            tokens += output + random.randrange(1, 300)
            at += random.uniform(1, 4)
    return Trace(sorted(requests, key=lambda request: request.arrival_s), BLOCK, closed_loop, "conversations")


def fleet(workers: int = 3, capacity_tokens: int = 8192, **settings: object) -> FleetSettings:
    return FleetSettings(workers=workers, profile="llama-3.1-8b/h100/1", capacity_tokens=capacity_tokens, **settings)  # type: ignore[arg-type]


def assert_equal(one: SimResult, other: SimResult) -> None:
    for name in ("ttft_s", "itl_s", "finish_s", "wait_s", "hit_tokens", "worker", "running", "kv_usage"):
        assert np.array_equal(getattr(one, name), getattr(other, name), equal_nan=name.endswith("_s"))
    assert one.summary() == other.summary()


@pytest.mark.parametrize("name", ["expected-cost", "round-robin", "random", "least-work", "session", "prefix-hash"])
def test_every_request_is_answered_once_by_one_worker(name):
    trace = conversations()
    result = simulate(trace, fleet(), name)
    assert result.answered.all()
    assert ((result.worker >= 0) & (result.worker < 3)).all()
    assert (result.ttft_s >= result.wait_s).all()
    assert (result.wait_s >= 0).all()
    assert (result.finish_s >= result.arrival_s + result.ttft_s).all()
    assert (result.hit_tokens.sum(1) < result.prompt_tokens).all()
    assert result.running[0].sum() == 0


def test_equal_seeds_give_equal_runs_and_others_do_not():
    trace = conversations()
    first = simulate(trace, fleet(), "random", seed=7)
    assert_equal(first, simulate(trace, fleet(), "random", seed=7))
    assert not np.array_equal(first.worker, simulate(trace, fleet(), "random", seed=8).worker)


def test_a_turn_waits_for_the_answer_before_it_and_thinks():
    trace = conversations(closed_loop=True)
    result = simulate(trace, fleet(), "expected-cost")
    assert result.answered.all()
    latest: dict[str | None, float] = {}
    for number, request in enumerate(trace.requests):
        if request.session in latest:
            assert result.arrival_s[number] == pytest.approx(latest[request.session] + request.think_s)
        latest[request.session] = result.finish_s[number]


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("tokens", [1024, 4096, 8192])
def test_a_lone_prompt_takes_what_the_profile_says(name, tokens):
    trace = Trace([SimRequest(0.0, (), tokens, 1)], BLOCK)
    result = simulate(trace, FleetSettings(workers=1, profile=name), "round-robin")
    assert result.ttft_s[0] == pytest.approx(find_profile(name).ttft_s(tokens))


def test_a_cached_prefix_is_attended_to_but_not_computed():
    prompt = list(range(8192 // BLOCK))
    first = SimRequest(0.0, prompt[: 4096 // BLOCK], 4096, 1)
    second = SimRequest(10.0, prompt, 8192, 1)
    result = simulate(Trace([first, second], BLOCK), FleetSettings(workers=1), "round-robin")
    assert result.hit_tokens[1].tolist() == [4096, 0, 0, 0]
    assert result.ttft_s[1] == pytest.approx(find_profile("llama-3.1-70b/h100/4").ttft_s(4096, 4096))


@pytest.mark.parametrize(("batch", "context"), [(1, 1024), (32, 4096), (64, 4096)])
def test_a_batch_decodes_as_fast_as_the_profile_says(batch, context):
    profile = find_profile("llama-3.1-8b/h100/1")
    requests = [SimRequest(0.0, (), context, 400) for _ in range(batch)]
    result = simulate(Trace(requests, BLOCK), fleet(1, 1_000_000), "round-robin")
    # the last one prefilled decodes beside all others, with nothing more to prefill
    last = int(result.ttft_s.argmax())
    assert result.itl_s[last] == pytest.approx(profile.itl_s(batch, batch * (context + 200)), rel=0.05)


def test_what_a_lagging_index_does_not_know_is_not_expected():
    trace = conversations(sessions=4, turns=6)
    gateway = GatewaySettings(event_lag_s=1e6, speculation_s=0.0)
    blind = simulate(trace, fleet(gateway=gateway), "least-work")
    seeing = simulate(trace, fleet(), "least-work")
    assert blind.expected_hit_tokens.sum() < seeing.expected_hit_tokens.sum()
    assert blind.hit_rate() < seeing.hit_rate()


def test_an_approximate_index_expects_what_a_large_cache_really_holds():
    trace = conversations(sessions=6)
    exact = simulate(trace, fleet(capacity_tokens=100_000), "least-work")
    approximate = simulate(
        trace, fleet(capacity_tokens=100_000, gateway=GatewaySettings(approximate=True)), "least-work"
    )
    # answers are not part of what was dispatched: about that much less is known
    assert approximate.hit_rate() > 0.6 * exact.hit_rate()
    assert (approximate.expected_hit_tokens <= approximate.prompt_tokens).all()


def test_gateways_that_tell_each_other_balance_better_than_those_that_do_not():
    requests = [SimRequest(0.001 * at, (), 4000, 20) for at in range(60)]
    trace = Trace(requests, BLOCK)
    alone, told = (
        simulate(
            trace,
            fleet(4, 60_000, gateway=GatewaySettings(replicas=4, sync_lag_s=lag_s, order="none")),
            "least-tokens",
        )
        for lag_s in (inf, 0.0)
    )
    assert told.answered.all()
    assert told.ttft_s.mean() <= alone.ttft_s.mean()


def test_a_simulated_gateway_holds_requests_and_speculates_as_a_real_one_does_by_default():
    real, simulated = Config(), GatewaySettings()
    assert (simulated.order, simulated.order_params) == (real.dispatch.order, real.dispatch.params)
    assert simulated.budget_tokens == real.dispatch.budget_tokens
    assert simulated.piece_tokens == real.dispatch.piece_tokens
    assert simulated.make_room == real.dispatch.make_room
    assert simulated.speculation_s == real.index.speculative_ttl_s


def test_held_requests_are_prefilled_least_work_first():
    lengths = {"first": 8000, "long": 6000, "short": 500, "middle": 3000}
    requests = [
        SimRequest(0.001 * at, [1000 * at + block for block in range(1, tokens // BLOCK)], tokens, 1, session=name)
        for at, (name, tokens) in enumerate(lengths.items())
    ]
    by_order = {}
    for order in ("fifo", "least-work"):
        gateway = GatewaySettings(order=order, budget_tokens=1)
        result = simulate(
            Trace(requests, BLOCK), fleet(workers=1, capacity_tokens=65_536, gateway=gateway, max_batched_tokens=8192)
        )
        by_order[order] = [name for _, name in sorted(zip(result.finish_s, lengths, strict=True))]
    assert by_order["fifo"] == ["first", "long", "short", "middle"]
    assert by_order["least-work"] == ["first", "short", "middle", "long"]


def test_conversations_that_are_answered_in_time_keep_their_cache_where_there_is_a_goal():
    punctual, late, other = (range(first, first + 20) for first in (0, 100, 200))
    prompts = ((0.0, punctual), (0.001, late), (10.0, other), (20.0, punctual))
    trace = Trace([SimRequest(at, chunks, 20 * BLOCK, 1) for at, chunks in prompts], BLOCK)
    [[*_, without], [*_, with_goal]] = (
        simulate(
            trace,
            fleet(1, 50 * BLOCK, eviction=EvictionSettings(rule="cost", ttft_goal_s=goal_s)),
            "round-robin",
        ).hit_tokens.sum(1)
        for goal_s in (inf, 1.5 * PROFILES["llama-3.1-8b/h100/1"].ttft_s(20 * BLOCK))
    )
    assert without < with_goal == 20 * BLOCK - 16


def test_tokenizing_comes_before_everything_else():
    trace = Trace([SimRequest(0.0, (), 2000, 1)], BLOCK)
    plain = simulate(trace, fleet(), "round-robin")
    slow = simulate(trace, fleet(gateway=GatewaySettings(tokenize_s_per_token=1e-4, overhead_s=0.5)), "round-robin")
    assert slow.ttft_s[0] - plain.ttft_s[0] == pytest.approx(0.7)


def test_samples_show_the_load_while_it_is_there():
    trace = conversations()
    result = simulate(trace, fleet(sample_s=0.5), "least-requests")
    assert result.sample_s[1] == 0.5
    assert result.running.shape == result.kv_usage.shape == result.pending_tokens.shape == (len(result.sample_s), 3)
    assert result.running.max() > 0
    assert 0 < result.kv_usage.max() <= 1
    times, rates = result.hit_rates_over_time(10)
    assert len(times) == len(rates) == 10
    assert np.nanmax(rates[:, Tier.HBM]) > 0


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (SimRequest(0.0, (), 0, 1), "prompt and output tokens"),
        (SimRequest(-1.0, (), 10, 1), "arrival_s"),
        (SimRequest(0.0, (1, 2, 3), 64, 1), "3 blocks of 64 tokens"),
        (SimRequest(0.0, (), 9000, 1), "do not fit"),
    ],
)
def test_a_request_that_cannot_be_simulated_is_named(request_, message):
    with pytest.raises(ValueError, match=f"request 0: .*{message}"):
        simulate(Trace([request_], BLOCK), fleet(), "round-robin")


def test_unknown_policies_and_odd_blocks_are_refused():
    with pytest.raises(PolicyError, match="unknown policy"):
        simulate(conversations(), fleet(), "cleverest")
    with pytest.raises(ValueError, match="not multiples"):
        simulate(Trace([SimRequest(0.0, (), 10, 1)], 10), fleet(), "round-robin")


@pytest.mark.slow
def test_one_infinite_cache_hits_as_often_as_was_published():
    path = TRACES / "mooncake_conversation.jsonl.gz"
    if not path.exists():
        pytest.skip(f"no {path.name} in {TRACES}; set KVWAY_TRACES to the directory of traces")
    trace = read_trace(path)
    # one request after the other: whatever was computed before can be hit
    for number, request in enumerate(trace.requests):
        request.arrival_s = number * 1000.0
        request.output_tokens = 1
    result = simulate(trace, FleetSettings(workers=1, capacity_tokens=200_000_000, sample_s=1e6), "round-robin")
    assert round(result.hit_rate(), 3) == 0.374
