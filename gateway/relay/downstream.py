"""The client side: uvicorn's HTTP protocol, with relayed paths taken out before ASGI.

``RelayProtocol`` reads requests as uvicorn does. Those under a relayed path become an ``Exchange``; all others go on to
uvicorn and the FastAPI app behind it. Answers leave in the order of their requests, whoever gives them.

A client that shuts down its sending side is taken to have left: HTTP clients that still want the answer do not do that,
and it is the only sign that a client behind a silent prefill is gone. While requests are pipelined beyond a bound, the
socket is not read, and only then a leaving client is noticed late.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from time import monotonic
from typing import Any, ClassVar, Final

import httptools
from uvicorn import Config
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from gateway.errors import BadRequest, GatewayError, TooLarge
from gateway.relay.exchange import Exchange
from gateway.relay.head import (
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    RequestHead,
    check_head_size,
    head_too_large,
    head_without_upgrade,
    new_request_id,
    origin_form,
    read_request_head,
)
from gateway.relay.paths import is_relayed
from gateway.relay.services import Services
from gateway.relay.upload import Upload

MAX_PIPELINED: Final = 16
LINGER_S: Final = 2.0  # how long a refused client may go on sending, unread, before its connection is closed

_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER: on, 0 s


def make_protocol(services: Services) -> type[RelayProtocol]:
    """Return the protocol class for ``uvicorn.Config(http=...)``."""
    return type("KvwayProtocol", (RelayProtocol,), {"services": services})


class RelayProtocol(HttpToolsProtocol):
    """One client connection.

    It is at most one of: reading a request, answering one, or idle; requests that arrive while one is answered wait in
    uvicorn's ``pipeline``, exchanges and ASGI cycles in one queue.
    """

    services: ClassVar[Services]

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = self.services.config.server
        self._client_s = self.services.config.timeouts.client_s
        self._exchange: Exchange | None = None  # being answered
        self._incoming: Exchange | None = None  # its body is arriving
        self._for_app = False  # the body that is arriving is uvicorn's
        self._deaf = False  # no further request is read from this connection
        self._refused = False  # its last answer is an error about what it sent
        self._in_head = True
        self._head_bytes = 0  # of reads that brought nothing but a head
        self._long_read = False  # the present read could hold a head that is too long
        self._request_ended = False  # it has brought the end of a request
        self._upload = Upload()
        self._between_exchanges = False
        self._quiet_since = monotonic()
        self._stalled_since = 0.0

    # What the transport tells

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to watch the connection."""
        super().connection_made(transport)
        self.services.sweeper.watch(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone: so is whatever was done for it."""
        self.services.sweeper.forget(self)
        super().connection_lost(exc)
        self._deaf = True
        self._incoming = None
        self.pipeline.clear()
        if self._exchange is not None:
            self._exchange.on_client_gone()

    def eof_received(self) -> None:
        """The client sends no more, so it has left (see above); unsent parts of an answer do not delay that."""
        if self._exchange is not None:
            self.transport.abort()

    def pause_writing(self) -> None:
        """The client does not keep up."""
        super().pause_writing()
        self._stalled_since = monotonic()
        if self._exchange is not None:
            self._exchange.pause()

    def resume_writing(self) -> None:
        """It does again."""
        super().resume_writing()
        self._stalled_since = 0.0
        if self._exchange is not None:
            self._exchange.resume()
        elif self._between_exchanges:
            self._start_next()

    def data_received(self, data: bytes) -> None:
        """Parse what arrived; a request that is complete with it is started from ``on_message_complete``."""
        if self._deaf:
            return
        if self.timeout_keep_alive_task is not None:
            self._unset_keepalive_if_required()
        if not self._head_bytes:
            self._quiet_since = monotonic()
        received = len(data)
        self._long_read = received > MAX_HEAD_BYTES
        self._request_ended = False
        while True:
            try:
                self.parser.feed_data(data)
                break
            except httptools.HttpParserUpgrade as upgrade:
                data = self._decline_upgrade(data[upgrade.args[0] :])
                if not data:
                    return
            except httptools.HttpParserError as error:
                self._refuse(BadRequest(f"The request is not valid HTTP/1.1: {error}."))
                return
        if self._in_head:
            if not self._request_ended:
                self._head_bytes += received
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(head_too_large())
        elif self._incoming is not None or self._for_app:
            self._quiet_since = monotonic()
            self._check_framing(received)

    # What llhttp tells

    def on_message_begin(self) -> None:
        """A head begins. uvicorn's scope is only made for requests that are uvicorn's."""
        self.url = b""
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note a header, or a trailer, which nobody looks at."""
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Decide who answers."""
        if self._deaf or self.parser.should_upgrade():
            return
        self._in_head = False
        try:
            if self._long_read or self._head_bytes > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS:
                check_head_size(self.url, self.headers, self._head_bytes)
            if not self.url.startswith(b"/"):
                self.url = origin_form(self.url)
            if is_relayed(self.url):
                self._receive()
            else:
                self._hand_to_app()
        except BadRequest as error:
            self._refuse(error)
        self.headers = []  # what comes in addition are trailers

    def on_body(self, body: bytes) -> None:
        """Collect the body, up to the configured limit."""
        upload = self._upload
        upload.count(body)
        if self._incoming is None:
            if self._for_app:
                super().on_body(body)
        elif upload.size > self._limits.max_body_bytes:
            self._refuse(self._body_too_large())
        else:
            upload.keep(body)

    def on_message_complete(self) -> None:
        """The request is whole: answer it, or let it wait for its turn."""
        if self._in_head:
            return  # no request that anybody answers: see ``on_headers_complete``
        self._in_head = self._request_ended = True
        self._head_bytes = 0
        exchange, self._incoming = self._incoming, None
        if exchange is not None:
            exchange.body = self._upload.take()
            self._deaf = not exchange.head.keep_alive
            self._enqueue(exchange)
        elif self._for_app:
            self._for_app = False
            super().on_message_complete()

    # Reading requests

    def _decline_upgrade(self, rest: bytes) -> bytes:
        """Return a request to be read again without its offer to upgrade: llhttp takes its body for that protocol."""
        method, version = self.parser.get_method(), self.parser.get_http_version()
        if method == b"CONNECT":
            self._refuse(BadRequest("CONNECT is not supported."))
            return b""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return head_without_upgrade(method, self.url, version, self.headers) + rest

    def _receive(self) -> None:
        """Prepare to collect the body of a request that is relayed.

        Raises:
            BadRequest: its head is ambiguous, or announces too large a body.
        """
        parser = self.parser
        head = read_request_head(
            parser.get_method(), self.url, parser.get_http_version(), self.headers, parser.should_keep_alive()
        )
        if (head.content_length or 0) > self._limits.max_body_bytes:
            raise self._body_too_large()
        self._upload = Upload()
        self._incoming = Exchange(self.services, self, head)
        if head.expects_continue and not self._busy:
            self._invite_body()

    def _invite_body(self) -> None:
        """Answer ``Expect: 100-continue``, where that is waited for."""
        if self._incoming is not None and self._incoming.head.expects_continue and not self._upload.size:
            self.write(_CONTINUE)

    def _hand_to_app(self) -> None:
        url, headers = self.url, self.headers
        super().on_message_begin()
        self.url = url
        for name, value in headers:
            super().on_header(name, value)
        self._for_app = True
        self._upload = Upload()
        super().on_headers_complete()

    def _check_framing(self, received: int) -> None:
        if not self._upload.wastes(received):
            return
        if self._for_app:  # which has answered already, or waits for the body's end
            self.transport.abort()
        else:
            self._refuse(BadRequest("The body's chunk extensions or trailers are out of proportion."))

    def _body_too_large(self) -> TooLarge:
        limit = self._limits.max_body_bytes
        return TooLarge(f"The request body is above {limit} bytes (server.max_body_bytes).")

    def _refuse(self, error: GatewayError) -> None:
        """Answer with ``error`` when it is its turn; what follows on this connection cannot be understood."""
        if self._deaf:
            return
        self._deaf = self._refused = True
        self._incoming = None
        self._enqueue(Exchange(self.services, self, RequestHead(request_id=new_request_id()), refusal=error))

    # Answering them in order

    @property
    def _busy(self) -> bool:
        return (
            self._exchange is not None
            or self._between_exchanges
            or bool(self.pipeline)
            or (self.cycle is not None and not self.cycle.response_complete)
        )

    def _enqueue(self, exchange: Exchange) -> None:
        if not self._busy:
            self._start(exchange)
            return
        self.pipeline.appendleft((exchange, self.app))  # type: ignore[arg-type]  # the queue carries both kinds
        if len(self.pipeline) >= MAX_PIPELINED or len(exchange.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()

    def _start(self, exchange: Exchange) -> None:
        self._exchange = exchange
        exchange.task = self.loop.create_task(exchange.run())
        self.tasks.add(exchange.task)  # uvicorn waits for these when it shuts down, and cancels what takes too long

    def _start_asgi_task(self, cycle: RequestResponseCycle | Exchange, app: ASGI3Application) -> None:
        """Start what is next in the queue; uvicorn calls this for its own requests, as they come or when one ends."""
        if isinstance(cycle, Exchange):
            self._start(cycle)
        elif self._exchange is not None or self._between_exchanges:
            self.pipeline.appendleft((cycle, app))
        else:
            super()._start_asgi_task(cycle, app)

    def _start_next(self) -> None:
        self._between_exchanges = False
        if self.pipeline:
            self.flow.resume_reading()
            self._start_asgi_task(*self.pipeline.pop())
        else:
            self._invite_body()

    def on_response_complete(self) -> None:
        """The app has answered: uvicorn starts what is next, and closes where nothing comes; a body may be coming."""
        super().on_response_complete()
        if self._incoming is not None and not self._busy:
            self._unset_keepalive_if_required()
            self._invite_body()

    # What exchanges use

    @property
    def write_paused(self) -> bool:
        """Whether the client reads more slowly than its worker writes."""
        return self.flow.write_paused

    def write(self, data: bytes) -> None:
        """Send bytes, unless the client has left."""
        if not self.transport.is_closing():
            self.transport.write(data)

    def reset(self) -> None:
        """Close with RST: a FIN would look like the proper end of a body that has no announced length."""
        sock = self.transport.get_extra_info("socket")
        if sock is not None and not self.transport.is_closing():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.abort()

    def exchange_ended(self, exchange: Exchange) -> None:
        """Go on to the next request, or close."""
        assert exchange.task is not None
        self.tasks.discard(exchange.task)
        self.server_state.total_requests += 1
        self._exchange = None
        self._quiet_since = monotonic()
        if self.transport.is_closing():
            return
        if not exchange.answer.keep_alive:
            self._end()
        elif self.flow.write_paused:
            self._between_exchanges = True
        elif self.pipeline or self._incoming is not None:
            self._start_next()

    def _end(self) -> None:
        self._deaf = True
        if not self._refused:
            self.transport.close()
        elif self.transport.can_write_eof():  # TLS cannot: there the client is told by nothing but a header
            # Closing now, with bytes unread, would make the kernel reset the connection and drop our answer.
            self.transport.write_eof()

    # Time

    def sweep(self, now: float) -> None:
        """Act on timeouts; ``now`` is monotonic seconds."""
        if self._stalled_since and self._client_s and now - self._stalled_since >= self._client_s:
            self.transport.abort()
        elif self._exchange is not None:
            self._exchange.sweep(now)
        elif not self._busy:
            limit_s = self._patience_s()
            if limit_s and now - self._quiet_since >= limit_s:
                self.transport.abort() if self.transport.is_closing() else self.transport.close()

    def _patience_s(self) -> float:
        """Return how long the connection may stay as it is, between answers."""
        if self.transport.is_closing() or self._incoming is not None or self._head_bytes:
            return self._client_s
        return LINGER_S if self._deaf else self._limits.keep_alive_s

    def shutdown(self) -> None:
        """Take no new request, and close once the running one is answered, or the one whose body is arriving."""
        incoming = self._incoming
        if self._exchange is not None:
            self._exchange.answer.keep_alive = False
            self._deaf = True
            self.pipeline.clear()
        elif incoming is not None and not self._busy:
            incoming.head.keep_alive = incoming.answer.keep_alive = False
        else:
            super().shutdown()
