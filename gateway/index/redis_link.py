"""One connection to Redis or Valkey.

Commands are pipelined: any number may wait for their answers, which come in the order of the commands. A client
library takes a connection out of a pool for each command, and reads a quarter of a megabyte of masks in small pieces;
that took longer than the server does (``python -m tests.bench.index``).
"""

from __future__ import annotations

import asyncio
from collections import deque
from ssl import SSLContext
from typing import Any, Final, cast

import hiredis

from gateway.index.redis_address import Address

RedisError = hiredis.HiredisError
"""What a server refuses to do, or says that cannot be understood."""

_READ_BYTES: Final = 1 << 18
_MAX_UNASKED: Final = 10_000


def pack(*command: bytes | str | float) -> bytes:
    """Return a command as it is sent."""
    return cast("Any", hiredis.pack_command)(command)  # type: ignore[no-any-return]


class Link(asyncio.BufferedProtocol):
    """An open connection; ``open_link`` makes one."""

    def __init__(self) -> None:
        self._parser = hiredis.Reader()
        self._buffer = bytearray(_READ_BYTES)
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[tuple[asyncio.Future[list[Any]], int]] = deque()
        self._answers: list[Any] = []  # to the first that waits
        self._unasked: asyncio.Queue[Any] = asyncio.Queue()

    @property
    def is_open(self) -> bool:
        """Whether commands can be sent."""
        return self._transport is not None

    async def ask(self, packed: bytes) -> Any:
        """Send one command and return its answer. Cancelling only stops the waiting.

        Raises:
            RedisError: the server refuses.
            ConnectionError: the connection is closed, or was before the answer came.
        """
        return (await self.ask_all(packed, 1))[0]

    async def ask_all(self, packed: bytes, n_commands: int) -> list[Any]:
        """Send several commands and return their answers; as ``ask``, if the server refuses one of them."""
        if self._transport is None:
            raise ConnectionResetError("the connection is closed")
        answered: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._waiting.append((answered, n_commands))
        self._transport.write(packed)
        answers = await answered
        for answer in answers:
            if isinstance(answer, RedisError):
                raise answer
        return answers

    async def unasked(self) -> Any:
        """Return the next message of the channels that were subscribed to.

        Raises:
            ConnectionError: the connection is closed.
        """
        message = await self._unasked.get()
        if isinstance(message, ConnectionError):
            raise message
        return message

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
        parser = cast("Any", self._parser)
        try:
            parser.feed(self._buffer, 0, nbytes)
            while (answer := parser.gets()) is not False:
                self._take(answer)
        except hiredis.ProtocolError:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        self._lose(exc)

    def _take(self, answer: Any) -> None:
        if not self._waiting:
            if self._unasked.qsize() < _MAX_UNASKED:
                self._unasked.put_nowait(answer)
            return
        self._answers.append(answer)
        answered, n_commands = self._waiting[0]
        if len(self._answers) == n_commands:
            self._waiting.popleft()
            answers, self._answers = self._answers, []
            if not answered.done():
                answered.set_result(answers)

    def _lose(self, cause: Exception | None) -> None:
        self._transport = None
        lost = ConnectionResetError(f"the connection was lost: {cause or 'closed'}")
        self._unasked.put_nowait(lost)
        while self._waiting:
            answered, _ = self._waiting.popleft()
            if not answered.done():
                answered.set_exception(lost)


async def open_link(address: Address, tls: SSLContext | None, username: str, password: str, db: int = 0) -> Link:
    """Connect, authenticate and choose the database.

    Raises:
        RedisError: the server refuses.
        OSError: it cannot be reached, or its certificate is not to be trusted.
    """
    loop = asyncio.get_running_loop()
    if address.port < 0:
        _, link = await loop.create_unix_connection(Link, address.host)
    else:
        _, link = await loop.create_connection(Link, *address, ssl=tls)
    try:
        if password:
            await link.ask(pack("AUTH", *((username,) if username else ()), password))
        if db:
            await link.ask(pack("SELECT", db))
    except BaseException:
        link.close()
        raise
    return link
