"""Before the first byte a request moves on to another worker; after it, it ends honestly."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
import pytest

from gateway.observe.record import Outcome
from tests.peers import (
    DONE,
    LAST_CHUNK,
    STREAM_HEAD,
    FakeWorker,
    Message,
    Script,
    Wire,
    answer,
    chunk,
    deaf_listener,
    event,
    eventually,
    request,
    response,
)
from tests.relay_rig import MODEL, Rig, relay

CHAT = msgspec.json.encode({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]})
STREAMED = msgspec.json.encode({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True})
MESSAGES = STREAMED.replace(b"{", b'{"max_tokens":9,', 1)
GOOD = answer(response(b'{"good":true}'))
NOBODY = "http://127.0.0.1:1"


async def reset(wire: Wire, _: Message) -> None:
    wire.reset()


async def close(wire: Wire, _: Message) -> None:
    wire.close()


async def close_within_head(wire: Wire, _: Message) -> None:
    await wire.send_slowly(b"HTTP/1.1 200 OK\r\nContent-")
    wire.close()


async def close_before_first_byte(wire: Wire, _: Message) -> None:
    await wire.send_slowly(STREAM_HEAD)
    wire.close()


async def speak_nonsense(wire: Wire, _: Message) -> None:
    wire.send(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")


async def hang(wire: Wire, _: Message) -> None:
    await wire.gone()


def busy(status: str = "503 Service Unavailable", retry_after: str | None = None) -> Script:
    headers = {"Retry-After": retry_after} if retry_after else {}
    return answer(response(b'{"error": "queue  full"}', status, headers=headers))


@asynccontextmanager
async def fleet(*scripts: Script | str, **sections: Any) -> AsyncIterator[tuple[Rig, list[FakeWorker]]]:
    """A relay in front of one worker per script; a string is the URL of a worker that is not there."""
    async with AsyncExitStack() as stack:
        workers = [
            script if isinstance(script, str) else await stack.enter_async_context(FakeWorker(script))
            for script in scripts
        ]
        sections.setdefault("retries", {"backoff_s": 0.001})
        rig = await stack.enter_async_context(relay(workers, **sections))
        yield rig, [worker for worker in workers if isinstance(worker, FakeWorker)]


@contextmanager
def no_descriptors_left() -> Iterator[None]:
    """Let this process open no file or socket more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Path(os.devnull).open() as next_one:
        resource.setrlimit(resource.RLIMIT_NOFILE, (next_one.fileno(), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def ask(rig: Rig, raw: bytes = request(CHAT)) -> Message:
    async with rig.connect() as client:
        client.send(raw)
        return await client.read_message()


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        (NOBODY, "connect"),
        (reset, "reset"),
        (close, "reset"),
        (close_within_head, "reset"),
        (close_before_first_byte, "reset"),
        (speak_nonsense, "malformed"),
        (answer(b"\r\n" + response()), "malformed"),
        (answer(response().replace(b"HTTP", b"ICE", 1)), "malformed"),
        (busy("502 Bad Gateway"), "bad_status"),
        (busy("504 Gateway Timeout"), "bad_status"),
    ],
)
async def test_a_failure_before_the_first_byte_goes_to_another_worker(script: Script | str, kind: str) -> None:
    async with fleet(script, GOOD) as (rig, _):
        got = await ask(rig)
        assert (got.status, got.body) == (200, b'{"good":true}')
        record = await rig.settled()
        assert (record.outcome, record.attempts, record.worker) == (Outcome.OK, 2, "w1")
        assert rig.blamed == [("w0", kind)]


@pytest.mark.parametrize("status", ["503 Service Unavailable", "429 Too Many Requests"])
async def test_a_worker_at_its_limit_is_passed_over_without_blame(status: str) -> None:
    async with fleet(busy(status), GOOD) as (rig, _):
        assert (await ask(rig)).status == 200
        await rig.settled()
        assert rig.blamed == []


async def test_a_worker_that_does_not_answer_in_time_is_passed_over() -> None:
    async with fleet(hang, GOOD, timeouts={"header_s": 0.3}) as (rig, _):
        assert (await ask(rig)).status == 200
        assert rig.blamed == [("w0", "header_timeout")]


async def test_a_worker_that_does_not_accept_connections_is_passed_over() -> None:
    with deaf_listener() as deaf:
        async with fleet(deaf, GOOD, timeouts={"connect_s": 0.2}) as (rig, _):
            assert (await ask(rig)).status == 200
            assert rig.blamed == [("w0", "connect")]


async def test_no_worker_is_tried_twice_while_others_exist() -> None:
    async with fleet(busy(), busy(), busy(), GOOD, retries={"max_attempts": 4, "backoff_s": 0.001}) as (rig, workers):
        assert (await ask(rig)).status == 200
        assert [len(worker.requests) for worker in workers] == [1, 1, 1, 1]


async def test_the_only_worker_is_tried_again() -> None:
    called_at = []

    async def script(wire: Wire, _: Message) -> None:
        called_at.append(monotonic())
        wire.send(response(b'{"good":true}') if len(called_at) == 3 else response(b"{}", "503 Busy"))

    async with fleet(script) as (rig, _):
        assert (await ask(rig)).body == b'{"good":true}'
        record = await rig.settled()
        assert record.attempts == 3
        assert record.routed_at <= called_at[0], "attempts are no part of the time that a decision takes"


async def test_the_same_bytes_go_to_the_second_worker() -> None:
    async with fleet(busy(), GOOD) as (rig, (first, second)):
        await ask(rig, request(CHAT, headers={"X-Request-Id": "r1", "X-Other": "o"}))
        assert first.requests[0].body == second.requests[0].body == CHAT
        assert second.requests[0].headers["x-other"] == "o"
        assert second.requests[0].headers["x-request-id"] == "r1"


async def test_in_the_end_the_workers_own_error_passes_untouched() -> None:
    async with fleet(busy(), busy()) as (rig, _):
        got = await ask(rig)
        assert got.start == "HTTP/1.1 503 Service Unavailable"
        assert got.body == b'{"error": "queue  full"}'
        record = await rig.settled()
        assert (record.outcome, record.status, record.attempts) == (Outcome.OK, 503, 3)
        assert rig.blamed == []


async def test_a_workers_error_is_better_than_none() -> None:
    async with fleet(busy("429 Too Many Requests"), NOBODY) as (rig, _):
        got = await ask(rig)
        assert got.status == 429
        assert got.headers["x-kvway-worker"] == "w0"


async def test_an_error_in_chunks_passes_untouched() -> None:
    frames = chunk(b'{"error":') + chunk(b'"full"}') + LAST_CHUNK
    raw = b"HTTP/1.1 503 Busy\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n" + frames
    async with fleet(answer(raw)) as (rig, _):
        assert (await ask(rig)).raw_body == frames
        async with rig.connect() as client:
            client.send(request(CHAT, version="1.0"))
            assert (await client.read_message(until_close=True)).body == b'{"error":"full"}'


async def test_an_error_too_large_to_hold_is_the_answer() -> None:
    body = b'{"error":"' + b"x" * 200_000 + b'"}'
    async with fleet(answer(response(body, "503 Busy")), GOOD) as (rig, _):
        got = await ask(rig)
        assert (got.status, got.body) == (503, body)


async def test_nobody_there_is_a_503_that_says_when_to_come_back() -> None:
    async with fleet(NOBODY, NOBODY) as (rig, _):
        got = await ask(rig)
        assert (got.status, got.headers["retry-after"]) == (503, "1")
        error = msgspec.json.decode(got.body)["error"]
        assert (error["type"], error["code"]) == ("service_unavailable_error", "no_worker")
        assert "w0" in error["message"] or "w1" in error["message"]
        assert await rig.outcome() is Outcome.UPSTREAM_FAILED


async def test_answers_that_break_off_everywhere_are_a_502_in_the_form_clients_know() -> None:
    async with fleet(reset, close) as (rig, _):
        got = await ask(rig)
        assert got.status == 502
        error = msgspec.json.decode(got.body)["error"]
        assert (error["type"], error["code"]) == ("upstream_error", "upstream_failed")
        assert await rig.outcome() is Outcome.UPSTREAM_FAILED


async def test_a_gateway_out_of_descriptors_blames_no_worker() -> None:
    async with fleet(GOOD, GOOD) as (rig, _), rig.connect() as client:
        await eventually(lambda: len(rig.connections) == 1)
        with no_descriptors_left():
            client.send(request(CHAT))
            got = await client.read_message()
        assert (got.status, got.headers["retry-after"]) == (503, "1")
        assert b"Too many open files" in got.body
        await rig.settled()
        assert rig.blamed == []
        client.send(request(CHAT))
        assert (await client.read_message()).status == 200


async def test_silence_everywhere_is_a_504() -> None:
    async with fleet(hang, timeouts={"header_s": 0.1}, retries={"max_attempts": 1}) as (rig, _):
        got = await ask(rig)
        assert got.status == 504
        assert msgspec.json.decode(got.body)["error"]["code"] == "upstream_timeout"
        assert await rig.outcome() is Outcome.UPSTREAM_FAILED


async def test_retry_after_is_passed_on_rather_than_waited_for_too_long() -> None:
    async with fleet(busy(retry_after="30"), retries={"backoff_s": 0.001, "backoff_max_s": 0.5}) as (rig, (worker,)):
        got = await ask(rig)
        assert got.status == 503
        assert got.headers["retry-after"] == "30"
        assert len(worker.requests) == 1


async def test_the_only_worker_is_left_alone_for_as_long_as_it_asks() -> None:
    times: list[float] = []

    async def script(wire: Wire, _: Message) -> None:
        times.append(asyncio.get_running_loop().time())
        wire.send(response(b"{}", "503 Busy", headers={"Retry-After": "1"}) if len(times) == 1 else response())

    async with fleet(script, retries={"backoff_s": 0.001, "backoff_max_s": 2}) as (rig, _):
        assert (await ask(rig)).status == 200
        assert times[1] - times[0] >= 0.99


async def test_retries_stop_when_the_budget_is_used_up() -> None:
    none = {"budget": 0, "budget_min_per_s": 0, "backoff_s": 0.001}
    async with fleet(busy(), GOOD, retries=none) as (rig, _):
        assert (await ask(rig)).status == 503
        assert (await rig.settled()).attempts == 1


async def test_attempts_are_bounded() -> None:
    async with fleet(*[busy()] * 5, retries={"max_attempts": 2, "backoff_s": 0.001}) as (rig, workers):
        assert (await ask(rig)).status == 503
        assert sum(len(worker.requests) for worker in workers) == 2


async def test_client_errors_are_nobodys_fault_and_not_tried_elsewhere() -> None:
    async with fleet(answer(response(b"{}", "400 Bad Request")), GOOD) as (rig, (_, other)):
        assert (await ask(rig)).status == 400
        assert (await rig.settled()).outcome is Outcome.OK
        assert rig.blamed == []
        assert other.requests == []


async def test_a_500_passes_and_counts_against_the_worker() -> None:
    async with fleet(answer(response(b"{}", "500 Oh")), GOOD) as (rig, (_, other)):
        assert (await ask(rig)).status == 500
        assert rig.blamed == [("w0", "bad_status")]
        assert other.requests == []


# Requests that must not run twice

STATEFUL = request(b'{"model":"m","input":"x"}', path="/v1/responses")


@pytest.mark.parametrize("script", [reset, close, busy(), busy("502 Bad Gateway"), hang])
async def test_a_stateful_request_is_not_sent_again_once_it_was_sent(script: Script) -> None:
    async with fleet(script, script, timeouts={"header_s": 0.2}) as (rig, workers):
        assert (await ask(rig, STATEFUL)).status >= 500
        assert sum(len(worker.requests) for worker in workers) == 1


async def test_a_stateful_request_that_was_never_sent_goes_elsewhere() -> None:
    async with fleet(NOBODY, NOBODY, GOOD) as (rig, (good,)):
        assert (await ask(rig, STATEFUL)).status == 200
        assert len(good.requests) == 1


# The keep-alive race: the worker closes an idle connection as the next request is sent on it


class ClosesIdle:
    """A worker that answers once per connection, and closes it when the next request is already on its way."""

    def __init__(self) -> None:
        self.served = 0

    async def __call__(self, wire: Wire, message: Message) -> None:
        if hasattr(wire, "used"):
            wire.reset()
            return
        wire.used = True  # type: ignore[attr-defined]
        self.served += 1
        wire.send(response(b'{"n":%d}' % self.served))


async def test_a_connection_that_closes_as_we_send_is_replaced_unnoticed() -> None:
    async with fleet(ClosesIdle()) as (rig, (worker,)), rig.connect() as client:
        for n in range(1, 5):
            client.send(request(CHAT))
            got = await client.read_message()
            assert (got.status, got.body) == (200, b'{"n":%d}' % n)
            assert (await rig.settled()).attempts == 1
        assert rig.blamed == []
        assert worker.connections == 4


async def test_stateful_requests_never_meet_that_race() -> None:
    script = ClosesIdle()
    async with fleet(script) as (rig, (worker,)), rig.connect() as client:
        for _ in range(4):
            client.send(STATEFUL)
            assert (await client.read_message()).status == 200
        assert script.served == len(worker.requests) == 4


async def test_an_idle_connection_that_the_worker_closed_is_not_used() -> None:
    async def script(wire: Wire, _: Message) -> None:
        wire.send(response())
        await wire.writer.drain()
        wire.close()

    async with fleet(script) as (rig, (worker,)), rig.connect() as client:
        for _ in range(4):
            client.send(request(CHAT))
            assert (await client.read_message()).status == 200
            await rig.settled()
        assert len(worker.requests) >= 4
        assert rig.blamed == []


async def test_bytes_that_nobody_asked_for_end_the_connection() -> None:
    async def script(wire: Wire, _: Message) -> None:
        await wire.send_slowly(response(b'{"n":1}'), response(b'{"n":"smuggled"}'))

    async with fleet(script) as (rig, (worker,)), rig.connect() as client:
        for _ in range(3):
            client.send(request(CHAT))
            assert (await client.read_message()).body == b'{"n":1}'
            await asyncio.sleep(0.02)
        assert worker.connections == 3


# After the first byte


def dies_after(*pieces: bytes, how: Any = Wire.reset) -> Script:
    async def script(wire: Wire, _: Message) -> None:
        await wire.send_slowly(*pieces)
        how(wire)

    return script


def assert_ends_with_error(body: bytes, whole_events: bytes) -> None:
    assert body.startswith(whole_events)
    assert body.endswith(b"\n\n")
    assert b"[DONE]" not in body
    error = msgspec.json.decode(body.rpartition(b"data: ")[2])["error"]
    assert error["code"] == "upstream_failed"
    assert "w0" in error["message"]
    assert body.count(b'"error":') == 1


@pytest.mark.parametrize("how", [Wire.reset, Wire.close])
async def test_a_cut_stream_ends_with_one_error_event(how: Any) -> None:
    script = dies_after(STREAM_HEAD + chunk(event("a")), chunk(event("b")), how=how)
    async with fleet(script, GOOD) as (rig, (_, other)), rig.connect() as client:
        client.send(request(STREAMED))
        got = await client.read_message()
        assert_ends_with_error(got.body, event("a") + event("b"))
        assert await rig.outcome() is Outcome.CUT
        assert rig.blamed == [("w0", "reset")]
        assert other.requests == []


async def test_a_cut_stream_of_messages_ends_with_the_error_event_that_anthropics_clients_know() -> None:
    delta = b'event: content_block_delta\ndata: {"type":"content_block_delta"}\n\n'
    async with fleet(dies_after(STREAM_HEAD + chunk(delta))) as (rig, _), rig.connect() as client:
        client.send(request(MESSAGES, "/v1/messages"))
        got = await client.read_message()
        assert_ends_with_error(got.body, delta + b"event: error\n")
        error = msgspec.json.decode(got.body.rpartition(b"data: ")[2])
        assert (error["type"], error["error"]["type"]) == ("error", "upstream_error")


@pytest.mark.parametrize("cut_at", range(0, len(chunk(event("b"))), 7))
async def test_a_stream_cut_inside_a_chunk_still_ends_with_an_error_event(cut_at: int) -> None:
    second = chunk(event("b"))[:cut_at]
    async with fleet(dies_after(STREAM_HEAD + chunk(event("a")) + second)) as (rig, _), rig.connect() as client:
        client.send(request(STREAMED))
        if 0 < cut_at <= 2:  # inside the size line, whose end cannot be made up
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await client.read_message()
            return
        got = await client.read_message()
        assert_ends_with_error(got.body, event("a"))


@pytest.mark.parametrize("last", [b"0\r\n", b"0\r\n\r", b"0\r\nX: y", b"0\r\nX: y\r\n", b"0;x"])
async def test_nothing_follows_a_stream_cut_after_its_last_chunk(last: bytes) -> None:
    whole = chunk(event("a") + DONE)
    async with fleet(dies_after(STREAM_HEAD + whole + last)) as (rig, _), rig.connect() as client:
        client.send(request(STREAMED))
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await client.read_message()
        assert await rig.outcome() is Outcome.CUT


async def test_an_event_split_over_chunks_and_cut_is_closed_before_the_error() -> None:
    script = dies_after(STREAM_HEAD + chunk(event("a")) + chunk(b'data: {"choi'))
    async with fleet(script) as (rig, _), rig.connect() as client:
        client.send(request(STREAMED))
        got = await client.read_message()
        assert_ends_with_error(got.body, event("a"))
        assert b'data: {"choi\n\ndata: {"error"' in got.body


async def test_the_connection_of_a_cut_stream_carries_the_next_request() -> None:
    async with fleet(dies_after(STREAM_HEAD + chunk(event("a"))), GOOD) as (rig, _), rig.connect() as client:
        client.send(request(STREAMED))
        await client.read_message()
        client.send(request(CHAT))
        assert (await client.read_message()).body == b'{"good":true}'


async def test_an_http_1_0_client_gets_the_error_event_too() -> None:
    async with fleet(dies_after(STREAM_HEAD + chunk(event("a")))) as (rig, _), rig.connect() as client:
        client.send(request(STREAMED, version="1.0"))
        got = await client.read_message(until_close=True)
        assert_ends_with_error(got.body, event("a"))


async def test_a_stream_without_framing_gets_the_error_event_when_it_is_reset() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    async with fleet(dies_after(head, event("a"))) as (rig, _), rig.connect() as client:
        client.send(request(STREAMED))
        got = await client.read_message(until_close=True)
        assert_ends_with_error(got.body, event("a"))


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: audio/mpeg\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 100\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Encoding: gzip\r\n\r\n",
    ],
)
async def test_any_other_cut_answer_resets_the_connection(head: bytes) -> None:
    piece = chunk(b'{"half":') if b"chunked" in head else b'{"half":'
    async with fleet(dies_after(head + piece)) as (rig, _), rig.connect() as client:
        client.send(request(CHAT))
        assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        with pytest.raises(ConnectionResetError):
            await client.read_to_end()
        assert await rig.outcome() is Outcome.CUT


async def test_a_stream_that_falls_silent_is_cut() -> None:
    async def script(wire: Wire, _: Message) -> None:
        wire.send(STREAM_HEAD, chunk(event("a")))
        await wire.gone()

    async with fleet(script, timeouts={"idle_s": 0.3}) as (rig, _), rig.connect() as client:
        client.send(request(STREAMED))
        assert_ends_with_error((await client.read_message()).body, event("a"))
        assert await rig.outcome() is Outcome.CUT
        assert rig.blamed == [("w0", "idle_timeout")]


async def test_a_worker_that_sends_more_than_it_announced_cannot_smuggle_an_answer() -> None:
    smuggled = response(b'{"n":1}') + response(b'{"smuggled":1}')
    async with fleet(answer(smuggled)) as (rig, _), rig.connect() as client:
        client.send(request(CHAT) * 2)
        assert (await client.read_message()).status == 502
        assert (await client.read_message()).status == 502
        assert set(rig.blamed) == {("w0", "malformed")}


async def test_a_stream_that_goes_on_after_its_end_is_reset() -> None:
    second = chunk(event("b"))
    script = dies_after(
        STREAM_HEAD + chunk(event("a")) + second[:9], second[9:] + LAST_CHUNK + b"HTTP/1.1 200 OK\r\n\r\n"
    )
    async with fleet(script) as (rig, _), rig.connect() as client:
        client.send(request(STREAMED))
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await client.read_message()
        assert await rig.outcome() is Outcome.CUT


async def test_a_stream_that_ends_with_done_is_whole() -> None:
    frames = chunk(event("a")) + chunk(DONE) + LAST_CHUNK
    async with fleet(answer(STREAM_HEAD + frames)) as (rig, _):
        assert (await ask(rig, request(STREAMED))).raw_body == frames
        assert await rig.outcome() is Outcome.OK
