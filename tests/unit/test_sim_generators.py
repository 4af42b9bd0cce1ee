"""Generated and scaled traffic is what its settings say."""

from __future__ import annotations

from itertools import groupby, pairwise

import pytest

from sim.generators import GENERATORS, generator
from sim.requests import SimRequest, Trace
from sim.scaling import scale_load, scale_working_set, subset, working_set_tokens


def by_session(trace: Trace) -> dict[str, list[SimRequest]]:
    ordered = sorted(trace.requests, key=lambda request: str(request.session))  # stable: turns keep their order
    return {name: list(turns) for name, turns in groupby(ordered, lambda request: str(request.session))}


def distinct(trace: Trace) -> set[int]:
    return {chunk for request in trace.requests for chunk in request.chunks}


@pytest.mark.parametrize("name", GENERATORS)
def test_the_same_seed_makes_the_same_traffic(name: str) -> None:
    one, same, other = (generator(name).trace(seed) for seed in (1, 1, 2))
    one.check()
    assert one.requests == same.requests
    assert one.requests != other.requests


@pytest.mark.parametrize("name", ["chat", "agents"])
def test_a_turn_repeats_the_conversation_and_its_answer(name: str) -> None:
    trace = generator(f"{name}:sessions=10").trace()
    assert trace.closed_loop
    for turns in by_session(trace).values():
        for before, after in pairwise(turns):
            so_far = before.prompt_tokens + before.output_tokens
            assert after.prompt_tokens > so_far
            assert len(before.chunks) == so_far // trace.block_tokens
            assert list(after.chunks[: len(before.chunks)]) == list(before.chunks)
            assert after.arrival_s > before.arrival_s


def test_agents_call_tools_until_their_last_turn_and_share_the_system_prompt() -> None:
    trace = generator("agents:sessions=5,turns=4,system_tokens=2560").trace()
    sessions = by_session(trace)
    assert len(sessions) == 5
    assert all([turn.tool_call for turn in turns] == [True, True, True, False] for turns in sessions.values())
    assert len({tuple(turns[0].chunks[:10]) for turns in sessions.values()}) == 1
    assert len({turns[0].chunks[10] for turns in sessions.values()}) == 5


def test_popular_tenants_ask_most() -> None:
    def most_asked(zipf: float) -> float:
        trace = generator(f"tenants:requests=2000,tenants=50,zipf={zipf}").trace()
        first = [request.chunks[0] for request in trace.requests if request.chunks]
        return max(first.count(chunk) for chunk in set(first)) / len(first)

    assert most_asked(1.2) > 3 * most_asked(0)


def test_documents_stand_behind_one_system_prompt() -> None:
    trace = generator("rag:requests=300,documents=20,system_tokens=512,document_tokens=3000").trace()
    assert len({tuple(request.chunks[:2]) for request in trace.requests}) == 1
    assert len({request.chunks[2] for request in trace.requests}) <= 20


def test_a_burst_is_one_prompt_many_times() -> None:
    trace = generator("bursts:bursts=3,copies=8,every_s=10,within_s=0.5").trace()
    firsts = [request.chunks[0] for request in trace.requests]
    assert len(set(firsts)) == 3
    assert [firsts.count(chunk) for chunk in dict.fromkeys(firsts)] == [8, 8, 8]
    assert trace.requests[7].arrival_s - trace.requests[0].arrival_s <= 0.5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("chats", "Did you mean 'chat'"),
        ("chat:session=3", "session"),
        ("chat:sessions=0", "sessions"),
        ("chat:sessions=many", "sessions"),
        ("agents:think_s=0", "think_s"),
        ("agents:think_s=inf", "think_s"),
        ("agents:spread_s=nan", "spread_s"),
        ("tenants:zipf=99", "zipf"),
    ],
)
def test_traffic_that_is_not_known_is_refused(words: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        generator(words)


def test_twice_the_load_is_half_the_time() -> None:
    trace = generator("chat:sessions=20").trace()
    scaled = scale_load(trace, 2)
    assert [each.arrival_s for each in scaled.requests] == [each.arrival_s / 2 for each in trace.requests]
    assert [each.think_s for each in scaled.requests] == [each.think_s / 2 for each in trace.requests]


@pytest.mark.parametrize("name", ["agents:sessions=40", "rag:requests=2000,documents=200,system_tokens=1"])
@pytest.mark.parametrize("factor", [0.5, 2, 2.5])
def test_a_wider_trace_holds_more_at_the_same_rate(name: str, factor: float) -> None:
    trace = generator(name).trace()
    wide = scale_working_set(trace, factor)
    wide.check()
    assert working_set_tokens(wide) == pytest.approx(factor * working_set_tokens(trace), rel=0.35)
    rates = [len(each.requests) / each.requests[-1].arrival_s for each in (trace, wide)]
    assert rates[1] == pytest.approx(rates[0], rel=0.35)
    assert len(distinct(wide)) == pytest.approx(factor * len(distinct(trace)), rel=0.35)


def test_copies_share_nothing_and_keep_their_turns() -> None:
    trace = generator("agents:sessions=3,turns=3").trace()
    wide = scale_working_set(trace, 2)
    assert len(distinct(wide)) == 2 * len(distinct(trace))
    sessions = by_session(wide)
    assert len(sessions) == 6
    for turns in sessions.values():
        assert [len(turn.chunks) for turn in turns] == sorted(len(turn.chunks) for turn in turns)


def test_a_subset_has_whole_conversations() -> None:
    trace = generator("chat:sessions=200").trace()
    part = subset(trace, share=0.3)
    whole, kept = by_session(trace), by_session(part)
    assert 30 < len(kept) < 90
    assert all(len(turns) == len(whole[name]) for name, turns in kept.items())
    assert part.requests[0].arrival_s == 0
    assert len(subset(trace, first=17).requests) == 17


@pytest.mark.parametrize("factor", [0, -1, float("inf"), float("nan")])
def test_factors_that_make_no_trace_are_refused(factor: float) -> None:
    trace = generator("chat:sessions=2").trace()
    with pytest.raises(ValueError, match="above 0"):
        scale_load(trace, factor)
    with pytest.raises(ValueError, match="above 0"):
        scale_working_set(trace, factor)
    with pytest.raises(ValueError, match="above 0"):
        subset(trace, share=factor)


def test_the_working_set_is_what_lies_between_first_and_last_use() -> None:
    def request(arrival_s: float, *chunks: int) -> SimRequest:
        return SimRequest(arrival_s, chunks, 10 * len(chunks), 1)

    # Block 1 lives for 10 of 10 seconds, block 2 for 5, block 3 is used once.
    trace = Trace([request(0, 1), request(5, 1, 2), request(10, 1, 2, 3)], block_tokens=10)
    assert working_set_tokens(trace) == pytest.approx(15)
