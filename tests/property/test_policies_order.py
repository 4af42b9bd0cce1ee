"""A turnstile against what it promises, over arbitrary comings and goings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.order import Held, Turnstile, create_order
from policies.room import PATIENCE, Room

BUDGET = 1000
CAPACITY = 1000

requests = st.tuples(
    st.floats(0, 10), st.integers(1, 3000), st.integers(-1, 1), st.sampled_from("ab"), st.booleans()
)  # work, tokens, priority, tenant, whether it is dropped where it is


@pytest.mark.parametrize("order", ["fifo", "least-work", "fair"])
@given(steps=st.lists(st.one_of(requests, st.integers(0, 20)), max_size=60))
def test_a_turnstile_keeps_its_budget_never_idles_and_loses_nobody(order, steps):
    stile = Turnstile(create_order(order), BUDGET)
    through, waiting, finished, now = [], [], [], 0.0

    def let_through(held):
        assert not through or sum(other.tokens for other in through) + held.tokens <= BUDGET
        through.append(held)

    def pump():
        while (held := stile.release()) is not None:
            assert held is expected(waiting)[0] or order != "fifo"
            assert held.priority == max(other.priority for other in waiting)
            waiting.remove(held)
            let_through(held)

    def expected(held):
        return sorted(held, key=lambda each: (-each.priority, each.held_at))

    for step in steps:
        now += 1.0
        if isinstance(step, tuple):
            work_s, tokens, priority, tenant, drop = step
            held = Held(work_s, tokens, now, priority, tenant)
            (let_through if stile.enter(held) else waiting.append)(held)
            if drop:
                (waiting if held in waiting else through).remove(held)
                stile.leave(held)
                finished.append(held)
        elif through:
            held = through.pop(step % len(through))
            stile.leave(held)
            finished.append(held)
        pump()
        assert stile.waiting == len(waiting)
        assert set(stile.queue()) == set(waiting)
        assert stile.outstanding_tokens == sum(held.tokens for held in through)
        assert through or not waiting


@given(steps=st.lists(st.one_of(st.tuples(st.integers(1, 900), st.booleans()), st.integers(0, 20)), max_size=60))
def test_a_lost_context_goes_on_only_where_it_fits_and_idles_nobody(steps):
    room = Room[int](1)
    stile = Turnstile(create_order("least-work"), BUDGET, room)
    through, waiting, now = [], [], 0.0

    def let_through(held):
        in_use = sum(other.lost_tokens for other in through)
        patient = now - held.held_at < PATIENCE * held.work_s
        if held.lost_tokens and through and room.crowded and patient:
            assert in_use + held.lost_tokens <= CAPACITY
        through.append(held)
        room.begin(held, [id(held) * 1000 + number for number in range(held.lost_tokens)])

    for step in steps:
        now += 30.0
        stile.look(CAPACITY, now)
        if isinstance(step, tuple):
            tokens, lost = step
            held = Held(tokens / 100, 100, now)
            held.lost_tokens = tokens * lost
            (let_through if stile.enter(held) else waiting.append)(held)
        elif through:
            held = through.pop(step % len(through))
            stile.leave(held)
            room.end(held, prefill_s=0.0)
            stile.look(CAPACITY, now)
        while (held := stile.release()) is not None:
            waiting.remove(held)
            let_through(held)
        assert set(stile.queue()) == set(waiting)
        assert stile.waiting == len(waiting)
        assert through or not waiting
