"""The shared index and the replicas' talk on what Redis and Valkey can be: Sentinels, a cluster, users."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from redis.crc import key_slot

from gateway.config import IndexConfig
from gateway.index.publisher import FIRST_PRIVATE_SLOT
from gateway.sharing.store import SharingStore
from gateway.tasks import spawn, stop
from policies.base import Tier
from tests.events_rig import until
from tests.gateway_rig import sim_workers
from tests.index_rig import all_seen, says, two_indexes
from tests.residency import hits, prompt
from tests.sharing_rig import all_predict, ask, is_settled, replicas
from tests.valkey import SentinelService, Valkey, cluster_url, free_port, valkey_cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[list[Valkey]]:
    with valkey_cluster() as nodes:
        yield nodes


@pytest.mark.slow
async def test_a_primary_that_dies_is_replaced_and_no_request_fails() -> None:
    statuses: Counter[int] = Counter()
    with SentinelService() as service:
        async with (
            sim_workers(3) as workers,
            replicas(workers, service) as gateways,
            httpx.AsyncClient(timeout=30) as client,
        ):

            async def load(number: int) -> None:
                while True:
                    statuses[(await ask(client, gateways[number], f"{number} says so. " * 20)).status_code] += 1
                    await asyncio.sleep(0.02)

            text = "What was known before is known afterwards. " * 10
            answer = await ask(client, gateways[0], text)
            held = answer.json()["usage"]["prompt_tokens"] // 16 * 16
            await all_predict(gateways, text, answer.headers["x-kvway-worker"], held)
            loading = [spawn(load(number), "load") for number in range(2)]
            await until(lambda: statuses[200] > 20)
            service.primary.kill()
            await until(service.has_failed_over, within_s=30)
            await until(lambda: all(is_settled(gateway, 2) for gateway in gateways), within_s=30)
            await all_predict(gateways, text, answer.headers["x-kvway-worker"], held)
            await stop(*loading)
    assert statuses.keys() == {200}


@pytest.mark.slow
async def test_a_service_that_the_sentinels_do_not_know_is_out_of_reach_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with SentinelService() as service:
        url = service.url.replace(service.NAME, "another")
        async with two_indexes(url) as (index, _):
            assert await index.acquire_slot("a") >= FIRST_PRIVATE_SLOT
    assert "'another'" in caplog.text


@pytest.mark.slow
async def test_sentinels_are_given_their_own_password_whatever_its_characters(tmp_path: Path) -> None:
    password, file, wrong = "it's: {#1", tmp_path / "password", tmp_path / "wrong"
    file.write_text(f"{password}\n")
    wrong.write_text("another")
    with SentinelService() as service:
        with redis.Redis(port=service.sentinel_port) as admin:
            admin.acl_setuser("default", reset_passwords=True, passwords=[f"+{password}"], enabled=True)

        async def connects(**settings: Any) -> bool:
            async with two_indexes(service.url, **settings) as (index, _):
                return await index.acquire_slot("a") < FIRST_PRIVATE_SLOT

        assert await connects(sentinel_password_file=file)
        assert await connects(sentinel_password=password)
        assert not await connects(sentinel_password_file=wrong)


async def test_a_cluster_has_what_replicas_share_and_all_its_nodes_have_some(cluster: list[Valkey]) -> None:
    async with two_indexes(cluster_url(cluster)) as (one, other):
        slot, _ = await one.acquire_slot("a"), await other.acquire_slot("b")
        for seed in range(40):
            await one.store(slot, prompt(20, seed), Tier.HBM)
        await one.flush()
        await all_seen(other, slot, 20, range(40))
        await one.remove(slot, prompt(20, 7)[5:], None, prompt(20, 7)[0])
        await one.flush()
        assert await hits(other, prompt(20, 7), [slot]) == [5]
        for node in cluster[:3]:
            with redis.Redis.from_url(node.url) as admin:
                assert admin.dbsize() > 20


async def test_replicas_hear_each_other_whatever_node_of_a_cluster_they_ask_first(cluster: list[Valkey]) -> None:
    urls = [f"redis+cluster://127.0.0.1:{node.port}" for node in cluster[1:3]]
    one, other = (SharingStore(IndexConfig(url=url, namespace="news"), url) for url in urls)
    heard: list[bytes] = []

    async def listen() -> None:
        heard.append(await anext(other.listen(30)))

    listening = spawn(listen(), "listen")
    await one.beat({"w": 7})
    alive, records = await other.beat({"w": -2})
    assert alive == set(urls)
    assert (records["w"].owner, records["w"].slot) == (urls[0], 7)

    async def told() -> bool:
        await one.tell(b"news")
        return bool(heard)

    await until(told)
    await stop(listening)
    await one.close()
    await other.close()


@pytest.mark.slow
async def test_a_node_of_a_cluster_that_dies_is_replaced_and_the_index_filled_again() -> None:
    with valkey_cluster() as nodes:
        async with two_indexes(cluster_url(nodes), timeout_s=0.05) as (one, other):
            slot, own = await one.acquire_slot("a"), await other.acquire_slot("b")
            for seed in range(20):
                await one.store(slot, prompt(10, seed), Tier.HBM)
            await other.store(own, prompt(4), Tier.HBM)
            await one.flush()
            await all_seen(other, slot, 10, range(20))
            nodes[0].kill()
            await one.store(slot, prompt(10, 20), Tier.HBM)
            for seed in range(21):
                assert (await hits(other, prompt(10, seed), [own]))[0] == (4 if seed == 0 else 0)
            await all_seen(other, slot, 10, range(21))


@pytest.mark.slow
async def test_hash_slots_that_move_to_another_node_are_found_there(cluster: list[Valkey]) -> None:
    chains = range(100)
    async with two_indexes(cluster_url(cluster)) as (one, other):
        own, _ = await one.acquire_slot("a"), await other.acquire_slot("b")
        await until(lambda: one.number(own) >= 0)  # a private one, if the machine was busy
        slot = one.number(own)
        for seed in chains:
            await one.store(own, prompt(3, seed), Tier.HBM)
        await one.flush()
        await all_seen(other, slot, 3, chains)
        with redis.Redis.from_url(cluster[1].url) as old, redis.Redis.from_url(cluster[2].url) as new:
            old.flushall()
            new_id = new.execute_command("CLUSTER", "MYID")
            new.execute_command("CLUSTER", "BUMPEPOCH")  # first: else a heartbeat of the old node may take slots back
            for node in (new, old):
                moving = node.pipeline(transaction=False)
                for hash_slot in range(5461, 7500):
                    moving.execute_command("CLUSTER", "SETSLOT", hash_slot, "NODE", new_id)
                moving.execute()
        for seed in chains:
            await one.remove(own, prompt(3, seed)[1:], None, prompt(3, seed)[0])
            await one.store(own, prompt(3, seed), Tier.HBM)
        await all_seen(other, slot, 3, chains)
        with redis.Redis.from_url(cluster[2].url) as new:
            assert any(new.execute_command("CLUSTER", "COUNTKEYSINSLOT", number) for number in range(5461, 7500))


@pytest.mark.slow
async def test_a_cluster_of_which_no_node_answers_is_found_as_soon_as_one_does() -> None:
    node = Valkey(**{"cluster-enabled": "yes", "cluster-port": free_port()})
    async with two_indexes(f"redis+cluster://127.0.0.1:{node.port}") as (one, other):
        slot, _ = await asyncio.gather(one.acquire_slot("a"), other.acquire_slot("b"))
        assert slot >= FIRST_PRIVATE_SLOT
        await one.store(slot, prompt(40), Tier.HBM)
        with node, redis.Redis.from_url(node.url) as admin:
            admin.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            await until(lambda: one.number(slot) >= 0)

            async def is_seen() -> bool:
                return await hits(other, prompt(40), [one.number(slot)]) == [40]

            await until(is_seen)


async def test_a_user_may_do_what_the_documentation_says_and_its_password_may_change(
    valkey: Valkey, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "password"
    file.write_text("first-secret\n")
    rules = ["on", "resetchannels", "&topology-*:news", "~topology-*", "-@all"]
    rules += [f"+{command}" for command in ("eval", "mget", "zadd", "publish", "subscribe", "info", "role")]
    # What our scripts do, their caller must be allowed to do.
    scripted = (
        "time bitfield getrange set pexpire strlen bitcount unlink zscore zrem zcard zrangebyscore zremrangebyscore "
        "zrange hget hset hdel hmget hgetall hexists hincrby"
    )
    rules += [f"+{command}" for command in scripted.split()]
    with redis.Redis.from_url(valkey.url) as admin:
        admin.execute_command("ACL", "SETUSER", "kvway", "reset", *rules, ">first-secret")
        async with two_indexes(valkey.url, username="kvway", password_file=file) as (one, other):
            slot, _ = await one.acquire_slot("a"), await other.acquire_slot("b")
            assert slot == 0
            admin.execute_command("ACL", "SETUSER", "kvway", "resetpass", ">second-secret")
            admin.client_kill_filter(user="kvway")
            await until(lambda: not one.up)
            await until(lambda: not other.up)
            file.write_text("second-secret")
            await one.store(slot, prompt(5), Tier.HBM)
            await all_seen(other, slot, 5, range(1))
            assert one.number(slot) == slot
    assert "invalid username-password pair" in caplog.text
    assert "-secret" not in caplog.text


@pytest.mark.slow
async def test_while_a_hash_slot_moves_its_chains_may_be_unknown_and_all_others_are_known(
    cluster: list[Valkey],
) -> None:
    moving, staying = prompt(20, 901), prompt(20, 902)
    hash_slot = key_slot(moving[0][:2].hex().encode())
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(redis.Redis.from_url(node.url)) for node in cluster[:3]]
        async with two_indexes(cluster_url(cluster)) as (one, other):
            own, _ = await one.acquire_slot("a"), await other.acquire_slot("b")
            await until(lambda: one.number(own) >= 0)  # a private one, if the machine was busy
            slot = one.number(own)
            for chunks in (moving, staying):
                await one.store(own, chunks[:10], Tier.HBM)
            await one.flush()
            await until(lambda: says(other, moving, slot, 10))
            source = next(node for node in nodes if node.execute_command("CLUSTER", "COUNTKEYSINSLOT", hash_slot))
            target = next(node for node in nodes if node is not source)
            ids = [node.execute_command("CLUSTER", "MYID") for node in (source, target)]
            target.execute_command("CLUSTER", "SETSLOT", hash_slot, "IMPORTING", ids[0])
            source.execute_command("CLUSTER", "SETSLOT", hash_slot, "MIGRATING", ids[1])
            keys = source.execute_command("CLUSTER", "GETKEYSINSLOT", hash_slot, 1000)
            port = target.connection_pool.connection_kwargs["port"]
            for some in (keys[::2], keys[1::2]):
                source.execute_command("MIGRATE", "127.0.0.1", port, "", 0, 5000, "KEYS", *some)
                await one.store(own, moving[10:], Tier.HBM, moving[0])
                await one.store(own, staying[10:], Tier.HBM, staying[0])
                await until(lambda: one.counters.errors > 0)
                assert one.up and other.up
                assert await hits(other, moving, [slot]) == [0]
                await until(lambda: says(other, staying, slot, 20))
            for node in (target, source):
                node.execute_command("CLUSTER", "SETSLOT", hash_slot, "NODE", ids[1])
            await until(lambda: says(other, moving, slot, 20))
            assert one.counters.generations == other.counters.errors == other.counters.skipped == 0
