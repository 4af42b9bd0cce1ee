"""An answer on its way to the client: a worker's bytes as they are, or one error of our own."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, Protocol

from gateway.config import ServerConfig
from gateway.errors import GatewayError
from gateway.observe.record import RequestRecord
from gateway.relay.chunked import LAST_CHUNK, Dechunker, chunk
from gateway.relay.head import Framing, RequestHead, ResponseHead
from gateway.relay.sse import UsageReader, error_event
from gateway.relay.upstream import Upstream

if TYPE_CHECKING:
    from gateway.relay.exchange import Exchange

_HELD_BYTES: Final = 64 * 1024
"""A worker's error answer up to this size is kept while other workers are tried."""


class Client(Protocol):
    """The client's connection, as the relay sees it."""

    @property
    def write_paused(self) -> bool:
        """Whether the client reads more slowly than its worker writes."""
        ...

    def write(self, data: bytes) -> None:
        """Send bytes."""
        ...

    def reset(self) -> None:
        """Break the connection, so that a cut body cannot be taken for a whole one."""
        ...

    def exchange_ended(self, exchange: Exchange) -> None:
        """The exchange is over and accounted for."""
        ...


class ErrorAnswer:
    """A worker's error answer, kept while other workers are tried.

    Args:
        head: its head.
        worker: the worker's name.

    Attributes:
        body: as it came, with its framing.
    """

    __slots__ = ("body", "head", "worker")

    def __init__(self, head: ResponseHead, worker: str) -> None:
        self.head = head
        self.worker = worker
        self.body = b""

    def add(self, data: bytes) -> bool:
        """Keep more of its body; False once that is too much to keep."""
        self.body += data
        return len(self.body) <= _HELD_BYTES


class Answer:
    """What one request is answered with.

    Args:
        client: where it goes.
        request: what it answers.

    Attributes:
        started: bytes of it have been sent: whatever happens now, there is no other answer.
        keep_alive: whether the client's connection may carry another request afterwards.
        status: the status that was sent, 0 until then.
        usage: token counts seen in the body, None where it has none to see.
        read: looks at the next piece of the body, without its framing.
        moved: set whenever body bytes pass; whoever looks for standstill clears it.
        write: sends the next bytes of the body.
    """

    __slots__ = (
        "_client",
        "_dechunked",
        "_head",
        "_request",
        "keep_alive",
        "moved",
        "read",
        "started",
        "status",
        "usage",
        "write",
    )

    def __init__(self, client: Client, request: RequestHead) -> None:
        self._client = client
        self._request = request
        self.write = client.write
        self._head: ResponseHead | None = None
        self._dechunked = False
        self.started = False
        self.keep_alive = request.keep_alive
        self.status = 0
        self.usage: UsageReader | None = None
        self.read: Callable[[bytes], None] = _ignore
        self.moved = False

    def announce(self, head: ResponseHead) -> None:
        """Note a worker's head, which is not sent before ``begin``; a later worker's replaces it."""
        self._head = head
        self.usage = UsageReader() if head.is_readable else None
        self.read = _ignore if self.usage is None else self.usage.feed

    def begin(self, added: bytes, data: bytes) -> None:
        """Send the announced head and the first bytes of the body.

        Args:
            added: header lines of our own, each with its CRLF.
            data: the body so far, with its framing; empty for a response without one.
        """
        head = self._head
        assert head is not None, "a head was announced"
        self.started = True
        self.status = head.status
        self._dechunked = self._request.http10 and head.framing is Framing.CHUNKED
        if head.framing is Framing.UNTIL_CLOSE:
            self.keep_alive = False
        if not self.keep_alive:
            added += b"connection: close\r\n"
        raw_head = head.for_client(added, self._dechunked)
        if self._dechunked:
            self._client.write(raw_head)
            self.write = Dechunker(self._client.write).feed
            self.write(data)
        else:
            self._client.write(raw_head + data)

    def cut(self, error: GatewayError, upstream: Upstream | None) -> None:
        """End an answer whose worker will not: a stream with an error event, anything else with a reset.

        Args:
            error: what the event says.
            upstream: the connection that brought a chunked body so far; None where there is none any more.
        """
        assert self._head is not None, "only an answer that began can be cut"
        head, framing = self._head, self._head.framing
        if self.usage is None or not head.is_event_stream or framing in (Framing.LENGTH, Framing.NONE):
            self._client.reset()
            return
        event = error_event(error.body(), self._request.path, self.usage.mid_event)
        if self._dechunked or framing is Framing.UNTIL_CLOSE:
            self._client.write(event)
        elif (filling := b"" if head.reframed or upstream is None else upstream.filling()) is not None:
            self._client.write(filling + chunk(event) + LAST_CHUNK)
        else:
            self._client.reset()

    def note_usage(self, record: RequestRecord) -> None:
        """Write down the token counts seen."""
        usage = self.usage
        if usage is not None:
            record.prompt_tokens = usage.prompt_tokens or record.prompt_tokens
            record.cached_tokens = usage.cached_tokens
            record.output_tokens = usage.output_tokens

    def tokens(self, prompt_tokens: int) -> int:
        """Return the length of prompt and answer together, as far as it was reported; else of ``prompt_tokens``."""
        usage = self.usage
        if usage is None:
            return prompt_tokens
        return (usage.prompt_tokens or prompt_tokens) + (usage.output_tokens or 0)

    def refuse(self, error: GatewayError) -> None:
        """Send an error of our own instead of an answer."""
        self.started = True
        self.status = error.status
        body = error.body()
        lines = [
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            f"x-request-id: {self._request.request_id}",
        ]
        if error.retry_after_s is not None:
            lines.append(f"retry-after: {max(1, round(error.retry_after_s))}")
        if not self.keep_alive:
            lines.append("connection: close")
        head = "\r\n".join((*lines, "", "")).encode("latin-1")
        self._client.write(head if self._request.method == b"HEAD" else head + body)


def _ignore(payload: bytes) -> None:
    """Look at no piece of a body that cannot be read."""


def own_headers(record: RequestRecord, config: ServerConfig) -> bytes:
    """Return the header lines that every answer of a worker gets, each with its CRLF."""
    if not config.decision_headers:
        return f"x-request-id: {record.request_id}\r\n".encode()
    return (
        f"x-request-id: {record.request_id}\r\nx-kvway-worker: {record.worker}\r\n"
        f"x-kvway-predicted-hit-tokens: {record.predicted_hit_tokens}\r\n"
    ).encode("latin-1", "replace")
