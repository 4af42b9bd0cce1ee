import pytest

from policies.traffic import MAX_ENDS, Traffic
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
    traffic.decided(1, fresh=True, new_tokens=100, work_s=0.0, capacity_tokens=1000)
    before = traffic.crowding()
    traffic.advance(fleet, 60.0)
    assert traffic.crowding() == pytest.approx(before / 2.71828, rel=1e-4)
    assert traffic.turnover.tolist() == pytest.approx([0, 0.1 * 0.904837, 0, 0])


def test_a_worker_of_unknown_capacity_has_no_turnover(traffic):
    traffic.decided(1, fresh=True, new_tokens=100, work_s=0.0, capacity_tokens=0)
    assert traffic.turnover.tolist() == [0, 0, 0, 0]


def test_turnover_follows_workers_by_name(traffic):
    fleet = make_fleet(4)
    traffic.advance(fleet, 0.0)
    for row in range(4):
        traffic.decided(row, fresh=True, new_tokens=100 * row, work_s=0.0, capacity_tokens=1000)
    fleet.names, fleet.version = ["worker-3", "new", "worker-1"], 2
    traffic.advance(fleet, 0.0)
    # a newcomer starts at the mean: at zero it would attract every new conversation
    assert traffic.turnover.tolist() == pytest.approx([0.3, 0.15, 0.1])


def test_growth_is_what_conversations_add_after_their_first_request(traffic):
    for _ in range(9):
        traffic.decided(0, fresh=True, new_tokens=5000, work_s=0.0, capacity_tokens=0)
        traffic.decided(0, fresh=False, new_tokens=700, work_s=0.0, capacity_tokens=0)
        traffic.decided(0, fresh=False, new_tokens=300, work_s=0.0, capacity_tokens=0)
    assert traffic.growth_tokens() == pytest.approx(9000 / 10)


def test_a_prefix_that_many_conversations_start_from_is_counted(traffic):
    assert [traffic.met(b"system", 500 + length, True, 0.0) for length in (0, 40, 10)] == [0, 1, 2]


def test_a_conversation_that_comes_back_longer_is_not_counted_again(traffic):
    # its last chunk is not whole yet, then it is
    assert [traffic.met(b"end", 500, False, 0.0), traffic.met(b"end", 560, False, 1.0)] == [0, 0]
    assert traffic.met(b"end", 620, True, 2.0) == 0
    # another one, which shares the prefix
    assert traffic.met(b"end", 610, True, 3.0) == pytest.approx(1, rel=0.01)


def test_prefixes_are_forgotten_with_time(traffic):
    traffic.met(b"system", 500, True, 0.0)
    assert traffic.met(b"system", 500, True, 600.0) == pytest.approx(0.3679, rel=1e-3)


def test_only_so_many_prefixes_are_remembered_and_the_oldest_go_first(traffic):
    for number in range(MAX_ENDS + 1):
        traffic.met(b"%d" % number, 500, True, 0.0)
    assert traffic.met(b"0", 500, True, 0.0) == 0
    assert traffic.met(b"%d" % MAX_ENDS, 500, True, 0.0) == 1
