"""Requests in every form HTTP/1.1 allows, and the refusal of those it does not."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import msgspec
import pytest

from gateway.observe.record import Outcome
from tests.peers import STREAM_HEAD, FakeWorker, Message, Wire, chunk, event, eventually, request, response
from tests.relay_rig import MODEL, Rig, relay

CHAT = msgspec.json.encode({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]})
LIMIT = 4096
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\n"


async def echo_body(wire: Wire, message: Message) -> None:
    wire.send(response(message.body))


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with FakeWorker(echo_body) as worker, relay([worker], server={"max_body_bytes": LIMIT}) as rig:
        yield rig


@pytest.fixture
async def client(rig: Rig) -> AsyncIterator[Wire]:
    async with rig.connect() as client:
        yield client


def error_of(got: Message) -> dict[str, str]:
    assert got.headers["content-type"] == "application/json"
    error = msgspec.json.decode(got.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def chunked(*pieces: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(map(chunk, pieces)) + end


# Forms of requests


async def test_a_chunked_upload_becomes_one_of_known_length(client: Wire) -> None:
    client.send(chunked(CHAT[:5], CHAT[5:6], CHAT[6:]))
    assert (await client.read_message()).body == CHAT


async def test_extensions_and_trailers_of_a_chunked_upload_end_here(client: Wire, rig: Rig) -> None:
    client.send(HEAD, b"Transfer-Encoding: chunked\r\n\r\n")
    client.send(b"%x;a=b\r\n%b\r\n0\r\nX-Kvway-Worker: w9\r\nHost: evil\r\n\r\n" % (len(CHAT), CHAT))
    assert (await client.read_message()).body == CHAT


async def test_a_request_that_arrives_byte_by_byte_is_understood(client: Wire) -> None:
    await client.send_slowly(*(bytes([byte]) for byte in request(CHAT)))
    assert (await client.read_message()).body == CHAT


async def test_pipelined_requests_are_answered_in_order(client: Wire) -> None:
    bodies = [msgspec.json.encode({"model": MODEL, "prompt": str(n)}) for n in range(40)]
    client.send(b"".join(request(body, path="/v1/completions") for body in bodies))
    assert [(await client.read_message()).body for _ in bodies] == bodies


async def test_the_apps_answers_keep_their_place_among_the_workers(client: Wire) -> None:
    health = request(method="GET", path="/health")
    client.send(request(CHAT), health, request(b"[1]"), health, health, request(CHAT), health)
    bodies = [(await client.read_message()).body for _ in range(7)]
    assert bodies[0] == bodies[5] == CHAT
    assert bodies[1] == bodies[3] == bodies[4] == bodies[6] == b'{"status":"ok"}'
    assert b"JSON object" in bodies[2]


async def test_a_body_for_the_app_reaches_it(client: Wire) -> None:
    client.send(request(b'{"a":1}', path="/echo", headers={"Content-Type": "application/json"}), request(CHAT))
    assert (await client.read_message()).body == b'{"a":1}'
    assert (await client.read_message()).body == CHAT


async def test_expect_100_continue_is_answered_before_the_body(client: Wire) -> None:
    head = HEAD + b"Content-Length: %d\r\nExpect: 100-continue\r\n\r\n" % len(CHAT)
    for _ in range(2):
        client.send(head)
        assert (await client.read_message()).status == 100
        client.send(CHAT)
        assert (await client.read_message()).body == CHAT


async def test_expect_100_continue_waits_for_its_turn(client: Wire) -> None:
    client.send(request(CHAT), HEAD, b"Content-Length: %d\r\nExpect: 100-continue\r\n\r\n" % len(CHAT))
    assert (await client.read_message()).status == 200
    assert (await client.read_message()).status == 100
    client.send(CHAT)
    assert (await client.read_message()).body == CHAT


async def test_expect_100_continue_waits_for_the_apps_answer_too(client: Wire) -> None:
    health = request(method="GET", path="/health")
    client.send(request(CHAT), health, HEAD, b"Content-Length: %d\r\nExpect: 100-continue\r\n\r\n" % len(CHAT))
    assert [(await client.read_message()).status for _ in range(3)] == [200, 200, 100]
    client.send(CHAT)
    assert (await client.read_message()).body == CHAT


async def test_no_body_is_invited_that_would_be_refused(client: Wire) -> None:
    client.send(HEAD, b"Content-Length: %d\r\nExpect: 100-continue\r\n\r\n" % (LIMIT + 1))
    assert (await client.read_message()).status == 413


async def test_http_1_0_is_answered_and_closed(client: Wire) -> None:
    client.send(b"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (len(CHAT), CHAT))
    got = await client.read_message()
    assert got.body == CHAT
    assert got.headers["connection"] == "close"
    assert await client.read_to_end() == b""


async def test_connection_close_is_honoured_and_what_follows_ignored(client: Wire, rig: Rig) -> None:
    client.send(request(CHAT, headers={"Connection": "close"}) + request(CHAT))
    got = await client.read_message()
    assert got.headers["connection"] == "close"
    assert await client.read_to_end() == b""
    assert len(rig.records) == 1


async def test_a_connection_lives_on_after_an_error(client: Wire) -> None:
    client.send(request(b"nonsense"))
    assert (await client.read_message()).status == 400
    client.send(request(CHAT))
    assert (await client.read_message()).body == CHAT


async def test_an_offer_to_upgrade_is_not_taken_up(client: Wire) -> None:
    headers = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABk"}
    client.send(request(CHAT, headers=headers), request(CHAT))
    assert (await client.read_message()).body == CHAT
    assert (await client.read_message()).body == CHAT


async def test_any_number_of_offers_to_upgrade_may_be_pipelined(client: Wire) -> None:
    count = 1000
    client.send(b"GET /v1/x HTTP/1.1\r\nHost: g\r\nConnection: Upgrade\r\nUpgrade: h\r\n\r\n" * count)
    assert {(await client.read_message()).status for _ in range(count)} == {200}


async def test_an_offer_to_upgrade_makes_no_newer_client(client: Wire) -> None:
    client.send(request(CHAT, version="1.0", headers={"Connection": "Upgrade", "Upgrade": "h2c"}))
    got = await client.read_message()
    assert (got.body, got.headers["connection"]) == (CHAT, "close")
    assert await client.read_to_end() == b""


async def test_an_absolute_target_is_understood(client: Wire) -> None:
    client.send(request(CHAT, path="http://g/v1/chat/completions"), request(method="GET", path="http://g/health"))
    assert (await client.read_message()).body == CHAT
    assert (await client.read_message()).body == b'{"status":"ok"}'


async def test_answers_to_head_requests_of_ours_have_no_body(client: Wire) -> None:
    client.send(request(b'{"model":"unknown"}', method="HEAD", path="/v1/embeddings"), request(CHAT))
    assert (await client.read_message(bodiless=True)).status == 404
    assert (await client.read_message()).body == CHAT


async def test_client_sockets_send_without_delay(rig: Rig, client: Wire) -> None:
    client.send(request(CHAT))
    await client.read_message()
    (connection,) = rig.connections
    sock = connection.transport.get_extra_info("socket")
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


# What is refused

SMUGGLING = {
    "length and chunked": HEAD + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET ",
    "chunked and length": HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\nGET ",
    "two lengths": HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}x",
    "the same length twice": HEAD + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
    "a list of lengths": HEAD + b"Content-Length: 2, 2\r\n\r\n{}",
    "a signed length": HEAD + b"Content-Length: +2\r\n\r\n{}",
    "a hexadecimal length": HEAD + b"Content-Length: 0x2\r\n\r\n{}",
    "an enormous length": HEAD + b"Content-Length: 99999999999999999999\r\n\r\n{}",
    "no length": HEAD + b"Content-Length:\r\n\r\n{}",
    "bare LF in a head": HEAD[:-2] + b"\nContent-Length: 2\r\n\r\n{}",
    "bare LF throughout": b"POST /v1/completions HTTP/1.1\nHost: g\nContent-Length: 2\n\n{}",
    "bare CR": b"POST /v1/completions HTTP/1.1\r\nHost: g\rX: y\r\n\r\n",
    "a folded header": HEAD + b"X-Long: a\r\n b\r\n\r\n",
    "a folded coding": HEAD + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    "a blank before the colon": HEAD + b"Content-Length : 2\r\n\r\n{}",
    "a blank line start": b"POST /v1/completions HTTP/1.1\r\n Host: g\r\n\r\n",
    "an unknown coding": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunked not last": HEAD + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    "chunked twice": HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a compressed body": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "identity": HEAD + b"Transfer-Encoding: identity\r\n\r\n",
    "chunked in 1.0": b"POST /v1/completions HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a bare LF in a chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\n{}\r\n0\r\n\r\n",
    "a chunk longer than it says": HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}}\r\n0\r\n\r\n",
    "a negative chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\n-2\r\n{}\r\n0\r\n\r\n",
    "an enormous chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n{}\r\n",
    "two hosts": HEAD + b"Host: h\r\nContent-Length: 2\r\n\r\n{}",
    "no host": b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}",
    "NUL in a value": HEAD + b"X: a\0b\r\n\r\n",
    "a nameless header": HEAD + b": x\r\n\r\n",
    "HTTP/2": b"POST /v1/completions HTTP/2.0\r\nHost: g\r\n\r\n",
    "the HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "an unknown method": b"FETCH /v1/completions HTTP/1.1\r\nHost: g\r\n\r\n",
    "a tunnel": b"CONNECT worker:80 HTTP/1.1\r\nHost: g\r\n\r\n",
    "no path": b"OPTIONS * HTTP/1.1\r\nHost: g\r\n\r\n",
    "a dot segment": b"GET /v1/../admin HTTP/1.1\r\nHost: g\r\n\r\n",
    "TLS on a plain port": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "noise": bytes(range(256)),
}


@pytest.mark.parametrize("name", SMUGGLING)
async def test_ambiguous_requests_are_refused(name: str, client: Wire, rig: Rig) -> None:
    client.send(SMUGGLING[name])
    got = await client.read_message()
    assert got.status == 400
    assert error_of(got)["type"] == "invalid_request_error"
    assert got.headers["connection"] == "close"
    assert await client.read_to_end() == b""
    assert await rig.outcome() is Outcome.REJECTED


async def test_what_is_refused_never_reaches_a_worker() -> None:
    async with FakeWorker(echo_body) as worker, relay([worker]) as rig:
        for raw in SMUGGLING.values():
            async with rig.connect() as client:
                client.send(raw)
                await client.read_to_end()
        assert worker.connections == 0


async def test_a_bad_request_behind_a_good_one_waits_for_its_turn(client: Wire) -> None:
    client.send(request(CHAT), SMUGGLING["length and chunked"])
    assert (await client.read_message()).body == CHAT
    assert (await client.read_message()).status == 400
    assert await client.read_to_end() == b""


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"[]", None),
        (b"null", None),
        (b'"text"', None),
        (b"{", None),
        (b'{"model": "m", "messages": "hi"}', "messages"),
        (b'{"model": 5, "messages": []}', "model"),
        (b'{"model": "m", "messages": [3]}', "messages[0]"),
        (b'\xff\xfe{"model":"m"}', None),
        (b"[" * 100_000, None),
        (b'{"a":' * 100_000, None),
    ],
)
async def test_malformed_bodies_are_refused_by_name(body: bytes, param: str | None) -> None:
    async with FakeWorker(echo_body) as worker, relay([worker]) as rig, rig.connect() as client:
        client.send(request(body))
        got = await client.read_message()
        assert got.status == 400
        error = error_of(got)
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param
        assert worker.connections == 0


async def test_of_doubled_keys_the_last_counts_as_it_does_for_engines(client: Wire, rig: Rig) -> None:
    body = b'{"model":"unknown","messages":5,"model":"m","messages":[{"role":"user","content":"hi"}]}'
    client.send(request(body))
    got = await client.read_message()
    assert (got.status, got.body) == (200, body)
    assert rig.records[0].model == MODEL
    client.send(request(b'{"model":"m","messages":[],"model":"unknown"}'))
    assert (await client.read_message()).status == 404


async def test_an_unknown_model_is_a_404_and_no_label(client: Wire, rig: Rig) -> None:
    for path, body in (("/v1/chat/completions", b'{"model":"x","messages":[]}'), ("/v1/embeddings", b'{"model":"x"}')):
        client.send(request(body, path=path))
        got = await client.read_message()
        assert got.status == 404
        assert error_of(got)["code"] == "model_not_found"
    assert [record.model for record in rig.records] == ["", ""]


# Limits


async def test_a_body_above_the_limit_is_refused_by_its_announced_length(client: Wire) -> None:
    client.send(HEAD, b"Content-Length: %d\r\n\r\n" % (200 * 2**20))
    got = await client.read_message()
    assert got.status == 413
    assert str(LIMIT) in error_of(got)["message"]
    assert "max_body_bytes" in error_of(got)["message"]


async def test_a_chunked_body_above_the_limit_is_refused_when_it_gets_there(client: Wire) -> None:
    client.send(chunked(b"x" * LIMIT, b"x", end=b""))
    assert (await client.read_message()).status == 413


async def test_the_refusal_reaches_a_client_that_is_still_sending(client: Wire, rig: Rig) -> None:
    client.send(HEAD, b"Content-Length: %d\r\n\r\n" % (64 * 2**20))
    client.send(b"x" * (16 * 2**20))
    assert (await client.read_message()).status == 413
    (connection,) = rig.connections
    assert not connection.parser.feed_data(b"")
    assert connection._upload.take() == b""


async def test_a_body_at_the_limit_passes(client: Wire) -> None:
    body = CHAT[:-1] + b',"pad":"' + b"x" * (LIMIT - len(CHAT) - 9) + b'"}'
    assert len(body) == LIMIT
    client.send(request(body))
    assert (await client.read_message()).body == body


@pytest.mark.parametrize(
    "head",
    [
        b"GET /v1/" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: g\r\n\r\n",
        b"GET /v1/x HTTP/1.1\r\nHost: g\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
        b"GET /v1/x HTTP/1.1\r\nHost: g\r\n" + b"X: y\r\n" * 300 + b"\r\n",
        b"GET /v1/x HTTP/1.1\r\nHost: g\r\nX: " + b"x" * 300_000,
        b"GET /health HTTP/1.1\r\nHost: g\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
        b"\r\n" * 50_000,
    ],
)
async def test_heads_are_bounded(client: Wire, head: bytes) -> None:
    for start in range(0, len(head), 30_000):
        await client.send_slowly(head[start : start + 30_000])
    got = await client.read_message()
    assert got.status == 431
    error_of(got)


async def test_a_head_that_is_too_long_is_refused_also_in_one_read(client: Wire) -> None:
    client.send(b"GET /v1/x HTTP/1.1\r\nHost: g\r\nX: " + b"x" * 100_000 + b"\r\n\r\n")
    assert (await client.read_message()).status == 431


@pytest.mark.parametrize("filler", [b"0\r\nX-Trailer: ", b"1;ext="])
async def test_chunk_extensions_and_trailers_are_bounded(client: Wire, filler: bytes) -> None:
    client.send(HEAD, b"Transfer-Encoding: chunked\r\n\r\n", filler)
    with_refusal = asyncio.ensure_future(client.read_message())
    for _ in range(40):
        await client.send_slowly(b"x" * 65_536)
        if with_refusal.done():
            break
    assert (await with_refusal).status == 400


async def test_trailers_of_a_body_for_the_app_are_bounded(client: Wire, rig: Rig) -> None:
    client.send(b"POST /health HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n")
    with pytest.raises(ConnectionError):
        for _ in range(100):
            await client.send_slowly(b"A: b\r\n" * 10_000)
    await eventually(lambda: not rig.connections)


async def test_a_body_in_tiny_chunks_is_understood(client: Wire) -> None:
    client.send(chunked(*(CHAT[n : n + 1] for n in range(len(CHAT)))))
    assert (await client.read_message()).body == CHAT


# Time


async def test_an_idle_connection_is_closed() -> None:
    async with (
        FakeWorker(echo_body) as worker,
        relay([worker], server={"keep_alive_s": 0.3}) as rig,
        rig.connect() as used,
    ):
        used.send(request(CHAT))
        await used.read_message()
        async with rig.connect() as fresh:
            assert await fresh.read_to_end() == b""
        assert await used.read_to_end() == b""


@pytest.mark.parametrize("part", [HEAD, HEAD + b"Content-Length: 10\r\n\r\n123"])
async def test_a_request_that_never_becomes_whole_is_dropped(part: bytes) -> None:
    async with FakeWorker(echo_body) as worker, relay([worker], timeouts={"client_s": 0.3}) as rig:
        async with rig.connect() as client:
            client.send(part)
            assert await client.read_to_end() == b""
        assert worker.connections == 0


async def test_a_trickled_head_does_not_stay_for_ever() -> None:
    async with relay(["http://127.0.0.1:1"], timeouts={"client_s": 0.4}) as rig, rig.connect() as client:
        client.send(b"GET /v1/")
        for _ in range(60):
            await client.send_slowly(b"x")
            await asyncio.sleep(0.02)
            if not rig.connections:
                break
        assert not rig.connections


async def test_the_whole_request_may_take_only_so_long() -> None:
    async def script(wire: Wire, _: Message) -> None:
        wire.send(STREAM_HEAD)
        while True:
            wire.send(chunk(event("a")))
            await asyncio.sleep(0.02)
            await wire.writer.drain()

    async with FakeWorker(script) as worker, relay([worker], timeouts={"total_s": 0.4}) as rig, rig.connect() as client:
        client.send(request(CHAT))
        got = await client.read_message()
        assert b"total_s" in got.body
        assert b"[DONE]" not in got.body
        assert await rig.outcome() is Outcome.CUT
        assert rig.blamed == []


async def test_the_whole_request_may_take_only_so_long_before_the_first_byte() -> None:
    async def hang(wire: Wire, _: Message) -> None:
        await wire.gone()

    async with FakeWorker(hang) as worker, relay([worker], timeouts={"total_s": 0.3}) as rig, rig.connect() as client:
        client.send(request(CHAT))
        got = await client.read_message()
        assert got.status == 504
        assert "total_s" in error_of(got)["message"]
        assert rig.blamed == []
        await eventually(lambda: worker.open == 0)
