"""Bytes pass untouched, in every framing, as soon as they are there."""

from __future__ import annotations

import asyncio
import gzip
import random
import socket

import msgspec
import pytest

from gateway.observe.record import Outcome
from tests.peers import (
    DONE,
    LAST_CHUNK,
    STREAM_HEAD,
    FakeWorker,
    Message,
    Wire,
    answer,
    chunk,
    event,
    request,
    response,
)
from tests.relay_rig import MODEL, relay

CHAT = msgspec.json.encode({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]})
STREAMED = msgspec.json.encode({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True})


async def ask(raw_answer: bytes, raw_request: bytes = request(CHAT)) -> tuple[Message, Message]:
    """Return what the client got and what the worker was asked."""
    async with FakeWorker(answer(raw_answer)) as worker, relay([worker]) as rig, rig.connect() as client:
        client.send(raw_request)
        got = await client.read_message()
        assert await rig.outcome() is Outcome.OK
        return got, worker.requests[0]


async def test_the_worker_gets_the_very_bytes_of_the_body() -> None:
    body = b'{ "model":"m" ,"messages":[{"role":"user","content":"\\u00e9 \xc3\xa9"}],"unknown":{"a":[1,2.50]},"n" : 1}'
    _, asked = await ask(response(), request(body, headers={"X-Custom": "1", "Content-Type": "application/json"}))
    assert asked.body == body
    assert asked.headers["x-custom"] == "1"
    assert asked.headers["content-type"] == "application/json"
    assert asked.target == "/v1/chat/completions"


async def test_the_client_gets_the_very_bytes_of_the_answer() -> None:
    body = b'{"choices": [], "odd":  "\\ud83d \xff"}'
    got, _ = await ask(response(body, headers={"Set-Cookie": "a=1", "set-cookie": "b=2", "X-Engine": "v"}))
    assert got.body == body
    assert b"Content-Type: application/json\r\nContent-Length: %d\r\nSet-Cookie: a=1\r\nset-cookie: b=2\r\n" % len(
        body
    ) in (got.raw_head)


async def test_binary_and_compressed_bodies_pass() -> None:
    audio = random.Random(1).randbytes(300_000)
    got, _ = await ask(response(audio, content_type="audio/mpeg"))
    assert got.body == audio
    packed = gzip.compress(b'{"usage":{"prompt_tokens":1}}')
    got, _ = await ask(response(packed, headers={"Content-Encoding": "gzip"}))
    assert got.body == packed
    assert got.headers["content-encoding"] == "gzip"


@pytest.mark.parametrize("status", ["400 Bad Request", "401 Unauthorized", "404 Not Found", "422 What", "500 Oh"])
async def test_a_workers_error_passes_with_its_status_and_bytes(status: str) -> None:
    body = b'{"object":"error",  "message":"no \\u00fc", "code":1}'
    got, _ = await ask(response(body, status), request(STREAMED))
    assert got.start == f"HTTP/1.1 {status}"
    assert got.body == body
    assert got.headers["content-type"] == "application/json"


async def test_a_redirect_to_the_worker_leads_to_the_gateway() -> None:
    async def redirect(wire: Wire, asked: Message) -> None:
        location = f"http://{asked.headers['host']}/v1/chat/completions?a=b"
        wire.send(response(b"", "307 Temporary Redirect", headers={"Location": location}))

    async with FakeWorker(redirect) as worker, relay([worker]) as rig, rig.connect() as client:
        client.send(request(CHAT, "/v1/chat/completions/?a=b"))
        got = await client.read_message()
        assert got.start == "HTTP/1.1 307 Temporary Redirect"
        assert got.headers["location"] == "/v1/chat/completions?a=b"
        assert str(worker.port).encode() not in got.raw_head


async def test_a_stream_passes_with_its_framing() -> None:
    frames = b"".join(chunk(event(f"t{n}")) for n in range(20)) + chunk(DONE) + LAST_CHUNK
    got, _ = await ask(STREAM_HEAD + frames, request(STREAMED))
    assert got.raw_body == frames
    assert got.headers["content-type"] == "text/event-stream"


async def test_trailers_of_a_stream_pass() -> None:
    frames = chunk(event("x")) + b"0\r\nX-Checksum: 1\r\n\r\n"
    got, _ = await ask(STREAM_HEAD + frames)
    assert got.raw_body == frames


async def test_frames_split_anywhere_pass() -> None:
    whole = STREAM_HEAD + chunk(event("one") + event("two")) + chunk(event("three")[:9]) + chunk(event("three")[9:])
    whole += chunk(DONE) + LAST_CHUNK
    step = random.Random(2)

    async def script(wire: Wire, _: Message) -> None:
        at = 0
        while at < len(whole):
            size = step.randint(1, 25)
            await wire.send_slowly(whole[at : at + size])
            at += size

    async with FakeWorker(script) as worker, relay([worker]) as rig, rig.connect() as client:
        client.send(request(STREAMED))
        got = await client.read_message()
        assert got.body == event("one") + event("two") + event("three") + DONE
        assert STREAM_HEAD + got.raw_body == whole


async def test_each_chunk_arrives_when_the_worker_sends_it() -> None:
    seen = asyncio.Event()

    async def script(wire: Wire, _: Message) -> None:
        wire.send(STREAM_HEAD)
        for n in range(5):
            wire.send(chunk(event(f"t{n}")))
            await seen.wait()
            seen.clear()
        wire.send(LAST_CHUNK)

    async with FakeWorker(script) as worker, relay([worker]) as rig, rig.connect() as client:
        client.send(request(STREAMED))
        await client.reader.readuntil(b"\r\n\r\n")
        for n in range(5):
            assert await client.read_some() == chunk(event(f"t{n}"))
            seen.set()
        assert await client.read_some() == LAST_CHUNK


async def test_a_body_that_ends_with_the_connection_passes_and_ends_the_clients() -> None:
    async def script(wire: Wire, _: Message) -> None:
        await wire.send_slowly(b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\n", b"some ", b"text")
        wire.close()

    async with FakeWorker(script) as worker, relay([worker]) as rig, rig.connect() as client:
        client.send(request(CHAT))
        got = await client.read_message(until_close=True)
        assert got.start == "HTTP/1.1 200 OK"
        assert got.body == b"some text"
        assert got.headers["connection"] == "close"
        assert await rig.outcome() is Outcome.OK


async def test_an_answer_to_head_has_no_body_whatever_it_announces() -> None:
    plain = b"HTTP/1.1 200 OK\r\nContent-Length: 17\r\n\r\n"
    async with FakeWorker(answer(plain)) as worker, relay([worker]) as rig, rig.connect() as client:
        for _ in range(3):
            client.send(request(method="HEAD", path="/v1/files"))
            got = await client.read_message(bodiless=True)
            assert got.headers["content-length"] == "17"
        assert worker.connections == 1


@pytest.mark.parametrize("status", ["204 No Content", "304 Not Modified"])
async def test_bodiless_statuses_keep_the_connection(status: str) -> None:
    script = answer(f"HTTP/1.1 {status}\r\n\r\n".encode())
    async with FakeWorker(script) as worker, relay([worker]) as rig, rig.connect() as client:
        for _ in range(3):
            client.send(request(CHAT))
            got = await client.read_message()
            assert got.start == f"HTTP/1.1 {status}"
        assert worker.connections == 1


async def test_an_empty_body_passes() -> None:
    got, _ = await ask(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    assert got.status == 200
    got, _ = await ask(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + LAST_CHUNK)
    assert got.raw_body == LAST_CHUNK


async def test_interim_responses_are_not_passed_on() -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"
    got, _ = await ask(interim + response(b'{"a":1}'))
    assert got.status == 200
    assert "link" not in got.headers


async def test_a_head_that_arrives_byte_by_byte_is_understood() -> None:
    async def script(wire: Wire, _: Message) -> None:
        await wire.send_slowly(*(bytes([byte]) for byte in response(b"{}")))

    async with FakeWorker(script) as worker, relay([worker]) as rig, rig.connect() as client:
        client.send(request(CHAT))
        assert (await client.read_message()).body == b"{}"


async def test_http_1_0_clients_get_streams_without_chunks() -> None:
    frames = chunk(event("a")) + chunk(event("b") + DONE) + LAST_CHUNK
    async with FakeWorker(answer(STREAM_HEAD + frames)) as worker, relay([worker]) as rig, rig.connect() as client:
        client.send(request(STREAMED, version="1.0"))
        got = await client.read_message(until_close=True)
        assert got.body == event("a") + event("b") + DONE
        assert "transfer-encoding" not in got.headers
        assert got.headers["connection"] == "close"


async def test_worker_connections_are_used_again() -> None:
    async with FakeWorker(answer(response())) as worker, relay([worker]) as rig, rig.connect() as client:
        for _ in range(5):
            client.send(request(CHAT))
            await client.read_message()
        assert worker.connections == 1
        assert len(worker.requests) == 5


async def test_workers_that_vanish_without_a_word_are_noticed() -> None:
    async with FakeWorker(answer(response())) as worker, relay([worker]) as rig, rig.connect() as client:
        client.send(request(CHAT))
        await client.read_message()
        (pool,) = rig.services.upstream.pools.values()
        upstream = pool.take()
        assert upstream is not None
        sock = upstream.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < 60
        pool.keep(upstream)


async def test_a_worker_that_closes_after_each_answer_is_connected_to_anew() -> None:
    script = answer(response(headers={"Connection": "close"}))
    async with FakeWorker(script) as worker, relay([worker]) as rig, rig.connect() as client:
        for _ in range(3):
            client.send(request(CHAT))
            assert "connection" not in (await client.read_message()).headers
        assert worker.connections == 3


@pytest.mark.parametrize("method", ["OPTIONS", "DELETE", "PUT", "PATCH"])
async def test_other_methods_pass(method: str) -> None:
    _, asked = await ask(response(), request(method=method, path="/v1/files/1?x=%20y"))
    assert asked.method == method
    assert asked.target == "/v1/files/1?x=%20y"


async def test_large_bodies_pass_both_ways() -> None:
    content = "word " * 600_000
    body = msgspec.json.encode({"model": MODEL, "messages": [{"role": "user", "content": content}]})
    reply = msgspec.json.encode({"text": "x" * 5_000_000})
    got, asked = await ask(response(reply), request(body))
    assert asked.body == body
    assert got.body == reply
