"""Both ends of the gateway, byte by byte: a worker that follows a script, and a client that writes what it is told."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field

DEADLINE_S = 5.0
_RESET = struct.pack("ii", 1, 0)


@dataclass
class Message:
    """A request or response as read from a socket; header names in lower case, of repeated ones the last.

    ``body`` is the payload, ``raw_body`` the same with its chunked framing.
    """

    start: str
    headers: dict[str, str]
    body: bytes = b""
    raw_body: bytes = b""
    raw_head: bytes = b""

    @property
    def method(self) -> str:
        return self.start.split(" ")[0]

    @property
    def target(self) -> str:
        return self.start.split(" ")[1]

    @property
    def status(self) -> int:
        return int(self.start.split(" ")[1])


class Wire:
    """One end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, *pieces: bytes) -> None:
        """Write without waiting."""
        self.writer.write(b"".join(pieces))

    async def send_slowly(self, *pieces: bytes) -> None:
        """Write each piece so that it arrives in a read of its own."""
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(0.002)

    def close(self) -> None:
        """Close with FIN."""
        self.writer.close()

    def reset(self) -> None:
        """Close with RST."""
        if not self.writer.is_closing():
            sock = self.writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.writer.transport.abort()

    async def read_message(self, *, bodiless: bool = False, until_close: bool = False) -> Message:
        """Read one message.

        Args:
            bodiless: it has no body, whatever it announces (the answer to HEAD).
            until_close: without an announced length, the body goes on until the connection closes.

        Raises:
            asyncio.IncompleteReadError: the connection ended first.
        """
        async with asyncio.timeout(DEADLINE_S):
            raw = await self.reader.readuntil(b"\r\n\r\n")
            start, *lines = raw[:-4].decode("latin-1").split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            message = Message(start, headers, raw_head=raw)
            if bodiless or " 204 " in start or " 304 " in start or " 100 " in start:
                return message
            if headers.get("transfer-encoding", "").endswith("chunked"):
                message.body, message.raw_body = await self._read_chunked()
            elif "content-length" in headers:
                message.body = message.raw_body = await self.reader.readexactly(int(headers["content-length"]))
            elif until_close:
                message.body = message.raw_body = await self.reader.read()
            return message

    async def _read_chunked(self) -> tuple[bytes, bytes]:
        body: list[bytes] = []
        raw: list[bytes] = []
        while True:
            line = await self.reader.readuntil(b"\r\n")
            raw.append(line)
            size = int(line.split(b";")[0], 16)
            if not size:
                break
            piece = await self.reader.readexactly(size + 2)
            assert piece.endswith(b"\r\n"), "a chunk is longer than it says"
            body.append(piece[:-2])
            raw.append(piece)
        while raw[-1] != b"\r\n":
            raw.append(await self.reader.readuntil(b"\r\n"))
        return b"".join(body), b"".join(raw)

    async def read_some(self) -> bytes:
        """Read what is there, at least a byte; empty at the end."""
        async with asyncio.timeout(DEADLINE_S):
            return await self.reader.read(65536)

    async def read_to_end(self) -> bytes:
        """Read until the other side closes.

        Raises:
            ConnectionResetError: it did so with RST.
        """
        async with asyncio.timeout(DEADLINE_S):
            return await self.reader.read()

    async def gone(self) -> None:
        """Wait until the other side has closed, however it did."""
        with contextlib.suppress(ConnectionError):
            await self.read_to_end()


Script = Callable[["Wire", Message], Awaitable[None]]


@dataclass
class FakeWorker:
    """A worker that reads requests and lets its script answer them.

    The script is called once per request, and may be exchanged between them. A connection ends when the other side
    ends it, or the script closes it.

    Attributes:
        requests: what arrived, in order.
        connections: how many were accepted.
        open: how many are open now.
    """

    script: Script
    ssl_context: ssl.SSLContext | None = None
    port: int = 0
    requests: list[Message] = field(default_factory=list)
    connections: int = 0
    open: int = 0
    _server: asyncio.Server | None = None
    _wires: set[Wire] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"{'https' if self.ssl_context else 'http'}://127.0.0.1:{self.port}"

    async def __aenter__(self) -> FakeWorker:
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", self.port, ssl=self.ssl_context, limit=2**26
        )
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Stop listening and break every connection, as the death of the process does."""
        assert self._server is not None
        self._server.close()
        for wire in list(self._wires):
            wire.reset()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = Wire(reader, writer)
        self.connections += 1
        self.open += 1
        self._wires.add(wire)
        try:
            while not writer.is_closing():
                request = await self._next(wire)
                self.requests.append(request)
                await self.script(wire, request)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open -= 1
            self._wires.discard(wire)
            writer.close()

    async def _next(self, wire: Wire) -> Message:
        first = await wire.reader.readexactly(1)
        wire.reader._buffer[:0] = first  # type: ignore[attr-defined]  # an idle connection has no deadline
        return await wire.read_message()


@contextlib.asynccontextmanager
async def connect(port: int, ssl_context: ssl.SSLContext | None = None) -> AsyncIterator[Wire]:
    """Open a client connection."""
    name = "localhost" if ssl_context else None
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=ssl_context, server_hostname=name, limit=2**26
    )
    try:
        yield Wire(reader, writer)
    finally:
        writer.close()


@contextlib.contextmanager
def deaf_listener() -> Iterator[str]:
    """Give the URL of a listener whose queue is full: connecting to it takes for ever."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(2):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def request(
    body: bytes = b"",
    path: str = "/v1/chat/completions",
    method: str = "POST",
    version: str = "1.1",
    headers: dict[str, str] | None = None,
) -> bytes:
    """Return a well-formed request; ``headers`` come in addition to Host and Content-Length."""
    lines = [f"{method} {path} HTTP/{version}", "Host: gateway"]
    if body or method == "POST":
        lines.append(f"Content-Length: {len(body)}")
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join((*lines, "", "")).encode() + body


def response(
    body: bytes = b"{}",
    status: str = "200 OK",
    content_type: str = "application/json",
    headers: dict[str, str] | None = None,
) -> bytes:
    """Return a response of known length."""
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {content_type}", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join((*lines, "", "")).encode() + body


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def chunk(payload: bytes) -> bytes:
    """Return one HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def event(text: str) -> bytes:
    """Return one SSE event as a chat stream has it."""
    return b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % text.encode()


def answer(body: bytes) -> Script:
    """Return a script that answers every request with the same bytes."""

    async def script(wire: Wire, _: Message) -> None:
        wire.send(body)

    return script


async def eventually(condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    """Wait until ``condition`` holds."""
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.005)
