"""The load generator: one loop over epoll, requests ready as bytes, answers only framed.

It shares its core with the upstream, so it does the least that still notices a wrong answer: status 200, the length
announced, and for streams the end that says ``[DONE]``.
"""

from __future__ import annotations

import re
import select
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf

BUFFER = memoryview(bytearray(1 << 18))
LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
STAMP = re.compile(rb'"stamp":(\d{16})')
LAST_CHUNK = b"0\r\n\r\n"
TAIL_BYTES = 32
# States of a connection: no request, waiting for the head, body of known length, event stream, other chunked body.
IDLE, HEAD, SIZED, EVENTS, CHUNKED = range(5)
STALLED_S = 10.0

Source = Callable[[], bytes]


class WrongAnswer(Exception):
    """A router answered something else than the upstream did."""


@dataclass
class Samples:
    """What a run saw; times in seconds."""

    seconds: float = 0.0
    answers: int = 0
    answers_after_the_end: int = 0
    latencies: list[float] = field(default_factory=list)
    chunk_delays: list[float] = field(default_factory=list)


class Connection:
    """One connection to a router; it carries one request at a time."""

    __slots__ = ("missing", "sent_at", "sock", "state", "tail")

    def __init__(self, address: tuple[str, int]) -> None:
        self.sock = socket.create_connection(address)
        # A whole request fits into the send buffer, so that sending never waits.
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.state = IDLE
        self.missing = 0
        self.sent_at = 0.0
        self.tail = b""

    def send(self, request: bytes) -> None:
        self.state = HEAD
        self.tail = b""
        self.sent_at = time.perf_counter()
        self.sock.sendall(request)

    def receive(self) -> bytes:
        """Return the bytes of the body that are there; ``state`` is ``IDLE`` once the answer is complete."""
        size = self.sock.recv_into(BUFFER)
        if not size:
            raise WrongAnswer("the connection closed in the middle of an answer")
        data = bytes(BUFFER[:size])
        if self.state == HEAD:
            data = self._head(self.tail + data)
        if self.state == SIZED:
            self.missing -= len(data)
            if not self.missing:
                self.state = IDLE
        elif self.state != HEAD:
            self.tail = (self.tail + data)[-TAIL_BYTES:]
            if self.tail.endswith(LAST_CHUNK):
                self._stream_ended()
        return data

    def _head(self, data: bytes) -> bytes:
        end = data.find(b"\r\n\r\n")
        if end < 0:
            self.tail = data
            return b""
        if not data.startswith(b"HTTP/1.1 200 "):
            raise WrongAnswer(data.partition(b"\r\n")[0].decode("latin-1"))
        length = LENGTH.search(data, 0, end)
        if length:
            self.missing = int(length[1])
            self.state = SIZED
        else:
            self.state = EVENTS if data.find(b"text/event-stream", 0, end) > 0 else CHUNKED
        self.tail = b""
        return data[end + 4 :]

    def _stream_ended(self) -> None:
        if self.state == EVENTS and b"[DONE]" not in self.tail:
            raise WrongAnswer("a stream ended without [DONE]")
        self.state = IDLE


class LoadGenerator:
    """Sends requests to one router."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.address = address
        self.poll = select.epoll()
        self.connections: dict[int, Connection] = {}
        self.idle: list[Connection] = []

    def __enter__(self) -> LoadGenerator:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self.connections.values():
            connection.sock.close()
        self.poll.close()

    def closed_loop(self, source: Source, concurrency: int, seconds: float = inf, answers: float = inf) -> Samples:
        """Keep ``concurrency`` requests in flight for ``seconds``, or until ``answers`` have come."""
        samples = Samples()
        start = now = time.perf_counter()
        for _ in range(concurrency):
            self._start(source())
        while now < start + seconds and samples.answers < answers:
            for connection, _ in self._receive(STALLED_S):
                if connection.state == IDLE:
                    samples.answers += 1
                    connection.send(source())
            now = time.perf_counter()
        samples.seconds = now - start
        while len(self.idle) < len(self.connections):
            for connection, _ in self._receive(STALLED_S):
                if connection.state == IDLE:
                    samples.answers_after_the_end += 1
                    self.idle.append(connection)
        return samples

    def open_loop(self, source: Source, per_second: float, seconds: float) -> Samples:
        """Start requests on a fixed clock, whatever became of those before, and wait for all of them."""
        samples = Samples(answers=int(per_second * seconds))
        start = time.perf_counter()
        started = 0
        while started < samples.answers or len(self.idle) < len(self.connections):
            wait = STALLED_S
            if started < samples.answers:
                wait = start + started / per_second - time.perf_counter()
                if wait <= 0:
                    self._start(source())
                    started += 1
                    wait = 0
            for connection, data in self._receive(wait):
                if connection.state == IDLE:
                    samples.latencies.append(time.perf_counter() - connection.sent_at)
                    self.idle.append(connection)
                self._note_delays(data, samples)
        samples.seconds = time.perf_counter() - start
        return samples

    def _start(self, request: bytes) -> None:
        if self.idle:
            connection = self.idle.pop()
        else:
            connection = Connection(self.address)
            self.connections[connection.sock.fileno()] = connection
            self.poll.register(connection.sock, select.EPOLLIN)
        connection.send(request)

    def _receive(self, wait_s: float) -> Iterator[tuple[Connection, bytes]]:
        ready = self.poll.poll(wait_s)
        if not ready and wait_s == STALLED_S:
            raise WrongAnswer(f"nothing arrived for {STALLED_S:.0f} s")
        for fd, _ in ready:
            connection = self.connections[fd]
            yield connection, connection.receive()

    def _note_delays(self, data: bytes, samples: Samples) -> None:
        stamps = STAMP.findall(data)
        if stamps:
            now = time.monotonic_ns() // 1000
            samples.chunk_delays.extend((now - int(stamp)) / 1e6 for stamp in stamps)
