"""A small HTTP server on a real socket that answers control calls as told, or hangs, or is not there."""

import asyncio
import re
from dataclasses import dataclass, field

from gateway.config import WorkerConfig
from gateway.fleet.registry import Worker

HANG = object()
RESET = object()


@dataclass
class Engine:
    """``answers`` maps a path to a body (status 200), to ``(status, body)``, or to ``HANG`` or ``RESET``."""

    answers: dict = field(default_factory=dict)
    asked: list = field(default_factory=list)
    port: int = 0
    _server: asyncio.Server | None = None
    _connections: set = field(default_factory=set)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def worker(self, **config):
        return Worker.from_config(WorkerConfig(url=self.url, **config))

    async def __aenter__(self):
        await self.start()
        return self

    async def __aexit__(self, *_):
        await self.stop()

    async def start(self):
        """Listen, on the port of an earlier life where there was one."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self):
        self._server.close()
        for writer in list(self._connections):
            writer.transport.abort()
        await self._server.wait_closed()

    async def _serve(self, reader, writer):
        self._connections.add(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                path = head.split(b" ", 2)[1].decode()
                length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
                await reader.readexactly(int(length[1]) if length else 0)
                self.asked.append(path)
                answer = self.answers.get(path, (404, b"not found"))
                if answer is HANG:
                    await reader.read()  # until the client gives up
                    return
                if answer is RESET:
                    writer.transport.abort()
                    return
                status, body = answer if isinstance(answer, tuple) else (200, answer)
                writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._connections.discard(writer)
            writer.close()


async def until(condition, timeout_s=10.0):
    """Wait until ``condition()`` holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)
