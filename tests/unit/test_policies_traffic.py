import numpy as np
import pytest

from policies.base import FleetView
from policies.traffic import MAX_ENDS, PRIOR_CONVERSATIONS, PRIOR_GROWTH_TOKENS, Traffic
from tests.fleets import make_fleet


@pytest.fixture
def traffic():
    traffic = Traffic(rate_window_s=60, memory_s=600, now=0.0)
    traffic.advance(make_fleet(4), 0.0)
    return traffic


def test_crowding_is_the_arrival_rate_of_a_worker_over_its_idle_share(traffic):
    fleet = make_fleet(4)
    for second in range(1, 601):
        traffic.advance(fleet, float(second))
        for _ in range(8):
            traffic.decided(0, fresh=False, new_tokens=0, work_s=0.25, capacity_tokens=0)
    # 2 requests/s per worker, each 0.25 s of work: half of the time is idle
    assert traffic.crowding() == pytest.approx(2 / (1 - 0.5), rel=0.05)


def test_an_overloaded_fleet_is_priced_as_one_that_is_almost_full(traffic):
    for _ in range(60):
        traffic.decided(0, fresh=False, new_tokens=0, work_s=1000.0, capacity_tokens=0)
    assert traffic.crowding() == pytest.approx((60 / 60 / 4) / 0.05)


def test_nothing_is_crowded_before_the_first_request(traffic):
    assert traffic.crowding() == 0


def test_rates_decay_over_their_window_and_caches_over_theirs(traffic):
    fleet = make_fleet(4)
    traffic.advance(fleet, 0.0)
    traffic.decided(1, fresh=False, new_tokens=100, work_s=0.0, capacity_tokens=1000)
    before = traffic.crowding()
    traffic.advance(fleet, 60.0)
    assert traffic.crowding() == pytest.approx(before / 2.71828, rel=1e-4)
    assert traffic.turnover.tolist() == pytest.approx([0, 0.1 * 0.904837, 0, 0])


def test_a_worker_of_unknown_capacity_has_no_turnover(traffic):
    traffic.decided(1, fresh=True, new_tokens=100, work_s=0.0, capacity_tokens=0)
    assert traffic.turnover.tolist() == [0, 0, 0, 0]


def test_turnover_follows_workers_by_name_through_changing_sets_of_candidates(traffic):
    fleet = make_fleet(4)
    traffic.advance(fleet, 0.0)
    for row in range(4):
        traffic.decided(row, fresh=False, new_tokens=100 * row, work_s=0.0, capacity_tokens=1000)
    some = fleet.take(np.array([3, 1]))
    traffic.advance(some, 0.0)
    assert traffic.turnover.tolist() == [0.3, 0.1]
    traffic.decided(1, fresh=False, new_tokens=100, work_s=0.0, capacity_tokens=1000)
    traffic.advance(fleet, 0.0)
    assert traffic.turnover.tolist() == [0, 0.2, 0.2, 0.3]


def test_a_newcomer_starts_at_the_mean_so_that_it_does_not_attract_everything(traffic):
    for row in range(4):
        traffic.decided(row, fresh=False, new_tokens=100 * row, work_s=0.0, capacity_tokens=1000)
    traffic.advance(FleetView(["worker-3", "new"]), 0.0)
    assert traffic.turnover.tolist() == pytest.approx([0.3, 0.15])


def test_workers_that_are_gone_are_forgotten_when_they_become_too_many(traffic, monkeypatch):
    monkeypatch.setattr("policies.traffic.MAX_WORKERS", 50)
    for number in range(60):
        traffic.advance(FleetView([f"pod-{number}"]), 0.0)
        traffic.decided(0, fresh=True, new_tokens=100, work_s=0.0, capacity_tokens=1000)
    assert traffic.turnover.shape == (1,)
    assert len(traffic._known) <= 51


def test_time_that_goes_back_changes_nothing(traffic):
    fleet = make_fleet(4)
    traffic.advance(fleet, 1e9)
    traffic.met(b"system", 500, True, 0.5, 1e9)
    traffic.advance(fleet, 0.0)
    assert traffic.met(b"system", 500, True, 0.5, 0.0) == 1


def test_growth_is_what_conversations_add_after_their_first_request(traffic):
    for _ in range(9):
        traffic.decided(0, fresh=True, new_tokens=5000, work_s=0.0, capacity_tokens=0)
        traffic.decided(0, fresh=False, new_tokens=700, work_s=0.0, capacity_tokens=0)
        traffic.decided(0, fresh=False, new_tokens=300, work_s=0.0, capacity_tokens=0)
    prior = PRIOR_GROWTH_TOKENS * PRIOR_CONVERSATIONS
    assert traffic.growth_tokens() == pytest.approx((9000 + prior) / (9 + PRIOR_CONVERSATIONS))


def test_a_new_conversation_takes_the_room_it_is_going_to_need_at_once_and_only_once(traffic):
    traffic.decided(0, fresh=True, new_tokens=300, work_s=0.0, capacity_tokens=10_000)
    reserved = (300 + PRIOR_GROWTH_TOKENS) / 10_000
    assert traffic.turnover[0] == pytest.approx(reserved)
    traffic.decided(0, fresh=False, new_tokens=PRIOR_GROWTH_TOKENS, work_s=0.0, capacity_tokens=10_000)
    assert traffic.turnover[0] == pytest.approx(reserved)
    traffic.decided(0, fresh=False, new_tokens=500, work_s=0.0, capacity_tokens=10_000)
    assert traffic.turnover[0] == pytest.approx(reserved + 0.05)


def test_a_prefix_that_many_conversations_start_from_is_counted(traffic):
    assert [traffic.met(b"system", 500 + length, True, 0.5, at) for at, length in ((0, 0), (1, 40), (2, 10))] == (
        pytest.approx([0, 1, 2], rel=0.01)
    )


def test_a_burst_that_waits_for_one_prefill_of_a_prefix_is_one_start(traffic):
    for number in range(32):
        traffic.met(b"burst", 500, False, 0.5, number / 1000)
    assert traffic.met(b"burst", 500, False, 0.5, 60.0) == pytest.approx(1, rel=0.1)


def test_a_conversation_that_comes_back_longer_is_not_counted_again(traffic):
    # its last chunk is not whole yet, then it is
    assert [traffic.met(b"end", 500, False, 0.5, 0.0), traffic.met(b"end", 560, False, 0.5, 1.0)] == [0, 0]
    assert traffic.met(b"end", 620, True, 0.5, 2.0) == 0
    # another one, which shares the prefix
    assert traffic.met(b"end", 610, True, 0.5, 3.0) == pytest.approx(1, rel=0.01)


def test_prefixes_are_forgotten_with_time(traffic):
    traffic.met(b"system", 500, True, 0.5, 0.0)
    assert traffic.met(b"system", 500, True, 0.5, 600.0) == pytest.approx(0.3679, rel=1e-3)


def test_only_so_many_prefixes_are_remembered_and_the_oldest_go_first(traffic):
    for number in range(MAX_ENDS + 1):
        traffic.met(b"%d" % number, 500, True, 0.5, 0.0)
    assert traffic.met(b"0", 500, True, 0.5, 0.0) == 0
    assert traffic.met(b"%d" % MAX_ENDS, 500, True, 0.5, 0.0) == 1
