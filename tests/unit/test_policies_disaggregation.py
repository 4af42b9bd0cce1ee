"""Whether two workers are better than one, and which two: the terms of the comparison, the pick, what links teach."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from policies.base import FleetView, Residency, Tier
from policies.cost import prefill_seconds
from policies.disaggregation import (
    Comparison,
    Fetch,
    LinkRates,
    Prospects,
    Weights,
    choose_pair,
    compare,
    decoding_cost_s,
    prospects,
)
from tests.fleets import CHUNK, PREFILL, make_fleet, make_request, make_residency

PROMPT = 8_000
WEIGHTS = Weights(interference=0.1, itl_weight=100.0, read_s=25e-9)


def look(fleet: FleetView, residency: Residency, prompt_tokens: int = PROMPT, now: float = 0.0) -> Prospects:
    return prospects(fleet, residency, prompt_tokens, now, WEIGHTS)


def pools(there: FleetView, here: FleetView, transfer_s: object, hits: tuple[list[int], list[int]]) -> Comparison:
    shaped = np.broadcast_to(np.array(transfer_s, float), (len(there), len(here)))
    return compare(look(there, make_residency(hits[0])), look(here, make_residency(hits[1])), shaped, 0.1)


def test_a_prompt_meets_waiting_and_what_is_not_cached():
    there = look(make_fleet(2, pending_prefill_s=[0.0, 0.05], running=[3, 7]), make_residency([0, 7_680]))
    assert there.wait_s.tolist() == [0.0, 0.05]
    assert there.running.tolist() == [3, 7]
    assert there.work_s == pytest.approx([prefill_seconds(8_000, 0, *PREFILL), prefill_seconds(320, 7_680, *PREFILL)])


def test_a_prefill_under_way_has_been_waited_for_in_part():
    fleet = make_fleet(1, pending_prefill_s=[2.0], prefilling_since=[100.0])
    assert look(fleet, make_residency([0]), now=101.5).wait_s == pytest.approx([0.5])
    assert look(fleet, make_residency([0]), now=109.0).wait_s == [0]


def test_of_a_prompt_that_is_cached_whole_the_last_token_is_computed():
    there = look(make_fleet(1), make_residency([512]), 512)
    assert there.held_tokens == [511]
    assert there.work_s == pytest.approx([prefill_seconds(1, 511, *PREFILL)])


def test_what_lies_below_hbm_takes_its_reload():
    fleet = make_fleet(1, reload_disk_s=1e-4)
    below, above = (look(fleet, make_residency([4_096], tier)) for tier in (Tier.DISK, Tier.HBM))
    assert below.work_s - above.work_s == pytest.approx([0.4096])


def test_what_can_be_fetched_is_not_computed():
    fetch = Fetch(6_144, np.array([1e-6, 1e-5, 1e-5]))
    there = prospects(make_fleet(3), make_residency([0, 2_048, 7_680]), PROMPT, 0.0, WEIGHTS, fetch)
    assert there.held_tokens.tolist() == [6_144, 6_144, 7_680]
    assert there.work_s == pytest.approx(
        [
            6_144e-6 + prefill_seconds(PROMPT - 6_144, 6_144, *PREFILL),
            4_096e-5 + prefill_seconds(PROMPT - 6_144, 6_144, *PREFILL),
            prefill_seconds(PROMPT - 7_680, 7_680, *PREFILL),
        ]
    )


def test_a_place_in_a_batch_costs_itl_and_what_has_no_room_is_computed_again():
    fleet = make_fleet(2, decode_tokens=[10_000, 10_000], pending_prefill_tokens=[0, 2_000])
    itl_s = 100 * 25e-9
    assert look(fleet, make_residency([0, 0])).decode_s == pytest.approx([18_000 * itl_s, 20_000 * itl_s])
    fleet.kv_capacity_tokens[:] = [17_000, 30_000]
    crowded = look(fleet, make_residency([0, 0])).decode_s
    assert crowded == pytest.approx([18_000 * itl_s + 1_000 * PREFILL[1], 20_000 * itl_s])


def test_a_long_prompt_before_a_busy_worker_is_better_moved_and_a_cached_one_is_not():
    for running, hit, pays in ((0, 0, False), (30, 0, True), (30, 7_680, False)):
        comparison = pools(make_fleet(1), make_fleet(1, running=running), 0.1, ([0], [hit]))
        assert comparison.pays is pays


def test_the_terms_of_both_ways():
    comparison = pools(make_fleet(1, pending_prefill_s=0.2), make_fleet(1, running=4), 0.1, ([0], [0]))
    work_s, decode_s = prefill_seconds(PROMPT, 0, *PREFILL), PROMPT * 100 * 25e-9
    step_s = PREFILL[0] + PROMPT * 25e-9
    assert comparison.apart_s.item() == pytest.approx(0.2 + work_s + 0.1 + step_s + decode_s)
    assert comparison.whole_s.item() == pytest.approx(work_s * 1.4 + decode_s)


def test_kv_that_arrives_before_the_prefills_there_are_done_waits_for_them():
    here = look(make_fleet(2, pending_prefill_s=[3.0, 0.0]), make_residency([0, 0]))
    waits_s = decoding_cost_s(here, np.array([1.0, 1.0])) - here.step_s - here.decode_s
    assert waits_s == pytest.approx([3.0, 1.0])


def test_both_workers_are_chosen_together():
    """The prefill worker that alone is best is far from the decode worker that has room."""
    there, here = make_fleet(2), make_fleet(2, decode_tokens=[400_000, 0])
    comparison = pools(there, here, [[0.01, 2.0], [2.0, 0.01]], ([4_096, 0], [0, 0]))
    assert comparison.there.work_s.argmin() == 0
    assert choose_pair(comparison, make_request(PROMPT), there, comparison.apart_s) == (1, 1)
    here.decode_tokens[0] = 1_000
    comparison = pools(there, here, [[0.01, 2.0], [2.0, 0.01]], ([4_096, 0], [0, 0]))
    assert choose_pair(comparison, make_request(PROMPT), there, comparison.apart_s) == (0, 0)


def test_pairs_without_a_link_are_not_chosen():
    there, here = make_fleet(2), make_fleet(2)
    comparison = pools(there, here, [[inf, inf], [inf, 0.5]], ([7_680, 0], [0, 0]))
    assert choose_pair(comparison, make_request(PROMPT), there, comparison.apart_s) == (1, 1)
    nowhere = np.full((2, 2), inf)
    assert choose_pair(comparison, make_request(PROMPT), there, nowhere) is None


def test_new_prompts_spread_over_equal_prefill_workers_and_those_that_begin_alike_meet():
    there, here = make_fleet(4), make_fleet(1)
    comparison = pools(there, here, 0.1, ([0] * 4, [0]))
    chosen = [
        choose_pair(comparison, make_request(PROMPT, conversation), there, comparison.apart_s)
        for conversation in (*range(40), *range(40))
    ]
    assert chosen[:40] == chosen[40:]
    assert {pair[0] for pair in chosen if pair is not None} == {0, 1, 2, 3}


def test_prompts_that_share_what_everyone_holds_still_spread():
    there, here = make_fleet(4), make_fleet(1)
    comparison = pools(there, here, 0.1, ([CHUNK] * 4, [0]))
    rows = set()
    for conversation in range(40):
        request = make_request(PROMPT, conversation)
        request.chunks = [b"shared", *request.chunks[1:]]
        pair = choose_pair(comparison, request, there, comparison.apart_s)
        assert pair is not None
        rows.add(pair[0])
    assert rows == {0, 1, 2, 3}


def make_rates(*gb_s: float, latency_s: float = 0.0, **places: str) -> LinkRates:
    rates = LinkRates([rate * 1e9 for rate in gb_s], latency_s)
    for worker, place in places.items():
        rates.join(worker, place)
    return rates


def test_links_start_by_how_near_the_two_are():
    rates = make_rates(10, 25, 50, p="a/1/x", same="a/1/x", rack="a/1/y", zone="a/2/x", far="b/1/x", nowhere="")
    assert [rates.bytes_per_s("p", other) / 1e9 for other in ("same", "rack", "zone", "far", "nowhere")] == (
        pytest.approx([50, 50, 25, 10, 10])
    )


def test_links_approach_what_was_seen_beyond_the_latency():
    rates = make_rates(10, latency_s=0.5, p="", d="", other="")
    for _ in range(40):
        rates.observe("p", "d", 2e9, 1.5)
    assert rates.bytes_per_s("p", "d") == pytest.approx(2e9, rel=0.01)
    assert rates.bytes_per_s("p", "other") == pytest.approx(10e9)


@pytest.mark.parametrize(("size", "seconds", "target"), [(0.0, 1.0, "d"), (1e9, 0.5, "d"), (1e9, 1.0, "gone")])
def test_a_transfer_of_nothing_or_in_no_time_or_to_nobody_teaches_nothing(size: float, seconds: float, target: str):
    rates = make_rates(10, latency_s=0.5, p="", d="")
    rates.observe("p", target, size, seconds)
    rates.join("gone", "")
    assert rates.bytes_per_s("p", target) == pytest.approx(10e9)


def test_the_links_of_workers_that_leave_are_forgotten():
    rates = make_rates(10, p="", d="")
    rates.observe("p", "d", 1e9, 1.0)
    rates.leave("d")
    rates.join("d", "")
    assert rates.bytes_per_s("p", "d") == pytest.approx(10e9)
