"""Users play recorded sessions, one after another, and what is measured is when all of them play."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from sim.engine import simulate
from sim.experiment import Case, run_case
from sim.fleet import FleetSettings
from sim.generators import generator
from sim.requests import SimRequest, Trace
from sim.scenario import Traffic, read_policy
from sim.users import LONGEST_PAUSE_S, WARM_UP_SHARE, live_tokens, play, steady

SOURCE = "agents:sessions=6,turns=5,system_tokens=1024,task_tokens=1000"


@pytest.fixture(scope="module")
def recorded() -> Trace:
    return generator(SOURCE).trace(0)


def turns_of(trace: Trace) -> dict[str, list[SimRequest]]:
    users: dict[str, list[SimRequest]] = {}
    for request in trace.requests:
        users.setdefault(request.session or "", []).append(request)
    return users


def test_every_user_has_so_many_turns(recorded: Trace) -> None:
    trace = play(recorded, 4, turns=12)
    trace.check()
    assert trace.closed_loop
    assert {name: len(turns) for name, turns in turns_of(trace).items()} == {f"user-{n}": 12 for n in range(4)}


def test_the_same_seed_plays_the_same(recorded: Trace) -> None:
    assert play(recorded, 4, 1).requests == play(recorded, 4, 1).requests
    assert play(recorded, 4, 1).requests != play(recorded, 4, 2).requests


def test_a_user_begins_in_the_middle_of_a_session_and_every_other_session_at_its_beginning(recorded: Trace) -> None:
    beginnings = {turns[0].prompt_tokens for turns in turns_of(recorded).values()}
    entered = []
    for turns in turns_of(play(recorded, 40, turns=12)).values():
        entered.append(turns[0].prompt_tokens in beginnings)
        shrinks = [after for before, after in pairwise(turns) if after.prompt_tokens < before.prompt_tokens]
        assert {after.prompt_tokens for after in shrinks} <= beginnings
    assert set(entered) == {True, False}


def test_sessions_that_are_played_again_share_only_what_all_sessions_share(recorded: Trace) -> None:
    first, *_ = turns_of(recorded).values()
    common = set.intersection(*(set(turns[0].chunks) for turns in turns_of(recorded).values()))
    assert common
    (turns,) = turns_of(play(replace(recorded, requests=first), 1, turns=3 * len(first))).values()
    # one recorded session alone: nothing is known to be shared
    again = [set(request.chunks) for request in turns if request.prompt_tokens == first[0].prompt_tokens]
    assert len(again) >= 2
    assert not set.intersection(*again)
    (turns,) = turns_of(play(recorded, 1, turns=100)).values()
    assert all(common <= set(request.chunks) for request in turns)


def test_pauses_and_prompts_have_a_limit(recorded: Trace) -> None:
    slow = replace(recorded, requests=[replace(request, think_s=1e6) for request in recorded.requests])
    longest = max(request.prompt_tokens for request in recorded.requests)
    trace = play(slow, 4, turns=20, max_prompt_tokens=longest - 1)
    for turns in turns_of(trace).values():
        same_session = [turn for before, turn in pairwise(turns) if turn.prompt_tokens > before.prompt_tokens]
        assert {turn.think_s for turn in same_session} == {LONGEST_PAUSE_S}
    assert max(request.prompt_tokens for request in trace.requests) < longest


def test_live_contexts_grow_with_the_users_and_what_is_shared_counts_once(recorded: Trace) -> None:
    trace = play(recorded, 4)
    alone = [live_tokens(replace(trace, requests=turns)) for turns in turns_of(trace).values()]
    assert max(alone) < live_tokens(trace) < sum(alone)


def test_the_steady_part_ends_when_the_first_user_is_through(recorded: Trace) -> None:
    trace = play(recorded, 4, turns=12)
    result = simulate(trace, FleetSettings(workers=2))
    part = steady(trace, result)
    finished = zip(trace.requests, result.finish_s.tolist(), strict=True)
    last_s = {request.session: finish_s for request, finish_s in sorted(finished, key=lambda pair: pair[1])}
    end_s = min(last_s.values())
    assert part.duration_s == pytest.approx((1 - WARM_UP_SHARE) * end_s)
    assert 0 < len(part.ttft_s) < len(result.ttft_s)
    assert part.arrival_s.min() >= WARM_UP_SHARE * end_s
    assert part.arrival_s.max() < end_s
    assert np.isin(part.sample_s, result.sample_s).all()


def test_an_experiment_measures_the_steady_part() -> None:
    policy = read_policy("least-work")
    whole = run_case(Case(policy, Traffic(SOURCE, users=4), FleetSettings(workers=2), {}, 0, 1.0)).summary
    assert 0 < int(whole["requests"]) < 4 * 60


@pytest.mark.parametrize(
    ("traffic", "message"),
    [
        (Traffic("tenants:requests=10", users=2), "it has none"),
        (Traffic(SOURCE, users=2, closed_loop=False), "closed loop only"),
    ],
)
def test_users_need_sessions_and_wait_for_answers(traffic: Traffic, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        traffic.trace(0)
