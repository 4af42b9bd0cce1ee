import copy

import numpy as np
import pytest

from policies.base import Residency, Tier, create_policy
from policies.cost import prefill_seconds
from policies.expected_cost import SMALL_FLEET
from policies.ring import ring_of
from tests.fleets import CHUNK, PREFILL, make_fleet, make_request, make_residency


@pytest.fixture
def policy():
    return create_policy("expected-cost")


def seconds(new, cached=0):
    return prefill_seconds(float(new), float(cached), *PREFILL)


def busy(fleet, row, wait_s, now=0.0):
    """Give a worker a queue of ``wait_s`` seconds that began just now."""
    fleet.pending_prefill_s[row] += wait_s
    fleet.pending_prefill_tokens[row] += wait_s / PREFILL[1]
    fleet.prefilling_since[row] = now
    fleet.running[row] += 1


def test_a_conversation_stays_where_its_cache_is(policy):
    decision = policy.decide(make_request(4000), make_fleet(4), make_residency([0, 0, 3840, 0]), now=0.0)
    assert (decision.worker, decision.expected_hit_tokens, decision.reason) == (2, 3840, "hit")
    assert decision.predicted_ttft == pytest.approx(seconds(160, 3840))


def test_a_2000_token_hit_in_a_10000_token_prompt_counts(policy):
    assert policy.decide(make_request(10_000), make_fleet(3), make_residency([0, 2048, 0]), now=0.0).worker == 1


def test_it_moves_when_waiting_would_cost_more_than_computing_anew(policy):
    residency = make_residency([3840, 0])
    for wait_s, row in ((0.5 * seconds(4000), 0), (1.5 * seconds(4000), 1)):
        fleet = make_fleet(2)
        busy(fleet, 0, wait_s)
        assert policy.decide(make_request(4000), fleet, residency, now=0.0).worker == row


def test_one_hot_worker_does_not_switch_affinity_off_for_the_others(policy):
    fleet = make_fleet(4)
    busy(fleet, 0, 60.0)
    assert policy.decide(make_request(4000), fleet, make_residency([0, 0, 0, 3840]), now=0.0).worker == 3


def test_time_that_the_running_prefill_has_taken_is_not_waited_for_again(policy):
    fleet = make_fleet(2)
    busy(fleet, 0, 2.0, now=10.0)
    for now, wait_s in ((10.0, 2.0), (11.5, 0.5), (13.0, 0.0)):
        breakdown = policy.decide(make_request(100), fleet, Residency.none(2), now=now).breakdown(fleet)
        assert [entry["wait_s"] for entry in breakdown] == pytest.approx([wait_s, 0])


def test_a_miss_goes_by_load(policy):
    fleet = make_fleet(4, capacity=100_000)
    for row in (0, 1, 3):
        busy(fleet, row, 1.0)
    assert policy.decide(make_request(4000), fleet, Residency.none(4), now=0.0).worker == 2


def test_faster_workers_get_more(policy):
    fleet = make_fleet(2)
    fleet.prefill_b_s[1] /= 4
    assert policy.decide(make_request(4000), fleet, Residency.none(2), now=0.0).worker == 1


def test_the_same_hit_is_worth_less_in_a_slower_tier(policy):
    fleet = make_fleet(2, reload_host_s=2e-6)
    residency = make_residency([3840, 3840])
    residency.by_tier[0] = [0, 3840, 0, 0]
    decision = policy.decide(make_request(4000), fleet, residency, now=0.0)
    assert decision.worker == 1
    work_s = [entry["work_s"] for entry in decision.breakdown(fleet)]
    assert work_s[0] - work_s[1] == pytest.approx(3840 * 2e-6)


def test_a_tier_slower_than_computing_is_not_worth_going_to(policy):
    fleet = make_fleet(2, reload_remote_s=1e-3)
    decision = policy.decide(make_request(4000), fleet, make_residency([3840, 0], Tier.REMOTE), now=0.0)
    assert decision.worker == 1


def test_equal_costs_go_to_the_worker_with_fewer_requests(policy):
    fleet = make_fleet(3, running=[2, 1, 2])
    assert policy.decide(make_request(4000), fleet, make_residency([3840] * 3), now=0.0).worker == 1


def test_new_conversations_go_to_their_place_on_the_ring():
    fleet = make_fleet(8)
    for conversation in range(20):
        request = make_request(2000, conversation)
        decision = create_policy("expected-cost").decide(request, fleet, Residency.none(8), now=0.0)
        assert (decision.worker, decision.reason) == (ring_of(tuple(fleet.names)).first(request.chunks[0]), "ring")


def test_a_prompt_without_a_whole_chunk_is_placed_by_its_ring_key(policy):
    request = make_request(40, ring_key=b"user-7")
    decision = policy.decide(request, make_fleet(8), Residency.none(8), now=0.0)
    assert decision.worker == ring_of(tuple(make_fleet(8).names)).first(b"user-7")


def test_the_ring_walks_on_past_workers_with_more_than_their_share(policy):
    request, fleet = make_request(2000), make_fleet(8)
    order = list(ring_of(tuple(fleet.names)).walk(request.chunks[0]))
    fleet.running[order[0]] = 1
    assert policy.decide(request, fleet, Residency.none(8), now=0.0).worker == order[1]


def test_a_candidate_far_above_the_mean_is_skipped_however_much_it_holds(policy):
    fleet = make_fleet(4, pending_prefill_tokens=[50_000, 0, 0, 0])
    residency = make_residency([3840, 0, 0, 0])
    decision = policy.decide(make_request(4000), fleet, residency, now=0.0)
    assert decision.worker != 0
    assert [entry["bounded"] for entry in decision.breakdown(fleet)] == [True, False, False, False]
    unbounded = create_policy("expected-cost", {"bounded": False})
    assert unbounded.decide(make_request(4000), fleet, residency, now=0.0).worker == 0


def test_load_is_bounded_in_the_time_it_takes_so_faster_workers_may_hold_more(policy):
    fleet = make_fleet(2, pending_prefill_tokens=[40_000, 10_000])
    fleet.prefill_b_s[0] /= 4
    decision = policy.decide(make_request(4000), fleet, make_residency([3840, 0]), now=0.0)
    assert [entry["bounded"] for entry in decision.breakdown(fleet)] == [False, False]


def test_decode_load_counts_with_its_weight():
    fleet = make_fleet(4, decode_tokens=[1_000_000, 0, 0, 0])
    for weight, bounded in ((0.1, True), (0.0, False)):
        policy = create_policy("expected-cost", {"decode_weight": weight})
        decision = policy.decide(make_request(4000), fleet, make_residency([3840, 0, 0, 0]), now=0.0)
        assert decision.breakdown(fleet)[0]["bounded"] is bounded


def test_a_worker_whose_cache_turns_over_is_charged_for_what_it_would_displace(policy):
    fleet = make_fleet(2, capacity=50_000)
    for conversation in range(10):  # fill the first worker's cache
        policy.decide(make_request(5000, conversation), fleet.take(np.array([0])), Residency.none(1), now=0.0)
    decision = policy.decide(make_request(5000, 99), fleet, make_residency([0, 0]), now=0.0)
    displacement_s = [entry["displacement_s"] for entry in decision.breakdown(fleet)]
    assert displacement_s[0] > 0
    off = create_policy("expected-cost", {"reuse": 0})
    assert off.decide(make_request(5000), fleet, Residency.none(2), now=0.0).breakdown(fleet)[0]["displacement_s"] == 0


def test_what_is_brought_back_from_a_lower_tier_displaces_nothing(policy):
    fleet = make_fleet(1, capacity=50_000, reload_host_s=[5e-6])
    for conversation in range(20):
        policy.decide(make_request(5000, conversation), fleet, Residency.none(1), now=0.0)
    charged = [
        copy.deepcopy(policy)
        .decide(make_request(5000), fleet, make_residency([4864], tier=tier), now=0.0)
        .breakdown(fleet)[0]
        for tier in (Tier.HBM, Tier.HOST)
    ]
    assert charged[0]["displacement_s"] > 0
    assert charged[1]["displacement_s"] == pytest.approx(charged[0]["displacement_s"])
    assert charged[0]["work_s"] < charged[1]["work_s"]


def test_the_price_of_delaying_others_grows_with_traffic_and_can_be_switched_off():
    for price in (True, False):
        policy, fleet = create_policy("expected-cost", {"price": price}), make_fleet(2)
        decisions = [
            policy.decide(make_request(4000, number), fleet, Residency.none(2), now=number / 10) for number in range(50)
        ]
        prices = [decision.breakdown(fleet)[0]["pi"] for decision in decisions]
        assert (sorted(prices) == prices and prices[0] == 0 < prices[-1]) if price else not any(prices)


def test_the_price_is_of_those_that_come_meanwhile_not_of_those_that_wait(policy):
    fleet = make_fleet(2)
    for number in range(20):
        policy.decide(make_request(4000, number), fleet, Residency.none(2), now=number / 10)
    busy(fleet, 0, 30.0, now=2.0)
    waiting, idle = policy.decide(make_request(4000, 99), fleet, Residency.none(2), now=2.0).breakdown(fleet)
    assert waiting["wait_s"] == 30 > idle["wait_s"] == 0
    assert waiting["pi"] == idle["pi"] > 0


def test_the_price_grows_with_the_work_during_which_others_come(policy):
    fleet = make_fleet(2)
    for number in range(20):
        policy.decide(make_request(4000, number), fleet, Residency.none(2), now=number / 10)
    held, new = policy.decide(make_request(4000, 99), fleet, make_residency([3840, 0]), now=2.0).breakdown(fleet)
    assert new["pi"] / held["pi"] == pytest.approx(new["work_s"] / held["work_s"])


def start_conversations(policy, fleet, count, shared_tokens=5120):
    """Start a conversation a second from one system prompt that only the first worker, always a little busy, holds."""
    busy(fleet, 0, 0.05)
    residency = make_residency([shared_tokens] + [0] * (len(fleet) - 1))
    shared = make_request(shared_tokens, conversation=0).chunks
    decisions = []
    for number in range(1, count + 1):
        request = make_request(shared_tokens + 3 * CHUNK, conversation=number)
        request.chunks = [*shared, *request.chunks[len(shared) :]]
        fleet.prefilling_since[0] = number
        decisions.append(policy.decide(request, fleet, residency, now=float(number)))
    return decisions


def test_a_prefix_that_many_conversations_start_from_spreads(policy):
    fleet = make_fleet(4)
    decisions = start_conversations(policy, fleet, 80)
    assert {decision.worker for decision in decisions[:4]} == {0}
    assert {decision.worker for decision in decisions} == {0, 1, 2, 3}
    still = start_conversations(create_policy("expected-cost", {"replicate": False}), fleet, 80)
    assert {decision.worker for decision in still} == {0}


@pytest.mark.parametrize("workers", [4, SMALL_FLEET + 1])
def test_a_prefix_does_not_spread_over_caches_that_are_turned_over(policy, workers):
    fleet = make_fleet(workers, capacity=20_000)
    for conversation in range(10 * workers):  # which fill all caches
        row = np.array([conversation % workers])
        policy.decide(make_request(10_000, 1000 + conversation), fleet.take(row), Residency.none(1), now=0.0)
    decisions = start_conversations(policy, fleet, 20 * workers)
    assert {decision.worker for decision in decisions} == {0}


def test_what_is_promised_of_a_spreading_prefix_is_what_the_worker_holds(policy):
    decision = next(d for d in start_conversations(policy, make_fleet(4), 80) if d.worker != 0)
    assert decision.expected_hit_tokens == 0
    assert decision.predicted_ttft == pytest.approx(seconds(5120 + 3 * CHUNK))


def test_models_learn_apart(policy):
    fleet = make_fleet(2, capacity=1000)
    request = make_request(4000)
    policy.decide(request, fleet, Residency.none(2), now=0.0)
    request.model = "other"
    breakdown = policy.decide(request, fleet, Residency.none(2), now=0.0).breakdown(fleet)
    assert [entry["displacement_s"] for entry in breakdown] == [0, 0]


def test_a_copy_decides_alike_and_leaves_the_original_as_it_was(policy):
    fleet = make_fleet(3, capacity=10_000)
    policy.decide(make_request(4000), fleet, Residency.none(3), now=0.0)
    looks = [copy.deepcopy(policy).decide(make_request(4000, 9), fleet, Residency.none(3), 1.0) for _ in range(2)]
    assert looks[0].breakdown(fleet) == looks[1].breakdown(fleet)


def test_a_breakdown_gives_every_term_of_the_score(policy):
    fleet = make_fleet(2, capacity=100_000, reload_host_s=2e-6)
    residency = make_residency([3840, 0])
    residency.by_tier[0] = [2560, 1280, 0, 0]
    decision = policy.decide(make_request(4000), fleet, residency, now=0.0)
    entry = decision.breakdown(fleet)[0]
    assert entry | {"work_s": 0, "cost": 0, "ring": 0} == {
        "worker": "worker-0",
        "chosen": True,
        "cost": 0,
        "hit_tokens": 3840,
        "hbm_tokens": 2560,
        "host_tokens": 1280,
        "disk_tokens": 0,
        "remote_tokens": 0,
        "uncached_tokens": 160,
        "wait_s": 0,
        "work_s": 0,
        "pi": 0,
        "displacement_s": 0,
        "bounded": False,
        "ring": 0,
    }
    assert entry["cost"] == entry["wait_s"] + (1 + entry["pi"]) * (entry["work_s"] + entry["displacement_s"])


def test_small_and_large_fleets_are_scored_alike():
    """Candidates beyond the threshold are too busy to matter; the scores of the others must not change."""
    random = np.random.default_rng(0)
    small, extra = SMALL_FLEET, 8
    hits = random.integers(0, 15, small + extra) * CHUNK
    hits[small:] = 0
    fleet = make_fleet(small + extra, reload_host_s=2e-6, kv_capacity_tokens=50_000)
    fleet.pending_prefill_tokens[:] = random.integers(0, 9000, small + extra)
    fleet.pending_prefill_s[:] = fleet.pending_prefill_tokens * 6e-5
    fleet.prefilling_since[:] = 9.9
    rows = np.arange(small)
    breakdowns = []
    for some in (rows, np.arange(small + extra)):
        policy = create_policy("expected-cost", {"bounded": False, "price": False})
        view = fleet.take(some)
        breakdowns.append(policy.decide(make_request(4000), view, make_residency(hits[some]), now=10.0).breakdown(view))
    for one, other in zip(*(breakdown[:small] for breakdown in breakdowns), strict=True):
        assert one | {"chosen": 0, "ring": 0} == pytest.approx(other | {"chosen": 0, "ring": 0})


def test_a_prompt_without_tokens_is_routed_all_the_same(policy):
    decision = policy.decide(make_request(0), make_fleet(3), Residency.none(3), now=0.0)
    assert decision.expected_hit_tokens == 0
    assert decision.predicted_ttft == pytest.approx(seconds(1))


def test_a_fleet_without_any_figures_is_balanced_by_requests(policy):
    fleet = make_fleet(4)
    fleet.state[:] = 0
    for _ in range(40):
        fleet.running[policy.decide(make_request(4000), fleet, Residency.none(4), now=0.0).worker] += 1
    assert fleet.running.max() <= 13


def test_a_hundred_cold_requests_at_one_moment_spread_by_what_was_just_dispatched(policy):
    fleet = make_fleet(8)
    for conversation in range(100):
        request = make_request(4000, conversation)
        row = policy.decide(request, fleet, Residency.none(8), now=5.0).worker
        busy(fleet, row, seconds(4000), now=5.0)
    counts = sorted(fleet.running.tolist())
    assert counts[0] >= 11
    assert counts[-1] <= 14


def test_a_burst_of_one_cold_prompt_computes_it_once_per_worker_at_most(policy):
    """Those that join a worker see the speculative residency of the first: a prefill in flight is charged once."""
    fleet, hits = make_fleet(4), [0] * 4
    for _ in range(100):
        decision = policy.decide(make_request(8000), fleet, make_residency(hits), now=5.0)
        hit = decision.expected_hit_tokens
        busy(fleet, decision.worker, seconds(8000 - hit, hit), now=5.0)
        hits[decision.worker] = 31 * CHUNK
    assert fleet.pending_prefill_s.sum() < 4 * seconds(8000) + 100 * seconds(64, 31 * CHUNK) + 1e-9
    assert max(fleet.running) <= 32
