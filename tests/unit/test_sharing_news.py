"""What a replica tells the others."""

from __future__ import annotations

import pytest

from gateway.config import WorkerConfig
from gateway.events.drops import Dropped
from gateway.fleet.ledger import Ledger
from gateway.fleet.registry import Registry, Worker
from gateway.sharing.news import MAX_CHUNKS, MAX_DROPPED, MAX_NOTICES, News, Outbox, decode, encode
from tests.residency import prompt


class Witness:
    """A speculation that notes what becomes of it."""

    def __init__(self) -> None:
        self.fate = ""

    def settle(self, now: float) -> None:
        self.fate = "settled"

    def cancel(self) -> None:
        self.fate = "cancelled"


@pytest.fixture
def registry() -> Registry:
    registry = Registry()
    for name in ("a", "b"):
        registry.add(Worker.from_config(WorkerConfig(url="http://127.0.0.1:1", name=name, models=("m",))))
    return registry


@pytest.fixture
def outbox(registry: Registry) -> Outbox:
    outbox = Outbox("me", registry)
    outbox.open = True
    outbox.take(whole=True)
    return outbox


def taken(outbox: Outbox, whole: bool = False) -> News:
    news = outbox.take(whole)
    assert news is not None
    return decode(encode(news))


def test_there_is_nothing_to_tell_while_nothing_changes(outbox: Outbox, registry: Registry) -> None:
    assert outbox.take(whole=False) is None
    registry.fleet.column("kv_usage")[:] = 0.5  # everybody scrapes that
    assert outbox.take(whole=False) is None


def test_a_load_that_changed_is_told_whole(outbox: Outbox, registry: Registry) -> None:
    ledger = Ledger(registry)
    worker = registry.workers["b"]
    flight = ledger.dispatch(worker, 100, 60, 0.5, now=1.0)
    assert taken(outbox).loads == {"b": (60, 0.5, 1, 0)}
    assert outbox.take(whole=False) is None
    flight.first_byte(now=2.0)
    assert taken(outbox).loads == {"b": (0, 0, 1, 100)}
    flight.end(now=3.0)
    assert taken(outbox).loads == {"b": (0, 0, 0, 0)}


def test_whole_news_has_all_load_and_all_prompts_on_their_way(outbox: Outbox, registry: Registry) -> None:
    Ledger(registry).dispatch(registry.workers["a"], 9, 9, 0.1, now=1.0)
    speculations = [outbox.announce(registry.workers["a"], prompt(2, seed), Witness()) for seed in range(3)]
    assert [len(begun.chunks) for begun in taken(outbox).begun] == [2, 2, 2]
    speculations[1].settle(1.0)
    news = taken(outbox, whole=True)
    assert news.whole and news.loads == {"a": (9, 0.1, 1, 0)}
    assert (news.live, news.settled, news.begun) == ([0, 2], [1], [])


def test_a_fleet_that_changed_is_told_whole(outbox: Outbox, registry: Registry) -> None:
    Ledger(registry).dispatch(registry.workers["b"], 9, 9, 0.1, now=1.0)
    outbox.take(whole=False)
    registry.remove("a")
    news = taken(outbox)
    assert news.whole and news.loads == {"b": (9, 0.1, 1, 0)}


def test_a_prompt_is_told_from_its_dispatch_to_its_end(outbox: Outbox, registry: Registry) -> None:
    fates = [Witness(), Witness()]
    chunks = prompt(3)
    speculations = [outbox.announce(registry.workers["a"], chunks, fate) for fate in fates]
    begun = taken(outbox).begun
    assert [(one.worker, one.chunks) for one in begun] == [("a", chunks)] * 2
    speculations[0].settle(1.0)
    speculations[1].cancel()
    news = taken(outbox)
    assert (news.settled, news.cancelled) == ([begun[0].number], [begun[1].number])
    assert [fate.fate for fate in fates] == ["settled", "cancelled"]


def test_a_prompt_that_ended_before_it_was_told_is_not_mentioned(outbox: Outbox, registry: Registry) -> None:
    outbox.announce(registry.workers["a"], prompt(3), Witness()).cancel()
    assert outbox.take(whole=False) is None


def test_prompts_are_not_collected_while_nobody_listens(outbox: Outbox, registry: Registry) -> None:
    outbox.open = False
    witness = Witness()
    assert outbox.announce(registry.workers["a"], prompt(3), witness) is witness
    assert outbox.take(whole=False) is None


def test_there_is_a_bound_on_what_one_message_tells(outbox: Outbox, registry: Registry) -> None:
    big = [bytes(16)] * (MAX_CHUNKS - 1)
    outbox.announce(registry.workers["a"], big, Witness())
    witness = Witness()
    assert outbox.announce(registry.workers["a"], prompt(2), witness) is witness
    assert len(taken(outbox).begun) == 1


def test_a_move_is_told_once(outbox: Outbox) -> None:
    outbox.moved = True
    assert taken(outbox).moved
    assert outbox.take(whole=False) is None


def test_what_lmcache_says_of_others_requests_goes_on_once_per_rank_and_is_bounded(outbox: Outbox) -> None:
    for request in ("a", "b", "a"):
        outbox.pass_on(request)
    told = outbox.take(whole=False)
    assert told is not None
    assert decode(encode(told)).written == ["a", "b", "a"]
    assert outbox.take(whole=False) is None
    for _ in range(MAX_NOTICES + 5):
        outbox.pass_on("c")
    told = outbox.take(whole=False)
    assert told is not None
    assert len(told.written) == MAX_NOTICES


def test_nothing_is_passed_on_where_nobody_listens(outbox: Outbox) -> None:
    outbox.open = False
    outbox.pass_on("a")
    outbox.open = True
    assert outbox.take(whole=False) is None


def test_what_pools_dropped_is_told_once_though_late(outbox: Outbox) -> None:
    outbox.open = False
    outbox.dropped(Dropped("store", 1.5, [1, b"\xff", "c"]))
    outbox.drop()  # a message could not be sent
    outbox.open = True
    assert taken(outbox).dropped == [Dropped("store", 1.5, [1, b"\xff", "c"])]
    assert outbox.take(whole=False) is None


def test_pools_that_drop_too_much_for_one_message_begin_anew(outbox: Outbox) -> None:
    outbox.dropped(Dropped("small", 2.0, [1]))
    for at in (1.0, 3.0, 2.0):
        outbox.dropped(Dropped("large", at, [*range(MAX_DROPPED // 3 + 1)]))
    assert taken(outbox).dropped == [Dropped("large", 3.0, None), Dropped("small", 2.0, None)]


def test_who_asks_is_told_what_was_dropped_before(outbox: Outbox) -> None:
    outbox.asks = True
    assert taken(outbox).asks
    outbox.dropped(Dropped("store", 2.0, [2]))
    outbox.remember([Dropped("store", 1.0, [1])], {"store": 0.5})
    news = taken(outbox)
    assert (news.dropped, news.dropped_since, news.asks) == (
        [Dropped("store", 1.0, [1]), Dropped("store", 2.0, [2])],
        {"store": 0.5},
        False,
    )
    assert outbox.take(whole=False) is None


def test_messages_are_numbered_without_gaps(outbox: Outbox) -> None:
    assert outbox.take(whole=False) is None
    assert [taken(outbox, whole=True).number for _ in range(2)] == [1, 2]
