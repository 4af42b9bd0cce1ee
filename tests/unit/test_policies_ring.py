from collections import Counter

import numpy as np
import pytest

from policies.ring import Ring, ring_of

NAMES = tuple(f"worker-{number}:8000" for number in range(8))


def test_every_worker_is_met_once():
    assert sorted(ring_of(NAMES).walk(b"key")) == list(range(8))


def test_a_walk_may_be_confined_to_some_workers_and_keeps_their_order():
    order = list(ring_of(NAMES).walk(b"key"))
    assert list(ring_of(NAMES).walk(b"key", [1, 4, 6])) == [row for row in order if row in (1, 4, 6)]


def test_every_worker_owns_about_its_share_of_the_keys():
    ring = ring_of(NAMES)
    counts = Counter(ring.first(b"%d" % number) for number in range(8000))
    assert all(700 < counts[row] < 1300 for row in range(8))


def test_the_ring_of_a_set_of_workers_is_built_once():
    assert ring_of(tuple(NAMES)) is ring_of(NAMES)


def test_names_with_any_character_have_a_place():
    assert Ring(["ключ", "\udc80", ""]).size == 3


def test_the_bound_lets_a_key_stay_home_until_home_has_its_share():
    ring, loads = ring_of(NAMES), np.zeros(8)
    home = ring.first(b"key")
    assert ring.bounded(b"key", loads, 1.25) == home
    loads[home] = 1
    assert ring.bounded(b"key", loads, 1.25) == list(ring.walk(b"key"))[1]


def test_among_rows_that_are_all_above_the_bound_the_least_loaded_is_taken():
    loads = np.array([0, 0, 0, 0, 0, 0, 9, 7])
    assert ring_of(NAMES).bounded(b"key", loads, 1.0, rows=[6, 7]) == 7


@pytest.mark.parametrize("factor", [1.0, 1.25, 2.0])
def test_one_hot_key_spreads_over_the_fleet_under_the_bound(factor):
    loads = np.zeros(8)
    for _ in range(160):
        loads[ring_of(NAMES).bounded(b"hot", loads, factor)] += 1
    assert max(loads) <= -(-factor * 160 // 8)
    assert sum(loads) == 160
