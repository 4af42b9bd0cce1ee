"""Fetching a prefix from another worker: what it saves, who gives it, and where expected-cost then sends a request."""

from __future__ import annotations

import numpy as np
import pytest

from policies.base import FleetView, Residency, Tier, create_policy
from policies.cost import prefill_seconds
from policies.expected_cost import SMALL_FLEET
from policies.pull import NO_GROUP, PullLinks
from tests.fleets import PREFILL, make_fleet, make_request, make_residency

S_PER_TOKEN = 8e-6  # 320 KiB per token at 40 GB/s
LATENCY_S = 0.026


def pulling(fleet: FleetView, groups: list[int] | None = None) -> FleetView:
    n = len(fleet)
    group = np.zeros(n, np.int64) if groups is None else np.array(groups)
    fleet.pulls = PullLinks(group, np.full(n, S_PER_TOKEN), np.full(n, LATENCY_S))
    return fleet


def savings(fleet: FleetView, residency: Residency) -> list[float]:
    assert fleet.pulls is not None
    saved: list[float] = fleet.pulls.savings(fleet, residency.hit_tokens, residency).tolist()
    return saved


def test_what_is_fetched_saves_its_prefill_less_the_transfer():
    fleet = pulling(make_fleet(2))
    _, b, c = PREFILL
    recompute_s = prefill_seconds(7_680.0, 2_560.0, 0.0, b, c)
    saved = savings(fleet, make_residency([2_560, 10_240]))
    assert saved == pytest.approx([recompute_s - LATENCY_S - 7_680 * S_PER_TOKEN, 0.0])


@pytest.mark.parametrize("tokens", [0, 256])
def test_what_is_not_worth_the_latency_is_computed(tokens):
    fleet = pulling(make_fleet(2))
    residency = make_residency([0, tokens])
    assert savings(fleet, residency) == [0, 0]
    assert fleet.pulls.best(fleet, 0, 0, residency) is None


def test_a_link_slower_than_the_prefill_moves_nothing():
    fleet = pulling(make_fleet(2))
    fleet.pulls.s_per_token[:] = 1e-3
    assert savings(fleet, make_residency([0, 10_240])) == [0, 0]


def test_workers_fetch_within_their_group_only():
    fleet = pulling(make_fleet(5), [0, 0, 1, 1, NO_GROUP])
    saved = savings(fleet, make_residency([0, 10_240, 0, 0, 20_480]))
    assert saved[0] > 0
    assert saved[1:] == [0, 0, 0, 0]
    assert fleet.pulls.best(fleet, 2, 0, make_residency([0, 10_240, 0, 0, 20_480])) is None
    assert fleet.pulls.best(fleet, 4, 0, make_residency([10_240, 0, 0, 0, 0])) is None


def test_what_lies_in_a_shared_pool_is_nobodys_to_give():
    assert savings(pulling(make_fleet(2)), make_residency([0, 10_240], Tier.REMOTE)) == [0, 0]


def test_of_equal_holders_the_least_busy_one_gives():
    fleet = pulling(make_fleet(3, running=[0, 9, 4]))
    pull = fleet.pulls.best(fleet, 0, 0, make_residency([0, 10_240, 10_240]))
    assert pull is not None
    assert (pull.source, pull.tokens) == (2, 10_240)
    assert pull.saved_s == pytest.approx(savings(fleet, make_residency([0, 10_240, 10_240]))[0])


def test_links_follow_a_choice_of_candidates():
    chosen = pulling(make_fleet(3), [0, 1, 0]).take(np.array([2, 1]))
    assert chosen.pulls is not None
    assert chosen.pulls.group.tolist() == [0, 1]


def decide(fleet: FleetView, residency: Residency, prompt_tokens: int = 10_500):
    return create_policy("expected-cost").decide(make_request(prompt_tokens), fleet, residency, now=0.0)


@pytest.mark.parametrize("n", [4, SMALL_FLEET + 8])
def test_a_conversation_whose_worker_is_busy_moves_and_takes_its_cache_along(n):
    residency = make_residency([10_240] + [0] * (n - 1))
    busy = {"pending_prefill_s": [0.5] + [0.0] * (n - 1), "prefilling_since": [0.0] * n}
    assert decide(make_fleet(n, **busy), residency).worker == 0
    decision = decide(pulling(make_fleet(n, **busy)), residency)
    assert decision.worker != 0
    assert decision.reason == "pull"
    saves_s = [row["fetch_saves_s"] for row in decision.breakdown(make_fleet(n))]
    assert saves_s[0] == 0 < saves_s[decision.worker] == pytest.approx(decision.pull.saved_s)
    assert (decision.pull.source, decision.pull.tokens, decision.expected_hit_tokens) == (0, 10_240, 10_240)
    # what is left to compute, and the transfer
    assert decision.predicted_ttft == pytest.approx(
        prefill_seconds(260.0, 10_240.0, *PREFILL) + LATENCY_S + 10_240 * S_PER_TOKEN
    )


def test_a_conversation_stays_where_nothing_waits():
    decision = decide(pulling(make_fleet(4)), make_residency([0, 10_240, 0, 0]))
    assert (decision.worker, decision.reason, decision.pull) == (1, "hit", None)


def test_what_the_cost_says_of_small_and_large_fleets_is_the_same():
    n = SMALL_FLEET + 1
    residency = make_residency([10_240] + [0] * (n - 1))
    large = decide(pulling(make_fleet(n)), residency).breakdown(make_fleet(n))
    few = decide(pulling(make_fleet(4)), make_residency([10_240, 0, 0, 0])).breakdown(make_fleet(4))
    assert [row["work_s"] for row in large[:4]] == pytest.approx([row["work_s"] for row in few])


def test_a_prefix_shared_by_many_is_never_charged_below_nothing():
    policy = create_policy("expected-cost")
    fleet = pulling(make_fleet(2))
    for conversation in range(30):
        request = make_request(10_240, conversation)
        request.chunks = [b"shared %d" % number for number in range(38)] + [b"own %d" % conversation, b"x"]
        decision = policy.decide(request, fleet, make_residency([9_728, 0]), now=float(conversation))
        assert min(row["work_s"] for row in decision.breakdown(fleet)) > 0
        assert decision.predicted_ttft > 0
