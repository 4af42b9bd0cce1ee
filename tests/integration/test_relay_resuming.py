"""A stream whose worker dies goes on on another worker, where that is switched on, and the client sees one stream."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

import sim
from gateway.observe.record import Outcome
from sim.server import Fault, SimWorker, WorkerSettings
from tests.peers import (
    DONE,
    LAST_CHUNK,
    STREAM_HEAD,
    FakeWorker,
    Message,
    Wire,
    chunk,
    event,
    eventually,
    request,
    response,
)
from tests.relay_rig import MODEL, Rig, relay

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ON = {"max_per_stream": 2}
LENGTH = 40
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "tell me more"}], "max_tokens": LENGTH},
    TEXT: {"prompt": "a story of sixteen bytes or so: ", "max_tokens": LENGTH},
}
TINY = Path(sim.__file__).parent / "data" / "tiny-model"
CUT = Fault("cut", count=1, after_tokens=4)
NOBODY = "http://127.0.0.1:1"


@asynccontextmanager
async def fleet(*faults: Fault | None, worker: Any = None, **sections: Any) -> AsyncIterator[Rig]:
    """Serve a relay before one simulated worker per fault; a first stream begins on the first, goes on on the last."""
    async with AsyncExitStack() as stack:
        workers = []
        for fault in faults:
            settings = WorkerSettings(model=MODEL, speed=2, faults=(fault,) if fault else (), **(worker or {}))
            workers.append(await stack.enter_async_context(SimWorker(settings)))
        sections.setdefault("resumption", ON)
        yield await stack.enter_async_context(relay([worker.url for worker in workers], **sections))


def streamed(path: str, **fields: Any) -> bytes:
    return msgspec.json.encode({"model": MODEL, "stream": True, **BODIES[path], **fields})


async def ask(rig: Rig, path: str, **fields: Any) -> bytes:
    async with rig.connect() as client:
        client.send(request(streamed(path, **fields), path))
        return (await client.read_message()).body


def chunks_of(body: bytes) -> list[dict[str, Any]]:
    """Return the chunks of a stream, which ends with one ``[DONE]``."""
    *events, last, nothing = body.split(b"\n\n")
    assert (last, nothing) == (b"data: [DONE]", b"")
    return [msgspec.json.decode(one.removeprefix(b"data: ")) for one in events]


def text_of(chunks: list[dict[str, Any]]) -> str:
    choices = [choice for one in chunks for choice in one["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content", "") for choice in choices)


def resumptions(rig: Rig) -> dict[str, int]:
    lines = rig.services.observer.render().decode().splitlines()
    name = "kvway_resumptions_total"
    return {line.split(" ")[0].removeprefix(name): int(line.split(" ")[1]) for line in lines if line.startswith(name)}


RESUMED = '{outcome="resumed",reason="reset"}'
FAILED = '{outcome="failed",reason="reset"}'


@pytest.mark.parametrize("include_usage", [False, True], ids=["no-usage", "usage"])
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_cut_stream_goes_on_as_if_nothing_had_happened(path: str, include_usage: bool) -> None:
    fields = {"stream_options": {"include_usage": True}} if include_usage else {}
    async with fleet(CUT, None) as rig:
        resumed = chunks_of(await ask(rig, path, **fields))
        record = await rig.settled()
        whole = chunks_of(await ask(rig, path, **fields))
    assert text_of(resumed) == text_of(whole)
    assert len(resumed) == len(whole)
    assert len({(one["id"], one["created"], one["model"]) for one in resumed}) == 1
    roles = [choice.get("delta", {}).get("role") for one in resumed for choice in one["choices"]]
    assert roles.count("assistant") == (path == CHAT)
    reasons = [choice["finish_reason"] for one in resumed for choice in one["choices"]]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    usages = [one["usage"] for one in resumed if one.get("usage")]
    assert len(usages) == include_usage
    if usages:
        counts = ("prompt_tokens", "completion_tokens", "total_tokens")
        assert [usages[0][name] for name in counts] == [whole[-1]["usage"][name] for name in counts]
        assert (record.prompt_tokens, record.output_tokens) == (whole[-1]["usage"]["prompt_tokens"], LENGTH)
    assert (record.outcome, record.status, record.resumptions, record.worker) == (Outcome.OK, 200, 1, "w1")
    assert rig.blamed == [("w0", "reset")]
    assert resumptions(rig) == {RESUMED: 1}


async def test_usage_in_every_chunk_adds_up_over_both_workers() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with fleet(CUT, None) as rig:
        usages = [one["usage"] for one in chunks_of(await ask(rig, CHAT, stream_options=options))]
    assert {one["prompt_tokens"] for one in usages} == {usages[0]["prompt_tokens"]}
    assert [one["completion_tokens"] for one in usages] == [*range(LENGTH + 1), LENGTH]


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_with_the_models_tokenizer_tokens_are_counted_however_many_come_in_an_event(path: str) -> None:
    options = {"stream_options": {"include_usage": True}}
    models = {MODEL: {"tokenizer": str(TINY)}}
    async with fleet(CUT, None, worker={"tokenizer": TINY, "stream_interval": 3}, models=models) as rig:
        resumed = chunks_of(await ask(rig, path, **options))
        assert (await rig.settled()).resumptions == 1
        whole = chunks_of(await ask(rig, path, **options))
    assert text_of(resumed) == text_of(whole)
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [resumed[-1]["usage"][name] for name in counts] == [whole[-1]["usage"][name] for name in counts]


async def test_a_stream_may_go_on_more_than_once() -> None:
    async with fleet(CUT, None, CUT) as rig:
        resumed = chunks_of(await ask(rig, CHAT))
        record = await rig.settled()
        assert text_of(resumed) == text_of(chunks_of(await ask(rig, CHAT)))
    assert record.resumptions == 2
    assert resumptions(rig) == {RESUMED: 2}


async def test_a_stream_goes_on_no_more_often_than_configured() -> None:
    async with fleet(CUT, None, CUT, resumption={"max_per_stream": 1}) as rig:
        body = await ask(rig, CHAT)
        assert await rig.outcome() is Outcome.CUT
    ends_with_an_error(body)
    assert resumptions(rig) == {RESUMED: 1, '{outcome="refused",reason="too_often"}': 1}


def ends_with_an_error(body: bytes) -> None:
    last = body.removesuffix(b"\n\n").rpartition(b"data: ")[2]
    assert msgspec.json.decode(last)["error"]["code"] in ("upstream_failed", "no_worker")
    assert body.count(b'"error"') == 1
    assert DONE not in body


async def test_a_stream_that_no_other_worker_takes_over_ends_with_the_error() -> None:
    async with fleet(CUT) as rig:
        ends_with_an_error(await ask(rig, CHAT))
        assert await rig.outcome() is Outcome.CUT
        assert resumptions(rig) == {'{outcome="refused",reason="no_other_worker"}': 1}


async def test_a_stream_whose_continuation_fails_ends_with_the_error() -> None:
    async with SimWorker(WorkerSettings(model=MODEL, speed=2, faults=(CUT,))) as dying:
        once = {"max_attempts": 2}
        async with relay([dying.url, NOBODY], resumption=ON, retries=once) as rig:
            ends_with_an_error(await ask(rig, CHAT))
            assert await rig.outcome() is Outcome.CUT
            assert rig.blamed == [("w0", "reset"), ("w1", "connect")]
            assert resumptions(rig) == {FAILED: 1}


async def test_the_next_worker_is_asked_when_one_refuses_to_go_on() -> None:
    refusing = Fault("error503", count=1)
    async with fleet(CUT, None, refusing) as rig:
        resumed = chunks_of(await ask(rig, CHAT))
        record = await rig.settled()
        assert text_of(resumed) == text_of(chunks_of(await ask(rig, CHAT)))
    assert (record.worker, record.attempts, record.resumptions) == ("w1", 3, 1)
    assert rig.blamed == [("w0", "reset")]


async def test_a_stream_that_stands_still_goes_on_elsewhere() -> None:
    async def stall(wire: Wire, _: Message) -> None:
        wire.send(STREAM_HEAD, chunk(event("one")))
        await wire.gone()

    async with pair(stall, timeouts={"idle_s": 0.1}) as (rig, _):
        body = await ask(rig, CHAT)
        assert await rig.outcome() is Outcome.OK
        assert rig.blamed == [("w0", "idle_timeout")]
    assert body == event("one") + event(" two") + DONE


async def goes_on(wire: Wire, _: Message) -> None:
    wire.send(STREAM_HEAD, chunk(event(" two")), chunk(DONE), LAST_CHUNK)


def dies_after(*pieces: bytes) -> Any:
    async def script(wire: Wire, _: Message) -> None:
        await wire.send_slowly(STREAM_HEAD, *pieces)
        wire.reset()

    return script


@asynccontextmanager
async def pair(script: Any, other: Any = goes_on, **sections: Any) -> AsyncIterator[tuple[Rig, FakeWorker]]:
    """Serve a relay before a worker that dies and one that goes on; give that one."""
    sections.setdefault("resumption", ON)
    async with FakeWorker(script) as dying, FakeWorker(other) as heir, relay([dying, heir], **sections) as rig:
        yield rig, heir


async def test_a_stream_cut_inside_an_event_goes_on_after_the_last_whole_one() -> None:
    async with pair(dies_after(chunk(event("one")), chunk(event("lost")[:20]))) as (rig, _):
        assert await ask(rig, CHAT) == event("one") + event(" two") + DONE


async def test_events_that_end_in_carriage_returns_are_whole_too() -> None:
    windows = event("one").replace(b"\n", b"\r\n")
    async with pair(dies_after(chunk(windows[:-1]), chunk(windows[-1:]), chunk(b": ping\r\n\r\n"))) as (rig, _):
        assert await ask(rig, CHAT) == windows + b": ping\r\n\r\n" + event(" two") + DONE


async def test_what_is_asked_of_the_next_worker_is_the_same_but_for_the_text_and_the_limits() -> None:
    fields = {"max_tokens": 9, "max_completion_tokens": 8, "min_tokens": 1, "temperature": 0, "x_unknown": [1.5]}
    async with pair(dies_after(chunk(event("one")), chunk(event(" and")))) as (rig, heir):
        await ask(rig, CHAT, **fields)
    asked = msgspec.json.decode(heir.requests[0].body)
    sent = msgspec.json.decode(streamed(CHAT, **fields))
    final = {"role": "assistant", "content": "one and"}
    assert asked == sent | {
        "messages": [*sent["messages"], final],
        "continue_final_message": True,
        "add_generation_prompt": False,
        "max_tokens": 7,
        "max_completion_tokens": 6,
        "min_tokens": 0,
    }


async def test_a_message_that_the_client_left_open_is_continued_further() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "zero "}]
    fields = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    async with pair(dies_after(chunk(event("one")))) as (rig, heir):
        await ask(rig, CHAT, **fields)
    asked = msgspec.json.decode(heir.requests[0].body)
    assert asked["messages"] == [messages[0], {"role": "assistant", "content": "zero one"}]


async def test_a_stream_without_text_so_far_is_asked_for_as_at_first() -> None:
    role = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
    async with pair(dies_after(chunk(role))) as (rig, heir):
        assert await ask(rig, CHAT) == role + event(" two") + DONE
    assert heir.requests[0].body == streamed(CHAT)


async def test_a_stream_of_comments_so_far_begins_with_the_role() -> None:
    role = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'

    async def begins(wire: Wire, _: Message) -> None:
        wire.send(STREAM_HEAD, chunk(role), chunk(event("one")), chunk(DONE), LAST_CHUNK)

    async with pair(dies_after(chunk(b": ping\n\n")), begins) as (rig, _):
        assert await ask(rig, CHAT) == b": ping\n\n" + role + event("one") + DONE


async def test_whitespace_at_the_cut_is_neither_lost_nor_doubled() -> None:
    async def repeats(wire: Wire, _: Message) -> None:
        again = b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n'
        wire.send(STREAM_HEAD, *(chunk(again % text) for text in (b" ", b"\\n two")), chunk(DONE), LAST_CHUNK)

    async with pair(dies_after(chunk(event("one")), chunk(event(r" \n"))), repeats) as (rig, heir):
        assert await ask(rig, CHAT) == event("one") + event(r" \n") + event(" two") + DONE
    assert msgspec.json.decode(heir.requests[0].body)["messages"][-1]["content"] == "one"


async def test_whitespace_is_not_doubled_by_a_worker_that_dies_while_it_repeats_it() -> None:
    async def repeats(wire: Wire, _: Message) -> None:
        await wire.send_slowly(STREAM_HEAD, chunk(event(" ")))
        if len(first.requests) + len(second.requests) == 1:
            wire.reset()
        else:
            wire.send(chunk(event(" two")), chunk(DONE), LAST_CHUNK)

    async with (
        FakeWorker(dies_after(chunk(event("one  ")))) as dying,
        FakeWorker(repeats) as first,
        FakeWorker(repeats) as second,
        relay([dying, first, second], resumption=ON, retries={"backoff_s": 0.001}) as rig,
    ):
        assert await ask(rig, CHAT) == event("one  ") + event("two") + DONE
        assert (await rig.settled()).attempts == 3


async def test_a_continuation_that_ends_without_an_end_is_no_end() -> None:
    async def stops(wire: Wire, _: Message) -> None:
        wire.send(STREAM_HEAD, chunk(event(" two")), LAST_CHUNK)

    async with pair(dies_after(chunk(event("one"))), stops, resumption={"max_per_stream": 1}) as (rig, _):
        ends_with_an_error(await ask(rig, CHAT))
        assert await rig.outcome() is Outcome.CUT
        assert rig.blamed == [("w0", "reset"), ("w1", "malformed")]


@pytest.mark.parametrize("status", ["400 Bad Request", "500 Oops"])
async def test_an_error_instead_of_a_continuation_does_not_reach_the_client(status: str) -> None:
    async def refuse(wire: Wire, _: Message) -> None:
        wire.send(response(b'{"error":"no such thing"}', status))

    async with pair(dies_after(chunk(event("one"))), refuse, retries={"max_attempts": 2}) as (rig, _):
        body = await ask(rig, CHAT)
        await rig.settled()
    assert body.startswith(event("one"))
    ends_with_an_error(body)
    assert b"no such thing" not in body
    assert rig.blamed == [("w0", "reset")] + [("w1", "bad_status")] * (status[0] == "5")


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"n": 2}, "several_choices"),
    (TEXT, {"best_of": 2}, "several_choices"),
    (TEXT, {"use_beam_search": True}, "several_choices"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    (CHAT, {"tool_choice": "auto"}, "tools"),
    (CHAT, {"logprobs": True}, "logprobs"),
    (TEXT, {"logprobs": 0}, "logprobs"),
    (TEXT, {"prompt_logprobs": 1}, "logprobs"),
    (CHAT, {"response_format": {"type": "json_object"}}, "constrained_decoding"),
    (CHAT, {"structured_outputs": {"choice": ["a"]}}, "constrained_decoding"),
    (CHAT, {"guided_regex": "a+"}, "constrained_decoding"),
    (TEXT, {"regex": "a+"}, "constrained_decoding"),
    (TEXT, {"echo": True}, "prompt"),
    (TEXT, {"suffix": "end"}, "prompt"),
    (TEXT, {"prompt": [1, 2, 3]}, "prompt"),
    (TEXT, {"max_tokens": None}, "no_max_tokens"),
    (CHAT, {"max_tokens": "12"}, "unreadable"),
    (CHAT, {"include_reasoning": False}, "reasoning"),
    (CHAT, {"stop": "net"}, "stop_string"),
    (CHAT, {"stop": ["x", "ever\nmore", "e\n"]}, "stop_string"),
    (CHAT, {"stop": "one"}, "stop_string"),
    (CHAT, {"stop": "x" * 257}, "stop_string"),
    (TEXT, {"stop_regex": "e+"}, "stop_string"),
    (CHAT, {"return_token_ids": True}, "engine_field"),
    (CHAT, {"messages": [], "continue_final_message": True}, "prompt"),
]


@pytest.mark.parametrize(("path", "fields", "reason"), REFUSED, ids=[f"{next(iter(case[1]))}" for case in REFUSED])
async def test_what_text_alone_cannot_continue_ends_as_without_resumption(
    path: str, fields: dict[str, Any], reason: str
) -> None:
    async with pair(dies_after(chunk(event("one")))) as (rig, heir):
        body = await ask(rig, path, **fields)
        assert await rig.outcome() is Outcome.CUT
    assert body.startswith(event("one"))
    ends_with_an_error(body)
    assert heir.requests == []
    assert resumptions(rig) == {f'{{outcome="refused",reason="{reason}"}}': 1}


UNIMPORTANT: list[dict[str, Any]] = [
    {"n": 1},
    {"tools": []},
    {"tool_choice": "none"},
    {"logprobs": False},
    {"stop": ["\n\n", "on", "x"]},
]


@pytest.mark.parametrize("fields", UNIMPORTANT)
async def test_fields_that_ask_for_nothing_do_not_matter(fields: dict[str, Any]) -> None:
    async with pair(dies_after(chunk(event("one")))) as (rig, _):
        assert (await ask(rig, CHAT, **fields)).endswith(event(" two") + DONE)


def choice(inside: str) -> bytes:
    return b'data: {"choices":[%b]}\n\n' % inside.encode()


SEEN: dict[str, tuple[bytes, str]] = {
    "reasoning": (choice('{"index":0,"delta":{"reasoning":"hm"}}'), "reasoning"),
    "reasoning_content": (choice('{"index":0,"delta":{"reasoning_content":"hm"}}'), "reasoning"),
    "think": (event("<think>hm"), "reasoning"),
    "thought": (event("<thi") + event("nk>hm"), "reasoning"),
    "tool_calls": (choice('{"index":0,"delta":{"tool_calls":[{"index":0}]}}'), "tools"),
    "choices": (choice('{"index":1,"delta":{"content":"b"}}'), "several_choices"),
    "finished": (choice('{"index":0,"delta":{},"finish_reason":"stop"}'), "finished"),
    "error": (b'data: {"error":{"message":"CUDA"}}\n\n', "finished"),
    "long": (event("x" * 33), "too_long"),
    "nonsense": (b"data: {\n\n", "unreadable"),
}


@pytest.mark.parametrize("seen", SEEN)
async def test_what_the_stream_itself_shows_can_forbid_to_go_on(seen: str) -> None:
    piece, reason = SEEN[seen]
    async with pair(dies_after(chunk(piece)), resumption={**ON, "max_text_bytes": 32}) as (rig, heir):
        body = await ask(rig, CHAT)
        assert await rig.outcome() is Outcome.CUT
    assert body.startswith(piece)
    assert body.removeprefix(piece).startswith(b'data: {"error":')
    assert heir.requests == []
    assert resumptions(rig) == {f'{{outcome="refused",reason="{reason}"}}': 1}


async def test_an_event_too_long_to_wait_for_is_passed_on_in_pieces() -> None:
    piece = b"data: " + b"x" * 300_000
    async with pair(dies_after(chunk(piece))) as (rig, _):
        body = await ask(rig, CHAT)
    assert body.startswith(piece + b'\n\ndata: {"error":')


async def test_without_retry_budget_a_stream_does_not_go_on() -> None:
    async with pair(dies_after(chunk(event("one"))), retries={"budget": 0, "budget_min_per_s": 0}) as (rig, heir):
        ends_with_an_error(await ask(rig, CHAT))
    assert heir.requests == []
    assert resumptions(rig) == {'{outcome="refused",reason="retry_budget"}': 1}


async def test_a_client_that_leaves_before_the_continuation_begins() -> None:
    asked, given_up = asyncio.Event(), asyncio.Event()

    async def silent(wire: Wire, _: Message) -> None:
        asked.set()
        await wire.gone()
        given_up.set()

    async with pair(dies_after(chunk(event("one"))), silent) as (rig, _), rig.connect() as client:
        client.send(request(streamed(CHAT)))
        await asked.wait()
        client.close()
        async with asyncio.timeout(0.5):
            await given_up.wait()
        assert await rig.outcome() is Outcome.CLIENT_GONE
        assert rig.blamed == [("w0", "reset")]
        assert resumptions(rig) == {}


async def test_a_client_of_http_1_0_sees_one_stream_too() -> None:
    async with pair(dies_after(chunk(event("one")))) as (rig, _), rig.connect() as client:
        client.send(request(streamed(CHAT), version="1.0"))
        assert (await client.read_to_end()).partition(b"\r\n\r\n")[2] == event("one") + event(" two") + DONE


async def test_a_stream_that_nothing_happens_to_passes_unaltered() -> None:
    async def script(wire: Wire, _: Message) -> None:
        await wire.send_slowly(STREAM_HEAD, *(chunk(piece) for piece in pieces), LAST_CHUNK)

    pieces = [event("a")[:9], event("a")[9:] + event("b"), b": ping\n\n" + event("c") + DONE + b"data: cut off"]
    async with FakeWorker(script) as worker, relay([worker], resumption=ON) as rig:
        assert await ask(rig, CHAT) == b"".join(pieces)
        assert await rig.outcome() is Outcome.OK


async def test_an_answer_that_is_no_stream_passes_unaltered() -> None:
    async def script(wire: Wire, _: Message) -> None:
        wire.send(response(b'{"error":"bad"}', "400 Bad Request"))

    async with FakeWorker(script) as worker, relay([worker], resumption=ON) as rig:
        assert await ask(rig, CHAT) == b'{"error":"bad"}'


async def test_a_model_may_have_a_setting_of_its_own() -> None:
    off = {MODEL: {"resumption": {"max_per_stream": 0}}}
    async with pair(dies_after(chunk(event("one"))), models=off) as (rig, heir):
        ends_with_an_error(await ask(rig, CHAT))
    assert heir.requests == []
    assert resumptions(rig) == {}


async def test_the_log_says_that_a_stream_went_on() -> None:
    log = io.BytesIO()
    async with pair(dies_after(chunk(event("one"))), log=log) as (rig, _):
        await ask(rig, CHAT)
        await rig.settled()
        await eventually(lambda: bool(log.getvalue()))
    assert msgspec.json.decode(log.getvalue())["resumptions"] == 1
