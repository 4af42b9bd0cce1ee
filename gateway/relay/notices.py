"""Hears from LMCache's prefill workers which prompts' KV they have written to their decode workers.

LMCache calls whoever listens the proxy (``pd_proxy_host``, ``pd_proxy_port``): every tensor-parallel rank pushes one
message per request over ZMQ, as msgpack: ``{"type": "ProxyNotif", "req_id": "…"}``.

They connect to one address. Of several gateway processes on a machine one has it, another when that one is gone; what
comes for the others, on this machine or elsewhere, goes on to them as replicas tell one another everything else.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from time import monotonic
from typing import Any, Final

import msgspec
import zmq
import zmq.asyncio

from gateway.errors import ConfigError
from gateway.sharing.news import Outbox
from gateway.tasks import spawn, stop

log = logging.getLogger("kvway.relay")

_decode = msgspec.msgpack.Decoder(dict[str, Any]).decode
_NOTICE: Final = "ProxyNotif"
_MAX_ID_LENGTH: Final = 64  # ours have 37 characters
_RETRY_S: Final = 1.0
_WARN_EVERY_S: Final = 60.0


class Notices:
    """The socket that prefill workers push their notices to.

    Args:
        endpoint: where to bind, tcp://*:7500; None: nobody is listened to, and a prefill worker's answer is taken to
            say that the KV is written (``pd_skip_proxy_notification``).
        outbox: tells the other replicas, where there may be any.
    """

    def __init__(self, endpoint: str | None, outbox: Outbox | None = None) -> None:
        self._endpoint = endpoint
        self._outbox = outbox
        self._awaited: dict[str, tuple[int, asyncio.Future[None]]] = {}  # request → notices to come, and who waits
        self._context: zmq.asyncio.Context | None = None
        self._task: asyncio.Task[None] | None = None
        self._warned_at = -_WARN_EVERY_S

    async def start(self) -> None:
        """Bind the socket, if there is to be one; where another process has the address, wait for it in the background.

        Raises:
            ConfigError: it cannot be bound, and no other process would tell us what it hears.
        """
        if self._endpoint is None:
            return
        self._context = zmq.asyncio.Context()
        socket = self._context.socket(zmq.PULL)
        try:
            bound = self._bind(socket, self._endpoint)
        except zmq.ZMQError as error:
            await self.close()
            raise ConfigError(
                f"disaggregation.lmcache_bind: {self._endpoint} cannot be bound: {error}. Where another gateway "
                "listens there, connect both (index.backend: redis): then one of them does for all."
            ) from None
        if not bound:
            log.info("another process listens to disaggregation.lmcache_bind", extra={"endpoint": self._endpoint})
        self._task = spawn(self._listen(socket, self._endpoint, bound), "lmcache notices")

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

    def heard(self, request_id: str) -> bool:
        """Take a notice about a request; return whether somebody here waits for it."""
        if request_id not in self._awaited:
            return False
        count, written = self._awaited[request_id]
        self._awaited[request_id] = count - 1, written
        if count <= 1 and not written.done():
            written.set_result(None)
        return True

    def missed(self, worker: str) -> None:
        """Warn, once in a while, that no notice came of what a prefill worker has answered."""
        now = monotonic()
        if now - self._warned_at >= _WARN_EVERY_S:
            self._warned_at = now
            log.warning(
                "a prefill worker's notice did not come; its pd_proxy_host and pd_proxy_port must lead to "
                "disaggregation.lmcache_bind of this gateway, where no other program may listen",
                extra={"worker": worker, "endpoint": self._endpoint},
            )

    def _bind(self, socket: zmq.asyncio.Socket, endpoint: str) -> bool:
        """Bind a socket; False where another process, which may be one of ours, has the address."""
        try:
            socket.ipv6 = "[" in endpoint  # an IPv6 address
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            if error.errno != errno.EADDRINUSE or self._outbox is None:
                raise
            return False
        return True

    async def _listen(self, socket: zmq.asyncio.Socket, endpoint: str, bound: bool) -> None:
        while not bound:
            await asyncio.sleep(_RETRY_S)
            bound = self._bind(socket, endpoint)
        while True:
            message = await socket.recv()
            try:
                notice = _decode(message)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                log.warning("what came to disaggregation.lmcache_bind is no message of LMCache's")
                continue
            request_id = notice.get("req_id")
            if notice.get("type") != _NOTICE or not isinstance(request_id, str) or len(request_id) > _MAX_ID_LENGTH:
                continue
            if not self.heard(request_id) and self._outbox is not None:
                self._outbox.pass_on(request_id)
