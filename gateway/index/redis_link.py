"""Connections to Redis or Valkey over which masks are read.

Commands are pipelined: any number may wait for their answers, which come in the order of the commands. redis-py takes
a connection out of a pool for each command, and reads a quarter of a megabyte of masks in small pieces; that took
longer than the server does (``python -m tests.bench.index``).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from ssl import SSLContext
from typing import Any, Final, cast

import hiredis
from redis.exceptions import InvalidResponse, ResponseError

Address = tuple[str, int] | str
"""Host and port, or the path of a Unix socket."""

_READ_BYTES: Final = 1 << 18


def pack(*command: bytes | str | float) -> bytes:
    """Return a command as it is sent."""
    return cast("Any", hiredis.pack_command)(command)  # type: ignore[no-any-return]


class _Question:
    """Commands that were sent together, and the answers that have come."""

    __slots__ = ("answered", "answers", "n_commands")

    def __init__(self, n_commands: int) -> None:
        self.n_commands = n_commands
        self.answers: list[Any] = []
        self.answered: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()


class Link(asyncio.BufferedProtocol):
    """An open connection; ``open_link`` makes one."""

    def __init__(self) -> None:
        self._parser: Any = hiredis.Reader(protocolError=InvalidResponse, replyError=ResponseError)
        self._buffer = bytearray(_READ_BYTES)
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[_Question] = deque()

    @property
    def is_open(self) -> bool:
        """Whether commands can be sent."""
        return self._transport is not None

    async def ask(self, packed: bytes) -> Any:
        """Send one command and return its answer; see ``ask_all``."""
        (answer,) = await self.ask_all([packed])
        return answer

    async def ask_all(self, commands: Sequence[bytes]) -> list[Any]:
        """Send commands, at least one, together, and return their answers. Cancelling only stops the waiting.

        Raises:
            ResponseError: the server refuses one of them.
            ConnectionError: the connection is closed, or was before the answers came.
        """
        if self._transport is None:
            raise ConnectionResetError("the connection is closed")
        question = _Question(len(commands))
        self._waiting.append(question)
        self._transport.write(b"".join(commands))
        answers = await question.answered
        for answer in answers:
            if isinstance(answer, ResponseError):
                raise answer
        return answers

    def close(self) -> None:
        """Close the connection; whoever waits for an answer waits in vain."""
        if self._transport is not None:
            self._transport.abort()
            self._lose(None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = cast("asyncio.Transport", transport)

    def get_buffer(self, sizehint: int) -> bytearray:
        """Called by the event loop: where to put what comes."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Called by the event loop: so much has come."""
        try:
            self._parser.feed(self._buffer, 0, nbytes)
            while (answer := self._parser.gets()) is not False:
                question = self._waiting[0]
                question.answers.append(answer)
                if len(question.answers) == question.n_commands:
                    self._waiting.popleft()
                    if not question.answered.done():
                        question.answered.set_result(question.answers)
        except (InvalidResponse, IndexError):  # it says what it was not asked
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        self._lose(exc)

    def _lose(self, cause: Exception | None) -> None:
        self._transport = None
        lost = ConnectionResetError(f"the connection was lost: {cause or 'closed'}")
        while self._waiting:
            answered = self._waiting.popleft().answered
            if not answered.done():
                answered.set_exception(lost)


async def open_link(address: Address, tls: SSLContext | None, credentials: tuple[str, ...] = (), db: int = 0) -> Link:
    """Connect, authenticate and choose the database.

    Raises:
        ResponseError: the server refuses.
        OSError: it cannot be reached, or its certificate is not to be trusted.
    """
    loop = asyncio.get_running_loop()
    if isinstance(address, str):
        _, link = await loop.create_unix_connection(Link, address)
    else:
        _, link = await loop.create_connection(Link, *address, ssl=tls)
    try:
        if credentials:
            await link.ask(pack("AUTH", *credentials))
        if db:
            await link.ask(pack("SELECT", db))
    except BaseException:
        link.close()
        raise
    return link
