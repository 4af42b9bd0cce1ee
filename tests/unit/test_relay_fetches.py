"""How fast workers fetch KV, learned from requests that were placed to do so."""

from __future__ import annotations

import random

import numpy as np
import pytest

from gateway.config import LogConfig
from gateway.config_workers import WorkerConfig
from gateway.fleet.ledger import Fetch, Ledger
from gateway.fleet.registry import Registry, State, Worker
from gateway.observe.observer import Observer
from gateway.relay.fetches import FetchRates
from policies.base import COLUMNS

GB_S = 10.0
KV_BYTES = 327_680
CONFIGURED_S = KV_BYTES / (GB_S * 1e9)
TOKENS = 30_000
REST_S = 0.02
PENDING_S = COLUMNS.index("pending_prefill_s")


def entry(name: str, group: str = "rack") -> WorkerConfig:
    pull = {"group": group, "gb_s": GB_S, "latency_s": 0.0}
    return WorkerConfig(url=f"http://{name}:1", name=name, pull=pull, models=("m",))


@pytest.fixture
def registry() -> Registry:
    registry = Registry()
    for name, group in (("a", "rack"), ("b", "rack"), ("c", "other")):
        registry.add(Worker.from_config(entry(name, group)))
    return registry


@pytest.fixture
def rates(registry: Registry) -> FetchRates:
    return FetchRates(registry)


def fetched(registry: Registry, took_s: float, name: str = "a", rest_s: float = REST_S) -> Fetch:
    worker = registry.workers[name]
    return Fetch(worker, TOKENS, TOKENS * worker.fetch_s, TOKENS, True, rest_s, took_s)


def learn(rates: FetchRates, registry: Registry, took_s: float, count: int = 40, name: str = "a") -> None:
    for at in range(count):
        rates.ended(fetched(registry, took_s, name), TOKENS, now=float(at))


@pytest.mark.parametrize("gb_s", [1.0, 10.0, 40.0])
def test_the_bandwidth_is_found_from_a_wrong_start_value(rates: FetchRates, registry: Registry, gb_s: float) -> None:
    draw = random.Random(1)
    for at in range(60):
        took_s = REST_S + TOKENS * KV_BYTES / (gb_s * 1e9) * draw.uniform(0.9, 1.1)
        rates.ended(fetched(registry, took_s), TOKENS, now=float(at))
    assert rates.bytes_per_s(registry.workers["a"]) == pytest.approx(gb_s * 1e9, rel=0.1)


def test_a_fetch_that_is_far_off_moves_it_little(rates: FetchRates, registry: Registry) -> None:
    learn(rates, registry, REST_S + TOKENS * CONFIGURED_S)
    before = rates.bytes_per_s(registry.workers["a"])
    rates.ended(fetched(registry, 1000.0), TOKENS, now=50.0)
    assert rates.bytes_per_s(registry.workers["a"]) > 0.8 * before


@pytest.mark.parametrize("cached_tokens", [None, 0, TOKENS // 2, 2 * TOKENS])
def test_what_the_engine_does_not_report_as_fetched_teaches_nothing(
    rates: FetchRates, registry: Registry, cached_tokens: int | None
) -> None:
    rates.ended(fetched(registry, 100.0), cached_tokens, now=0.0)
    assert rates.bytes_per_s(registry.workers["a"]) == pytest.approx(GB_S * 1e9)


def test_a_transfer_that_the_prefill_of_the_rest_hides_teaches_nothing(rates: FetchRates, registry: Registry) -> None:
    rates.ended(fetched(registry, took_s=5.5, rest_s=5.0), TOKENS, now=0.0)
    assert rates.bytes_per_s(registry.workers["a"]) == pytest.approx(GB_S * 1e9)


def test_one_that_takes_no_time_at_all_makes_the_link_faster(rates: FetchRates, registry: Registry) -> None:
    rates.ended(fetched(registry, REST_S / 2), TOKENS, now=0.0)
    assert rates.bytes_per_s(registry.workers["a"]) == pytest.approx(2 * GB_S * 1e9)


def test_workers_that_were_not_seen_are_taken_to_be_like_their_group(rates: FetchRates, registry: Registry) -> None:
    learn(rates, registry, REST_S + 4 * TOKENS * CONFIGURED_S)
    of = {name: rates.bytes_per_s(worker) for name, worker in registry.workers.items()}
    assert of["b"] == pytest.approx(of["a"])
    assert of["a"] < 0.3 * GB_S * 1e9
    assert of["c"] == pytest.approx(GB_S * 1e9)
    learn(rates, registry, REST_S + TOKENS * CONFIGURED_S, name="b")
    assert rates.bytes_per_s(registry.workers["b"]) > 3 * rates.bytes_per_s(registry.workers["a"])


def test_without_fetches_the_configured_bandwidth_comes_back(rates: FetchRates, registry: Registry) -> None:
    learn(rates, registry, REST_S + 16 * TOKENS * CONFIGURED_S)
    slow = rates.bytes_per_s(registry.workers["a"])
    for minute in range(2, 12):
        rates.fade(60.0 * minute)
    a, b = (rates.bytes_per_s(registry.workers[name]) for name in "ab")
    assert a == b == pytest.approx((slow * GB_S * 1e9) ** 0.5)
    for minute in range(12, 200):
        rates.fade(60.0 * minute)
    assert rates.bytes_per_s(registry.workers["a"]) == pytest.approx(GB_S * 1e9, rel=0.01)


def test_so_are_those_that_join_later(rates: FetchRates, registry: Registry) -> None:
    learn(rates, registry, REST_S + 4 * TOKENS * CONFIGURED_S)
    registry.add(Worker.from_config(entry("d")))
    assert rates.bytes_per_s(registry.workers["d"]) == pytest.approx(rates.bytes_per_s(registry.workers["a"]))


def test_a_group_of_which_nobody_is_left_that_was_seen_is_as_configured(rates: FetchRates, registry: Registry) -> None:
    learn(rates, registry, REST_S + 16 * TOKENS * CONFIGURED_S)
    registry.remove("a")
    assert rates.bytes_per_s(registry.workers["b"]) == pytest.approx(GB_S * 1e9)


def test_policies_see_it_in_every_view(rates: FetchRates, registry: Registry) -> None:
    a, b, _ = registry.workers.values()
    for worker in registry.workers.values():
        worker.models = {"m": "m"}
        registry.set_state(worker, State.READY)
    registry.set_state(a, State.DRAINING)
    of_two, of_all = registry.candidates("m"), registry.fleet
    learn(rates, registry, REST_S + 4 * TOKENS * CONFIGURED_S, name="b")
    for links, row in ((registry.candidates("m").fleet.pulls, 0), (of_two.fleet.pulls, 0), (of_all.pulls, b.row)):
        assert links is not None
        assert links.s_per_token[row] == b.fetch_s > 3 * CONFIGURED_S
    registry.set_state(a, State.READY)
    links = registry.candidates("m").fleet.pulls
    assert links is not None
    assert links.s_per_token[b.row] == b.fetch_s


def test_they_see_it_of_workers_that_only_prefill(rates: FetchRates, registry: Registry) -> None:
    one = Worker.from_config(entry("p").model_copy(update={"role": "prefill"}))
    registry.add(one)
    registry.set_state(one, State.READY)
    registry.prefilling("m")
    learn(rates, registry, REST_S + 4 * TOKENS * CONFIGURED_S, name="p")
    links = registry.prefilling("m").fleet.pulls
    assert links is not None
    assert links.s_per_token[0] == one.fetch_s > 3 * CONFIGURED_S


def flight_that_fetches(ledger: Ledger, worker: Worker, now: float, idle: bool = True) -> tuple[Fetch, object]:
    fetch = Fetch(worker, 1000, 1.0, 1000, idle)
    flight = ledger.dispatch(worker, 1100, 100, 1.1, now)
    flight.fetch = fetch
    return fetch, flight


def test_the_time_of_a_fetch_is_that_of_a_request_alone_and_no_prefill(registry: Registry) -> None:
    prefills: list[float] = []
    ledger = Ledger(registry, lambda worker, new, cached, seconds: prefills.append(seconds))
    fetch, flight = flight_that_fetches(ledger, registry.workers["a"], 10.0)
    flight.first_byte(12.5)
    assert (fetch.took_s, prefills) == (2.5, [])


@pytest.mark.parametrize("company", ["before", "after", "between", "unseen", "other_replica"])
def test_in_company_no_time_is_taken(registry: Registry, company: str) -> None:
    worker = registry.workers["a"]
    ledger = Ledger(registry)
    if company == "before":
        before = ledger.dispatch(worker, 100, 100, 0.1, 9.0)
    fetch, flight = flight_that_fetches(ledger, worker, 10.0)
    if company == "before":
        before.first_byte(10.5)
    if company in ("after", "between", "unseen"):
        other = ledger.dispatch(worker, 100, 100, 0.1, 11.0, streamed=company != "unseen")
    if company in ("between", "unseen"):
        other.first_byte(11.5)
        other.end(11.6)
    if company == "other_replica":
        registry.elsewhere = np.zeros_like(registry.fleet.state)
        registry.elsewhere[PENDING_S, worker.row] = 0.3
    flight.first_byte(12.5)
    assert fetch.took_s == 0


def test_a_request_that_was_held_is_timed_from_when_it_went_on(registry: Registry) -> None:
    ledger = Ledger(registry)
    fetch = Fetch(registry.workers["a"], 1000, 1.0, 1000, True)
    flight = ledger.dispatch(registry.workers["a"], 1100, 100, 1.1, 10.0, held=True)
    flight.fetch = fetch
    flight.start(11.0)
    flight.first_byte(12.5)
    assert fetch.took_s == 1.5


def test_it_is_shown_until_the_worker_leaves(rates: FetchRates, registry: Registry) -> None:
    observer = Observer(registry, LogConfig(requests=False))
    rates.expose(observer)
    rates.ended(fetched(registry, REST_S + TOKENS * CONFIGURED_S), TOKENS, now=0.0)
    rates.ended(fetched(registry, 1.0), 0, now=0.0)
    lines = observer.render().decode().splitlines()
    assert 'kvway_fetches_total{worker="a",outcome="fetched"} 1' in lines
    assert 'kvway_fetches_total{worker="a",outcome="computed"} 1' in lines
    assert 'kvway_fetch_measured_total{worker="a"} 1' in lines
    assert f'kvway_fetch_bytes_total{{worker="a"}} {float(TOKENS * KV_BYTES)}' in lines
    assert any(line.startswith('kvway_fetch_bytes_per_second{worker="b"} ') for line in lines)
    registry.remove("a")
    rates.ended(fetched_by(registry), TOKENS, now=0.0)
    assert not any('worker="a"' in line for line in observer.render().decode().splitlines() if "fetch" in line)


def fetched_by(registry: Registry) -> Fetch:
    """Return a fetch of a worker that is not there any more."""
    return Fetch(Worker.from_config(entry("a")), TOKENS, 1.0, TOKENS, True)
