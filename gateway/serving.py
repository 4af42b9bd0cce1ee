"""uvicorn, told to leave sockets, signals and logging to us."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Generator
from typing import Final

import uvicorn
from fastapi import FastAPI

from gateway.certificate import Certificate
from gateway.config import ServerConfig
from gateway.errors import ConfigError
from gateway.keepalive import watch_peer

_RENEW_S: Final = 10  # between two looks at the certificate's files


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
        watch_peer(listener)
        listener.bind((host, port))
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    except UnicodeError:
        raise ConfigError(f"cannot listen on {host}:{port}: no host can have this name") from None
    return listener


def raise_descriptor_limit() -> None:
    """Open as many files as the process may: a stream takes two, a worker's KV events six, most systems allow 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS names a limit that it does not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


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
                timeout_notify=_RENEW_S,
            )
        )
        self.up = asyncio.Event()
        self._address = (host, port)
        self._settings = settings
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
            if self.config.ssl is not None:
                assert self._settings.tls_cert is not None and self._settings.tls_key is not None
                certificate = Certificate(self.config.ssl, self._settings.tls_cert, self._settings.tls_key)
                self.config.callback_notify = certificate.renew
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
        try:
            await self.serve(sockets=[self._socket])
        finally:
            self.up.set()  # whoever waits for it finds a task that has ended

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals alone: one process runs two servers, and ``Gateway.run`` decides what a signal means."""
        yield
