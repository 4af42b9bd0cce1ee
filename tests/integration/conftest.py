"""Integration tests run on the event loop of the product."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterator

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
