"""Hears from LMCache's prefill workers which prompts' KV they have written to their decode workers.

LMCache calls whoever listens the proxy (``pd_proxy_host``, ``pd_proxy_port``): every tensor-parallel rank pushes one
message per request over ZMQ, as msgpack: ``{"type": "ProxyNotif", "req_id": "…"}``.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

import msgspec
import zmq
import zmq.asyncio

from gateway.errors import ConfigError
from gateway.tasks import spawn, stop

log = logging.getLogger("kvway.relay")

_decode = msgspec.msgpack.Decoder(dict[str, Any]).decode
_NOTICE: Final = "ProxyNotif"


class Notices:
    """The socket that prefill workers push their notices to.

    Args:
        endpoint: where to bind, tcp://*:7500; None: nobody is listened to, and a prefill worker's answer is taken to
            say that the KV is written (``pd_skip_proxy_notification``).
    """

    def __init__(self, endpoint: str | None) -> None:
        self._endpoint = endpoint
        self._awaited: dict[str, tuple[int, asyncio.Future[None]]] = {}  # request → notices to come, and who waits
        self._context: zmq.asyncio.Context | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Bind the socket, if there is to be one.

        Raises:
            ConfigError: it cannot be bound.
        """
        if self._endpoint is None:
            return
        self._context = zmq.asyncio.Context()
        socket = self._context.socket(zmq.PULL)
        try:
            socket.bind(self._endpoint)
        except zmq.ZMQError as error:
            await self.close()
            raise ConfigError(f"disaggregation.lmcache_bind: {self._endpoint} cannot be bound: {error}") from None
        self._task = spawn(self._listen(socket), "lmcache notices")

    async def close(self) -> None:
        """Close it."""
        await stop(self._task)
        if self._context is not None:
            self._context.destroy(linger=0)

    def expect(self, request_id: str, count: int) -> asyncio.Future[None]:
        """Return what is done once ``count`` notices about a request have come; cancelled, it is forgotten."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._endpoint is None:
            written.set_result(None)
        else:
            self._awaited[request_id] = count, written
            written.add_done_callback(lambda _: self._awaited.pop(request_id, None))
        return written

    async def _listen(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            message = await socket.recv()
            try:
                notice = _decode(message)
            except msgspec.DecodeError:
                log.warning("what came to disaggregation.lmcache_bind is no message of LMCache's")
                continue
            request_id = notice.get("req_id")
            if notice.get("type") == _NOTICE and request_id in self._awaited:
                count, written = self._awaited[request_id]
                self._awaited[request_id] = count - 1, written
                if count <= 1 and not written.done():
                    written.set_result(None)
