"""Polls of workers over the relay's client: httpx would hold up the request path for a millisecond each."""

from __future__ import annotations

import asyncio
from time import monotonic

from gateway.config import TimeoutsConfig
from gateway.fleet.credentials import credentials
from gateway.fleet.polling import MAX_ANSWER_BYTES, FetchFailed, system_authorities
from gateway.fleet.registry import Registry, Worker
from gateway.relay.head import field_lines
from gateway.relay.pool import UpstreamPool
from gateway.relay.retry import Failure
from gateway.relay.upstream import Upstream
from gateway.relay.whole import WholeAnswer


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
        pool, page = self._upstream.of(worker), WholeAnswer(MAX_ANSWER_BYTES)
        pool.reap(monotonic())

        def ask(upstream: Upstream) -> asyncio.Future[Failure | None]:
            outcome = page.expect(upstream)
            fields = field_lines({"accept": "*/*", "user-agent": "kvway", **credentials(worker.config)})
            head = b"GET %b HTTP/1.1\r\nhost: %b\r\n%b\r\n" % (path.encode(), pool.host, fields)
            upstream.send(page, head, b"", False)
            return outcome

        try:
            async with asyncio.timeout(timeout_s):
                failure = await pool.ask(ask)
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
