"""uvicorn, told to leave sockets, signals and logging to us."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Generator
from pathlib import Path
from typing import Final

import uvicorn
from fastapi import FastAPI

from gateway.config import ServerConfig
from gateway.errors import ConfigError
from gateway.tasks import spawn, stop

log = logging.getLogger("kvway")

_RENEWAL_S: Final = 10.0


def bind_socket(host: str, port: int, reuse_port: bool = False) -> socket.socket:
    """Return a TCP socket bound to an address.

    Raises:
        ConfigError: the address is in use, not ours, or not permitted.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    except UnicodeError:
        raise ConfigError(f"cannot listen on {host}:{port}: no host can have this name") from None
    return listener


class Server(uvicorn.Server):
    """A uvicorn server on a socket that is bound before anything else starts.

    Args:
        app: what answers requests that no protocol takes out of ASGI.
        host: address to bind.
        port: port to bind; 0 for any.
        settings: keep-alive, drain time and TLS.
        protocol: the HTTP protocol class; uvicorn's own where None.
        reuse_port: share the port with other processes (SO_REUSEPORT).

    Attributes:
        up: set once it accepts connections.
    """

    def __init__(
        self,
        app: FastAPI,
        host: str,
        port: int,
        settings: ServerConfig,
        protocol: type | None = None,
        reuse_port: bool = False,
    ) -> None:
        tls = protocol is not None and settings.tls_cert is not None
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol or "httptools",
                loop="uvloop",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=4096,
                timeout_keep_alive=max(1, round(settings.keep_alive_s)),
                timeout_graceful_shutdown=max(1, round(settings.drain_s)),
                ssl_certfile=settings.tls_cert if tls else None,
                ssl_keyfile=settings.tls_key if tls else None,
            )
        )
        self.up = asyncio.Event()
        self._address = (host, port)
        self._reuse_port = reuse_port
        self._socket: socket.socket | None = None

    @property
    def port(self) -> int:
        """The port actually bound."""
        assert self._socket is not None, "bind() comes first"
        return int(self._socket.getsockname()[1])

    def bind(self) -> None:
        """Load the certificate, where there is one, and bind the socket.

        Raises:
            ConfigError: the certificate is not usable; the address is in use, not ours, or not permitted.
        """
        try:
            self.config.load()
        except OSError as error:  # SSLError is one
            raise ConfigError(f"server.tls_cert, server.tls_key: not a usable certificate and key: {error}") from None
        self._socket = bind_socket(*self._address, self._reuse_port)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept, and say so through ``up``."""
        await super().startup(sockets)
        self.up.set()

    async def run_bound(self) -> None:
        """Serve on the bound socket until ``should_exit``, then drain."""
        assert self._socket is not None, "bind() comes first"
        tls, cert, key = self.config.ssl, self.config.ssl_certfile, self.config.ssl_keyfile
        renewal = tls and cert and key and spawn(_renew(tls, Path(cert), Path(key)), "renew the certificate")
        try:
            await self.serve(sockets=[self._socket])
        finally:
            self.up.set()  # whoever waits for it finds a task that has ended
            await stop(renewal or None)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals alone: one process runs two servers, and ``Gateway.run`` decides what a signal means."""
        yield


async def _renew(tls: ssl.SSLContext, cert: Path, key: Path) -> None:
    """Show new connections the certificate that follows ours in its file: issuers renew it every few weeks."""
    shown = _stamps(cert, key)
    while True:
        await asyncio.sleep(_RENEWAL_S)
        if (found := _stamps(cert, key)) == shown:
            continue
        shown = found
        try:
            # Tried out first: a context whose new key does not go with its new certificate has none any more.
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(cert, key)
            tls.load_cert_chain(cert, key)
            log.info("new connections are shown the new certificate")
        except OSError as error:
            log.warning("server.tls_cert, server.tls_key: not usable, the certificate before still counts: %s", error)


def _stamps(*files: Path) -> list[tuple[int, int]]:
    """Tell contents apart; empty where a file is missing."""
    try:
        return [(status.st_ino, status.st_mtime_ns) for status in (file.stat() for file in files)]
    except OSError:
        return []
