"""What requests say about their workers: who is ejected for them and who is not, and whom a bad worker slows down."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest

from gateway.fleet.registry import State
from gateway.observe.record import Outcome
from tests.peers import LAST_CHUNK, STREAM_HEAD, FakeWorker, Message, Wire, answer, chunk, event, eventually, request
from tests.peers import response as http
from tests.relay_rig import MODEL, Rig, relay

CHAT = msgspec.json.encode({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]})
STREAMED = CHAT[:-1] + b',"stream":true}'
GOOD = answer(http(b'{"good":true}'))
EAGER = {"failures": 1, "interval_s": 0.05}


async def reset(wire: Wire, _: Message) -> None:
    wire.reset()


async def ask(rig: Rig, body: bytes = CHAT) -> Message:
    async with rig.connect() as client:
        client.send(request(body))
        return await client.read_message()


def states(rig: Rig) -> list[State]:
    return [worker.state for worker in rig.services.registry.workers.values()]


async def test_a_worker_that_fails_requests_gets_none_until_a_probe_brings_it_back() -> None:
    async with FakeWorker(reset) as bad, FakeWorker(GOOD) as good, relay([bad, good], health=EAGER) as rig:
        assert [(await ask(rig)).status for _ in range(6)] == [200] * 6
        assert states(rig) == [State.EJECTED, State.READY]
        assert len(bad.requests) == 1
        bad.script = GOOD
        await rig.services.health.start()
        await eventually(lambda: states(rig) == [State.READY, State.READY])
        await ask(rig)
        await ask(rig)
        assert [message.target for message in bad.requests].count("/v1/chat/completions") == 2


async def test_failing_requests_never_take_the_last_workers() -> None:
    async with FakeWorker(reset) as one, FakeWorker(reset) as two, relay([one, two], health=EAGER) as rig:
        for _ in range(4):
            assert (await ask(rig)).status == 502
        assert states(rig).count(State.READY) == 1
        one.script = two.script = GOOD
        assert (await ask(rig)).status == 200


@pytest.mark.parametrize("status", ["400 Bad Request", "404 Not Found", "429 Too Many Requests", "503 Queue Full"])
async def test_statuses_that_are_no_fault_of_the_worker_do_not_eject_it(status: str) -> None:
    refusing = answer(http(b'{"error":"busy"}', status))
    sections: dict[str, Any] = {"health": EAGER, "retries": {"max_attempts": 1}}
    async with FakeWorker(refusing) as bad, FakeWorker(GOOD) as good, relay([bad, good], **sections) as rig:
        for _ in range(6):
            await ask(rig)
        await rig.settled()
        assert len(bad.requests) == 3
        assert states(rig) == [State.READY, State.READY]


async def test_a_generation_that_takes_long_is_no_failure() -> None:
    limits = {"header_s": 0.4, "idle_s": 0.4}
    pieces = [event(f"t{n}") for n in range(20)]

    async def slowly(wire: Wire, _: Message) -> None:
        wire.send(STREAM_HEAD)
        for piece in pieces:
            wire.send(chunk(piece))
            await asyncio.sleep(0.05)
        wire.send(LAST_CHUNK)

    async with FakeWorker(slowly) as worker, relay([worker], health=EAGER, timeouts=limits) as rig:
        assert (await ask(rig, STREAMED)).body == b"".join(pieces)
        record = await rig.settled()
        assert record.outcome is Outcome.OK
        assert record.ended_at - record.received_at > limits["header_s"] + limits["idle_s"]
        assert rig.blamed == []


async def test_a_hung_worker_slows_nobody_else() -> None:
    async def hang(wire: Wire, _: Message) -> None:
        await wire.gone()

    async with (
        FakeWorker(hang) as hung,
        FakeWorker(GOOD) as good,
        relay([hung, good]) as rig,
        AsyncExitStack() as stack,
    ):
        for _ in range(10):  # in turn to one and the other
            client = await stack.enter_async_context(rig.connect())
            client.send(request(CHAT))
        await eventually(lambda: len(hung.requests) == 5 and len(rig.records) == 5)
        assert {(record.worker, record.status) for record in rig.records} == {("w1", 200)}
        assert rig.services.ledger.in_flight == 5


SLOW = {"header_s": b"", "idle_s": chunk(event("a")), "total_s": chunk(event("a"))}


@pytest.mark.parametrize("limit", SLOW)
async def test_every_timeout_may_differ_per_model(limit: str) -> None:
    async def stall(wire: Wire, _: Message) -> None:
        wire.send(STREAM_HEAD, SLOW[limit])
        await wire.gone()

    models = {MODEL: {"timeouts": {limit: 0.1}}}
    async with FakeWorker(stall) as worker, relay([worker], models=models, retries={"max_attempts": 1}) as rig:
        got = await ask(rig, STREAMED)
        outcome = Outcome.UPSTREAM_FAILED if limit == "header_s" else Outcome.CUT
        assert await rig.outcome() is outcome
        assert b'"error"' in got.body
