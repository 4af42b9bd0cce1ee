from math import ceil

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from policies.ring import Ring

names = st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=6, unique=True)
keys = st.binary(max_size=24)
factors = st.floats(1.0, 4.0)


@given(names, st.lists(keys, min_size=1, max_size=30), st.data())
def test_a_worker_that_leaves_moves_only_its_own_keys(workers, hashed, data):
    leaving = data.draw(st.sampled_from(workers))
    remaining = [name for name in workers if name != leaving]
    if not remaining:
        return
    before, after = Ring(workers), Ring(remaining)
    for key in hashed:
        owner = workers[before.first(key)]
        if owner != leaving:
            assert remaining[after.first(key)] == owner


@given(names, st.text(min_size=1, max_size=12), st.lists(keys, min_size=1, max_size=30))
def test_a_worker_that_joins_takes_keys_and_moves_none_between_the_others(workers, newcomer, hashed):
    if newcomer in workers:
        return
    before, after = Ring(workers), Ring([*workers, newcomer])
    for key in hashed:
        owner = [*workers, newcomer][after.first(key)]
        assert owner in (workers[before.first(key)], newcomer)


@given(names, keys, st.data())
def test_the_order_of_the_list_does_not_matter(workers, key, data):
    shuffled = data.draw(st.permutations(workers))
    walks = [[order[row] for row in Ring(order).walk(key)] for order in (workers, shuffled)]
    assert walks[0] == walks[1]


@given(names, st.lists(keys, max_size=60), factors)
def test_no_load_ever_exceeds_the_bound(workers, hashed, factor):
    ring, loads = Ring(workers), np.zeros(len(workers))
    for key in hashed:
        bound = ceil(factor * (sum(loads) + 1) / len(workers))
        row = ring.bounded(key, loads, factor)
        loads[row] += 1
        assert loads[row] <= bound


@given(names, keys, st.data())
def test_a_choice_among_some_rows_is_one_of_them(workers, key, data):
    rows = data.draw(st.lists(st.integers(0, len(workers) - 1), min_size=1, unique=True))
    loads = data.draw(st.lists(st.integers(0, 9), min_size=len(workers), max_size=len(workers)))
    assert Ring(workers).bounded(key, np.array(loads), 1.25, rows) in rows


@given(st.integers(1, 40), keys, st.data())
def test_some_rows_are_met_in_the_order_in_which_all_are(size, key, data):
    ring = Ring([f"worker-{number}" for number in range(size)])
    rows = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=8, unique=True))
    assert list(ring.walk(key, rows)) == [row for row in ring.walk(key) if row in rows]
    assert ring.first(key, rows) == next(ring.walk(key, rows))
