"""An engine that costs next to nothing, so that a router in front of it is what a benchmark measures.

``python -m tests.bench.fast_upstream PORT [PORT …]`` answers on each port as one worker would: chat completions as
1 KB of JSON, or as a stream of 64 chunks of about 180 bytes when the body says ``"stream":true``. ``"seed":20`` asks
for a chunk about every 20 ms (routers that rewrite bodies keep that field), else they go out as fast as they can, each
in a write of its own. Every chunk carries the clock when it was written (``time.monotonic_ns`` / 1000, 16 digits).

A loop over epoll rather than asyncio: it shares its core with the load generator and must not be what is measured.
"""

from __future__ import annotations

import heapq
import random
import re
import select
import socket
import sys
import time
from collections.abc import Iterator

import msgspec

MODEL = "bench"
BUFFER = memoryview(bytearray(1 << 18))
CHUNKS_PER_STREAM = 64
PACE_MS = re.compile(rb'"seed":(\d+)')
STREAM = b'"stream":true'
LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


def http(body: bytes, content_type: bytes = b"application/json") -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
    return head % (content_type, len(body)) + body


def chat_completion() -> bytes:
    answer = {
        "id": "chatcmpl-0123456789abcdef",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "The cache already holds this prefix. " * 18},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 500, "completion_tokens": 128, "total_tokens": 628},
    }
    return msgspec.json.encode(answer)


CHAT = http(chat_completion())
MODELS = http(
    msgspec.json.encode(
        {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "bench", "max_model_len": 131072}]}
    )
)
METRICS = http(
    b'vllm:num_requests_running{model_name="bench"} 0.0\n'
    b'vllm:num_requests_waiting{model_name="bench"} 0.0\n'
    b'vllm:kv_cache_usage_perc{model_name="bench"} 0.1\n',
    b"text/plain; version=0.0.4",
)
# What sglang-router asks for before it accepts a worker.
ABOUT = http(msgspec.json.encode({"model_path": MODEL, "served_model_name": MODEL, "is_generation": True}))
PAGES = {b"/v1/models": MODELS, b"/metrics": METRICS}

STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = (
    b'data: {"stamp":%016d,"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","model":"bench",'
    b'"choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}]}\n\n'
)
EVENT_BYTES = len(EVENT % 0)
CHUNK = b"%x\r\n" % EVENT_BYTES + EVENT + b"\r\n"
USAGE = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","model":"bench","choices":[],'
    b'"usage":{"prompt_tokens":500,"completion_tokens":64,"total_tokens":564}}\n\n'
)
DONE = b"data: [DONE]\n\n"
STREAM_END = b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in (USAGE, DONE)) + b"0\r\n\r\n"


class Connection:
    """One connection of a router; it carries one request at a time."""

    __slots__ = ("chunks_left", "incoming", "pace_s", "sock", "unsent")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.incoming = b""
        self.unsent = b""
        self.chunks_left = 0
        self.pace_s = 0.0

    def send(self, data: bytes) -> None:
        """Write what the socket takes; the rest goes before the next write."""
        data = self.unsent + data
        try:
            self.unsent = data[self.sock.send(data) :]
        except BlockingIOError:
            self.unsent = data

    def next_request(self) -> tuple[bytes, bytes] | None:
        """Return the path and body of a request that has arrived whole.

        Raises:
            ConnectionAbortedError: this is not HTTP/1; sglang-router also tries gRPC.
        """
        if self.incoming and not self.incoming.startswith((b"GET ", b"POST ")):
            raise ConnectionAbortedError
        end = self.incoming.find(b"\r\n\r\n")
        if end < 0:
            return None
        length = LENGTH.search(self.incoming, 0, end)
        body_end = end + 4 + (int(length[1]) if length else 0)
        if len(self.incoming) < body_end:
            return None
        path = self.incoming.split(b" ", 2)[1].partition(b"?")[0]
        body = self.incoming[end + 4 : body_end]
        self.incoming = self.incoming[body_end:]
        return path, body


class Upstream:
    """All workers of a benchmark in one process and one loop."""

    def __init__(self, ports: list[int]) -> None:
        self.poll = select.epoll()
        self.listeners: dict[int, socket.socket] = {}
        self.connections: dict[int, Connection] = {}
        self.unpaced: set[Connection] = set()
        self.paced: list[tuple[float, int, Connection]] = []
        for port in ports:
            listener = socket.create_server(("127.0.0.1", port), backlog=4096)
            listener.setblocking(False)
            self.listeners[listener.fileno()] = listener
            self.poll.register(listener, select.EPOLLIN)

    def run(self) -> None:
        while True:
            for fd, _ in self.poll.poll(self._wait_s()):
                if fd in self.listeners:
                    self._accept(self.listeners[fd])
                else:
                    self._read(self.connections[fd])
            self._write_due_chunks()

    def _wait_s(self) -> float | None:
        if self.unpaced:
            return 0
        return max(0.0, self.paced[0][0] - time.monotonic()) if self.paced else None

    def _accept(self, listener: socket.socket) -> None:
        sock, _ = listener.accept()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connections[sock.fileno()] = Connection(sock)
        self.poll.register(sock, select.EPOLLIN)

    def _close(self, connection: Connection) -> None:
        self.unpaced.discard(connection)
        connection.chunks_left = 0
        self.connections.pop(connection.sock.fileno(), None)
        connection.sock.close()

    def _read(self, connection: Connection) -> None:
        try:
            size = connection.sock.recv_into(BUFFER)
            connection.incoming += BUFFER[:size]
            while request := connection.next_request():
                self._answer(connection, *request)
        except ConnectionError:
            size = 0
        if not size:
            self._close(connection)

    def _answer(self, connection: Connection, path: bytes, body: bytes) -> None:
        if not path.startswith(b"/v1/chat"):
            connection.send(PAGES.get(path, ABOUT))
        elif STREAM not in body:
            connection.send(CHAT)
        else:
            self._start_stream(connection, body)

    def _start_stream(self, connection: Connection, body: bytes) -> None:
        pace = PACE_MS.search(body)
        connection.chunks_left = CHUNKS_PER_STREAM
        connection.send(STREAM_HEAD)
        if pace is None:
            self.unpaced.add(connection)
            return
        connection.pace_s = int(pace[1]) / 1000
        self._schedule(connection, time.monotonic())

    def _schedule(self, connection: Connection, now: float) -> None:
        # Jitter keeps streams from falling into step, which would make bursts of what should be a flow.
        due = now + connection.pace_s * random.uniform(0.5, 1.5)
        heapq.heappush(self.paced, (due, id(connection), connection))

    def _write_due_chunks(self) -> None:
        for connection in list(self.unpaced):
            self._write_chunk(connection)
            if not connection.chunks_left:
                self.unpaced.discard(connection)
        now = time.monotonic()
        for connection in self._due(now):
            if connection.chunks_left:
                self._write_chunk(connection)
            if connection.chunks_left:
                self._schedule(connection, now)

    def _due(self, now: float) -> Iterator[Connection]:
        while self.paced and self.paced[0][0] <= now:
            yield heapq.heappop(self.paced)[2]

    def _write_chunk(self, connection: Connection) -> None:
        if len(connection.unsent) > len(BUFFER):
            return
        try:
            connection.send(CHUNK % (time.monotonic_ns() // 1000))
            connection.chunks_left -= 1
            if not connection.chunks_left:
                connection.send(STREAM_END)
        except ConnectionError:
            self._close(connection)


if __name__ == "__main__":
    Upstream([int(port) for port in sys.argv[1:]]).run()
