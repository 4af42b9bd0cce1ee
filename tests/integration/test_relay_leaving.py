"""Clients that leave are noticed at once in every phase: the worker is told, nobody is blamed, nothing stays behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest

from gateway.observe.record import Outcome
from tests.peers import (
    LAST_CHUNK,
    STREAM_HEAD,
    FakeWorker,
    Message,
    Wire,
    chunk,
    deaf_listener,
    event,
    eventually,
    request,
    response,
)
from tests.relay_rig import MODEL, Rig, relay

BODY = msgspec.json.encode({"model": MODEL, "messages": [{"role": "user", "content": "hi " * 200}], "stream": True})
AT_ONCE_S = 0.5

Leave = Callable[[Wire], None]


def half_close(client: Wire) -> None:
    client.writer.write_eof()


LEAVING: dict[str, Leave] = {"FIN": Wire.close, "RST": Wire.reset, "half-close": half_close}


@pytest.fixture(params=LEAVING)
def leave(request: pytest.FixtureRequest) -> Leave:
    return LEAVING[request.param]


class Patient:
    """A worker's script that sends some bytes, then nothing, and notices when the gateway gives up."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces
        self.asked = asyncio.Event()
        self.given_up = asyncio.Event()

    async def __call__(self, wire: Wire, _: Message) -> None:
        wire.send(*self.pieces)
        self.asked.set()
        await wire.gone()
        self.given_up.set()


@pytest.fixture
async def silent() -> AsyncIterator[tuple[Patient, Rig]]:
    script = Patient()
    async with FakeWorker(script) as worker, relay([worker]) as rig:
        yield script, rig


async def gives_up(script: Patient, rig: Rig) -> None:
    async with asyncio.timeout(AT_ONCE_S):
        await script.given_up.wait()
    assert await rig.outcome() is Outcome.CLIENT_GONE
    assert rig.blamed == []
    assert rig.services.ledger.in_flight == 0


async def test_a_client_that_leaves_during_a_silent_prefill(silent: tuple[Patient, Rig], leave: Leave) -> None:
    script, rig = silent
    async with rig.connect() as client:
        client.send(request(BODY))
        await script.asked.wait()
        leave(client)
        await gives_up(script, rig)


async def test_a_client_that_leaves_between_head_and_first_byte(leave: Leave) -> None:
    script = Patient(STREAM_HEAD)
    async with FakeWorker(script) as worker, relay([worker]) as rig, rig.connect() as client:
        client.send(request(BODY))
        await script.asked.wait()
        leave(client)
        await gives_up(script, rig)


async def test_a_client_that_leaves_mid_stream(leave: Leave) -> None:
    script = Patient(STREAM_HEAD, chunk(event("a")))
    async with FakeWorker(script) as worker, relay([worker]) as rig, rig.connect() as client:
        client.send(request(BODY))
        await client.reader.readuntil(event("a"))
        leave(client)
        await gives_up(script, rig)


async def test_usage_seen_before_the_client_left_is_recorded() -> None:
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":50,"completion_tokens":7}}\n\n'
    script = Patient(STREAM_HEAD, chunk(usage))
    async with FakeWorker(script) as worker, relay([worker]) as rig, rig.connect() as client:
        client.send(request(BODY))
        await client.reader.readuntil(usage)
        client.close()
        await gives_up(script, rig)
        record = await rig.settled()
        assert (record.prompt_tokens, record.output_tokens) == (50, 7)


async def test_a_client_that_leaves_while_the_worker_is_being_connected_to(leave: Leave) -> None:
    with deaf_listener() as url:
        async with relay([url], timeouts={"connect_s": 30}) as rig, rig.connect() as client:
            client.send(request(BODY))
            await eventually(lambda: rig.services.ledger.in_flight == 1)
            leave(client)
            await eventually(lambda: bool(rig.records), AT_ONCE_S)
            assert await rig.outcome() is Outcome.CLIENT_GONE
            assert rig.blamed == []


async def test_a_client_that_leaves_between_two_attempts(leave: Leave) -> None:
    async def busy(wire: Wire, _: Message) -> None:
        wire.send(response(b"{}", "503 Busy", headers={"Retry-After": "20"}))

    patience = {"backoff_s": 30, "backoff_max_s": 60}
    async with FakeWorker(busy) as worker, relay([worker], retries=patience) as rig, rig.connect() as client:
        client.send(request(BODY))
        await eventually(lambda: len(worker.requests) == 1 and rig.services.ledger.in_flight == 0)
        leave(client)
        await eventually(lambda: bool(rig.records), AT_ONCE_S)
        assert await rig.outcome() is Outcome.CLIENT_GONE


async def test_a_client_that_leaves_while_it_is_still_sending_costs_nothing(leave: Leave) -> None:
    async with FakeWorker(Patient()) as worker, relay([worker]) as rig:
        async with rig.connect() as client:
            client.send(request(BODY)[:-10])
            await eventually(lambda: len(rig.connections) == 1)
            leave(client)
            await eventually(lambda: not rig.connections, AT_ONCE_S)
        assert worker.requests == []
        assert rig.records == []


async def test_a_client_that_does_not_read_and_then_leaves(leave: Leave) -> None:
    flood = chunk(b"x" * 65_536)

    async def script(wire: Wire, _: Message) -> None:
        wire.send(STREAM_HEAD)
        try:
            while True:
                wire.send(flood)
                await wire.writer.drain()
        except ConnectionError:
            flooded.set()

    flooded = asyncio.Event()
    async with FakeWorker(script) as worker, relay([worker]) as rig, rig.connect() as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.send(request(BODY))
        await eventually(lambda: any(c.write_paused for c in rig.connections))  # type: ignore[union-attr]
        leave(client)
        async with asyncio.timeout(AT_ONCE_S):
            await flooded.wait()
        assert await rig.outcome() is Outcome.CLIENT_GONE
        assert rig.blamed == []


async def test_a_client_that_leaves_after_its_answer_is_no_failure(leave: Leave) -> None:
    async def script(wire: Wire, _: Message) -> None:
        wire.send(STREAM_HEAD, chunk(event("a")), LAST_CHUNK)

    async with FakeWorker(script) as worker, relay([worker]) as rig, rig.connect() as client:
        client.send(request(BODY))
        await client.read_message()
        leave(client)
        assert await rig.outcome() is Outcome.OK


async def test_a_pipelined_client_that_leaves_takes_its_waiting_requests_along(leave: Leave) -> None:
    script = Patient()
    async with FakeWorker(script) as worker, relay([worker]) as rig, rig.connect() as client:
        client.send(request(BODY) * 3)
        await script.asked.wait()
        leave(client)
        await gives_up(script, rig)
        assert len(worker.requests) == 1
