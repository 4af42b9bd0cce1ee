"""Asking every worker something again and again, each on a schedule of its own, so that a hung one delays nobody."""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
from collections.abc import Awaitable, Callable
from functools import cache
from time import monotonic
from typing import Final

import httpx

from gateway.config import TimeoutsConfig
from gateway.fleet.credentials import credentials
from gateway.fleet.registry import Registry, Worker
from gateway.relay.head import ResponseHead
from gateway.relay.retry import Failure, FailureKind
from gateway.relay.upstream import Upstream, UpstreamPool
from gateway.tasks import spawn, stop

log = logging.getLogger("kvway.fleet")

_MAX_ANSWER_BYTES: Final = 32 * 2**20  # /metrics of a large engine is below 1 MB
_MAX_PER_S: Final = 100  # polls over all workers; each takes up to 0.2 ms of the request path's processor
_JITTER: Final = 0.1  # share of the interval; keeps a thousand workers from being asked in the same millisecond


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
                if len(body) > _MAX_ANSWER_BYTES:
                    raise FetchFailed(f"{path} answers more than {_MAX_ANSWER_BYTES} bytes")
            return response.status_code, bytes(body)
    except TimeoutError:
        raise FetchFailed(f"{path} does not answer within {timeout_s:g} s", timed_out=True) from None
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        raise FetchFailed(f"{path} fails: {error or type(error).__name__}") from None


class _Page:
    """What a worker answers to ``GET path``, as it arrives.

    Args:
        worker: who is asked.
        path: what for.

    Attributes:
        status: of the answer.
        body: so far, without framing.
    """

    __slots__ = ("_done", "_path", "_upstream", "_worker", "body", "status")

    def __init__(self, worker: Worker, path: str) -> None:
        self._worker = worker
        self._path = path
        self._done: asyncio.Future[Failure | None]
        self._upstream: Upstream | None = None
        self.status = 0
        self.body = bytearray()

    def ask(self, upstream: Upstream) -> asyncio.Future[Failure | None]:
        """Ask for it over a connection; return what tells how the answer has ended."""
        self._upstream = upstream
        self._done = asyncio.get_running_loop().create_future()
        fields = {"accept": "*/*", "user-agent": "kvway", **credentials(self._worker.config)}
        lines = "".join([f"{name}: {value}\r\n" for name, value in fields.items()])
        head = f"GET {self._path} HTTP/1.1\r\nhost: {upstream.pool.host.decode()}\r\n{lines}\r\n"
        upstream.send(self, head.encode(), b"", False)
        return self._done

    def drop(self) -> None:
        """Give it up, unless it is complete."""
        if self._upstream is not None:
            self._upstream.abort()
            self._upstream = None

    def on_upstream_head(self, head: ResponseHead) -> None:
        """Its head."""
        self.status = head.status

    def on_upstream_payload(self, payload: bytes) -> None:
        """A piece of its body."""
        self.body += payload

    def on_upstream_data(self, data: bytes) -> None:
        """The same with its framing."""
        if len(self.body) > _MAX_ANSWER_BYTES:
            self.drop()
            self._resolve(Failure(FailureKind.MALFORMED, f"answers more than {_MAX_ANSWER_BYTES} bytes"))

    def on_upstream_end(self) -> None:
        """It is complete."""
        self._upstream = None
        self._resolve(None)

    def on_upstream_lost(self, failure: Failure) -> None:
        """It ended before that."""
        self._upstream = None
        self._resolve(failure)

    def _resolve(self, failure: Failure | None) -> None:
        if not self._done.done():
            self._done.set_result(failure)


class Poller:
    """Runs ``poll`` for every worker of a registry: at once when it joins, then at intervals, until it leaves.

    Polls go over the relay's client rather than httpx, which would hold up the request path for a millisecond each.

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
        self._upstream = UpstreamPool(TimeoutsConfig(connect_s=0))  # `fetch` bounds the whole call
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
        await self._upstream.close()

    async def fetch(self, worker: Worker, path: str, timeout_s: float) -> tuple[int, bytes]:
        """Return status and body of ``GET path``.

        Raises:
            FetchFailed: no connection, no complete answer within ``timeout_s``, or one beyond any reasonable size.
        """
        pool, page = self._upstream.of(worker), _Page(worker, path)
        pool.reap(monotonic())
        try:
            async with asyncio.timeout(timeout_s):
                failure = await pool.ask(page.ask)
        except TimeoutError:
            raise FetchFailed(f"{path} does not answer within {timeout_s:g} s", timed_out=True) from None
        finally:
            page.drop()
        if failure is not None:
            raise FetchFailed(f"{path} fails: the worker {failure.detail}")
        return page.status, bytes(page.body)

    def nudge(self, worker: Worker) -> None:
        """Ask this worker now instead of at its next turn."""
        wake = self._wakes.get(worker)
        if wake is not None:
            wake.set()

    def _on_change(self, worker: Worker, joined: bool) -> None:
        if not joined:
            self._upstream.remove(worker)
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
