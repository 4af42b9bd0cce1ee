"""Asking every worker something again and again, each on a schedule of its own, so that a hung one delays nobody."""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Final

import httpx

from gateway.fleet.credentials import credentials
from gateway.fleet.registry import Registry, Worker
from gateway.tasks import spawn, stop

log = logging.getLogger("kvway.fleet")

MAX_ANSWER_BYTES: Final = 32 * 2**20
"""Longer answers are given up; ``/metrics`` of a large engine is below 1 MB."""

_MAX_PER_S: Final = 100  # polls over all workers; each takes up to 0.2 ms of the request path's processor
_JITTER: Final = 0.1  # share of the interval; keeps a thousand workers from being asked in the same millisecond

Fetcher = Callable[[Worker, str, float], Awaitable[tuple[int, bytes]]]
"""Called with a worker, a path and a timeout in seconds, returns status and body of ``GET path``, or raises
``FetchFailed``."""


class FetchFailed(Exception):
    """A worker gave no answer.

    Attributes:
        timed_out: it was silent, and may only be busy; otherwise the connection failed.
    """

    def __init__(self, message: str, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


@cache
def system_authorities() -> ssl.SSLContext:
    """Return a context for TLS to servers whose certificates the system's authorities have signed."""
    return ssl.create_default_context()  # reads every root certificate: once is enough


def control_client() -> httpx.AsyncClient:
    """Return a client for control calls to any number of workers; proxies in the environment do not concern it."""
    # Idle connections are dropped before the 5 s after which uvicorn drops its side.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=4.0)
    # `fetch` bounds the whole call, not each read.
    return httpx.AsyncClient(limits=limits, timeout=None, trust_env=False, verify=system_authorities())  # noqa: S113


async def fetch(client: httpx.AsyncClient, worker: Worker, path: str, timeout_s: float) -> tuple[int, bytes]:
    """Return status and body of ``GET path``.

    Raises:
        FetchFailed: no connection, no complete answer within ``timeout_s``, or one beyond any reasonable size.
    """
    body = bytearray()
    url, headers = worker.config.url + path, credentials(worker.config)
    try:
        async with asyncio.timeout(timeout_s), client.stream("GET", url, headers=headers) as response:
            async for part in response.aiter_bytes():
                body += part
                if len(body) > MAX_ANSWER_BYTES:
                    raise FetchFailed(f"{path} answers more than {MAX_ANSWER_BYTES} bytes")
            return response.status_code, bytes(body)
    except TimeoutError:
        raise FetchFailed(f"{path} does not answer within {timeout_s:g} s", timed_out=True) from None
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        raise FetchFailed(f"{path} fails: {error or type(error).__name__}") from None


class Poller:
    """Runs ``poll`` for every worker of a registry: at once when it joins, then at intervals, until it leaves.

    Args:
        registry: whose workers.
        poll: returns whether all went well.
        name: for logs.
        interval_s: pause after a poll that went well; longer in a fleet of hundreds.
        retry_s: pause after one that did not; default ``interval_s``.
    """

    def __init__(
        self,
        registry: Registry,
        poll: Callable[[Worker], Awaitable[bool]],
        name: str,
        interval_s: float,
        retry_s: float | None = None,
    ) -> None:
        self._registry = registry
        self._poll = poll
        self._name = name
        self._interval_s = interval_s
        self._retry_s = interval_s if retry_s is None else retry_s
        self._wakes: dict[Worker, asyncio.Event] = {}
        self._tasks: dict[Worker, asyncio.Task[None]] = {}
        self._running = False
        registry.on_change(self._on_change)

    async def start(self) -> None:
        """Begin with the workers that are there."""
        self._running = True
        for worker in self._registry.workers.values():
            self._on_change(worker, True)

    async def close(self) -> None:
        """Stop asking."""
        self._running = False
        tasks, self._tasks = list(self._tasks.values()), {}
        self._wakes.clear()
        await stop(*tasks)

    def nudge(self, worker: Worker) -> None:
        """Ask this worker now instead of at its next turn."""
        wake = self._wakes.get(worker)
        if wake is not None:
            wake.set()

    def _on_change(self, worker: Worker, joined: bool) -> None:
        if not joined:
            self._wakes.pop(worker, None)
            task = self._tasks.pop(worker, None)
            if task is not None:
                task.cancel()
        elif self._running:
            wake = self._wakes[worker] = asyncio.Event()
            self._tasks[worker] = spawn(self._keep_asking(worker, wake), f"{self._name} {worker.name}")

    async def _keep_asking(self, worker: Worker, wake: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        while True:
            wake.clear()
            try:
                went_well = await self._poll(worker)
            except Exception:
                # Whatever a worker answers must not end the asking; the next answer may be a better one.
                log.exception("%s of %s failed", self._name, worker.name)
                went_well = False
            pause_s = max(self._interval_s if went_well else self._retry_s, len(self._tasks) / _MAX_PER_S)
            timer = loop.call_later(pause_s * random.uniform(1 - _JITTER, 1 + _JITTER), wake.set)
            try:
                await wake.wait()
            finally:
                timer.cancel()
