"""Polls over real sockets: what workers' HTTP servers do that a plain answer does not show."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from gateway.config import WorkerConfig
from gateway.fleet.polling import FetchFailed
from gateway.fleet.registry import Registry, Worker
from gateway.relay import polls
from tests.integration.engine import until

CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n6\r\nfirst \r\n4\r\npage\r\n0\r\n\r\n"


@asynccontextmanager
async def server(*answers):
    """A worker that gives one answer per request, over as few connections as it is asked on; None: it hangs up."""
    left, connections = list(answers), []

    async def serve(reader, writer):
        connections.append(writer)
        while await reader.readline():
            await reader.readuntil(b"\r\n\r\n")
            answer = left.pop(0)
            if answer is None:
                break
            writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        yield Worker.from_config(WorkerConfig(url=f"http://127.0.0.1:{port}")), connections


@pytest.fixture
def registry():
    return Registry()


async def test_a_page_in_chunks_is_read_whole_and_its_connection_used_again(fetch):
    async with server(CHUNKED, CHUNKED) as (worker, connections):
        for _ in range(2):
            assert await fetch(worker, "/metrics", 5.0) == (200, b"first page")
        assert len(connections) == 1


async def test_a_worker_that_closes_an_idle_connection_as_it_is_asked_is_asked_again(fetch):
    async with server(CHUNKED, None, CHUNKED) as (worker, connections):
        for _ in range(2):
            assert await fetch(worker, "/metrics", 5.0) == (200, b"first page")
        assert len(connections) == 2


async def test_a_page_without_a_reasonable_end_is_given_up(fetch, monkeypatch):
    monkeypatch.setattr(polls, "MAX_ANSWER_BYTES", 5)
    async with server(CHUNKED) as (worker, _):
        with pytest.raises(FetchFailed, match="more than 5 bytes"):
            await fetch(worker, "/metrics", 5.0)


async def test_what_is_no_http_is_a_failure(fetch):
    async with server(b"nonsense\r\n\r\n") as (worker, _):
        with pytest.raises(FetchFailed, match="does not answer in HTTP") as failure:
            await fetch(worker, "/health", 5.0)
        assert not failure.value.timed_out


async def test_the_connections_to_a_worker_that_leaves_are_closed(registry, fetch):
    async with server(CHUNKED) as (worker, connections):
        registry.add(worker)
        await fetch(worker, "/metrics", 5.0)
        registry.remove(worker.name)
        await until(connections[0].is_closing)
