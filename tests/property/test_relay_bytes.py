"""However a request or an answer is cut on its way, worker and client get the very bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise

import msgspec
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from tests.peers import LAST_CHUNK, STREAM_HEAD, FakeWorker, Message, Wire, chunk, event, request, response
from tests.relay_rig import MODEL, Rig, relay

CHAT = msgspec.json.encode({"model": MODEL, "messages": [{"role": "user", "content": "hé \u2028 hi"}], "x": {"y": [1]}})
EVENTS = b"".join(event(f"t{n}") for n in range(4)) + b'data: {"usage":{"prompt_tokens":3}}\n\ndata: [DONE]\n\n'
BODIES = st.one_of(st.just(EVENTS), st.binary(max_size=2000))
CUTS = st.lists(st.integers(0, 10_000), max_size=12)


def cut(whole: bytes, places: list[int]) -> list[bytes]:
    if not whole:
        return []
    edges = sorted({0, len(whole), *(place % len(whole) for place in places)})
    return [whole[start:end] for start, end in pairwise(edges)]


class Line:
    """A gateway between one worker and one client, on a loop of its own that outlives an example."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self.runner = runner
        self.pieces: list[bytes] = []
        self.closes = False
        self.worker = FakeWorker(self._script)
        self.stack = relay([self.worker])
        self.rig: Rig

    async def open(self) -> None:
        await self.worker.__aenter__()
        self.stack = relay([self.worker])
        self.rig = await self.stack.__aenter__()

    async def close(self) -> None:
        await self.stack.__aexit__(None, None, None)
        await self.worker.__aexit__()

    async def _script(self, wire: Wire, _: Message) -> None:
        for piece in self.pieces:
            wire.send(piece)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        if self.closes:
            wire.close()

    def ask(self, request_pieces: list[bytes], answer_pieces: list[bytes], closes: bool = False) -> Message:
        """Send a request in pieces, let the worker answer in pieces, and return what the client got."""
        self.pieces, self.closes = answer_pieces, closes
        return self.runner.run(self._ask(request_pieces, closes))

    async def _ask(self, pieces: list[bytes], closes: bool) -> Message:
        async with self.rig.connect() as client:
            for piece in pieces:
                client.send(piece)
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            return await client.read_message(until_close=closes)


@pytest.fixture(scope="module")
def line() -> Iterator[Line]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        line = Line(runner)
        runner.run(line.open())
        yield line
        runner.run(line.close())


@given(body=BODIES, places=CUTS)
def test_an_answer_of_known_length_arrives_whole(line: Line, body: bytes, places: list[int]) -> None:
    assert line.ask([request(CHAT)], cut(response(body), places)).body == body


@given(body=BODIES, chunk_places=CUTS, places=CUTS)
def test_a_chunked_answer_arrives_with_its_framing(
    line: Line, body: bytes, chunk_places: list[int], places: list[int]
) -> None:
    frames = b"".join(map(chunk, cut(body, chunk_places))) + LAST_CHUNK
    assert line.ask([request(CHAT)], cut(STREAM_HEAD + frames, places)).raw_body == frames


@given(body=BODIES, chunk_places=CUTS, places=CUTS)
def test_an_http_1_0_client_gets_the_same_without_framing(
    line: Line, body: bytes, chunk_places: list[int], places: list[int]
) -> None:
    frames = b"".join(map(chunk, cut(body, chunk_places))) + LAST_CHUNK
    old = request(CHAT, version="1.0")
    assert line.runner.run(read_to_end(line, old, cut(STREAM_HEAD + frames, places))) == body


async def read_to_end(line: Line, raw: bytes, answer_pieces: list[bytes]) -> bytes:
    line.pieces, line.closes = answer_pieces, False
    async with line.rig.connect() as client:
        client.send(raw)
        return (await client.read_message(until_close=True)).body


@given(body=BODIES, places=CUTS)
def test_an_answer_that_ends_with_the_connection_arrives_whole(line: Line, body: bytes, places: list[int]) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    assert line.ask([request(CHAT)], cut(head + body, places), closes=True).body == body


@given(places=CUTS)
def test_a_request_of_known_length_reaches_the_worker_whole(line: Line, places: list[int]) -> None:
    line.ask(cut(request(CHAT), places), [response()])
    assert line.worker.requests[-1].body == CHAT


@given(chunk_places=CUTS, places=CUTS)
def test_a_chunked_request_reaches_the_worker_whole(line: Line, chunk_places: list[int], places: list[int]) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n"
    raw = head + b"".join(map(chunk, cut(CHAT, chunk_places))) + LAST_CHUNK
    line.ask(cut(raw, places), [response()])
    assert line.worker.requests[-1].body == CHAT
