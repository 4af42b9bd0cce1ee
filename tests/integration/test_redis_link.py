"""One connection to a real server, and to one that talks nonsense."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import closing

import pytest
from redis.exceptions import ResponseError

from gateway.index.redis_link import Link, open_link, pack
from gateway.tasks import spawn, stop
from tests.valkey import Valkey


@pytest.fixture
async def link(valkey: Valkey) -> AsyncIterator[Link]:
    with closing(await open_link(("127.0.0.1", valkey.port), None)) as link:
        yield link


async def test_answers_come_to_those_who_asked_however_many_ask_at_once(link: Link) -> None:
    answers = await asyncio.gather(*(link.ask(pack("ECHO", number)) for number in range(100)))
    assert answers == [b"%d" % number for number in range(100)]


async def test_commands_sent_together_are_answered_together_and_in_order(link: Link) -> None:
    asked = [[pack("ECHO", f"{number} {part}") for part in range(number)] for number in range(1, 10)]
    answers = await asyncio.gather(*map(link.ask_all, asked))
    assert answers == [[b"%d %d" % (number, part) for part in range(number)] for number in range(1, 10)]


async def test_a_refusal_of_one_of_several_is_raised_when_all_are_answered(link: Link) -> None:
    with pytest.raises(ResponseError, match="unknown command"):
        await link.ask_all([pack("ECHO", 1), pack("NOTHING"), pack("ECHO", 2)])
    assert await link.ask_all([pack("ECHO", 3), pack("ECHO", 4)]) == [b"3", b"4"]


async def test_an_answer_that_nobody_waits_for_any_more_is_nobody_elses(link: Link, valkey: Valkey) -> None:
    valkey.freeze()
    asking = spawn(link.ask(pack("ECHO", "late")), "ask")
    await asyncio.sleep(0)
    await stop(asking)
    valkey.thaw()
    assert await link.ask(pack("ECHO", "next")) == b"next"


async def test_a_command_that_is_refused_is_raised_and_the_next_one_is_answered(link: Link) -> None:
    await link.ask(pack("SET", "a", 1))
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await link.ask(pack("LPUSH", "a", 1))
    assert await asyncio.gather(*(link.ask(pack(command, "a")) for command in ("GET", "DEL"))) == [b"1", 1]


async def test_an_answer_of_megabytes_is_one_answer(link: Link) -> None:
    await link.ask(pack("SET", "large", b"x" * 5_000_000))
    assert len(await link.ask(pack("GET", "large"))) == 5_000_000
    await link.ask(pack("DEL", "large"))


async def test_whoever_waits_when_the_server_dies_learns_it_and_so_does_who_asks_afterwards(
    link: Link, valkey: Valkey
) -> None:
    valkey.freeze()
    asking = spawn(link.ask(pack("PING")), "ask")
    await asyncio.sleep(0)
    valkey.kill()
    with pytest.raises(ConnectionError):
        await asking
    assert not link.is_open
    with pytest.raises(ConnectionError):
        await link.ask(pack("PING"))


async def test_a_database_of_its_own_is_one(valkey: Valkey, link: Link) -> None:
    with closing(await open_link(("127.0.0.1", valkey.port), None, db=3)) as third:
        await third.ask(pack("SET", "here", "alone"))
        assert await link.ask(pack("GET", "here")) is None


async def test_a_server_that_talks_nonsense_is_left() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server:
        link = await open_link(server.sockets[0].getsockname()[:2], None)
        with pytest.raises(ConnectionError):
            await link.ask(pack("PING"))
        assert not link.is_open
