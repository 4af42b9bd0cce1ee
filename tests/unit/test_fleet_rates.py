import random

import pytest

from gateway.config import PrefillConfig, WorkerConfig
from gateway.fleet.ledger import Ledger
from gateway.fleet.rates import PrefillRates
from gateway.fleet.registry import Registry, Worker

CONFIG = WorkerConfig(url="http://127.0.0.1:1", name="a", prefill={"a_s": 0.01, "b_s": 60e-6, "c_s": 1e-9})


def prefill_s(new_tokens, cached_tokens):
    prefill = CONFIG.prefill
    return prefill.a_s + prefill.b_s * new_tokens + prefill.c_s * new_tokens * (cached_tokens + new_tokens / 2)


@pytest.fixture
def registry():
    registry = Registry()
    registry.add(Worker.from_config(CONFIG))
    return registry


@pytest.fixture
def worker(registry):
    return registry.workers["a"]


@pytest.fixture
def rates(registry):
    return PrefillRates(registry)


@pytest.mark.parametrize("factor", [0.05, 0.4, 1.0, 3.0, 20.0])
def test_the_rate_of_a_worker_is_found_from_a_wrong_start_value(registry, rates, worker, factor):
    draw = random.Random(1)
    for _ in range(400):
        new, cached = draw.randint(100, 8000), draw.randint(0, 30_000)
        rates.observe(worker, new, cached, factor * prefill_s(new, cached) * draw.uniform(0.9, 1.1))
    assert rates.scale(worker) == pytest.approx(factor, rel=0.1)
    fleet = registry.fleet
    assert fleet.prefill_a_s[0] == pytest.approx(0.01 * rates.scale(worker))
    assert fleet.prefill_b_s[0] == pytest.approx(60e-6 * rates.scale(worker))
    assert fleet.prefill_c_s[0] == pytest.approx(1e-9 * rates.scale(worker))


def test_prompts_that_an_engine_prefills_in_batches_give_the_rate_of_the_batch(registry, rates, worker):
    ledger = Ledger(registry, rates.observe)
    now = 0.0
    for _ in range(60):
        batch = [ledger.dispatch(worker, 2000, 1000, 0.07, now) for _ in range(8)]
        now += 8 * prefill_s(1000, 1000) * 0.5
        for flight in batch:
            flight.first_byte(now)
            flight.end(now)
    assert rates.scale(worker) == pytest.approx(0.5, rel=0.15)


def test_outliers_move_a_learned_rate_little(rates, worker):
    for _ in range(100):
        rates.observe(worker, 8000, 0, prefill_s(8000, 0))
    for seconds in (600.0, 1e-6, 0.0, 3000.0):
        rates.observe(worker, 8000, 0, seconds)
        assert rates.scale(worker) == pytest.approx(1.0, rel=0.15)


@pytest.mark.parametrize("seconds", [1e-9, 0.0, 1e9])
def test_nonsense_converges_to_a_bound(registry, rates, worker, seconds):
    for _ in range(2000):
        rates.observe(worker, 1000, 0, seconds)
    assert 1 / 64 <= rates.scale(worker) <= 64
    assert registry.fleet.prefill_b_s[0] > 0


def test_a_few_short_prefills_decide_nothing_yet(rates, worker):
    for _ in range(10):
        rates.observe(worker, 10, 0, 5.0)
    assert rates.scale(worker) == 1.0


def test_a_worker_that_comes_back_starts_from_its_configuration(registry, rates, worker):
    for _ in range(100):
        rates.observe(worker, 8000, 0, 3.0)
    registry.remove("a")
    rates.observe(worker, 8000, 0, 3.0)
    registry.add(worker)
    assert rates.scale(worker) == 1.0
    assert registry.fleet.prefill_b_s[0] == CONFIG.prefill.b_s


def test_a_worker_whose_prefill_is_configured_as_free_stays_free(registry):
    free = WorkerConfig(url="http://127.0.0.1:2", name="b", prefill={"a_s": 0, "b_s": 0, "c_s": 0})
    registry.add(worker := Worker.from_config(free))
    rates = PrefillRates(registry)
    for _ in range(100):
        rates.observe(worker, 1000, 0, 1.0)
    assert rates.scale(worker) == 1.0


def test_workers_that_are_alike_are_taken_to_be_as_fast_as_the_one_that_was_seen(registry, rates, worker):
    twin = Worker.from_config(CONFIG.model_copy(update={"name": "b"}))
    other = Worker.from_config(CONFIG.model_copy(update={"name": "c", "prefill": PrefillConfig(b_s=1e-3)}))
    registry.add(twin)
    registry.add(other)
    for _ in range(100):
        rates.observe(worker, 8000, 0, prefill_s(8000, 0) / 2)
    late = Worker.from_config(CONFIG.model_copy(update={"name": "d"}))
    registry.add(late)
    rates.observe(worker, 8000, 0, prefill_s(8000, 0) / 2)
    assert rates.scale(twin) == rates.scale(late) == pytest.approx(rates.scale(worker)) == pytest.approx(0.5)
    assert registry.fleet.prefill_b_s[late.row] == pytest.approx(CONFIG.prefill.b_s / 2)
    assert rates.scale(other) == 1.0


def test_what_was_presumed_of_a_worker_gives_way_to_what_is_seen_there(registry, rates, worker):
    twin = Worker.from_config(CONFIG.model_copy(update={"name": "b"}))
    registry.add(twin)
    for _ in range(100):
        rates.observe(worker, 8000, 0, prefill_s(8000, 0) / 2)
        rates.observe(twin, 8000, 0, prefill_s(8000, 0) * 2)
    assert rates.scale(worker) == pytest.approx(0.5, rel=0.05)
    assert rates.scale(twin) == pytest.approx(2.0, rel=0.05)
