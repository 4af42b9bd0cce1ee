import copy
from collections.abc import Sequence
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.base import FleetView, PolicyError, Residency, create_policy, known_policies
from policies.expected_cost import SMALL_FLEET
from tests.fleets import CHUNK, make_fleet, make_request, make_residency

ALL = sorted(known_policies())
DRAWING = {
    "overlap-cost": {"seed": 1, "temperature": 0.5},
    "power-of-two": {"seed": 1},
    "predicted-latency": {"seed": 1, "explore": 0.5},
    "random": {"seed": 1},
}
"""Policies that draw lots, with parameters that make the draws repeat."""
FEW = settings(max_examples=settings.default.max_examples // 6)
"""Examples per policy: there are many policies."""
NOT_EXPLORING = {"predicted-latency": {"explore": 0.0}, "power-of-two": {"seed": 1}}
UNORDERED = sorted(set(ALL) - {"power-of-two", "random", "round-robin"})
BY_LOAD = sorted(set(ALL) - {"random", "round-robin", "session"})


@st.composite
def situations(draw, most=2 * SMALL_FLEET):
    """A loaded fleet, a request, and who holds how much of it in which tier."""
    n = draw(st.integers(1, most))
    prompt = draw(st.integers(0, 6000))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    fleet = make_fleet(n, capacity=draw(st.sampled_from([0, 5_000, 500_000])), reload_host_s=2e-6, reload_disk_s=5e-5)
    fleet.running[:] = random.integers(0, draw(st.integers(1, 9)), n)
    busy = fleet.running > 0
    fleet.pending_prefill_tokens[:] = random.integers(0, draw(st.integers(1, 30_000)), n) * busy
    fleet.pending_prefill_s[:] = fleet.pending_prefill_tokens * 6e-5
    fleet.prefilling_since[:] = random.uniform(90, 100, n) * (fleet.pending_prefill_tokens > 0)
    fleet.decode_tokens[:] = random.integers(0, 50_000, n) * busy
    residency = make_residency(random.integers(0, prompt // CHUNK + 1, n) * CHUNK)
    lower = residency.hit_tokens // CHUNK // 2 * CHUNK * random.integers(0, 2, n)
    residency.by_tier[:, 0] -= lower
    residency.by_tier[:, random.integers(1, 4)] += lower
    session = draw(st.none() | st.text(max_size=5))
    return fleet, make_request(prompt, conversation=draw(st.integers(0, 50)), session=session), residency


@pytest.mark.parametrize("name", ALL)
@FEW
@given(situation=situations())
def test_the_choice_is_a_candidate_and_every_other_is_a_fallback(name, situation):
    fleet, request, residency = situation
    decision = create_policy(name).decide(request, fleet, residency, now=100.0)
    assert sorted([decision.worker, *decision.fallbacks]) == list(range(len(fleet)))
    assert 0 <= decision.expected_hit_tokens <= max(0, request.prompt_tokens - 1)
    assert decision.predicted_ttft >= 0
    assert len(decision.breakdown(fleet)) == len(fleet)


@pytest.mark.parametrize("name", ALL)
@FEW
@given(one=situations(), other=situations())
def test_a_copy_and_an_equal_policy_decide_alike(name, one, other):
    policy, equal = create_policy(name, DRAWING.get(name)), create_policy(name, DRAWING.get(name))
    for fleet, request, residency in (one, other):
        assert outline(equal, fleet, request, residency) == outline(policy, fleet, request, residency)
    duplicate = copy.deepcopy(policy)
    for fleet, request, residency in (other, one, other):
        assert outline(duplicate, fleet, request, residency) == outline(policy, fleet, request, residency)


@pytest.mark.parametrize("name", ALL)
@FEW
@given(situation=situations())
def test_a_decision_does_not_go_through_the_prompts_chunks(name, situation):
    fleet, request, residency = situation
    request.chunks = Watched(request.chunks)
    create_policy(name).decide(request, fleet, residency, now=100.0)
    assert request.chunks.looks <= 4


@pytest.mark.parametrize("name", UNORDERED)
@FEW
@given(situation=situations(), data=st.data())
def test_the_order_of_the_workers_does_not_matter(name, situation, data):
    fleet, request, residency = situation
    order = np.array(data.draw(st.permutations(range(len(fleet)))))
    shuffled = make_residency(residency.hit_tokens[order])
    shuffled.by_tier = residency.by_tier[order]
    params = NOT_EXPLORING.get(name)
    chosen = create_policy(name, params).decide(request, fleet, residency, now=100.0).worker
    again = create_policy(name, params).decide(request, fleet.take(order), shuffled, now=100.0).worker
    assert fleet.names[order[again]] == fleet.names[chosen]


@pytest.mark.parametrize("name", BY_LOAD)
@FEW
@given(situation=situations(most=8), data=st.data())
def test_more_load_never_attracts_a_request(name, situation, data):
    fleet, request, residency = situation
    params = NOT_EXPLORING.get(name)
    chosen = create_policy(name, params).decide(request, fleet, residency, now=100.0).worker
    others = [row for row in range(len(fleet)) if row != chosen]
    if not others:
        return
    row = data.draw(st.sampled_from(others))
    add_load(fleet, row, data.draw(st.integers(1, 20_000)))
    assert create_policy(name, params).decide(request, fleet, residency, now=100.0).worker != row


@given(situation=situations(most=8), data=st.data())
def test_a_longer_hit_never_costs_least_works_choice_the_request(situation, data):
    fleet, request, residency = situation
    policy = create_policy("least-work")
    chosen = policy.decide(request, fleet, residency, now=100.0).worker
    residency.hit_tokens[chosen] = data.draw(st.integers(int(residency.hit_tokens[chosen]), request.prompt_tokens))
    assert policy.decide(request, fleet, residency, now=100.0).worker == chosen


@given(situation=situations(most=SMALL_FLEET))
def test_lists_and_arrays_lead_to_the_same_decisions(situation):
    fleet, request, residency = situation
    listed = Residency.of_lists(residency.by_tier.tolist())
    plain, vectorised = create_policy("expected-cost"), create_policy("expected-cost")
    for now in (100.0, 100.2, 103.0):
        one = plain.decide(request, fleet, listed, now)
        with mock.patch("policies.expected_cost.SMALL_FLEET", 0):
            other = vectorised.decide(request, fleet, residency, now)
        assert one.breakdown(fleet) == other.breakdown(fleet)
        for part in ("worker", "fallbacks", "reason", "expected_hit_tokens", "predicted_ttft"):
            assert getattr(one, part) == getattr(other, part)


@given(st.text(max_size=20))
def test_any_unknown_name_gets_an_answer_that_lists_the_known_ones(name):
    if name in known_policies():
        return
    with pytest.raises(PolicyError) as error:
        create_policy(name)
    assert all(known in str(error.value) for known in ALL)


@pytest.mark.parametrize("name", ALL)
@FEW
@given(
    params=st.dictionaries(
        st.text(max_size=8), st.none() | st.booleans() | st.floats() | st.text(max_size=4), max_size=3
    )
)
def test_any_parameters_are_accepted_or_answered(name, params):
    try:
        create_policy(name, params)
    except PolicyError as error:
        assert f"policy {name!r}" in str(error)


class Watched(Sequence):
    """Chunks that count how often one of them is looked at."""

    def __init__(self, chunks):
        self.chunks = chunks
        self.looks = 0

    def __len__(self):
        return len(self.chunks)

    def __getitem__(self, at):
        self.looks += len(self.chunks[at]) if isinstance(at, slice) else 1
        return self.chunks[at]


def outline(policy, fleet, request, residency):
    """Return what a decision amounts to."""
    decision = policy.decide(request, fleet, residency, now=100.0)
    return decision.worker, decision.reason, decision.predicted_ttft, decision.breakdown(fleet)


def add_load(fleet: FleetView, row: int, tokens: int) -> None:
    """Dispatch one more prompt to a worker, as the ledger does."""
    if fleet.pending_prefill_tokens[row] == 0:
        fleet.prefilling_since[row] = 100.0
    fleet.pending_prefill_tokens[row] += tokens
    fleet.pending_prefill_s[row] += tokens * 6e-5
    fleet.running[row] += 1
