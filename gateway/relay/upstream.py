"""The worker side: connections over which requests go, and answers pass as the bytes they are.

llhttp only watches: it checks the head and says where a body ends. What it watched goes to the ``Receiver`` unchanged,
without a task, queue or timer per read.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Protocol

import httptools

from gateway.keepalive import watch_peer
from gateway.relay.chunked import LAST_CHUNK, chunk
from gateway.relay.head import MAX_HEAD_BYTES, Framing, ResponseHead, read_response_head
from gateway.relay.retry import Failure, FailureKind

if TYPE_CHECKING:
    from gateway.relay.pool import WorkerPool

_MAX_FILL_BYTES: Final = 64 * 1024


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
        if self._overrun:  # the parser is ahead of what was passed on
            return None
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
        """Keep the transport, and notice if the worker's machine goes down: nothing else tells of that."""
        self.transport = transport
        watch_peer(transport.get_extra_info("socket"))

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
