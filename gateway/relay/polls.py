"""Polls of workers over the relay's client: httpx would hold up the request path for a millisecond each."""

from __future__ import annotations

import asyncio
from time import monotonic

from gateway.config import TimeoutsConfig
from gateway.fleet.credentials import credentials
from gateway.fleet.polling import MAX_ANSWER_BYTES, FetchFailed, system_authorities
from gateway.fleet.registry import Registry, Worker
from gateway.relay.head import ResponseHead, field_lines
from gateway.relay.retry import Failure, FailureKind
from gateway.relay.upstream import Upstream, UpstreamPool


class PollClient:
    """Gets pages from workers, over connections of its own.

    Args:
        registry: whose workers.
    """

    def __init__(self, registry: Registry) -> None:
        timeouts = TimeoutsConfig(connect_s=0)  # `fetch` bounds the whole call
        self._upstream = UpstreamPool(timeouts, system_authorities())
        registry.on_change(self._on_change)

    async def close(self) -> None:
        """Close the connections."""
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

    def _on_change(self, worker: Worker, joined: bool) -> None:
        if not joined:
            self._upstream.remove(worker)


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
        fields = field_lines({"accept": "*/*", "user-agent": "kvway", **credentials(self._worker.config)})
        head = b"GET %b HTTP/1.1\r\nhost: %b\r\n%b\r\n" % (self._path.encode(), upstream.pool.host, fields)
        upstream.send(self, head, b"", False)
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
        if len(self.body) > MAX_ANSWER_BYTES:
            self.drop()
            self._resolve(Failure(FailureKind.MALFORMED, f"answers more than {MAX_ANSWER_BYTES} bytes"))

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
