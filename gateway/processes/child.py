"""A child process that is started anew when it dies."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from typing import Final

log = logging.getLogger("kvway.processes")

CONFIG_ERROR: Final = 2
"""Exit code of a process that cannot serve with its configuration: starting it anew would not help."""

_FIRST_PAUSE_S: Final = 0.1
_MAX_PAUSE_S: Final = 10.0


class Child:
    """``python -m gateway.processes``, kept running.

    Args:
        name: for the log.
        arguments: what it is to be; see ``gateway.processes.__main__``.
        line: what it reads from its standard input, which stays open.
    """

    def __init__(self, name: str, arguments: Sequence[str], line: bytes = b"") -> None:
        self._name = name
        self._arguments = arguments
        self._line = line
        self._process: Process | None = None
        self._ending = asyncio.Event()

    async def keep(self) -> int:
        """Run it, again and again, until ``end`` is called or its configuration turns out wrong.

        Returns:
            Its last exit code; 1 if a signal killed it that it was not sent.
        """
        pause_s = _FIRST_PAUSE_S
        while True:
            started_at = monotonic()
            code = await self._run()
            if self._ending.is_set():
                return 0 if code == -signal.SIGTERM else 1 if code < 0 else code  # it may have no handler yet
            if code == CONFIG_ERROR:
                return code
            log.error("a process died and is started anew", extra={"child": self._name, "exit_code": code})
            if monotonic() - started_at > _MAX_PAUSE_S:
                pause_s = _FIRST_PAUSE_S
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), pause_s)
                return 0
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def tell(self, line: bytes) -> None:
        """Give it another line to read, which is also the one to begin with if it is started anew."""
        self._line = line
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(line)

    def end(self, number: signal.Signals) -> None:
        """Send it a signal, and do not start it anew."""
        self._ending.set()
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _run(self) -> int:
        # A session of its own: what a terminal sends to all its processes reaches the supervisor alone.
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gateway.processes", str(os.getpid()), *self._arguments,
            stdin=PIPE, start_new_session=True,
        )  # fmt: skip
        if self._ending.is_set():
            process.terminate()
        assert process.stdin is not None
        process.stdin.write(self._line)
        code = await process.wait()
        process.stdin.close()
        self._process = None
        return code
