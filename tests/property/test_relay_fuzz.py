"""Thousands of damaged requests: no crash, no hang, no leak, and no 5xx of our own making."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import re
from collections.abc import Iterator
from random import Random
from typing import Any

import msgspec
import pytest
import uvloop

from gateway.relay.exchange import Exchange
from gateway.relay.upstream import Upstream
from tests.peers import LAST_CHUNK, FakeWorker, Wire, answer, chunk, eventually, request, response
from tests.relay_rig import MODEL, Rig, relay

AT_ONCE = 120
QUIET_S = 0.5
GONE_S = 20.0  # each look takes long where the process has many objects
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")

CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "You are terse."},
        {"role": "user", "content": [{"type": "text", "text": "What is this?"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
    ],
    "stream": True,
    "max_tokens": 16,
    "temperature": 0.5,
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "user": "u",
}
COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": ["a b", [1, 2, 3]], "n": 2, "cache_salt": "s", "logprobs": None}
CHAT_BODY, COMPLETION_BODY = map(msgspec.json.encode, (CHAT, COMPLETION))
CHUNKED_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\nTrailer: X\r\n\r\n"
SEEDS = [
    request(CHAT_BODY, headers={"Content-Type": "application/json", "X-Request-Id": "r", "Connection": "keep-alive"}),
    request(COMPLETION_BODY, path="/v1/completions?x=1") * 2,
    CHUNKED_HEAD + chunk(COMPLETION_BODY[:20]) + chunk(COMPLETION_BODY[20:]) + LAST_CHUNK,
    CHUNKED_HEAD + chunk(CHAT_BODY) + b"0\r\nX: y\r\n\r\n" + request(method="GET", path="/health"),
    request(CHAT_BODY, headers={"Expect": "100-continue"}),
    request(CHAT_BODY, version="1.0") + request(CHAT_BODY),
    request(b'{"model":"m","input":"x"}', path="/v1/embeddings", headers={"Connection": "Upgrade", "Upgrade": "h2c"}),
    request(method="OPTIONS", path="/v1/files/%20/x"),
]
TOKENS = [
    b"\r\n",
    b"\n",
    b"\r",
    b"\0",
    b" ",
    b":",
    b"\r\n\r\n",
    b"0\r\n\r\n",
    b"Content-Length: 5\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Host: x\r\n",
    b"Connection: close\r\n",
    b"Expect: 100-continue\r\n",
    b"HTTP/1.0",
    b"HTTP/9.9",
    b"\xff\xfe",
    b"fffffffff\r\n",
    b"/../",
    b"CONNECT ",
    b"HEAD ",
    b"-1",
    b"9" * 30,
    b"[" * 3000,
    b"A" * 70_000,
]
VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    2**70,
    1.5e300,
    "",
    "x" * 5000,
    "\ud800",
    [],
    {},
    [[]],
    {"role": 3},
    MODEL,
    [None],
]


def mutated_bytes(random: Random) -> bytes:
    raw = bytearray(random.choice(SEEDS))
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(raw) + 1)
        match random.randrange(6):
            case 0:
                raw[at : at + 1] = bytes([random.randrange(256)])
            case 1:
                del raw[at : at + random.randint(1, 30)]
            case 2:
                raw[at:at] = random.choice(TOKENS)
            case 3:
                raw[at:at] = raw[at : at + random.randint(1, 60)]
            case 4:
                other = random.choice(SEEDS)
                raw[at:] = other[random.randrange(len(other)) :]
            case _:
                raw[at:at] = random.randbytes(random.randint(1, 40))
    return bytes(raw)


def mutated_json(random: Random) -> bytes:
    body, path = random.choice([(CHAT, "/v1/chat/completions"), (COMPLETION, "/v1/completions")])
    return request(dumped(damage(body, random), random), path=path)


def damage(value: Any, random: Random, depth: int = 0) -> Any:
    """Return ``value`` with one thing in it replaced, dropped, renamed or nested."""
    if depth and random.random() < 0.3:
        return random.choice(VALUES)
    if isinstance(value, dict) and value:
        copy = dict(value)
        key = random.choice(list(copy))
        match random.randrange(4):
            case 0:
                del copy[key]
            case 1:
                copy[random.choice(["model", "messages", "prompt", "stream", "\0", ""])] = copy.pop(key)
            case _:
                copy[key] = damage(copy[key], random, depth + 1)
        return copy
    if isinstance(value, list) and value:
        index = random.randrange(len(value))
        return [*value[:index], damage(value[index], random, depth + 1), *value[index + 1 :]]
    return random.choice(VALUES)


def dumped(value: Any, random: Random) -> bytes:
    raw = json.dumps(value, ensure_ascii=random.random() < 0.5).encode("utf-8", "surrogatepass")
    match random.randrange(8):
        case 0:
            return raw[: random.randrange(len(raw))]
        case 1:
            return raw + b"}"
        case 2:
            return raw.replace(b"{", b'{"model":"m","model":7,', 1)
        case 3:
            return b"\xef\xbb\xbf" + raw
        case _:
            return raw


async def torment(rig: Rig, requests: Iterator[tuple[bytes, Random]]) -> list[int]:
    """Send every request on a connection of its own, and return the statuses that came back."""
    statuses: list[int] = []

    async def one_by_one() -> None:
        for raw, random in requests:
            async with rig.connect() as client:
                received = await exchange(client, raw, random)
            statuses.extend(map(int, STATUS.findall(received)))

    await asyncio.gather(*(one_by_one() for _ in range(AT_ONCE)))
    return statuses


async def exchange(client: Wire, raw: bytes, random: Random) -> bytes:
    """Send, in one piece or two, and read until nothing comes any more; then leave in one way or another."""
    received = b""
    try:
        at = random.choice([0, random.randrange(len(raw) + 1)])
        if at:
            await client.send_slowly(raw[:at])
        client.send(raw[at:])
        while True:
            data = await asyncio.wait_for(client.reader.read(65_536), QUIET_S)
            received += data
            if not data:
                break
    except (TimeoutError, ConnectionError):
        pass
    if random.random() < 0.3:
        client.reset()
    return received


def under_way() -> list[Exchange | Upstream]:
    gc.collect()
    return [thing for thing in gc.get_objects() if isinstance(thing, Exchange | Upstream)]


async def survive(seed: int, count: int, caplog: pytest.LogCaptureFixture) -> None:
    randoms = (Random(f"{seed} {n}") for n in range(count))
    requests = ((random.choice([mutated_bytes, mutated_json])(random), random) for random in randoms)
    of_other_tests = under_way()
    unhandled: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    async with FakeWorker(answer(response(b'{"ok":1}'))) as worker, relay([worker]) as rig:
        statuses = await torment(rig, requests)
        assert {status for status in statuses if status >= 500} == set()
        assert {200, 400} <= set(statuses)
        await rig.settled()
        await eventually(lambda: not rig.connections)
        assert rig.blamed == []
        async with rig.connect() as client:
            client.send(SEEDS[0])
            assert (await client.read_message()).status == 200
        await rig.settled()
    await eventually(lambda: len(under_way()) <= len(of_other_tests), GONE_S)
    assert unhandled == []
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_damaged_requests_do_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(survive(0, 800, caplog))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(100, 110))
def test_very_many_damaged_requests_do_no_harm(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(survive(seed, 2000, caplog))
