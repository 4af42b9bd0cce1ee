"""The shared index over TLS: whose certificates are trusted, and what is shown."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from redis.asyncio.cluster import ClusterNode

from gateway.config import IndexConfig
from gateway.errors import ConfigError
from gateway.index.publisher import FIRST_PRIVATE_SLOT
from gateway.index.redis import RedisIndex
from gateway.index.redis_client import RedisClient
from policies.base import Tier
from tests.index_rig import all_seen, two_indexes
from tests.processes import running
from tests.residency import hits, prompt
from tests.valkey import Valkey, free_port


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
