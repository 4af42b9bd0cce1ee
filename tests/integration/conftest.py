"""Integration tests run on the event loop of the product."""

from __future__ import annotations

import subprocess
from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvloop

from tests.valkey import Valkey


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


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for localhost, and its key."""
    directory = tmp_path_factory.mktemp("tls")
    cert, key = directory / "cert.pem", directory / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost".split()
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key
