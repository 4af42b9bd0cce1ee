"""Scrapes and model listings over real sockets."""

import asyncio

import msgspec
import pytest

from gateway.config import MetricsConfig
from gateway.fleet.metrics import Scraper
from gateway.fleet.models import ModelCards, merged_models
from gateway.fleet.registry import Registry, State
from tests.integration.engine import HANG, RESET, Engine, until


def exposition(running=3, waiting=2, usage=0.5, start=1000.0, prompt_tokens=10, blocks=100):
    lines = [
        f'vllm:num_requests_running{{engine="0"}} {running}',
        f'vllm:num_requests_waiting{{engine="0"}} {waiting}',
        f'vllm:kv_cache_usage_perc{{engine="0"}} {usage}',
        f'vllm:cache_config_info{{block_size="16",engine="0",num_gpu_blocks="{blocks}"}} 1.0',
        f'vllm:prompt_tokens_total{{engine="0"}} {prompt_tokens}',
        *([f"process_start_time_seconds {start}"] if start else []),
    ]
    return "\n".join(lines).encode()


def listing(*cards):
    return msgspec.json.encode({"object": "list", "data": cards})


@pytest.fixture
def registry():
    return Registry()


@pytest.fixture
async def engine():
    async with Engine(
        {"/metrics": exposition(), "/v1/models": listing({"id": "llama", "max_model_len": 4096})}
    ) as engine:
        yield engine


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def restarts():
    return []


@pytest.fixture
async def scraper(registry, fetch, clock, restarts):
    scraper = Scraper(registry, fetch, MetricsConfig(interval_s=0.01, stale_s=10), restarts.append, clock)
    await scraper.start()
    yield scraper
    await scraper.close()


@pytest.fixture
async def models(registry, fetch):
    models = ModelCards(registry, fetch)
    await models.start()
    yield models
    await models.close()


def figures(registry, worker):
    fleet = registry.fleet
    names = ("engine_running", "engine_waiting", "kv_usage", "kv_capacity_tokens")
    return [float(fleet.column(name)[worker.row]) for name in names]


async def scraped_again(engine, times=2):
    seen = engine.asked.count("/metrics")
    await until(lambda: engine.asked.count("/metrics") >= seen + times)


async def test_a_scrape_fills_the_view(registry, scraper, engine):
    registry.add(worker := engine.worker())
    await until(lambda: figures(registry, worker) == [3, 2, 0.5, 1600])
    assert worker.block_size == 16


async def test_a_configured_capacity_wins(registry, scraper, engine):
    registry.add(worker := engine.worker(kv_capacity_tokens=777))
    await until(lambda: figures(registry, worker) == [3, 2, 0.5, 777])


@pytest.mark.parametrize("answer", [(500, b"oops"), RESET])
async def test_a_failed_scrape_changes_nothing_until_the_figures_are_stale(registry, scraper, engine, clock, answer):
    registry.add(worker := engine.worker())
    await until(lambda: figures(registry, worker)[0] == 3)
    engine.answers["/metrics"] = answer
    clock.now += 9
    await until(lambda: scraper.failures[worker.name] >= 2)
    assert figures(registry, worker) == [3, 2, 0.5, 1600]
    clock.now += 2
    await until(lambda: figures(registry, worker)[0] == 0)
    assert figures(registry, worker) == [0, 0, 0, 1600]


async def test_a_hung_scrape_delays_no_other(registry, scraper, engine):
    async with Engine({"/metrics": HANG}) as hung:
        registry.add(hung.worker())
        registry.add(worker := engine.worker())
        await until(lambda: figures(registry, worker)[0] == 3)
        await scraped_again(engine)


async def test_another_start_time_is_a_restart(registry, scraper, engine, restarts):
    registry.add(worker := engine.worker())
    await scraped_again(engine)
    assert restarts == []
    engine.answers["/metrics"] = exposition(start=2000.0, prompt_tokens=99)
    await until(lambda: restarts == [worker])
    await scraped_again(engine)
    assert restarts == [worker]
    assert scraper.restarts[worker.name] == 1


async def test_where_there_is_no_start_time_a_counter_that_falls_is_a_restart(registry, scraper, engine, restarts):
    engine.answers["/metrics"] = exposition(start=None, prompt_tokens=50)
    registry.add(worker := engine.worker())
    await scraped_again(engine)
    engine.answers["/metrics"] = exposition(start=None, prompt_tokens=60)
    await scraped_again(engine)
    assert restarts == []
    engine.answers["/metrics"] = exposition(start=None, prompt_tokens=5)
    await until(lambda: restarts == [worker])


async def test_a_restart_with_other_memory_is_seen(registry, scraper, engine):
    registry.add(worker := engine.worker())
    await until(lambda: figures(registry, worker)[3] == 1600)
    engine.answers["/metrics"] = exposition(start=2000.0, blocks=50)
    await until(lambda: figures(registry, worker)[3] == 800)


async def test_figures_follow_their_worker_when_rows_move(registry, scraper, engine):
    async with Engine({"/metrics": exposition(running=9)}) as other:
        registry.add(other.worker())
        registry.add(worker := engine.worker())
        await until(lambda: registry.fleet.engine_running.tolist() == [9, 3])
        registry.remove(next(iter(registry.workers)))
        await scraped_again(engine)
        assert figures(registry, worker)[0] == 3


async def test_counters_of_a_worker_that_left_are_forgotten(registry, scraper, engine):
    engine.answers["/metrics"] = (500, b"")
    registry.add(worker := engine.worker())
    await until(lambda: scraper.failures[worker.name])
    registry.remove(worker.name)
    await asyncio.sleep(0)
    assert scraper.failures == {}


async def test_models_are_asked_for_when_a_worker_joins(registry, models, engine):
    registry.add(worker := engine.worker())
    registry.set_state(worker, State.READY)
    await until(lambda: worker.models == {"llama": "llama"})
    assert registry.candidates("llama").workers == [worker]
    assert merged_models(registry) == [{"id": "llama", "max_model_len": 4096}]


async def test_an_adapter_loaded_at_run_time_appears(registry, models, engine):
    registry.add(worker := engine.worker())
    await until(lambda: worker.models)
    engine.answers["/v1/models"] = listing({"id": "llama"}, {"id": "sql", "parent": "llama"})
    models.refresh(worker)
    await until(lambda: worker.models == {"llama": "llama", "sql": "llama"})


async def test_configured_models_win_but_their_cards_and_parents_are_taken(registry, models, engine):
    engine.answers["/v1/models"] = listing({"id": "llama", "x": 1}, {"id": "sql", "parent": "llama"}, {"id": "other"})
    registry.add(worker := engine.worker(models=("llama", "sql", "alias")))
    await until(lambda: worker.models["sql"] == "llama")
    assert worker.models == {"llama": "llama", "sql": "llama", "alias": "alias"}
    assert [card["id"] for card in merged_models(registry)] == ["llama", "sql", "alias"]


async def test_candidates_are_selected_anew_only_when_models_changed(registry, models, engine):
    registry.add(worker := engine.worker())
    await until(lambda: worker.models)
    version = registry.version
    engine.answers["/v1/models"] = listing({"id": "llama", "created": 12345})  # engines write the present time here
    models.refresh(worker)
    await until(lambda: worker.model_cards[0].get("created"))
    assert registry.version == version


@pytest.mark.parametrize(
    "answer",
    [
        (500, b""),
        (200, b"not json"),
        b"[]",
        b'{"data": null}',
        b'{"data": [1]}',
        b'{"data": [{"id": 7}]}',
        b'{"data": []}',
        b"\xff\xfe",
        RESET,
    ],
)
async def test_an_answer_that_names_no_model_changes_nothing(registry, models, engine, answer):
    registry.add(worker := engine.worker())
    await until(lambda: worker.models)
    engine.answers["/v1/models"] = answer
    seen = len(engine.asked)
    models.refresh(worker)
    await until(lambda: len(engine.asked) > seen)
    await asyncio.sleep(0.02)
    assert worker.models == {"llama": "llama"}


async def test_a_worker_that_is_not_up_yet_is_asked_again_soon(registry, models):
    engine = Engine({"/v1/models": listing({"id": "llama"})})
    await engine.start()
    await engine.stop()
    registry.add(worker := engine.worker())
    await asyncio.sleep(0.05)
    await engine.start()
    await until(lambda: worker.models)
    await engine.stop()
