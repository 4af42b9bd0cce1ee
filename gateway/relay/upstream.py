"""The HTTP/1.1 client side: pooled connections to workers, over which answers pass as the bytes they are.

llhttp only watches: it checks the head and says where a body ends. What it watched goes to the ``Receiver`` unchanged,
without a task, queue or timer per read.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from time import monotonic
from typing import Final, Protocol

import httptools

from gateway.config import TimeoutsConfig
from gateway.fleet.registry import Worker
from gateway.relay.chunked import LAST_CHUNK, chunk
from gateway.relay.head import Framing, ResponseHead, read_response_head
from gateway.relay.retry import Failure, FailureKind

IDLE_S: Final = 4.0
"""Pooled connections unused for this long are closed, before uvicorn, and so vLLM, does it after 5 s."""
MAX_IDLE: Final = 512
"""Pooled connections per worker."""
MAX_HEAD_BYTES: Final = 64 * 1024
_MAX_FILL_BYTES: Final = 64 * 1024


class ConnectFailed(Exception):
    """No connection to the worker could be made; nothing was sent."""


class Receiver(Protocol):
    """Who is told about a response: the head once, then its body's bytes, then one of end and loss."""

    def on_upstream_head(self, head: ResponseHead) -> None:
        """The final response head has arrived."""
        ...

    def on_upstream_payload(self, payload: bytes) -> None:
        """A piece of the body without its framing, told before the read that brought it: to look at, not to send."""
        ...

    def on_upstream_data(self, data: bytes) -> None:
        """Bytes of the body have arrived, chunked framing included."""
        ...

    def on_upstream_end(self) -> None:
        """The response is complete."""
        ...

    def on_upstream_lost(self, failure: Failure) -> None:
        """The response will never be complete."""
        ...


class Upstream(asyncio.Protocol):
    """One connection to one worker, carrying one request at a time.

    Attributes:
        pool: where it belongs.
    """

    __slots__ = (
        "_awaits_head_only",
        "_body_follows",
        "_chunk_open",
        "_complete",
        "_framing",
        "_head",
        "_keep_alive",
        "_overrun",
        "_parser",
        "_paused",
        "_receiver",
        "_reused",
        "idle_since",
        "pool",
        "transport",
    )

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._receiver: Receiver | None = None
        self._reused = False
        self._awaits_head_only = False
        self._begin_response()
        self._paused = False
        self.idle_since = 0.0
        self.transport: asyncio.Transport

    def _begin_response(self) -> None:
        self._head = b""
        self._body_follows = False
        self._complete = False
        self._overrun = False
        self._chunk_open = False
        self._keep_alive = False
        self._framing = Framing.NONE

    # What the exchange does

    def send(self, receiver: Receiver, head: bytes, body: bytes, is_head_request: bool) -> None:
        """Send a request; ``receiver`` is told about its response."""
        self._receiver = receiver
        self._awaits_head_only = is_head_request
        if body:
            self.transport.writelines((head, body))
        else:
            self.transport.write(head)

    def abort(self) -> None:
        """Give the request up: the connection closes at once, and its receiver hears nothing more."""
        self._receiver = None
        self.transport.abort()

    def pause(self) -> None:
        """Stop reading: the client does not keep up."""
        if not self._paused and not self.transport.is_closing():
            self._paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._paused and not self.transport.is_closing():
            self._paused = False
            self.transport.resume_reading()

    def filling(self) -> bytes | None:
        """Return what must follow a cut chunked body for a next chunk to be understood; None where nothing helps.

        Only for a response that was lost: the parser is asked by feeding it, and is of no use afterwards.
        """
        fed, inside_chunk = 0, self._chunk_open
        try:
            if not inside_chunk:
                self._parser.feed_data(chunk(b"\n") + LAST_CHUNK)
                return b"" if self._complete else None
            while self._chunk_open and fed < _MAX_FILL_BYTES:
                self._parser.feed_data(b"\n" if fed % 2 else b"\r")
                fed += 1
        except httptools.HttpParserError:  # a LF met the chunk's end: an odd number of bytes was missing before
            return b"\n" * fed + b"\r\n" if fed % 2 else None
        return None if self._chunk_open or self._complete else b"\n" * (fed - 2) + b"\r\n"

    # What the transport tells

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Keep the transport."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Pass on what arrived."""
        receiver = self._receiver
        if receiver is None:  # bytes that nobody asked for: the connection cannot be trusted any more
            self.transport.abort()
            return
        try:
            if not self._body_follows:
                data = self._read_head(data, receiver)
            if data:
                self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._lose(Failure(FailureKind.MALFORMED, f"does not answer in HTTP: {error}"))
            return
        except httptools.HttpParserUpgrade:
            self._lose(Failure(FailureKind.MALFORMED, "switches to a protocol nobody asked for"))
            return
        if data:
            if self._overrun:
                self._lose(Failure(FailureKind.MALFORMED, "sent more than its response announced"))
                return
            receiver.on_upstream_data(data)
        if self._complete and self._receiver is receiver:
            self._finish(receiver)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the response that was under way, if any."""
        self.pool.forget(self)
        receiver = self._receiver
        if receiver is None:
            return
        self._receiver = None
        if self._framing is Framing.UNTIL_CLOSE and self._body_follows and exc is None:
            receiver.on_upstream_end()
        elif self._reused and not self._body_follows and not self._head:
            receiver.on_upstream_lost(Failure(FailureKind.STALE, "closed an idle connection"))
        else:
            receiver.on_upstream_lost(Failure(FailureKind.RESET, f"closed the connection ({exc or 'end of file'})"))

    # What llhttp tells

    def on_message_begin(self) -> None:
        """A response begins; inside a body's read it is one too many."""
        self._overrun = self._body_follows

    def on_headers_complete(self) -> None:
        """Note whether the connection may be used again: llhttp knows only now."""
        self._keep_alive = self._parser.should_keep_alive()

    def on_body(self, payload: bytes) -> None:
        """A piece of the body."""
        if self._receiver is not None:
            self._receiver.on_upstream_payload(payload)

    def on_chunk_header(self) -> None:
        """A chunk begins."""
        self._chunk_open = True

    def on_chunk_complete(self) -> None:
        """It ends."""
        self._chunk_open = False

    def on_message_complete(self) -> None:
        """The response is whole."""
        self._complete = True

    def _read_head(self, data: bytes, receiver: Receiver) -> bytes:
        """Read the head and return the body bytes that came with it; empty also while the head is not whole."""
        data = self._head + data
        while True:
            end = data.find(b"\r\n\r\n") + 4
            if end < 4:
                if len(data) > MAX_HEAD_BYTES:
                    raise httptools.HttpParserError(f"response head above {MAX_HEAD_BYTES} bytes")
                self._head = data
                return b""
            raw, data = data[:end], data[end:]
            self._parser.feed_data(raw)
            if not raw.startswith(b"HTTP/"):  # llhttp skips empty lines, and knows other protocols
                raise httptools.HttpParserError(f"response head begins with {raw[:8]!r}")
            status = self._parser.get_status_code()
            if status >= 200:
                break
            self._complete = False  # an interim response: we asked for none, the client need not see it
        head = read_response_head(raw, status, self._awaits_head_only, self.pool.host)
        self._head = raw
        self._body_follows = True
        self._framing = head.framing
        receiver.on_upstream_head(head)
        if self._awaits_head_only:
            self._parser = httptools.HttpResponseParser(self)  # the old one would wait for the announced body
            self._complete = True
        self._overrun = self._complete and bool(data)
        return data

    def _finish(self, receiver: Receiver) -> None:
        self._receiver = None
        if self._paused:
            self.resume()
        # A worker that answered before it had read the whole request would take the rest for the next one.
        if self._keep_alive and not self.transport.is_closing() and not self.transport.get_write_buffer_size():
            self._begin_response()
            self._reused = True
            self.pool.keep(self)
        else:
            self.transport.close()
        receiver.on_upstream_end()

    def _lose(self, failure: Failure) -> None:
        receiver, self._receiver = self._receiver, None
        self.transport.abort()
        if receiver is not None:
            receiver.on_upstream_lost(failure)


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
            raise ConnectFailed(f"cannot be reached: {why}") from None
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
                    return Failure(FailureKind.CONNECT, str(error))
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
