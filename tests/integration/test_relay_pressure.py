"""Slow clients, many clients, the end of the process, and TLS on both sides."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.config import ServerConfig
from gateway.observe.record import Outcome
from gateway.relay.downstream import make_protocol
from gateway.serving import Server
from gateway.tasks import spawn
from tests.peers import (
    LAST_CHUNK,
    STREAM_HEAD,
    FakeWorker,
    Message,
    Wire,
    answer,
    chunk,
    connect,
    event,
    eventually,
    request,
    response,
)
from tests.relay_rig import MODEL, Rig, relay

CHAT = msgspec.json.encode({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True})
FLOOD = chunk(b"x" * 65_536)
FLOOD_FRAMES = 200


async def flood(wire: Wire, _: Message) -> None:
    wire.send(STREAM_HEAD)
    for _ in range(FLOOD_FRAMES):
        wire.send(FLOOD)
        await wire.writer.drain()
    wire.send(LAST_CHUNK)


def buffered(rig: Rig) -> int:
    return sum(connection.transport.get_write_buffer_size() for connection in rig.connections)


async def test_a_slow_client_slows_its_worker_and_nobody_else() -> None:
    async def script(wire: Wire, message: Message) -> None:
        await (flood(wire, message) if b"flood" in message.body else answer(response())(wire, message))

    async with FakeWorker(script) as worker, relay([worker]) as rig, rig.connect() as slow, rig.connect() as quick:
        slow.writer.transport.pause_reading()  # type: ignore[attr-defined]
        slow.send(request(msgspec.json.encode({"model": MODEL, "prompt": "flood"}), path="/v1/completions"))
        await eventually(lambda: any(connection.write_paused for connection in rig.connections))
        for _ in range(20):
            quick.send(request(CHAT))
            assert (await quick.read_message()).status == 200
            assert buffered(rig) < 2**20
        slow.writer.transport.resume_reading()  # type: ignore[attr-defined]
        got = await slow.read_message()
        assert len(got.raw_body) == FLOOD_FRAMES * len(FLOOD) + len(LAST_CHUNK)
        assert await rig.outcome() is Outcome.OK


async def test_a_client_that_never_reads_is_given_up() -> None:
    limits = {"client_s": 0.4}
    async with FakeWorker(flood) as worker, relay([worker], timeouts=limits) as rig, rig.connect() as slow:
        slow.writer.transport.pause_reading()  # type: ignore[attr-defined]
        slow.send(request(CHAT))
        assert await rig.outcome() is Outcome.CLIENT_GONE
        assert rig.blamed == []
        await eventually(lambda: worker.open == 0)


async def test_pipelined_requests_of_a_client_that_does_not_read_wait() -> None:
    big = response(b"x" * 3_000_000)
    async with FakeWorker(answer(big)) as worker, relay([worker]) as rig, rig.connect() as slow:
        slow.writer.transport.pause_reading()  # type: ignore[attr-defined]
        slow.send(request(CHAT) * 30)
        await eventually(lambda: any(connection.write_paused for connection in rig.connections))
        await asyncio.sleep(0.1)
        assert len(worker.requests) < 10
        assert buffered(rig) < 2**20
        slow.writer.transport.resume_reading()  # type: ignore[attr-defined]
        for _ in range(30):
            assert len((await slow.read_message()).body) == 3_000_000


async def test_the_app_waits_for_its_turn_at_a_client_that_does_not_read() -> None:
    big = response(b"x" * 150_000)
    async with FakeWorker(answer(big)) as worker, relay([worker]) as rig, rig.connect() as slow:
        slow.writer.transport.pause_reading()  # type: ignore[attr-defined]
        sent: list[bytes] = []

        def is_full() -> bool:
            return any(connection.write_paused for connection in rig.connections)

        def is_answered_or_full() -> bool:
            return is_full() or len(rig.records) == len(sent)

        while not is_full():
            sent += [request(CHAT)] * 10
            slow.send(*sent[-10:])
            await eventually(is_answered_or_full)
        slow.send(request(method="GET", path="/health"))
        (connection,) = rig.connections
        await eventually(lambda: connection.cycle is not None)
        slow.writer.transport.resume_reading()  # type: ignore[attr-defined]
        bodies = [(await slow.read_message()).body for _ in range(len(sent) + 1)]
        assert [len(body) for body in bodies[:-1]] == [150_000] * len(sent)
        assert bodies[-1] == b'{"status":"ok"}'


async def test_many_streams_at_once_leave_the_app_responsive() -> None:
    go_on = asyncio.Event()

    async def script(wire: Wire, _: Message) -> None:
        wire.send(STREAM_HEAD, chunk(event("a")))
        await go_on.wait()
        wire.send(chunk(event("b")), LAST_CHUNK)

    async def stream(rig: Rig) -> bytes:
        async with rig.connect() as client:
            client.send(request(CHAT))
            return (await client.read_message()).body

    async with FakeWorker(script) as worker, relay([worker]) as rig:
        streams = [asyncio.ensure_future(stream(rig)) for _ in range(300)]
        await eventually(lambda: rig.services.ledger.in_flight == 300)
        async with rig.connect() as client:
            client.send(request(method="GET", path="/health"))
            assert (await client.read_message()).status == 200
        go_on.set()
        assert set(await asyncio.gather(*streams)) == {event("a") + event("b")}
        await rig.settled()


# The end of the process


@asynccontextmanager
async def served(rig: Rig, drain_s: float = 5.0) -> AsyncIterator[Server]:
    """Serve the rig's relay as the product does, with its drain."""
    settings = ServerConfig(drain_s=drain_s)
    server = Server(rig.app, "127.0.0.1", 0, settings, make_protocol(rig.services))
    server.bind()
    serving = spawn(server.run_bound(), "server under test")
    await eventually(lambda: server.started)
    try:
        yield server
    finally:
        server.should_exit = True
        await serving


async def test_running_streams_finish_while_the_server_drains() -> None:
    go_on = asyncio.Event()

    async def script(wire: Wire, _: Message) -> None:
        wire.send(STREAM_HEAD, chunk(event("a")))
        await go_on.wait()
        wire.send(chunk(event("b")), LAST_CHUNK)

    async with FakeWorker(script) as worker, relay([worker]) as rig, served(rig) as server:
        async with connect(server.port) as busy, connect(server.port) as idle:
            busy.send(request(CHAT))
            await busy.reader.readuntil(event("a"))
            server.should_exit = True
            assert await idle.read_to_end() == b""
            busy.send(request(CHAT))
            with pytest.raises(OSError):
                async with connect(server.port):
                    pass
            go_on.set()
            assert (await busy.read_to_end()).endswith(chunk(event("b")) + LAST_CHUNK)
        assert len(worker.requests) == 1
        assert await rig.outcome() is Outcome.OK


async def test_an_answer_that_begins_while_the_server_drains_says_that_it_closes() -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def script(wire: Wire, _: Message) -> None:
        asked.set()
        await go_on.wait()
        wire.send(response())

    async with (
        FakeWorker(script) as worker,
        relay([worker]) as rig,
        served(rig) as server,
        connect(server.port) as client,
    ):
        client.send(request(CHAT))
        await asked.wait()
        async with connect(server.port) as idle:
            server.should_exit = True
            assert await idle.read_to_end() == b""
        go_on.set()
        got = await client.read_message()
        assert got.headers["connection"] == "close"
        assert await client.read_to_end() == b""


async def test_a_request_that_is_arriving_when_the_drain_begins_is_answered() -> None:
    async with (
        FakeWorker(answer(response())) as worker,
        relay([worker]) as rig,
        served(rig) as server,
        connect(server.port) as client,
        connect(server.port) as idle,
    ):
        client.send(request(CHAT)[:-5])
        await eventually(lambda: any(connection._incoming for connection in server.server_state.connections))
        server.should_exit = True
        assert await idle.read_to_end() == b""
        client.send(request(CHAT)[-5:], request(CHAT))
        got = await client.read_message()
        assert (got.status, got.headers["connection"]) == (200, "close")
        assert await client.read_to_end() == b""
        assert len(worker.requests) == 1


async def test_a_stream_that_outlasts_the_drain_ends_with_an_error_event() -> None:
    async def script(wire: Wire, _: Message) -> None:
        wire.send(STREAM_HEAD, chunk(event("a")))
        await wire.gone()

    async with FakeWorker(script) as worker, relay([worker]) as rig, served(rig, drain_s=1) as server:
        async with connect(server.port) as client:
            client.send(request(CHAT))
            await client.reader.readuntil(chunk(event("a")))
            server.should_exit = True
            rest = await client.read_to_end()
            assert b"shutting down" in rest
            assert rest.endswith(LAST_CHUNK)
        assert rig.blamed == []


# TLS


async def test_tls_on_both_sides(certificate: tuple[Path, Path]) -> None:
    trusting = ssl.create_default_context(cafile=certificate[0])
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(*certificate)
    frames = chunk(event("a")) + LAST_CHUNK
    tls: dict[str, Any] = {"worker_tls": trusting, "tls": certificate}
    async with FakeWorker(answer(STREAM_HEAD + frames), serving) as worker, relay([worker], **tls) as rig:
        async with rig.connect(trusting) as client:
            for _ in range(3):
                client.send(request(CHAT))
                assert (await client.read_message()).raw_body == frames
        assert worker.connections == 1
        assert await rig.outcome() is Outcome.OK


async def test_a_refusal_reaches_a_client_that_is_still_sending_over_tls(certificate: tuple[Path, Path]) -> None:
    trusting = ssl.create_default_context(cafile=certificate[0])
    async with (
        FakeWorker(answer(response())) as worker,
        relay([worker], tls=certificate, server={"max_body_bytes": 4096}) as rig,
        rig.connect(trusting) as client,
    ):
        client.send(request(CHAT).replace(b"Content-Length: ", b"Content-Length: 99999"))
        for _ in range(80):
            client.send(b"x" * 65_536)
            await client.writer.drain()
        got = await client.read_message()
        assert (got.status, got.headers["connection"]) == (413, "close")
        assert await client.read_to_end() == b""


async def test_a_client_that_leaves_over_tls_is_noticed(certificate: tuple[Path, Path]) -> None:
    asked, given_up = asyncio.Event(), asyncio.Event()

    async def silent(wire: Wire, _: Message) -> None:
        asked.set()
        await wire.gone()
        given_up.set()

    trusting = ssl.create_default_context(cafile=certificate[0])
    async with FakeWorker(silent) as worker, relay([worker], tls=certificate) as rig:
        async with rig.connect(trusting) as client:
            client.send(request(CHAT))
            await asked.wait()
        async with asyncio.timeout(0.5):
            await given_up.wait()
        assert await rig.outcome() is Outcome.CLIENT_GONE


async def test_of_a_worker_that_hangs_up_during_the_handshake_the_client_is_told_why() -> None:
    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with relay([f"https://127.0.0.1:{port}"]) as rig, rig.connect() as client:
            client.send(request(CHAT))
            assert b"cannot be reached: Connection" in (await client.read_message()).body


async def test_a_worker_with_an_untrusted_certificate_is_not_spoken_to(certificate: tuple[Path, Path]) -> None:
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(*certificate)
    async with FakeWorker(answer(response()), serving) as worker, relay([worker]) as rig, rig.connect() as client:
        client.send(request(CHAT))
        assert (await client.read_message()).status == 503
        assert worker.requests == []
        assert {kind for _, kind in rig.blamed} == {"connect"}
