"""Integration tests run on the event loop of the product."""

from __future__ import annotations

import subprocess
from asyncio import AbstractEventLoop
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
import redis
import uvloop

from gateway.config import IndexConfig
from gateway.fleet.polling import Fetcher
from gateway.fleet.registry import Registry
from gateway.index.redis import RedisIndex
from gateway.index.redis_store import LEASE_S
from gateway.relay.polls import PollClient
from tests.index_rig import Replica
from tests.valkey import Valkey

_namespaces = count()


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], AbstractEventLoop]]:
    """Let pytest-asyncio run every test on uvloop."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="module")
def valkey_server() -> Iterator[Valkey]:
    """One server for all tests of a module."""
    with Valkey() as server:
        yield server


@pytest.fixture
def valkey(valkey_server: Valkey) -> Iterator[Valkey]:
    """The module's server, running whatever the test before did to it."""
    yield valkey_server
    valkey_server.thaw()
    valkey_server.restart_if_killed()


@pytest.fixture
def admin(valkey: Valkey) -> Iterator[redis.Redis]:
    """An ordinary client of the server."""
    with redis.Redis.from_url(valkey.url) as client:
        yield client


@pytest.fixture
async def replica(valkey: Valkey, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Replica]:
    """Build replicas that share one index and look at it ten times as often as usual; close them in the end."""
    monkeypatch.setattr("gateway.index.publisher._RENEW_S", LEASE_S / 100)
    namespace = f"test-{next(_namespaces)}"
    built: list[RedisIndex] = []

    def build(timeout_s: float = 5, **settings: object) -> RedisIndex:
        config = {"url": valkey.url, "namespace": namespace, "timeout_s": timeout_s, "ttl_s": 60} | settings
        built.append(RedisIndex(IndexConfig.model_validate(config)))
        return built[-1]

    yield build
    for index in built:
        await index.close()


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for localhost, and its key."""
    return make_certificate(tmp_path_factory.mktemp("tls"))


def make_certificate(directory: Path) -> tuple[Path, Path]:
    """Write a self-signed certificate for localhost, and its key."""
    cert, key = directory / "cert.pem", directory / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost".split()
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


@pytest.fixture
async def fetch(registry: Registry) -> AsyncIterator[Fetcher]:
    """What asks the workers of the test's registry."""
    client = PollClient(registry)
    yield client.fetch
    await client.close()
