"""The connections to each worker: opened, used again, and closed before the worker does it."""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections.abc import Callable
from time import monotonic
from typing import Final

from gateway.config import TimeoutsConfig
from gateway.fleet.registry import Worker
from gateway.relay.retry import Failure, FailureKind
from gateway.relay.upstream import Upstream

IDLE_S: Final = 4.0
"""Pooled connections unused for this long are closed, before uvicorn, and so vLLM, does it after 5 s."""
MAX_IDLE: Final = 512
"""Pooled connections per worker."""


_OURS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM})
"""What a connection may fail for that says nothing of the worker: descriptors, local ports and memory are used up."""


class ConnectFailed(Exception):
    """No connection to the worker could be made; nothing was sent.

    Attributes:
        kind: through whose fault.
    """

    def __init__(self, message: str, kind: FailureKind = FailureKind.CONNECT) -> None:
        super().__init__(message)
        self.kind = kind


class WorkerPool:
    """The connections to one worker."""

    __slots__ = ("_closed", "_idle", "_loop", "_ssl", "_timeout_s", "fields", "host", "worker")

    def __init__(self, worker: Worker, timeout_s: float, ssl_context: ssl.SSLContext | None) -> None:
        self.worker = worker
        port = "" if worker.port == (443 if worker.tls else 80) else f":{worker.port}"
        name = f"[{worker.host}]" if ":" in worker.host else worker.host
        self.host = f"{name}{port}".encode()
        rank = worker.config.data_parallel_rank
        self.fields = b"" if rank is None else b"x-data-parallel-rank: %d\r\n" % rank  # engines take the first one
        self._loop = asyncio.get_running_loop()
        self._timeout_s = timeout_s
        self._ssl = ssl_context
        self._idle: list[Upstream] = []
        self._closed = False

    def take(self) -> Upstream | None:
        """Return a pooled connection, the most recently used one, if there is any."""
        while self._idle:
            upstream = self._idle.pop()
            if not upstream.transport.is_closing():
                return upstream
        return None

    async def connect(self) -> Upstream:
        """Open a connection.

        Raises:
            ConnectFailed: refused, unreachable, not in time, or without the TLS that was asked for.
        """
        try:
            async with asyncio.timeout(self._timeout_s or None):
                _, upstream = await self._loop.create_connection(
                    lambda: Upstream(self), self.worker.host, self.worker.port, ssl=self._ssl
                )
        except TimeoutError:
            raise ConnectFailed(f"did not accept a connection within {self._timeout_s} s") from None
        except OSError as error:
            why = error.strerror or str(error) or type(error).__name__  # hung up on in TLS's handshake, it says nothing
            kind = FailureKind.EXHAUSTED if error.errno in _OURS else FailureKind.CONNECT
            raise ConnectFailed(f"cannot be reached: {why}", kind) from None
        return upstream

    async def ask(
        self, send: Callable[[Upstream], asyncio.Future[Failure | None]], fresh: bool = False
    ) -> Failure | None:
        """Send a request and wait for what becomes of its answer; None where all is well.

        A pooled connection may be closed by the worker just as we send: then nobody has seen the request, and it goes
        over a new one.

        Args:
            send: sends it over the connection that it is given, and returns what tells how its answer has ended.
            fresh: pooled connections are not to be used.
        """
        while True:
            upstream = None if fresh else self.take()
            if upstream is None:
                try:
                    upstream = await self.connect()
                except ConnectFailed as error:
                    return Failure(error.kind, str(error))
            failure = await send(upstream)
            if failure is None or failure.kind is not FailureKind.STALE:
                return failure
            fresh = True

    def keep(self, upstream: Upstream) -> None:
        """Take a connection back after its response."""
        if self._closed or len(self._idle) >= MAX_IDLE:
            upstream.transport.close()
            return
        upstream.idle_since = monotonic()
        self._idle.append(upstream)

    def forget(self, upstream: Upstream) -> None:
        """Drop a connection that is gone."""
        if upstream in self._idle:
            self._idle.remove(upstream)

    def reap(self, now: float) -> bool:
        """Close connections that have been idle for too long; return whether any are left."""
        while self._idle and now - self._idle[0].idle_since >= IDLE_S:
            self._idle.pop(0).transport.close()
        return bool(self._idle)

    def close(self) -> None:
        """Close idle connections, and those in use when their response ends."""
        self._closed = True
        while self._idle:
            self._idle.pop().transport.close()


class UpstreamPool:
    """The connections to all workers.

    Args:
        timeouts: ``connect_s`` is what is used of them.
        ssl_context: for workers behind https; the system's certificate authorities by default.
    """

    def __init__(self, timeouts: TimeoutsConfig, ssl_context: ssl.SSLContext | None = None) -> None:
        self._timeouts = timeouts
        self._ssl = ssl_context
        self.pools: dict[Worker, WorkerPool] = {}

    def of(self, worker: Worker) -> WorkerPool:
        """Return the pool of one worker."""
        return self.pools.get(worker) or self._open(worker)

    def remove(self, worker: Worker) -> None:
        """Close the pool of a worker that has left."""
        pool = self.pools.pop(worker, None)
        if pool is not None:
            pool.close()

    def reap(self, now: float) -> bool:
        """Close connections that have been idle for too long; return whether any idle ones are left."""
        idle = [pool.reap(now) for pool in self.pools.values()]
        return any(idle)

    async def close(self) -> None:
        """Close every pool."""
        for worker in list(self.pools):
            self.remove(worker)

    def _open(self, worker: Worker) -> WorkerPool:
        if worker.tls and self._ssl is None:
            self._ssl = ssl.create_default_context()
        pool = WorkerPool(worker, self._timeouts.connect_s, self._ssl if worker.tls else None)
        self.pools[worker] = pool
        return pool
