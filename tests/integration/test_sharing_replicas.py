"""Two gateways on one Valkey act as one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import redis

from gateway.app import Gateway
from gateway.tasks import spawn, stop
from tests.events_rig import until
from tests.gateway_rig import sim_workers
from tests.processes import kvway, running, write_config
from tests.sharing_rig import all_predict, ask, config_for, is_settled, metric, owners, predicted, replicas
from tests.valkey import Valkey

PROMPT = "The quick brown fox jumps over the lazy dog. " * 20
SLOW = 0.02  # a simulated worker this slow prefills as long as a test lasts


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=30, limits=httpx.Limits(max_connections=200)) as client:
        yield client


def slots(gateway: Gateway) -> list[int]:
    """The workers' slots by the numbers that all replicas know: a slot's owner may call it otherwise."""
    return [gateway.index.number(worker.slot) for worker in gateway.registry.workers.values()]


def in_flight(gateway: Gateway) -> int:
    """Requests of all replicas on all workers, as the gateway's policy sees them."""
    return int(gateway.registry.candidates("tiny").fleet.running.sum())


@pytest.mark.slow
async def test_each_worker_is_followed_by_one_replica_and_its_slot_known_to_both(
    valkey: Valkey, client: httpx.AsyncClient
) -> None:
    async with sim_workers(4) as workers, replicas(workers, valkey) as gateways:
        await until(lambda: all(len(by) == 1 for by in owners(gateways).values()))
        await until(lambda: slots(gateways[0]) == slots(gateways[1]))
        for number in range(4):
            prompt = f"{number}: {PROMPT}"
            answer = await ask(client, gateways[number % 2], prompt)
            held = answer.json()["usage"]["prompt_tokens"] // 16 * 16
            await all_predict(gateways, prompt, answer.headers["x-kvway-worker"], held)


async def test_what_one_dispatches_the_other_sees_at_once(valkey: Valkey, client: httpx.AsyncClient) -> None:
    async with sim_workers(2, speed=SLOW) as workers, replicas(workers, valkey) as (one, other):
        asking = spawn(ask(client, one, PROMPT), "ask")
        await until(lambda: in_flight(one) == 1)
        await until(lambda: in_flight(other) == 1, within_s=1.0)
        fleets = [gateway.registry.candidates("tiny").fleet for gateway in (one, other)]
        for column in ("pending_prefill_tokens", "pending_prefill_s", "decode_tokens"):
            assert fleets[0].column(column).tolist() == fleets[1].column(column).tolist()
        worker = fleets[0].names[int(fleets[0].running.argmax())]
        assert (await predicted(other, PROMPT))[worker] > 0  # although the worker has prefilled nothing
        assert not other.registry.fleet.running.any()
        await stop(asking)
        await until(lambda: in_flight(other) == 0)
        assert set((await predicted(other, PROMPT)).values()) == {0}


@pytest.mark.slow
async def test_a_burst_through_two_replicas_spreads_as_through_one(valkey: Valkey, client: httpx.AsyncClient) -> None:
    async def spread(gateways: list[Gateway], burst: str) -> list[float]:
        prompts = [f"{burst} {number}: {PROMPT}" for number in range(100)]
        asking = [
            spawn(ask(client, gateways[number % len(gateways)], prompt), "ask") for number, prompt in enumerate(prompts)
        ]
        await until(lambda: all(in_flight(gateway) == 100 for gateway in gateways))
        running = gateways[0].registry.candidates("tiny").fleet.running.tolist()
        await stop(*asking)
        await until(lambda: not any(map(in_flight, gateways)))
        return running

    async with (
        sim_workers(4, speed=SLOW) as workers,
        replicas(workers, valkey, policy={"name": "least-tokens"}) as gateways,
    ):
        through_one = await spread(gateways[:1], "first")
        through_two = await spread(gateways, "second")
    assert max(through_two) <= max(through_one) + 2
    assert min(through_two) >= min(through_one) - 2


@pytest.mark.slow
async def test_workers_of_a_replica_that_leaves_go_to_the_other(valkey: Valkey, client: httpx.AsyncClient) -> None:
    async with sim_workers(4) as workers, replicas(workers, valkey) as (one, other):
        answers = [await ask(client, one, f"{number}: {PROMPT}") for number in range(4)]
        held = [answer.json()["usage"]["prompt_tokens"] // 16 * 16 for answer in answers]
        named = [answer.headers["x-kvway-worker"] for answer in answers]
        for number in range(4):
            await all_predict([one, other], f"{number}: {PROMPT}", named[number], held[number])
        await one.stop()
        await until(lambda: len(other.feeds.stats) == 4)
        assert metric(other, "kvway_replicas") == 1
        for number in range(4):
            await all_predict([other], f"{number}: {PROMPT}", named[number], held[number])


async def test_workers_without_events_have_one_slot_and_one_model_for_all(
    valkey: Valkey, client: httpx.AsyncClient
) -> None:
    async with sim_workers(3, events=False) as workers, replicas(workers, valkey) as gateways:
        await until(lambda: all(len(by) == 1 for by in owners(gateways).values()))
        await until(lambda: slots(gateways[0]) == slots(gateways[1]))
        for number in range(6):
            prompt = f"{number}: {PROMPT}"
            answer = await ask(client, gateways[number % 2], prompt)
            held = answer.json()["usage"]["prompt_tokens"] // 16 * 16
            await all_predict(gateways, prompt, answer.headers["x-kvway-worker"], held)


@pytest.mark.slow
async def test_a_worker_that_one_replica_does_not_know_is_followed_by_one_that_does(valkey: Valkey) -> None:
    async with sim_workers(1) as workers:
        names = 16 * workers  # the replica without workers is certain to be the first choice for some of them
        config = config_for(names, valkey.url)
        async with (
            replicas([], valkey, n=1, index=config["index"]),
            replicas(names, valkey, n=1, index=config["index"]) as (gateway,),
        ):
            await until(lambda: is_settled(gateway, 2))
            assert len(gateway.feeds.stats) == 16


async def test_a_restarted_worker_has_a_new_slot_with_both(valkey: Valkey) -> None:
    async with sim_workers(2) as workers, replicas(workers, valkey) as gateways:
        await until(lambda: slots(gateways[0]) == slots(gateways[1]))
        before = slots(gateways[0])
        for gateway in gateways:
            gateway.feeds.restarted(gateway.registry.workers["w0"])
        await until(lambda: slots(gateways[0]) == slots(gateways[1]) and slots(gateways[0])[0] != before[0])


@pytest.mark.slow
async def test_without_redis_each_serves_alone_and_they_find_together_again(
    valkey: Valkey, client: httpx.AsyncClient
) -> None:
    async with sim_workers(3) as workers, replicas(workers, valkey) as gateways:
        statuses: Counter[int] = Counter()

        async def load(number: int) -> None:
            while True:
                statuses[(await ask(client, gateways[number], f"{number}: {PROMPT}")).status_code] += 1
                await asyncio.sleep(0.02)

        loading = [spawn(load(number), "load") for number in range(2)]
        await until(lambda: statuses[200] > 20)
        valkey.kill()
        await until(lambda: all(metric(gateway, "kvway_sharing_up") == 0 for gateway in gateways))
        await until(lambda: all(metric(gateway, "kvway_replicas") == 1 for gateway in gateways))
        await until(lambda: all(metric(gateway, "kvway_workers_followed") == 3 for gateway in gateways))
        answer = await ask(client, gateways[0], PROMPT)
        held = answer.json()["usage"]["prompt_tokens"] // 16 * 16
        await all_predict(gateways, PROMPT, answer.headers["x-kvway-worker"], held)
        valkey.start()
        await until(lambda: all(is_settled(gateway, 2) for gateway in gateways))
        await until(lambda: all(len(by) == 1 for by in owners(gateways).values()))
        await until(lambda: slots(gateways[0]) == slots(gateways[1]))
        await stop(*loading)
        assert statuses.keys() == {200}
        await all_predict(gateways, PROMPT, answer.headers["x-kvway-worker"], held)


@pytest.mark.slow
async def test_a_flushed_server_changes_nothing_for_long(valkey: Valkey, client: httpx.AsyncClient) -> None:
    async with sim_workers(3) as workers, replicas(workers, valkey) as gateways:
        answer = await ask(client, gateways[0], PROMPT)
        held = answer.json()["usage"]["prompt_tokens"] // 16 * 16
        await all_predict(gateways, PROMPT, answer.headers["x-kvway-worker"], held)
        with redis.Redis.from_url(valkey.url) as admin:
            admin.flushall()
        await until(lambda: all(len(by) == 1 for by in owners(gateways).values()))
        await until(lambda: slots(gateways[0]) == slots(gateways[1]))
        await all_predict(gateways, PROMPT, answer.headers["x-kvway-worker"], held)
        assert all(metric(gateway, "kvway_replicas") == 2 for gateway in gateways)


@pytest.mark.slow
async def test_a_frozen_server_is_one_that_is_away(valkey: Valkey, client: httpx.AsyncClient) -> None:
    async with sim_workers(2) as workers, replicas(workers, valkey) as gateways:
        valkey.freeze()
        await until(lambda: all(metric(gateway, "kvway_sharing_up") == 0 for gateway in gateways))
        await until(lambda: all(metric(gateway, "kvway_workers_followed") == 2 for gateway in gateways))
        assert [(await ask(client, gateway, PROMPT)).status_code for gateway in gateways] == [200, 200]
        valkey.thaw()
        await until(lambda: all(is_settled(gateway, 2) for gateway in gateways))
        await until(lambda: all(len(by) == 1 for by in owners(gateways).values()))


@pytest.mark.slow
async def test_a_replica_that_starts_without_redis_serves_alone(valkey: Valkey, client: httpx.AsyncClient) -> None:
    valkey.kill()
    async with sim_workers(2) as workers, replicas(workers, valkey, n=1) as (gateway,):
        answer = await ask(client, gateway, PROMPT)
        held = answer.json()["usage"]["prompt_tokens"] // 16 * 16
        await all_predict([gateway], PROMPT, answer.headers["x-kvway-worker"], held)
        assert metric(gateway, "kvway_sharing_up") == 0


async def test_workers_of_a_killed_replica_are_taken_over_and_no_request_to_the_other_fails(
    valkey: Valkey, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    async with sim_workers(1) as workers:
        names = 16 * workers  # one engine under many names: the victim is certain to follow some of them
        config = config_for(names, valkey.url)
        with running(kvway("serve", "-c", write_config(tmp_path, config))) as victim:
            async with replicas(names, valkey, n=1, index=config["index"]) as (survivor,):
                await until(lambda: is_settled(survivor, 2), within_s=30)
                await until(lambda: 0 < len(survivor.feeds.stats) < 16)
                name = min(set(survivor.registry.workers) - set(survivor.feeds.stats))
                answer = await ask(client, survivor, PROMPT)
                held = answer.json()["usage"]["prompt_tokens"] // 16 * 16
                await all_predict([survivor], PROMPT, name, held)
                slot = survivor.registry.workers[name].slot
                statuses: Counter[int] = Counter()

                async def load() -> None:
                    while True:
                        statuses[(await ask(client, survivor, PROMPT)).status_code] += 1

                loading = spawn(load(), "load")
                await until(lambda: statuses[200] > 5)
                victim.kill()

                async def taken_over() -> bool:
                    assert (await predicted(survivor, PROMPT))[name] == held, "the old slot went before the new came"
                    return survivor.registry.workers[name].slot != slot

                await until(taken_over, within_s=5)
                assert (await predicted(survivor, PROMPT))[name] == held
                assert len(survivor.feeds.stats) == 16
                before = statuses[200]
                await until(lambda: statuses[200] > before + 5)
                await stop(loading)
                assert statuses.keys() == {200}
