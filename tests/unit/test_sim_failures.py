"""What breaks, what stands apart, and what is copied ahead: every request still ends once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from policies.base import Tier
from sim.engine import simulate
from sim.fleet import (
    DisaggregationSettings,
    Failure,
    FleetSettings,
    GatewaySettings,
    ReplicationSettings,
    TierSettings,
    host_tier,
)
from sim.profiles import find_profile
from sim.requests import SimRequest, Trace
from sim.results import SimResult

BLOCK = 64
PROFILE = find_profile("llama-3.1-70b/h100/4")
SYSTEM = 8192  # tokens of the system prompt that everybody shares


def tenants(tenants: int, rounds: int, gap_s: float) -> Trace:
    """Tenants that take turns, each with a system prompt of its own and a few tokens more every time."""
    requests = []
    for at in range(rounds * tenants):
        tenant = at % tenants
        system = range(10_000 * tenant, 10_000 * tenant + SYSTEM // BLOCK)
        chunks = [*system, *range(10**6 + at * 4, 10**6 + at * 4 + 4)]
        requests.append(SimRequest(gap_s * at, chunks, SYSTEM + 4 * BLOCK, 20, session=f"tenant-{tenant}"))
    return Trace(requests, BLOCK)


def lone_prompt(tokens: int = 8192, output_tokens: int = 10) -> Trace:
    return Trace([SimRequest(0.0, range(tokens // BLOCK), tokens, output_tokens)], BLOCK)


def test_what_a_dead_worker_had_not_answered_is_answered_by_another():
    trace = tenants(1, 60, 0.05)
    failing = FleetSettings(workers=3, failures=(Failure(at_s=1.0, worker=1, down_s=5.0),))
    result = simulate(trace, failing, "least-work")
    lost = int(result.counters["lost"])
    assert result.answered.sum() == len(trace.requests) - lost
    assert result.counters["retries"] > 0
    assert np.isnan(result.ttft_s[~result.answered]).all()
    back = result.arrival_s > 6.0
    assert not (result.worker[(result.arrival_s > 1.0) & ~back] == 1).any()


def test_a_worker_that_returns_has_lost_its_memory_but_not_its_disk():
    disk = TierSettings(
        name="nvme", tier=Tier.DISK, capacity_tokens=10**6, read_bytes_per_s=50e9, write_bytes_per_s=50e9
    )
    hits = {}
    for cold in (False, True):
        death = Failure(at_s=30.0, worker=0, down_s=10.0, cold=cold)
        settings = FleetSettings(workers=1, tiers=(host_tier(PROFILE, 10**6), disk), failures=(death,))
        prompt = range(SYSTEM // BLOCK)
        # pushed through host memory to disk by nothing: what lies on disk is what was put there
        settings = replace(settings, tiers=(disk,))
        trace = Trace([SimRequest(at, prompt, SYSTEM, 5) for at in (0.0, 60.0)], BLOCK)
        hits[cold] = simulate(trace, settings, "round-robin").hit_tokens[1].tolist()
    assert hits[False] == [0, 0, SYSTEM - 16, 0]
    assert hits[True] == [0, 0, 0, 0]


def test_requests_wait_at_the_gateway_until_a_worker_is_back():
    trace = Trace([SimRequest(10.0, (), 1000, 5)], BLOCK)
    settings = FleetSettings(workers=1, failures=(Failure(at_s=5.0, worker=0, down_s=20.0),))
    assert simulate(trace, settings, "round-robin").ttft_s[0] == pytest.approx(15.0 + PROFILE.ttft_s(1000))


def test_a_worker_that_fails_again_while_it_is_down_stays_down_for_the_longer_time():
    trace = tenants(1, 2, 20.0)
    again = FleetSettings(workers=1, failures=(Failure(at_s=5.0, down_s=10.0, worker=0), Failure(at_s=6.0, worker=0)))
    assert simulate(trace, again, "round-robin").answered.tolist() == [True, False]
    back = replace(again, failures=(*again.failures[:1], Failure(at_s=6.0, down_s=60.0, worker=0)))
    assert simulate(trace, back, "round-robin").ttft_s[1] > 46


def test_requests_without_any_worker_left_are_never_answered():
    trace = Trace([SimRequest(10.0, (), 1000, 5)], BLOCK)
    result = simulate(trace, FleetSettings(workers=1, failures=(Failure(at_s=5.0, worker=0),)), "round-robin")
    assert not result.answered.any()
    assert result.summary()["answered"] == 0


def test_events_of_a_dead_worker_are_not_believed_when_it_is_back():
    prompt = range(SYSTEM // BLOCK)
    trace = Trace([SimRequest(at, prompt, SYSTEM, 2) for at in (0.0, 20.0)], BLOCK)
    settings = FleetSettings(
        workers=1,
        gateway=GatewaySettings(event_lag_s=10.0, speculation_s=0.0),
        failures=(Failure(at_s=5.0, worker=0, down_s=1.0),),
    )
    result = simulate(trace, settings, "least-work")
    assert result.expected_hit_tokens[1] == 0
    assert result.hit_tokens[1].sum() == 0


def test_a_lost_pool_is_done_without_until_it_is_back():
    pool = TierSettings(
        name="pool",
        tier=Tier.REMOTE,
        capacity_tokens=10**7,
        read_bytes_per_s=100e9,
        write_bytes_per_s=100e9,
        shared=True,
    )
    prompt = range(SYSTEM // BLOCK)
    trace = Trace([SimRequest(at, prompt, SYSTEM, 2) for at in (0.0, 20.0, 60.0)], BLOCK)
    settings = FleetSettings(workers=3, tiers=(pool,), failures=(Failure(at_s=10.0, link="pool", down_s=30.0),))
    result = simulate(trace, settings, "round-robin")
    assert result.hit_tokens[:, Tier.REMOTE].tolist() == [0, 0, SYSTEM - 16]
    assert result.answered.all()


def test_an_avalanche_of_recomputing_is_smaller_where_hot_prefixes_have_copies():
    """A worker dies, and with it the only copies of its tenants' system prompts: others compute them all at once."""
    trace = tenants(12, 40, 0.1)
    death = Failure(at_s=30.05, worker=0)
    settings = FleetSettings(workers=3, failures=(death,))
    copies = ReplicationSettings(copies=3, uses=4, interval_s=6.0)
    alone, copied = (
        simulate(trace, replace(settings, replication=replication), "session") for replication in (None, copies)
    )
    assert (alone.worker[alone.arrival_s < death.at_s] == 0).any()
    after = alone.arrival_s >= death.at_s
    computed = [(run.prompt_tokens - run.hit_tokens.sum(1))[after & run.answered].sum() for run in (alone, copied)]
    assert computed[1] < computed[0] / 1.5
    assert copied.ttft_s[after].max() < alone.ttft_s[after].max()
    assert copied.counters["replicated_bytes"] > 0


def apart(prefill_workers: int = 1, workers: int = 2, **settings: float | str) -> FleetSettings:
    return FleetSettings(
        workers=workers,
        disaggregation=DisaggregationSettings(prefill_workers=prefill_workers, **settings),  # type: ignore[arg-type]
    )


def test_a_prompt_is_computed_in_one_pool_and_decoded_in_the_other():
    result = simulate(lone_prompt(), apart(), "round-robin")
    assert result.worker.tolist() == [1]
    assert result.counters["transfers"] == 1
    assert result.counters["transfer_bytes"] == 8192 * PROFILE.kv_bytes_per_token
    # what is left of the transfer when the prompt is computed is its last layer
    last_layer_s = 2e-3 + 8192 * PROFILE.kv_bytes_per_token / 80 / 40e9
    assert result.ttft_s[0] == pytest.approx(PROFILE.ttft_s(8192) + last_layer_s + PROFILE.ttft_s(1, 8191))


def test_a_slow_link_delays_the_first_token_and_transfers_wait_for_each_other():
    fast, slow = (simulate(lone_prompt(), apart(bytes_per_s=rate), "round-robin") for rate in (40e9, 1e9))
    assert slow.ttft_s[0] - fast.ttft_s[0] > 1.5
    two = Trace([SimRequest(0.0, (), 8192, 5), SimRequest(0.0, (), 8192, 5)], BLOCK)
    crowded = simulate(two, apart(2, 4, bytes_per_s=1e9), "round-robin")
    transfer_s = 8192 * PROFILE.kv_bytes_per_token / 1e9
    assert abs(crowded.ttft_s[0] - crowded.ttft_s[1]) > transfer_s / 2


def test_prompts_with_little_to_compute_stay_where_they_are_decoded():
    trace = Trace([*lone_prompt().requests, SimRequest(30.0, range(8448 // BLOCK), 8448, 10)], BLOCK)
    result = simulate(trace, apart(least_tokens=1024), "round-robin")
    assert result.counters["transfers"] == 1
    assert result.worker.tolist() == [1, 1]
    assert result.hit_tokens[1].sum() == 8192


def test_a_lone_prompt_gains_nothing_by_being_moved_and_is_never_moved_where_that_is_off():
    for policy in ("break-even", "never"):
        result = simulate(lone_prompt(), apart(policy=policy), "round-robin")
        assert result.counters["transfers"] == 0


def second_turn_after_a_death(pull_back_s: float, policy: str = "always") -> SimResult:
    """A conversation whose prefill worker has lost its cache between two turns."""
    turns = [SimRequest(0.0, range(8192 // BLOCK), 8192, 10), SimRequest(30.0, range(8448 // BLOCK), 8448, 10)]
    settings = replace(
        apart(pull_back_s=pull_back_s, policy=policy), failures=(Failure(at_s=10.0, worker=0, down_s=5.0),)
    )
    return simulate(Trace(turns, BLOCK), settings, "round-robin")


def test_the_next_turns_prefill_pulls_what_the_decode_worker_has_of_the_turn_before():
    computed, pulled = second_turn_after_a_death(0.0), second_turn_after_a_death(60.0)
    assert (computed.counters["turns_pulled"], pulled.counters["turns_pulled"]) == (0, 1)
    assert (computed.hit_tokens[1].sum(), pulled.hit_tokens[1].sum()) == (0, 8192)
    assert pulled.counters["transfers"] == computed.counters["transfers"] == 2
    moved_s = 2e-3 + 8192 * PROFILE.kv_bytes_per_token / 40e9
    saved_s = PROFILE.ttft_s(8448) - PROFILE.ttft_s(256, 8192)
    assert computed.ttft_s[1] - pulled.ttft_s[1] == pytest.approx(saved_s - moved_s, rel=0.05)


def test_a_turn_is_pulled_no_later_than_it_is_kept_and_not_where_its_prompt_stays_whole():
    assert second_turn_after_a_death(5.0).counters["turns_pulled"] == 0
    assert second_turn_after_a_death(60.0, "break-even").counters["turns_pulled"] == 0


def test_of_a_turn_whose_blocks_have_no_ids_nothing_is_kept_to_be_pulled():
    trace = Trace([SimRequest(10.0 * at, [0][:at], 40 * BLOCK, 2) for at in range(2)], BLOCK)
    assert simulate(trace, apart(pull_back_s=60.0), "round-robin").answered.all()


def test_break_even_answers_sooner_than_always_and_disturbs_less_than_never():
    requests = []
    for number in range(60):  # conversations of three turns: the first prefix is long, what follows is cached
        begin, context = 0.25 * number, [number * 100 + block for block in range(30 + number % 30)]
        for turn in range(3):
            chunks = (*context, *(10_000 + number * 10 + block for block in range(turn)))
            requests.append(SimRequest(begin + 10.0 * turn, chunks, len(chunks) * BLOCK, 150))
    trace = Trace(sorted(requests, key=lambda request: request.arrival_s), BLOCK)
    always, never, break_even = (
        simulate(trace, apart(2, 5, bytes_per_s=100e9, policy=policy), "expected-cost")
        for policy in ("always", "never", "break-even")
    )
    assert 0 < break_even.counters["transfers"] < always.counters["transfers"]
    assert np.nanmean(break_even.ttft_s) < min(np.nanmean(always.ttft_s), np.nanmean(never.ttft_s))
    assert np.nanmean(break_even.itl_s) < np.nanmean(never.itl_s)


def test_decoding_is_not_disturbed_by_prefills_in_the_other_pool():
    requests = [SimRequest(0.2 * at, (), 8192, 200) for at in range(20)]
    trace = Trace(requests, BLOCK)
    together = simulate(trace, FleetSettings(workers=4), "least-work")
    separate = simulate(trace, apart(2, 4), "least-work")
    assert np.nanmedian(separate.itl_s) < np.nanmedian(together.itl_s)


def test_without_the_link_or_a_pool_workers_do_both():
    trace = Trace([SimRequest(10.0, (), 4096, 5)], BLOCK)
    for failure in (Failure(at_s=5.0, link="transfer"), Failure(at_s=5.0, worker=0), Failure(at_s=5.0, worker=1)):
        result = simulate(trace, replace(apart(), failures=(failure,)), "round-robin")
        assert result.answered.all()
        assert result.counters["transfers"] == 0


def test_a_prompt_that_nobody_is_left_to_decode_is_decoded_where_it_was_computed():
    settings = replace(apart(1, 2), failures=(Failure(at_s=0.1, worker=1),))
    result = simulate(lone_prompt(4096), settings, "round-robin")
    # computed, and then found but for the engine's last block
    assert result.ttft_s[0] == pytest.approx(PROFILE.ttft_s(4096) + PROFILE.ttft_s(16, 4080), rel=1e-9)


def test_a_decode_worker_that_dies_before_the_prompt_arrives_is_replaced():
    settings = replace(apart(1, 3, bytes_per_s=1e9), failures=(Failure(at_s=1.0, worker=1),))
    result = simulate(lone_prompt(), settings, "round-robin")
    assert result.worker.tolist() == [2]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Failure(at_s=1.0), "a worker or a link"),
        (lambda: Failure(at_s=-1.0, worker=0), "at_s"),
        (lambda: FleetSettings(workers=2, failures=(Failure(at_s=1.0, worker=2),)), "workers are 0 to 1"),
        (lambda: FleetSettings(failures=(Failure(at_s=1.0, link="pool"),)), "known links: none"),
        (lambda: apart(2, 2), "none is left to decode"),
        (lambda: ReplicationSettings(copies=0), "copies"),
        (lambda: DisaggregationSettings(prefill_workers=0), "prefill_workers"),
        (lambda: DisaggregationSettings(prefill_workers=1, pull_back_s=-1), "pull_back_s"),
    ],
)
def test_impossible_fleets_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
