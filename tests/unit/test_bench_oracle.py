"""What the benchmark of policies takes from the future is right: next uses, what is evicted, what is missed."""

import random
from math import inf
from pathlib import Path

import numpy as np
import pytest

from sim.cache import PLAIN_USE, LruQueue
from sim.engine import simulate
from sim.fleet import FleetSettings
from sim.requests import SimRequest, Trace
from tests.bench.policies_cells import Cell, Setting, fleet_of, trace_of
from tests.bench.policies_evaluation import ORACLE, Job, run
from tests.bench.policies_oracle import Future, KnownDisplacement, KnownQueue, simulate_knowing

BLOCK = 16
ONE_WORKER = FleetSettings(workers=1, capacity_tokens=5 * BLOCK, max_batched_tokens=256)


def ask(arrival_s, chunks, session=None, think_s=0.0):
    return SimRequest(arrival_s, chunks, len(chunks) * BLOCK + 8, 4, session=session, think_s=think_s)


def conversations():
    """Two that share chunk 1; the first goes on 5 s after its answer."""
    requests = [ask(0, [1, 2], "a"), ask(10, [1, 3], "b"), ask(30, [1, 2, 4], "a", think_s=5)]
    return Future(Trace(requests, BLOCK, closed_loop=True), workers=2)


def test_what_waits_is_needed_before_anything_that_is_to_come_and_in_the_order_of_release():
    future = conversations()
    assert future.next_use(2, 0) == 0
    future.routed(0, worker=0, rank=7.0, now=0)
    future.routed(1, worker=0, rank=3.0, now=10)
    assert future.next_use(3, 0) < future.next_use(2, 0) < 0
    assert future.next_use(1, 0) == future.next_use(3, 0)


def test_a_conversation_goes_on_where_it_was_when_it_has_thought_about_its_answer():
    future = conversations()
    future.routed(0, worker=0, rank=1.0, now=0)
    future.ended(0, worker=0, following=2, now=100)
    assert future.next_use(2, 0) == 105
    assert future.next_use(2, 1) == inf
    assert future.next_use(1, 1) == 10  # the other conversation may begin anywhere


def test_what_was_used_for_the_last_time_is_never_needed_again():
    future = conversations()
    future.routed(1, worker=1, rank=1.0, now=10)
    future.ended(1, worker=1, following=None, now=20)
    assert future.next_use(3, 1) == inf


def test_blocks_of_which_nothing_is_known_leave_in_the_order_of_their_use():
    rng = random.Random(1)
    ours, theirs = (KnownQueue(range(1, 9), lambda _: 0.0, farthest=False), LruQueue(range(1, 9)))
    held = []
    for _ in range(500):
        if held and rng.random() < 0.5:
            block = held.pop(rng.randrange(len(held)))
            for queue in (ours, theirs):
                queue.empty(block) if block % 3 == 0 else queue.idle([block], PLAIN_USE)
        elif len(ours):
            taken = ours.take(1)
            assert taken == theirs.take(1)
            held += taken


@pytest.mark.parametrize("seed", range(10))
def test_knowing_what_to_evict_never_finds_less_than_least_recently_used(seed):
    rng = random.Random(seed)
    requests = [ask(10.0 * number, [rng.randrange(6)]) for number in range(60)]
    trace = Trace(requests, BLOCK)
    known = simulate_knowing("eviction", trace, ONE_WORKER, 0)
    assert known.hit_tokens.sum() >= simulate(trace, ONE_WORKER).hit_tokens.sum()


def test_knowing_what_to_evict_keeps_what_a_cycle_would_lose():
    trace = Trace([ask(10.0 * number, [number % 5]) for number in range(40)], BLOCK)
    assert simulate(trace, ONE_WORKER).hit_tokens.sum() == 0
    assert simulate_knowing("eviction", trace, ONE_WORKER, 0).hit_tokens.sum() > 20 * BLOCK  # half of the requests


def test_only_what_would_have_been_found_again_is_missed():
    when = {10: 1.0, 11: 50.0, 12: inf, 13: 4.0}
    queue = KnownQueue(range(1, 5), when.__getitem__, farthest=False)
    policy = KnownDisplacement([queue], BLOCK)
    blocks = queue.take(4)
    queue.named(blocks, list(when))
    queue.cached(blocks, 0)
    queue.idle(blocks, PLAIN_USE)
    second = BLOCK * 1e-3  # of prefill, for a block

    def lost(new_blocks, rate):
        return policy.lost_s(queue, new_blocks * BLOCK, rate, b=1e-3, c=0.0, now=0.0)

    assert lost(0, rate=0.0) == 0
    assert lost(1, rate=0.0) == pytest.approx(second)  # 10, the first to go
    assert lost(3, rate=0.0) == pytest.approx(2 * second)  # 11 as well, but 12 is never needed
    assert lost(4, rate=1.0) == pytest.approx(1 * second)  # others push out 10 and 11 anyway


def test_where_nothing_is_displaced_knowing_the_future_changes_no_decision():
    setting = Setting(Path(), workers=2, requests=300)
    trace, fleet = trace_of(Cell("saas", 0.8), setting, 0), fleet_of(Cell("saas", 0.8), setting)
    known = simulate_knowing("worker", trace, fleet, 0)
    guessed = simulate(trace, fleet, "expected-cost", {"reuse": 0.0})
    assert np.array_equal(known.worker, guessed.worker)
    assert np.array_equal(known.ttft_s, guessed.ttft_s)


@pytest.mark.parametrize("entrant", ORACLE, ids=lambda entrant: entrant.label)
def test_every_kind_of_knowledge_answers_the_same_requests(entrant):
    setting = Setting(Path(), workers=2, requests=200)
    found = run(Job(Cell("saas", 0.8), setting, 0, entrant))
    assert found["answered"] == run(Job(Cell("saas", 0.8), setting, 0, ORACLE[0]))["answered"]


def test_tiers_below_hbm_are_refused():
    setting = Setting(Path(), workers=2, requests=10)
    cell = Cell("saas", 0.8, "host")
    with pytest.raises(ValueError, match="HBM only"):
        simulate_knowing("both", trace_of(cell, setting, 0), fleet_of(cell, setting), 0)
