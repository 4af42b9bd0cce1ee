"""Integration tests run on the event loop of the product."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable

import uvloop


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], AbstractEventLoop]]:
    """Let pytest-asyncio run every test on uvloop."""
    return {"uvloop": uvloop.new_event_loop}
