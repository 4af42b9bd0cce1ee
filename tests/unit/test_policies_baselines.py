from collections import Counter

import numpy as np
import pytest

from policies.base import Residency, RoutingRequest, create_policy
from tests.fleets import make_fleet, make_request, make_residency


def choose(name, fleet, residency=None, request=None, **params):
    residency = residency or Residency.none(len(fleet))
    return create_policy(name, params).decide(request or make_request(1000), fleet, residency, now=1.0).worker


def test_round_robin_takes_turns():
    policy, fleet = create_policy("round-robin"), make_fleet(3, running=[9, 0, 0])
    rows = [policy.decide(make_request(10), fleet, Residency.none(3), now=0.0).worker for _ in range(7)]
    assert rows == [0, 1, 2, 0, 1, 2, 0]


def test_round_robin_keeps_a_turn_per_model():
    policy, fleet = create_policy("round-robin"), make_fleet(2)
    rows = [
        policy.decide(RoutingRequest(model, 10), fleet, Residency.none(2), now=0.0).worker
        for model in ("a", "b", "a", "b")
    ]
    assert rows == [0, 0, 1, 1]


def test_round_robin_goes_on_when_the_fleet_shrinks():
    policy = create_policy("round-robin")
    for _ in range(3):
        policy.decide(make_request(10), make_fleet(4), Residency.none(4), now=0.0)
    assert policy.decide(make_request(10), make_fleet(2), Residency.none(2), now=0.0).worker == 1


def test_a_retry_after_round_robin_goes_to_whoever_is_next():
    policy, fleet = create_policy("round-robin"), make_fleet(4)
    policy.decide(make_request(10), fleet, Residency.none(4), now=0.0)
    decision = policy.decide(make_request(10), fleet, Residency.none(4), now=0.0)
    assert (decision.worker, decision.fallbacks, decision.reason) == (1, [2, 3, 0], "turn")


@pytest.mark.parametrize("name", ["random", "power-of-two"])
def test_a_seed_makes_chance_repeat(name):
    fleet = make_fleet(8)

    def rows(seed):
        policy = create_policy(name, {"seed": seed})
        return [policy.decide(make_request(10), fleet, Residency.none(8), now=0.0).worker for _ in range(40)]

    assert rows(1) == rows(1) != rows(2)
    assert set(rows(1)) == set(range(8))


def test_random_gives_every_worker_its_share():
    policy, fleet = create_policy("random", {"seed": 0}), make_fleet(4)
    counts = Counter(policy.decide(make_request(10), fleet, Residency.none(4), now=0.0).worker for _ in range(2000))
    assert all(400 < counts[row] < 600 for row in range(4))


def test_least_requests_counts_requests():
    fleet = make_fleet(3, running=[2, 1, 3], pending_prefill_tokens=[0, 9000, 0])
    assert choose("least-requests", fleet) == 1


def test_least_requests_breaks_ties_by_pending_tokens():
    assert choose("least-requests", make_fleet(3, running=[1, 1, 2], pending_prefill_tokens=[50, 10, 0])) == 1


def test_least_tokens_counts_pending_uncached_tokens():
    assert choose("least-tokens", make_fleet(3, running=[1, 9, 1], pending_prefill_tokens=[50, 10, 70])) == 1


def test_least_tokens_breaks_ties_by_running():
    assert choose("least-tokens", make_fleet(3, running=[5, 4, 3], pending_prefill_tokens=[0, 0, 1])) == 1


@pytest.mark.parametrize("name", ["least-requests", "least-tokens", "least-work"])
def test_a_full_tie_is_broken_by_the_ring_not_by_the_order_of_the_list(name):
    request = make_request(1000, conversation=5)
    fleet, reverse = make_fleet(6), make_fleet(6)
    reverse.names = fleet.names[::-1]
    assert fleet.names[choose(name, fleet, request=request)] == reverse.names[choose(name, reverse, request=request)]


def test_ties_of_different_prompts_go_to_different_workers():
    policy, fleet = create_policy("least-tokens"), make_fleet(4)
    requests = (make_request(1000, conversation=number) for number in range(40))
    assert {policy.decide(request, fleet, Residency.none(4), now=0.0).worker for request in requests} == {0, 1, 2, 3}


def test_least_work_adds_the_requests_own_uncached_tokens():
    fleet = make_fleet(2, pending_prefill_tokens=[500, 0])
    assert choose("least-work", fleet, make_residency([768, 0])) == 0
    assert choose("least-work", fleet, make_residency([256, 0])) == 1


def test_power_of_two_never_takes_the_busier_of_its_two():
    policy, fleet = create_policy("power-of-two", {"seed": 3}), make_fleet(2, running=[1, 0])
    assert {policy.decide(make_request(10), fleet, Residency.none(2), now=0.0).worker for _ in range(20)} == {1}


def test_power_of_two_has_no_second_choice_with_one_worker():
    assert choose("power-of-two", make_fleet(1)) == 0


def test_a_session_stays_on_its_worker_whatever_the_load():
    request = make_request(1000, session="alice")
    row = choose("session", make_fleet(5), request=request)
    loaded = make_fleet(5)
    loaded.running[row] = loaded.pending_prefill_tokens[row] = 1000
    assert choose("session", loaded, request=make_request(500, conversation=9, session="alice")) == row


def test_sessions_spread():
    policy, fleet = create_policy("session"), make_fleet(4)
    requests = (make_request(9, session=f"session-{number}") for number in range(400))
    rows = Counter(policy.decide(request, fleet, Residency.none(4), now=0.0).worker for request in requests)
    assert min(rows.values()) > 50


def test_a_request_without_session_goes_by_load():
    fleet = make_fleet(3, pending_prefill_tokens=[5, 5, 0])
    decision = create_policy("session").decide(make_request(1000), fleet, Residency.none(3), now=0.0)
    assert (decision.worker, decision.reason) == (2, "load")


def test_prefix_hash_sends_equal_beginnings_to_one_worker():
    rows = {choose("prefix-hash", make_fleet(8), request=make_request(tokens)) for tokens in (300, 1000, 5000)}
    assert len(rows) == 1


@pytest.mark.parametrize(("prefix_chunks", "workers"), [(1, 1), (2, 8)])
def test_prefix_hash_separates_what_differs_within_its_chunks(prefix_chunks, workers):
    policy, fleet = create_policy("prefix-hash", {"prefix_chunks": prefix_chunks}), make_fleet(8)
    requests = [RoutingRequest("m", 600, [b"start", b"end %d" % number]) for number in range(80)]
    rows = {policy.decide(request, fleet, Residency.none(8), now=0.0).worker for request in requests}
    assert len(rows) == workers


def test_prefix_hash_separates_models():
    policy, fleet = create_policy("prefix-hash"), make_fleet(8)
    requests = (RoutingRequest(f"model-{number}", 100) for number in range(80))
    assert len({policy.decide(request, fleet, Residency.none(8), now=0.0).worker for request in requests}) == 8


def test_prefix_hash_walks_on_past_a_worker_above_its_share():
    request, fleet = make_request(1000), make_fleet(4)
    home = choose("prefix-hash", fleet, request=request)
    fleet.running[home] = 1  # ⌈1.25·(1 + 1)/4⌉ = 1
    assert choose("prefix-hash", fleet, request=request) != home
    fleet.running[:] = 1  # everybody has one: ⌈1.25·(4 + 1)/4⌉ = 2
    assert choose("prefix-hash", fleet, request=request) == home
    fleet.running[home] = 2
    assert choose("prefix-hash", fleet, request=request, load_factor=3.0) == home


@pytest.mark.parametrize("name", ["round-robin", "random", "least-requests", "least-tokens", "power-of-two", "session"])
def test_baselines_that_ignore_the_cache_still_say_what_they_expect_to_hit(name):
    residency = make_residency([256] * 4)
    decision = create_policy(name).decide(make_request(1000, session="s"), make_fleet(4), residency, now=0.0)
    assert decision.expected_hit_tokens == 256


def test_decisions_do_not_write_to_the_fleet():
    fleet = make_fleet(4, capacity=1000, running=[1, 2, 3, 4], pending_prefill_tokens=[5, 6, 7, 8])
    before = fleet.state.copy()
    for name in ("round-robin", "random", "least-work", "prefix-hash", "power-of-two", "expected-cost"):
        choose(name, fleet, make_residency([256, 0, 0, 512]))
    assert np.array_equal(fleet.state, before)
