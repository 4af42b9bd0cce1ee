"""Whether two workers are better than one: the terms of the comparison, the pick, and what links teach."""

from __future__ import annotations

import numpy as np
import pytest

from policies.cost import prefill_seconds
from policies.disaggregation import LinkRates, Prospect, apart_cost_s, least_loaded, prospect, whole_cost_s
from tests.fleets import PREFILL, make_fleet, make_residency


def test_the_best_prospect_weighs_waiting_against_what_is_cached():
    fleet = make_fleet(2, pending_prefill_s=[0.0, 0.05], running=[3, 7])
    there = prospect(fleet, make_residency([0, 7_680]), 8_000, 0.0)
    assert (there.row, there.wait_s, there.running) == (1, 0.05, 7)
    assert there.prefill_s == pytest.approx(prefill_seconds(320, 7_680, *PREFILL))
    fleet.pending_prefill_s[1] = 5.0
    assert prospect(fleet, make_residency([0, 7_680]), 8_000, 0.0).row == 0


def test_a_prefill_under_way_has_been_waited_for_in_part():
    fleet = make_fleet(1, pending_prefill_s=[2.0], prefilling_since=[100.0])
    assert prospect(fleet, make_residency([0]), 100, 101.5).wait_s == pytest.approx(0.5)
    assert prospect(fleet, make_residency([0]), 100, 109.0).wait_s == 0


def test_of_a_prompt_that_is_cached_whole_the_last_token_is_computed():
    assert prospect(make_fleet(1), make_residency([512]), 512, 0.0).prefill_s == pytest.approx(
        prefill_seconds(1, 511, *PREFILL)
    )


def test_a_long_prompt_before_a_busy_worker_is_better_moved_and_a_cached_one_is_not():
    there = Prospect(row=0, wait_s=0.0, prefill_s=0.5, running=0)
    transfer_s = 0.1
    idle, busy = Prospect(0, 0.0, 0.5, 0), Prospect(0, 0.0, 0.5, 30)
    cached = Prospect(0, 0.0, 0.02, 30)
    assert apart_cost_s(there, transfer_s) == pytest.approx(0.6)
    assert whole_cost_s(idle, 0.1) == pytest.approx(0.5)
    assert whole_cost_s(busy, 0.1) == pytest.approx(2.0)
    assert whole_cost_s(cached, 0.1) < apart_cost_s(there, transfer_s) < whole_cost_s(busy, 0.1)


def test_who_decodes_has_the_least_context_for_its_size():
    fleet = make_fleet(3, decode_tokens=[5_000, 4_000, 9_000])
    anywhere = np.ones(3)
    assert least_loaded(fleet, anywhere, 1_000) == 1
    fleet.kv_capacity_tokens[:] = [10_000, 10_000, 100_000]
    assert least_loaded(fleet, anywhere, 1_000) == 2
    fleet.pending_prefill_tokens[2] = 500_000
    assert least_loaded(fleet, anywhere, 1_000) == 1


def test_a_near_worker_is_preferred_until_it_carries_a_quarter_more():
    fleet = make_fleet(2, decode_tokens=[10_000, 12_000])
    near = np.array([0.0, 1.0])
    assert least_loaded(fleet, near, 0) == 1
    fleet.decode_tokens[1] = 13_000
    assert least_loaded(fleet, near, 0) == 0


def test_links_start_as_configured_and_approach_what_was_seen():
    rates = LinkRates(10e9)
    assert rates.bytes_per_s("p", "d") == pytest.approx(10e9)
    for _ in range(40):
        rates.observe("p", "d", 2e9, 1.0)
    assert rates.bytes_per_s("p", "d") == pytest.approx(2e9, rel=0.01)
    assert rates.bytes_per_s("p", "other") == pytest.approx(10e9)


def test_a_transfer_of_nothing_or_in_no_time_teaches_nothing():
    rates = LinkRates(10e9)
    rates.observe("p", "d", 0.0, 1.0)
    rates.observe("p", "d", 1e9, 0.0)
    assert rates.bytes_per_s("p", "d") == pytest.approx(10e9)


def test_links_that_are_not_used_any_more_make_room():
    rates = LinkRates(10e9)
    for number in range(5_000):
        rates.observe("p", str(number), 1e9, 1.0)
    assert rates.bytes_per_s("p", "0") == pytest.approx(10e9)
    assert rates.bytes_per_s("p", "4999") < 10e9
