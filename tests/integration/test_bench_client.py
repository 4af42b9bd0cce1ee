from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.bench.client import LoadGenerator, WrongAnswer
from tests.bench.fast_upstream import CHUNKS_PER_STREAM
from tests.bench.workloads import LONG, SHORT, SHORT_NEW, Prompts, request_source
from tests.processes import free_ports, running, wait_for


@pytest.fixture(scope="module")
def upstream() -> Iterator[tuple[str, int]]:
    (port,) = free_ports(1)
    with running([sys.executable, "-m", "tests.bench.fast_upstream", str(port)]) as process:
        wait_for(f"http://127.0.0.1:{port}/health", process, 20)
        yield "127.0.0.1", port


@pytest.fixture
def answering() -> Iterator[Callable[[bytes], tuple[str, int]]]:
    """A server that gives every connection the same bytes and closes it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def start(answer: bytes) -> tuple[str, int]:
        def serve() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.recv(1 << 16)
                sock.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        return listener.getsockname()

    with listener:
        yield start


@pytest.mark.parametrize("prompts", [SHORT, SHORT_NEW, LONG])
def test_every_answer_is_counted(upstream: tuple[str, int], prompts: Prompts) -> None:
    with LoadGenerator(upstream) as load:
        samples = load.closed_loop(request_source(prompts, 0), concurrency=4, answers=50)
    assert samples.answers >= 50
    assert samples.answers_after_the_end <= 4


def test_every_chunk_of_paced_streams_has_a_delay(upstream: tuple[str, int]) -> None:
    with LoadGenerator(upstream) as load:
        samples = load.open_loop(request_source(SHORT, 0, {"stream": True, "seed": 1}), per_second=50, seconds=0.2)
    assert len(samples.latencies) == 10
    assert len(samples.chunk_delays) == 10 * CHUNKS_PER_STREAM
    assert all(0 <= delay < 5 for delay in samples.chunk_delays)


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n", "503"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort", "closed"),
        (
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            r"without \[DONE\]",
        ),
    ],
)
def test_a_wrong_answer_is_noticed(
    answering: Callable[[bytes], tuple[str, int]], answer: bytes, complaint: str
) -> None:
    with LoadGenerator(answering(answer)) as load, pytest.raises(WrongAnswer, match=complaint):
        load.closed_loop(request_source(SHORT, 0), concurrency=1, answers=1)


def test_the_same_number_gives_the_same_new_messages() -> None:
    one, same, other = request_source(LONG, 1), request_source(LONG, 1), request_source(LONG, 2)
    first = one()
    assert first == same()
    assert first != other()
    assert 30_000 < len(first) < 40_000
