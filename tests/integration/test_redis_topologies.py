"""The shared index and the replicas' talk on what Redis and Valkey can be: Sentinels, a cluster, TLS, users."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
import trustme
from redis.asyncio.cluster import ClusterNode
from redis.crc import key_slot

from gateway.config import IndexConfig
from gateway.errors import ConfigError
from gateway.index.publisher import FIRST_PRIVATE_SLOT
from gateway.index.redis import RedisIndex
from gateway.index.redis_client import RedisClient
from gateway.sharing.store import SharingStore
from gateway.tasks import spawn, stop
from policies.base import Tier
from tests.events_rig import until
from tests.gateway_rig import sim_workers
from tests.processes import running
from tests.residency import hits, prompt
from tests.sharing_rig import all_predict, ask, is_settled, replicas
from tests.valkey import SentinelService, Valkey, cluster_url, free_port, valkey_cluster

_namespaces = count()


@contextlib.asynccontextmanager
async def two_indexes(url: str, **settings: Any) -> AsyncIterator[tuple[RedisIndex, RedisIndex]]:
    """Two replicas' views of one index."""
    namespace = f"topology-{next(_namespaces)}"
    config = IndexConfig.model_validate({"url": url, "namespace": namespace, "timeout_s": 2} | settings)
    indexes = RedisIndex(config), RedisIndex(config)
    yield indexes
    for index in indexes:
        await index.close()


async def sees(index: RedisIndex, chunks: list[bytes], slot: int, expected: int) -> bool:
    return await hits(index, chunks, [slot]) == [expected]


async def all_seen(index: RedisIndex, slot: int, n_chunks: int, chains: range) -> None:
    """Wait until ``slot`` is known to hold so much of each chain."""

    async def seen() -> bool:
        return all([await hits(index, prompt(n_chunks, seed), [slot]) == [n_chunks] for seed in chains])

    await until(seen, within_s=30)


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
    namespace = f"topology-{next(_namespaces)}"
    urls = [f"redis+cluster://127.0.0.1:{node.port}" for node in cluster[1:3]]
    one, other = (SharingStore(IndexConfig(url=url, namespace=namespace), url) for url in urls)
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
        slot, _ = await one.acquire_slot("a"), await other.acquire_slot("b")
        for seed in chains:
            await one.store(slot, prompt(3, seed), Tier.HBM)
        await one.flush()
        await all_seen(other, slot, 3, chains)
        with redis.Redis.from_url(cluster[1].url) as old, redis.Redis.from_url(cluster[2].url) as new:
            old.flushall()
            new_id = new.execute_command("CLUSTER", "MYID")
            for node in (new, old):
                moving = node.pipeline(transaction=False)
                for hash_slot in range(5461, 7500):
                    moving.execute_command("CLUSTER", "SETSLOT", hash_slot, "NODE", new_id)
                moving.execute()
            new.execute_command("CLUSTER", "BUMPEPOCH")
        for seed in chains:
            await one.remove(slot, prompt(3, seed)[1:], None, prompt(3, seed)[0])
            await one.store(slot, prompt(3, seed), Tier.HBM)
        await all_seen(other, slot, 3, chains)
        with redis.Redis.from_url(cluster[2].url) as new:
            assert any(new.execute_command("CLUSTER", "COUNTKEYSINSLOT", number) for number in range(5461, 7500))


@contextlib.asynccontextmanager
async def tls_in_front_of(valkey: Valkey, context: ssl.SSLContext) -> AsyncIterator[int]:
    """End TLS where a server does that was built without it; yields the port."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", valkey.port)
        await asyncio.gather(carry(reader, inner_writer), carry(inner_reader, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


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


class Certificates:
    """A CA, the certificate of a server that checks those of its clients, and a client's, as files."""

    def __init__(self, folder: Path, host: str) -> None:
        self.ca, cert = trustme.CA(), trustme.CA()
        server, client = self.ca.issue_cert(host), self.ca.issue_cert("client")
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.context.verify_mode = ssl.CERT_REQUIRED
        self.ca.configure_trust(self.context)
        server.configure_cert(self.context)
        self.tls_ca, self.tls_cert, self.tls_key = (folder / name for name in ("ca.pem", "cert.pem", "key.pem"))
        self.server_cert, self.server_key = folder / "server-cert.pem", folder / "server-key.pem"
        self.ca.cert_pem.write_to_path(self.tls_ca)
        server.cert_chain_pems[0].write_to_path(self.server_cert)
        server.private_key_pem.write_to_path(self.server_key)
        client.cert_chain_pems[0].write_to_path(self.tls_cert)
        client.private_key_pem.write_to_path(self.tls_key)
        self.other_ca = folder / "other.pem"
        cert.cert_pem.write_to_path(self.other_ca)


async def test_tls_needs_a_ca_that_is_trusted_the_right_host_and_our_certificate(
    valkey: Valkey, tmp_path: Path
) -> None:
    files = Certificates(tmp_path, "redis.example")
    given = {"tls_ca": files.tls_ca, "tls_cert": files.tls_cert, "tls_key": files.tls_key}
    async with tls_in_front_of(valkey, files.context) as port:

        async def connects(**settings: Any) -> bool:
            async with two_indexes(f"rediss://127.0.0.1:{port}", **settings) as (index, _):
                return await index.acquire_slot("a") < FIRST_PRIVATE_SLOT

        assert await connects(**given, tls_verify="ca")
        assert not await connects(**given)  # it is not the host of the certificate
        assert not await connects(**given | {"tls_ca": files.other_ca}, tls_verify="ca")
        assert await connects(**given | {"tls_ca": files.other_ca}, tls_verify="none")
        assert not await connects(tls_ca=files.tls_ca, tls_verify="ca")  # no certificate of ours


async def test_whoever_names_a_ca_trusts_none_of_the_systems(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Certificates(tmp_path, "127.0.0.1")
    monkeypatch.setenv("SSL_CERT_FILE", str(files.tls_ca))  # what OpenSSL takes for the system's
    given = {"tls_cert": files.tls_cert, "tls_key": files.tls_key}
    async with tls_in_front_of(valkey, files.context) as port:
        for ca, is_trusted in ((None, True), (files.other_ca, False)):
            async with two_indexes(f"rediss://127.0.0.1:{port}", **given, tls_ca=ca) as (index, _):
                assert (await index.acquire_slot("a") < FIRST_PRIVATE_SLOT) == is_trusted


@pytest.mark.parametrize("kind", ["", "+sentinel", "+cluster"])
async def test_every_connection_trusts_the_ca_that_is_named_and_no_other(kind: str, tmp_path: Path) -> None:
    files = Certificates(tmp_path, "127.0.0.1")
    url = f"rediss{kind}://127.0.0.1:1{'/mymaster' if kind == '+sentinel' else ''}"
    client = RedisClient(IndexConfig(url=url, tls_ca=files.tls_ca, tls_cert=files.tls_cert, tls_key=files.tls_key))
    if kind == "+cluster":
        nodes = client.commands.nodes_manager
        found = ClusterNode("127.0.0.1", 2, **nodes.connection_kwargs)
        connections = [node.acquire_connection() for node in (*nodes.startup_nodes.values(), found)]
    else:
        clients = [client.commands, *client._sentinels]
        connections = [each.connection_pool.make_connection() for each in clients]
    assert len(connections) == (1 if kind == "" else 2)
    ours = ssl.create_default_context(cafile=files.tls_ca).get_ca_certs()
    for connection in connections:
        context = connection.ssl_context.get()
        assert context.get_ca_certs() == ours
        assert context.check_hostname and context.verify_mode is ssl.CERT_REQUIRED
    await client.close()


async def test_tls_verifies_the_host_and_carries_what_replicas_share(valkey: Valkey, tmp_path: Path) -> None:
    files = Certificates(tmp_path, "127.0.0.1")
    given = {"tls_ca": files.tls_ca, "tls_cert": files.tls_cert, "tls_key": files.tls_key}
    async with (
        tls_in_front_of(valkey, files.context) as port,
        two_indexes(f"rediss://127.0.0.1:{port}/0", **given) as (one, other),
    ):
        slot, _ = await one.acquire_slot("a"), await other.acquire_slot("b")
        await one.store(slot, prompt(400), Tier.HBM)
        await one.flush()
        assert await hits(other, prompt(400), [slot]) == [400]


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server, as Debian packages it")
async def test_redis_itself_with_its_own_tls_does_as_valkey_does(tmp_path: Path) -> None:
    files, port = Certificates(tmp_path, "127.0.0.1"), free_port()
    words = f"redis-server --port 0 --tls-port {port} --bind 127.0.0.1 --dir {tmp_path} --daemonize no --logfile log"
    words += f" --tls-cert-file {files.server_cert} --tls-key-file {files.server_key} --tls-ca-cert-file {files.tls_ca}"
    given = {"tls_ca": files.tls_ca, "tls_cert": files.tls_cert, "tls_key": files.tls_key}
    with running([*words.split(), "--save", ""]):
        async with two_indexes(f"rediss://127.0.0.1:{port}/1", **given) as (one, other):
            slots = [await one.acquire_slot(f"w{number}") for number in range(20)]
            await other.acquire_slot("b")
            for slot in slots:
                await one.store(slot, prompt(30), Tier.HBM)
            await all_seen(other, slots[-1], 30, range(1))
            assert await hits(other, prompt(30), slots) == [30] * 20
            await one.release_slot(slots[3])
            await one.flush()
            assert await hits(other, prompt(30), slots) == [30] * 3 + [0] + [30] * 16
            assert one.number(slots[0]) == slots[0]


def test_a_certificate_that_cannot_be_read_is_a_mistake_in_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    with pytest.raises(ConfigError, match=r"index\.tls_ca"):
        RedisIndex(IndexConfig(url="rediss://127.0.0.1", tls_ca=tmp_path / "ca.pem"))


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
            slot, _ = await one.acquire_slot("a"), await other.acquire_slot("b")
            for chunks in (moving, staying):
                await one.store(slot, chunks[:10], Tier.HBM)
            await one.flush()
            await until(lambda: sees(other, moving, slot, 10))
            source = next(node for node in nodes if node.execute_command("CLUSTER", "COUNTKEYSINSLOT", hash_slot))
            target = next(node for node in nodes if node is not source)
            ids = [node.execute_command("CLUSTER", "MYID") for node in (source, target)]
            target.execute_command("CLUSTER", "SETSLOT", hash_slot, "IMPORTING", ids[0])
            source.execute_command("CLUSTER", "SETSLOT", hash_slot, "MIGRATING", ids[1])
            keys = source.execute_command("CLUSTER", "GETKEYSINSLOT", hash_slot, 1000)
            port = target.connection_pool.connection_kwargs["port"]
            for some in (keys[::2], keys[1::2]):
                source.execute_command("MIGRATE", "127.0.0.1", port, "", 0, 5000, "KEYS", *some)
                await one.store(slot, moving[10:], Tier.HBM, moving[0])
                await one.store(slot, staying[10:], Tier.HBM, staying[0])
                await until(lambda: one.counters.errors > 0)
                assert one.up and other.up
                assert await hits(other, moving, [slot]) == [0]
                await until(lambda: sees(other, staying, slot, 20))
            for node in (target, source):
                node.execute_command("CLUSTER", "SETSLOT", hash_slot, "NODE", ids[1])
            await until(lambda: sees(other, moving, slot, 20))
            assert one.counters.generations == other.counters.errors == other.counters.skipped == 0
