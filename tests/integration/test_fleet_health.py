"""Probes against real sockets, and ejection with the clock in the test's hand."""

import asyncio

import pytest

from gateway.config import HealthConfig, WorkerConfig
from gateway.fleet.health import Health
from gateway.fleet.registry import Registry, State, Worker
from tests.integration.engine import HANG, RESET, Engine, until

FAST = HealthConfig(interval_s=0.02, timeout_s=0.1, failures=2)


@pytest.fixture
def registry():
    return Registry()


@pytest.fixture
async def engine():
    async with Engine({"/health": b""}) as engine:
        yield engine


@pytest.fixture
async def health(registry, fetch):
    health = Health(registry, fetch, FAST)
    await health.start()
    yield health
    await health.close()


def fleet_of(registry, count, model="llama"):
    """Return ready workers that nobody probes."""
    workers = []
    for number in range(count):
        config = WorkerConfig(url="http://127.0.0.1:1", name=f"{model}-{number}", models=(model,))
        workers.append(Worker.from_config(config))
        registry.add(workers[-1])
        registry.set_state(workers[-1], State.READY)
    return workers


def fail(health, worker, times=2, kind="reset"):
    for _ in range(times):
        health.failed(worker, kind)


async def test_a_joining_worker_is_ready_after_its_first_good_probe(registry, health, engine):
    worker = engine.worker()
    registry.add(worker)
    assert worker.state is State.STARTING
    await until(lambda: worker.state is State.READY)


async def test_workers_that_were_there_before_the_start_are_probed(registry, engine, fetch):
    registry.add(worker := engine.worker())
    health = Health(registry, fetch, FAST)
    await health.start()
    await until(lambda: worker.state is State.READY)
    await health.close()


@pytest.mark.parametrize("answer", [(503, b"engine is dead"), (404, b""), (302, b""), HANG, RESET])
async def test_failing_probes_keep_a_starting_worker_out(registry, health, engine, answer):
    engine.answers["/health"] = answer
    registry.add(worker := engine.worker())
    await until(lambda: worker.state is State.EJECTED)
    engine.answers["/health"] = b""
    await until(lambda: worker.state is State.READY)


async def test_a_worker_that_dies_is_ejected_and_comes_back(registry, health, engine):
    registry.add(worker := engine.worker(models=("llama",)))
    await until(lambda: worker.state is State.READY)
    await engine.stop()
    await until(lambda: worker.state is State.EJECTED)
    assert health.ejections == {(worker.name, "probe_connect"): 1}
    assert registry.candidates("llama").workers == [worker]  # better a suspect than none
    await engine.start()
    await until(lambda: worker.state is State.READY)


async def test_a_hung_worker_delays_nobody(registry, engine, fetch):
    health = Health(registry, fetch, HealthConfig(interval_s=0.02, timeout_s=60))
    await health.start()
    async with Engine({"/health": HANG}) as hung:
        for number in range(20):
            registry.add(hung.worker(name=f"hung-{number}"))
        registry.add(worker := engine.worker(name="well"))
        await until(lambda: worker.state is State.READY and len(engine.asked) >= 3)
        await health.close()


async def test_silent_probes_do_not_empty_a_fleet(registry, health):
    async with Engine({"/health": b""}) as first, Engine({"/health": b""}) as second:
        workers = [first.worker(models=("llama",)), second.worker(models=("llama",))]
        for worker in workers:
            registry.add(worker)
        await until(lambda: all(worker.state is State.READY for worker in workers))
        first.answers["/health"] = second.answers["/health"] = HANG
        await until(lambda: any(worker.state is State.EJECTED for worker in workers))
        seen = len(first.asked) + len(second.asked)
        await until(lambda: len(first.asked) + len(second.asked) >= seen + 6)
        assert sorted(worker.state for worker in workers) == [State.EJECTED, State.READY]


async def test_a_draining_worker_stays_draining_whatever_its_probes_say(registry, health, engine):
    registry.add(worker := engine.worker())
    await until(lambda: worker.state is State.READY)
    registry.set_state(worker, State.DRAINING)
    for answer in (b"", (503, b"")):
        engine.answers["/health"] = answer
        seen = len(engine.asked)
        await until(lambda seen=seen: len(engine.asked) >= seen + 4)
        assert worker.state is State.DRAINING


async def test_a_worker_that_left_is_not_probed_any_more(registry, health, engine):
    registry.add(worker := engine.worker())
    await until(lambda: worker.state is State.READY)
    registry.remove(worker.name)
    await asyncio.sleep(0)
    seen = len(engine.asked)
    async with Engine({"/health": b""}) as other:
        registry.add(other.worker())
        await until(lambda: len(other.asked) >= 5)
    assert len(engine.asked) <= seen + 1  # one may have been on its way
    health.failed(worker, "reset")
    health.succeeded(worker)


async def test_consecutive_failed_requests_eject(registry, health):
    first, *_ = fleet_of(registry, 4)
    fail(health, first, 1)
    health.succeeded(first)
    fail(health, first, 1)
    assert first.state is State.READY
    fail(health, first, 1)
    assert first.state is State.EJECTED
    assert health.ejections == {(first.name, "reset"): 1}


async def test_panic_mode_keeps_half_of_a_models_workers(registry, fetch):
    health = Health(registry, fetch, HealthConfig(failures=2, panic_share=0.5))
    workers = fleet_of(registry, 4)
    fleet_of(registry, 10, "qwen")  # of no help to the others
    for worker in workers:
        fail(health, worker)
    assert [worker.state for worker in workers] == [State.EJECTED, State.EJECTED, State.READY, State.READY]
    await health.close()


async def test_panic_mode_keeps_half_of_either_pool_where_prefill_and_decode_are_apart(registry, fetch):
    health = Health(registry, fetch, HealthConfig(failures=2, panic_share=0.5))
    workers = fleet_of(registry, 4)
    for worker, role in zip(workers, ("prefill", "prefill", "decode", "decode"), strict=True):
        worker.config = worker.config.model_copy(update={"role": role})
    for worker in workers[2:]:
        fail(health, worker)
    assert [worker.state for worker in workers[2:]] == [State.EJECTED, State.READY]
    await health.close()


async def test_a_single_worker_is_never_ejected_for_failing_requests(registry, health):
    (worker,) = fleet_of(registry, 1)
    fail(health, worker, 50)
    assert worker.state is State.READY


async def test_with_panic_mode_off_all_may_go_and_then_all_are_offered(registry, fetch):
    health = Health(registry, fetch, HealthConfig(failures=1, panic_share=0))
    workers = fleet_of(registry, 3)
    for worker in workers:
        fail(health, worker, 1)
    assert {worker.state for worker in workers} == {State.EJECTED}
    assert registry.candidates("llama").workers == workers
    await health.close()


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


async def test_each_ejection_soon_after_a_return_lasts_twice_as_long(registry, engine, fetch):
    clock = Clock()
    health = Health(
        registry, fetch, HealthConfig(interval_s=0.01, failures=1, panic_share=0, ejection_max_s=0.05), clock
    )
    await health.start()
    registry.add(worker := engine.worker())
    await until(lambda: worker.state is State.READY)
    for hold_s in (0.01, 0.02, 0.04, 0.05, 0.05):
        health.failed(worker, "reset")
        assert worker.state is State.EJECTED
        clock.now += hold_s * 0.9
        seen = len(engine.asked)
        await until(lambda seen=seen: len(engine.asked) >= seen + 3)
        assert worker.state is State.EJECTED  # good probes alone do not bring it back yet
        clock.now += hold_s * 0.2
        await until(lambda: worker.state is State.READY)
    clock.now += 1.0  # it has kept well for long: the past is forgotten
    health.failed(worker, "reset")
    clock.now += 0.011
    await until(lambda: worker.state is State.READY)
    await health.close()


async def test_as_many_good_probes_as_configured_bring_a_worker_back(registry, engine, fetch):
    health = Health(registry, fetch, HealthConfig(interval_s=0.01, failures=1, successes=3, panic_share=0))
    await health.start()
    registry.add(worker := engine.worker())
    await until(lambda: worker.state is State.READY)
    health.failed(worker, "reset")
    seen = len(engine.asked)
    await until(lambda: worker.state is State.READY)
    assert len(engine.asked) >= seen + 3
    await health.close()


async def test_a_worker_that_answers_requests_is_not_ejected_for_slow_probes(registry, engine, fetch):
    health = Health(registry, fetch, HealthConfig(interval_s=0.01, timeout_s=0.02, failures=3, panic_share=0))
    registry.add(worker := engine.worker(models=("llama",)))
    registry.set_state(worker, State.READY)
    engine.answers["/health"] = HANG
    await health.start()
    for probes in range(1, 8):
        await until(lambda probes=probes: len(engine.asked) >= probes)
        health.succeeded(worker)
    assert worker.state is State.READY
    await until(lambda: worker.state is State.EJECTED)
    await health.close()
