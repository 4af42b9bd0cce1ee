from math import inf

import pytest

from policies.order import Held, OrderError, Turnstile, create_order


def turnstile(order="least-work", budget=1000, **params):
    return Turnstile(create_order(order, params), budget)


def released(stile, finished):
    """Return who goes on once ``finished`` have been prefilled."""
    for held in finished:
        stile.leave(held)
    return list(iter(stile.release, None))


def enter(stile, *requests):
    return [stile.enter(held) for held in requests]


def test_requests_pass_up_to_the_budget_and_the_rest_is_held():
    stile = turnstile(budget=1000)
    assert enter(stile, *(Held(0.1, 400, 0.0) for _ in range(4))) == [True, True, False, False]
    assert (stile.waiting, stile.outstanding_tokens) == (2, 800)
    assert stile.waiting_s == pytest.approx(0.2)


def test_an_idle_worker_gets_a_request_of_any_size():
    stile = turnstile(budget=1000)
    big = Held(9.0, 100_000, 0.0)
    assert stile.enter(big)
    assert not stile.enter(Held(0.1, 1, 0.0))


def test_whoever_comes_later_does_not_pass_those_that_are_held():
    stile = turnstile(budget=1000)
    enter(stile, Held(1.0, 900, 0.0), large := Held(1.0, 900, 0.0))
    assert not stile.enter(Held(1.0, 50, 0.0))
    assert stile.queue()[0] is large


def test_the_least_work_goes_first():
    stile = turnstile(budget=1)
    enter(stile, first := Held(1.0, 9, 0.0))
    enter(stile, large := Held(5.0, 9, 0.0), small := Held(0.5, 9, 0.0), middle := Held(2.0, 9, 0.0))
    assert stile.queue() == [small, middle, large]
    assert released(stile, [first]) == [small]
    assert released(stile, [small]) == [middle]


def test_a_request_that_waited_long_enough_goes_before_less_work():
    for waited_s, first in ((40.0, "small"), (60.0, "large")):
        stile = turnstile(budget=1, ageing=0.1)
        enter(stile, running := Held(1.0, 9, 0.0))
        large, small = Held(5.5, 9, 0.0), Held(0.5, 9, waited_s)
        enter(stile, large, small)
        assert released(stile, [running]) == [{"small": small, "large": large}[first]]


def test_fifo_keeps_the_order_of_arrival():
    stile = turnstile("fifo", budget=1)
    enter(stile, running := Held(1.0, 9, 0.0))
    later = [Held(5.0 - number, 9, number) for number in range(4)]
    enter(stile, *later)
    assert stile.queue() == later
    assert released(stile, [running]) == later[:1]


@pytest.mark.parametrize("order", ["fifo", "least-work", "fair"])
def test_a_higher_priority_goes_first_whatever_the_order(order):
    stile = turnstile(order, budget=1)
    enter(stile, running := Held(1.0, 9, 0.0))
    enter(stile, Held(0.1, 9, 0.0), urgent := Held(9.0, 9, 5.0, priority=1), Held(0.1, 9, 0.0, priority=-1))
    assert released(stile, [running]) == [urgent]


def test_fair_lets_tenants_take_turns_whatever_their_number_of_requests():
    stile = turnstile("fair", budget=1)
    enter(stile, running := Held(1.0, 9, 0.0))
    enter(stile, *(Held(1.0, 9, 0.0, tenant="many") for _ in range(6)))
    enter(stile, *(Held(1.0, 9, 0.0, tenant="few") for _ in range(2)))
    order = []
    while running is not None:
        running = next(iter(released(stile, [running])), None)
        order += [running.tenant] if running else []
    assert order.count("few") == 2
    assert order[:4].count("few") == 2


def test_what_a_tenant_did_while_nobody_else_was_there_is_not_held_against_it_for_ever():
    stile = turnstile("fair", budget=1)
    for _ in range(50):
        stile.enter(alone := Held(1.0, 9, 0.0, tenant="early"))
        stile.leave(alone)
    enter(stile, running := Held(1.0, 9, 0.0, tenant="late"))
    enter(stile, early := Held(1.0, 9, 0.0, tenant="early"), *(Held(1.0, 9, 0.0, tenant="late") for _ in range(5)))
    first = released(stile, [running])
    second = released(stile, first)
    assert early in first + second


def test_what_a_tenant_gave_up_is_held_neither_against_it_nor_against_those_that_come_later():
    stile = turnstile("fair", budget=1)
    enter(stile, Held(1.0, 9, 0.0))
    many = [Held(1.0, 9, 0.0, tenant="many") for _ in range(200)]
    enter(stile, *many)
    for unwanted in many[2:]:
        stile.leave(unwanted)
    enter(stile, third := Held(1.0, 9, 0.0, tenant="many"), *(Held(1.0, 9, 0.0, tenant="few") for _ in range(4)))
    assert [held.tenant for held in stile.queue()] == ["many", "few", "many", "few", "many", "few", "few"]
    assert stile.queue()[4] is third


def test_a_held_request_that_is_not_wanted_any_more_is_gone_at_once():
    stile = turnstile(budget=1)
    enter(stile, running := Held(1.0, 9, 0.0), unwanted := Held(0.1, 9, 0.0), other := Held(1.0, 9, 0.0))
    stile.leave(unwanted)
    assert (stile.waiting, stile.queue()) == (1, [other])
    assert released(stile, [running]) == [other]


def test_requests_that_leave_while_they_are_held_do_not_pile_up():
    stile = turnstile(budget=1)
    enter(stile, Held(1.0, 9, 0.0))
    for number in range(1000):
        stile.enter(held := Held(number, 9, 0.0))
        stile.leave(held)
    assert len(stile._heap) < 100


def test_several_small_requests_follow_one_large_one():
    stile = turnstile(budget=1000)
    enter(stile, large := Held(5.0, 5000, 0.0))
    small = [Held(0.1, 400, number) for number in range(3)]
    enter(stile, *small)
    assert released(stile, [large]) == small[:2]


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("least-wrok", {}, "Did you mean 'least-work'"),
        ("least-work", {"agening": 1}, "accepts: ageing"),
        ("least-work", {"ageing": -1}, "ageing"),
        ("least-work", {"ageing": inf}, "a finite number, got inf - at `\\$.ageing`"),
        ("fifo", {"ageing": 1}, "accepts: none"),
    ],
)
def test_a_wrong_order_or_parameter_is_named(name, params, message):
    with pytest.raises(OrderError, match=message):
        create_order(name, params)
