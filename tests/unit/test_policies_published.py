"""The published baselines, rule by rule."""

from collections import Counter

import numpy as np
import pytest

from policies.base import Residency, Tier, create_policy
from tests.fleets import CHUNK, make_fleet, make_request, make_residency


def decide(name, fleet, residency=None, request=None, now=1.0, **params):
    residency = residency or Residency.none(len(fleet))
    return create_policy(name, params).decide(request or make_request(1000), fleet, residency, now)


def choose(*args, **kwargs):
    return decide(*args, **kwargs).worker


# cache-threshold


def test_cache_threshold_takes_the_best_match_of_a_balanced_fleet():
    decision = decide("cache-threshold", make_fleet(3, running=[30, 0, 0]), make_residency([768, 512, 0]))
    assert (decision.worker, decision.reason) == (0, "hit")


@pytest.mark.parametrize(
    ("running", "worker"), [([32, 0, 9], 0), ([33, 0, 9], 1), ([400, 367, 390], 0), ([440, 400, 410], 0)]
)
def test_cache_threshold_leaves_the_cache_only_when_both_thresholds_of_imbalance_are_passed(running, worker):
    assert choose("cache-threshold", make_fleet(3, running=running), make_residency([768, 0, 0])) == worker


def test_cache_threshold_fills_the_smallest_cache_when_no_match_is_good():
    policy, fleet = create_policy("cache-threshold"), make_fleet(4)
    requests = [
        make_request(5000, conversation=0),
        *(make_request(1000, conversation=number) for number in range(1, 4)),
    ]
    rows = [policy.decide(request, fleet, Residency.none(4), now=0.0).worker for request in requests]
    assert sorted(rows) == [0, 1, 2, 3]
    smallest = policy.decide(make_request(100, conversation=9), fleet, make_residency([0, 0, 0, 25]), now=0.0)
    assert smallest.worker in rows[1:]
    assert smallest.reason == "room"


def test_cache_threshold_takes_no_cache_for_fuller_than_its_capacity():
    policy, fleet = create_policy("cache-threshold"), make_fleet(2, capacity=1000)
    for conversation in range(8):
        policy.decide(make_request(5000, conversation), fleet, Residency.none(2), now=0.0)
    terms = policy.decide(make_request(10), fleet, Residency.none(2), now=0.0).breakdown(fleet)
    assert [entry["cached_tokens"] for entry in terms] == [1000, 1000]


# overlap-cost


def test_overlap_cost_weighs_tiers():
    fleet, residency = make_fleet(3), make_residency([512, 0, 0])
    residency.hit_tokens[:] = 512
    residency.by_tier[1, Tier.HOST] = residency.by_tier[2, Tier.DISK] = 512
    terms = decide("overlap-cost", fleet, residency, block_tokens=16).breakdown(fleet)
    assert [entry["credit_blocks"] for entry in terms] == [32, 24, 8]
    assert choose("overlap-cost", fleet, residency, device_weight=0.5) == 1


def test_overlap_cost_adds_decode_blocks_to_what_is_left_to_prefill():
    fleet = make_fleet(2, decode_tokens=[1600, 0], pending_prefill_tokens=[0, 160])
    costs = [entry["cost"] for entry in decide("overlap-cost", fleet, make_residency([1000, 0])).breakdown(fleet)]
    assert costs == [100, (1000 + 160) / 16]


def test_overlap_cost_credits_no_more_than_there_is():
    fleet = make_fleet(1)
    assert decide("overlap-cost", fleet, make_residency([1000]), device_weight=3).breakdown(fleet)[0]["cost"] == 0


def test_affinity_fades_with_the_prefill_that_waits_at_the_holder():
    fleet, residency = make_fleet(2, pending_prefill_tokens=[600, 0]), make_residency([768, 0])
    assert choose("overlap-cost", fleet, residency) == 0
    assert choose("overlap-cost", fleet, residency, affinity_decay=1.0) == 1


def test_requests_in_flight_count_where_they_are_given_weight():
    fleet = make_fleet(2, running=[3, 0], decode_tokens=[0, 16])
    assert choose("overlap-cost", fleet) == 0
    assert choose("overlap-cost", fleet, request_weight=1.0) == 1


def test_a_temperature_spreads_requests_and_still_prefers_the_cheaper():
    policy, fleet = create_policy("overlap-cost", {"temperature": 0.5, "seed": 1}), make_fleet(3)
    fleet.decode_tokens[:] = [0, 8000, 16000]
    drawn = Counter(policy.decide(make_request(10), fleet, Residency.none(3), now=0.0).worker for _ in range(600))
    assert drawn[0] > drawn[1] > drawn[2] > 0


def test_a_temperature_draws_evenly_among_equals():
    policy = create_policy("overlap-cost", {"temperature": 0.5, "seed": 1})
    drawn = Counter(policy.decide(make_request(10), make_fleet(3), Residency.none(3), 0.0).worker for _ in range(600))
    assert min(drawn.values()) > 150


# sticky


def test_sticky_stays_where_four_fifths_are_cached_whatever_the_requests_there():
    fleet = make_fleet(3, pending_prefill_tokens=[200_000, 0, 0], running=[50, 0, 0])
    assert choose("sticky", fleet, make_residency([800, 799, 0])) == 0


@pytest.mark.parametrize(("gap_s", "worker"), [(18.0, 0), (18.1, 1)])
def test_sticky_leaves_when_its_queue_is_longer_by_more_than_the_gap(gap_s, worker):
    fleet = make_fleet(2, pending_prefill_tokens=[gap_s * 10_000, 0])
    assert choose("sticky", fleet, make_residency([1000, 0]), peak_tokens_per_s=10_000) == worker


def test_sticky_goes_by_work_when_nobody_or_everybody_holds_enough():
    fleet = make_fleet(3, pending_prefill_tokens=[500, 100, 300])
    assert choose("sticky", fleet, make_residency([768, 0, 0])) == 0  # 500 + 232 < 100 + 1000
    assert choose("sticky", fleet, make_residency([900, 900, 1000])) == 1


def test_sticky_can_go_by_requests():
    fleet = make_fleet(3, pending_prefill_tokens=[0, 0, 0], running=[2, 1, 0])
    residency = make_residency([1000, 800, 0])
    assert choose("sticky", fleet, residency) == 0
    assert choose("sticky", fleet, residency, balance="requests") == 1


def test_the_workers_that_are_not_sticky_come_last_among_the_fallbacks():
    fleet = make_fleet(4, pending_prefill_tokens=[9000, 0, 5000, 10])
    assert decide("sticky", fleet, make_residency([1000, 0, 1000, 0])).fallbacks == [0, 1, 3]


# lmetric


def test_lmetric_multiplies_new_tokens_by_the_batch():
    fleet = make_fleet(2, running=[3, 1])
    assert choose("lmetric", fleet, make_residency([512, 0])) == 0  # 488 · 4 < 1000 · 2
    assert choose("lmetric", fleet, make_residency([256, 0])) == 1  # 744 · 4 > 1000 · 2


def test_lmetric_reads_p_with_or_without_the_queue():
    fleet = make_fleet(2, running=[1, 2], pending_prefill_tokens=[2000, 0])
    assert choose("lmetric", fleet) == 1  # 3000 · 2 > 1000 · 3
    assert choose("lmetric", fleet, queued=False) == 0  # 1000 · 2 < 1000 · 3


@pytest.mark.parametrize("queued", [True, False])
def test_lmetric_on_an_idle_fleet_goes_by_the_cache(queued):
    assert choose("lmetric", make_fleet(3), make_residency([0, 512, 256]), queued=queued) == 1


def test_lmetric_with_all_cached_everywhere_goes_by_the_batch():
    fleet = make_fleet(3, running=[2, 1, 2])
    assert choose("lmetric", fleet, make_residency([1000, 1000, 1000])) == 1


# dualmap


def test_dualmap_gives_a_prefix_two_workers():
    fleet = make_fleet(8)
    rows = set()
    for loaded in range(8):
        fleet.pending_prefill_s[:] = fleet.prefilling_since[:] = 0
        fleet.pending_prefill_s[loaded] = 100
        rows.add(choose("dualmap", fleet))
    assert len(rows) == 2
    assert sum(entry["mapped"] for entry in decide("dualmap", fleet).breakdown(fleet)) == 2


def test_dualmap_keys_on_its_first_tokens():
    policy, fleet = create_policy("dualmap", {"prefix_tokens": 2 * CHUNK}), make_fleet(16)
    short, long = make_request(2 * CHUNK), make_request(40 * CHUNK)
    rows = [policy.decide(request, fleet, Residency.none(16), now=0.0).worker for request in (short, long)]
    assert rows[0] == rows[1]


def test_dualmap_prefers_the_cached_one_up_to_the_slo():
    fleet = make_fleet(8)
    pair = [row for row, entry in enumerate(decide("dualmap", fleet).breakdown(fleet)) if entry["mapped"]]
    for cached, other in (pair, pair[::-1]):
        fleet.pending_prefill_s[:] = 0
        residency = make_residency([512 * (row == cached) for row in range(8)])
        fleet.pending_prefill_s[cached] = 4.0
        assert decide("dualmap", fleet, residency, now=0.0).worker == cached
        fleet.pending_prefill_s[cached] = 6.0
        assert decide("dualmap", fleet, residency, now=0.0).worker == other
        assert decide("dualmap", fleet, residency, now=0.0, slo_s=10).worker == cached
        fleet.pending_prefill_s[other] = 7.0  # neither meets it: the sooner one
        assert decide("dualmap", fleet, residency, now=0.0).worker == cached


def test_dualmap_with_one_worker_takes_it():
    assert choose("dualmap", make_fleet(1)) == 0


# conductor


def test_conductor_pulls_a_prefix_to_a_free_worker():
    fleet = make_fleet(2, pending_prefill_s=[9.0, 0.0], reload_remote_s=1e-6)
    decision = decide("conductor", fleet, make_residency([768, 0]), now=0.0)
    assert (decision.worker, decision.reason, decision.expected_hit_tokens) == (1, "pull", 0)
    terms = decision.breakdown(fleet)[1]
    assert terms["pulled_tokens"] == 768
    assert terms["transfer_s"] == pytest.approx(768e-6)


def test_conductor_stays_with_the_holder_when_pulling_takes_longer_than_its_queue():
    fleet, residency = make_fleet(2, pending_prefill_s=[0.5, 0.0]), make_residency([768, 0])
    assert choose("conductor", fleet, residency, now=0.0, pull_s_per_token=1e-3) == 0


def test_conductor_does_not_pull_what_is_hardly_longer_or_where_it_cannot():
    fleet = make_fleet(2, reload_remote_s=1e-6)
    pulled = [
        entry["pulled_tokens"] for entry in decide("conductor", fleet, make_residency([768, 512])).breakdown(fleet)
    ]
    assert pulled == [0, 256]
    kept = decide("conductor", fleet, make_residency([768, 512]), pull_ratio=2.0).breakdown(fleet)
    assert [entry["pulled_tokens"] for entry in kept] == [0, 0]
    without = make_fleet(2)
    assert decide("conductor", without, make_residency([768, 512])).breakdown(without)[1]["pulled_tokens"] == 0


# weighted


def test_weighted_blends_prefix_queue_and_usage_by_three_two_two():
    fleet = make_fleet(2, running=[4, 0], kv_usage=[0.5, 0.25])
    costs = [entry["cost"] for entry in decide("weighted", fleet, make_residency([500, 0])).breakdown(fleet)]
    assert costs == [-(3 * 0.5 + 2 * 0 + 2 * 0.5), -(3 * 0 + 2 * 1 + 2 * 0.75)]


def test_a_weight_of_zero_switches_a_scorer_off():
    fleet = make_fleet(2, running=[4, 0], kv_usage=[0.9, 0.25])
    assert choose("weighted", fleet, make_residency([256, 0]), queue=0, kv_usage=0) == 0


def test_weighted_can_count_tokens():
    fleet = make_fleet(3, pending_prefill_tokens=[5000, 0, 10])
    assert choose("weighted", fleet, prefix=0, queue=0, kv_usage=0, tokens=1) == 1


def test_no_hit_lru_gives_cold_prompts_to_every_worker_in_turn():
    policy, fleet = create_policy("weighted", {"no_hit_lru": 1}), make_fleet(5)
    requests = [make_request(1000, conversation=number) for number in range(15)]
    rows = [policy.decide(request, fleet, Residency.none(5), now=0.0).worker for request in requests]
    assert all(sorted(rows[start : start + 5]) == list(range(5)) for start in (0, 5, 10))
    assert rows[:5] == rows[5:10] == rows[10:]


def test_no_hit_lru_says_nothing_about_prompts_that_somebody_holds():
    policy, fleet = create_policy("weighted", {"no_hit_lru": 1}), make_fleet(2)
    cold = policy.decide(make_request(1000), fleet, Residency.none(2), now=0.0).worker
    held = [256 * (row == cold) for row in range(2)]
    assert policy.decide(make_request(1000), fleet, make_residency(held), now=0.0).worker == cold


# predicted-latency


def test_predicted_latency_counts_queue_prefill_and_reload():
    fleet = make_fleet(3, pending_prefill_s=[2.0, 0.0, 0.0], reload_host_s=[0, 0, 1e-3])
    residency = make_residency([0, 256, 256])
    residency.by_tier[2] = 0, 256, 0, 0
    decision = decide("predicted-latency", fleet, residency, now=0.0, explore=0)
    ttft = [entry["ttft_s"] for entry in decision.breakdown(fleet)]
    assert decision.worker == 1
    assert ttft[0] > 2.0
    assert ttft[2] - ttft[1] == pytest.approx(0.256)
    assert decision.predicted_ttft == ttft[1]


@pytest.mark.parametrize(("queue_s", "worker"), [(4.5, 0), (5.5, 1)])
def test_predicted_latency_keeps_to_holders_within_the_gap(queue_s, worker):
    fleet = make_fleet(2, pending_prefill_s=[queue_s, 0.0])
    assert choose("predicted-latency", fleet, make_residency([900, 0]), now=0.0, explore=0) == worker


def test_predicted_latency_fits_requests_into_the_slo():
    fleet = make_fleet(3, pending_prefill_s=[0.0, 0.5, 3.0])
    assert choose("predicted-latency", fleet, now=0.0, explore=0, slo_s=1.0) == 1
    assert choose("predicted-latency", fleet, now=0.0, explore=0, slo_s=0.001) == 0


def test_predicted_latency_explores():
    policy, fleet = create_policy("predicted-latency", {"explore": 0.5, "seed": 1}), make_fleet(4)
    fleet.pending_prefill_s[1:] = 1.0
    chosen = [policy.decide(make_request(1000), fleet, Residency.none(4), now=0.0) for _ in range(200)]
    assert {decision.worker for decision in chosen if decision.reason == "explore"} == {0, 1, 2, 3}
    assert {decision.worker for decision in chosen if decision.reason == "load"} == {0}


# lbgr


def test_lbgr_spreads_what_comes_at_once_and_forgets_it_in_time():
    policy, fleet, cached = create_policy("lbgr"), make_fleet(2, running=[1, 1]), make_residency([768, 0])
    rows = [policy.decide(make_request(1000), fleet, cached, now=0.0).worker for _ in range(8)]
    assert rows[0] == 0  # where it is cached
    assert set(rows) == {0, 1}
    waits = [entry["wait_s"] for entry in policy.decide(make_request(1000), fleet, cached, now=0.0).breakdown(fleet)]
    later = policy.decide(make_request(1000), fleet, cached, now=0.02).breakdown(fleet)
    assert later[1]["wait_s"] == pytest.approx(waits[1] * 31 / 32)
    assert policy.decide(make_request(1000), fleet, cached, now=60.0).worker == 0


def test_lbgr_knows_of_no_wait_where_nothing_is_in_flight():
    policy, fleet = create_policy("lbgr"), make_fleet(2, running=[1, 0])
    for _ in range(3):
        decision = policy.decide(make_request(1000), fleet, Residency.none(2), now=0.0)
    assert [entry["wait_s"] for entry in decision.breakdown(fleet)] == [0, 0]


def test_lbgr_stays_for_the_length_of_its_hysteresis():
    policy, fleet = create_policy("lbgr", {"hysteresis_s": 1e6}), make_fleet(2, running=[1, 1])
    rows = [policy.decide(make_request(1000), fleet, Residency.none(2), now=0.0).worker for _ in range(5)]
    assert len(set(rows)) == 1


# burst-colocation


def test_burst_colocation_keeps_a_burst_together_and_spills_over():
    policy, fleet = create_policy("burst-colocation", {"max_per_worker": 3, "window_s": 1}), make_fleet(3)
    rows = []
    for n in range(9):
        rows.append(policy.decide(make_request(2000), fleet, Residency.none(3), now=n / 10).worker)
        fleet.pending_prefill_s[rows[-1]] += 1.0
    assert [len(set(rows[at : at + 3])) for at in (0, 3, 6)] == [1, 1, 1]
    assert set(rows) == {0, 1, 2}


def test_burst_colocation_ends_a_burst_after_its_window_and_holds_other_prompts_apart():
    policy, fleet = create_policy("burst-colocation", {"window_s": 0.1}), make_fleet(2)
    first = policy.decide(make_request(2000), fleet, Residency.none(2), now=0.0).worker
    fleet.pending_prefill_s[first] = 5.0
    assert policy.decide(make_request(2000, conversation=1), fleet, Residency.none(2), now=0.0).worker != first
    assert policy.decide(make_request(2000), fleet, Residency.none(2), now=0.1).worker == first
    assert policy.decide(make_request(2000), fleet, Residency.none(2), now=0.3).worker != first


# all of them

PUBLISHED = [
    *("burst-colocation", "cache-threshold", "conductor", "dualmap", "lbgr", "lmetric"),
    *("overlap-cost", "predicted-latency", "sticky", "weighted"),
]


@pytest.mark.parametrize("name", PUBLISHED)
def test_an_empty_prompt_without_chunks_is_placed(name):
    assert choose(name, make_fleet(3), request=make_request(0)) in range(3)


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_learned_of_one_fleet_serves_another(name):
    policy = create_policy(name)
    for size in (4, 2, 6, 1):
        assert policy.decide(make_request(1000), make_fleet(size), Residency.none(size), now=1.0).worker < size


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_decision_does_not_write_to_what_it_is_given(name):
    fleet, residency = make_fleet(4, capacity=1000, running=[1, 2, 3, 4]), make_residency([256, 0, 0, 512])
    state, tiers = fleet.state.copy(), residency.by_tier.copy()
    decide(name, fleet, residency)
    assert np.array_equal(fleet.state, state)
    assert np.array_equal(residency.by_tier, tiers)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_breakdown_does_not_change_with_the_fleet_it_was_made_for(name):
    fleet = make_fleet(3, running=[1, 2, 3], pending_prefill_tokens=[10, 20, 30], decode_tokens=50)
    decision = decide(name, fleet, make_residency([256, 0, 0]))
    before = decision.breakdown(fleet)
    fleet.state += 7.0
    assert decision.breakdown(fleet) == before
