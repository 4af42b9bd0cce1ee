"""Commands to Redis or Valkey: to one server, to the primary that Sentinels name, or to a cluster.

The index and the sharing of replicas are written against ``RedisClient``, which alone knows the three apart. Every key
of ours has a hash tag in braces, and whoever asks names it: a cluster has all keys with one tag on one node.
"""

from __future__ import annotations

import asyncio
import ssl
from binascii import crc_hqx
from bisect import bisect_right
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from gateway.config import IndexConfig
from gateway.errors import ConfigError
from gateway.index.redis_address import Address, parse_url
from gateway.index.redis_link import Link, RedisError, open_link, pack

UNREACHABLE: Final = (RedisError, OSError, TimeoutError)
"""What every command may raise. It may have been carried out all the same."""

COMMAND_TIMEOUT_S: Final = 1.0
_GUIDE_TIMEOUT_S: Final = 0.3  # for a Sentinel or node that is asked the way; the next one may know it
_CLUSTER_SLOTS: Final = 16_384
_NOT_ALLOWED: Final = ("NOPERM", "ERR unknown command")


class RedisClient:
    """The commands. Each raises one of ``UNREACHABLE`` when it fails.

    Nothing is tried twice, for whoever asks has something better to do than to wait. But after a failure the next
    command looks afresh where the servers are.

    Args:
        config: the URL, and how to authenticate.

    Raises:
        ConfigError: the URL cannot be understood, or a file that is named cannot be used.
    """

    def __init__(self, config: IndexConfig) -> None:
        self._config = config
        self._place = parse_url(config.url)
        self._tls = _tls_context(config) if self._place.tls else None
        self._guides = list(self._place.addresses)  # Sentinels or nodes of the cluster; who knew the way last is first
        self._map: _SlotMap | None = None
        self._links: dict[tuple[Address, bool], Link] = {}
        self._looking = asyncio.Lock()
        if self._place.kind == "one":
            self._map = _SlotMap([(0, self._place.addresses[0])])

    @property
    def is_cluster(self) -> bool:
        """Whether only keys with the same tag can be named in one command."""
        return self._place.kind == "cluster"

    async def ask(self, tag: bytes, *command: Any) -> Any:
        """Return the answer to one command on keys with ``tag``."""
        async with self._minding_failures(COMMAND_TIMEOUT_S):
            link = await self._link(await self._address(tag))
            return await link.ask(pack(*command))

    async def ask_packed(self, tag: bytes, packed: bytes) -> Any:
        """Return the answer to one command, packed by ``pack``. Waits as long as the caller lets it."""
        try:
            link = await self._link(await self._address(tag))
            return await link.ask(packed)
        except UNREACHABLE as error:
            self._look_again(error)
            raise

    async def ask_all(self, commands: Iterable[tuple[bytes, bytes]], timeout_s: float) -> None:
        """Send many commands, each as (tag, packed), on connections of their own: nobody else waits behind them."""
        async with self._minding_failures(timeout_s):
            batches: dict[Address, list[bytes]] = {}
            for tag, packed in commands:
                batches.setdefault(await self._address(tag), []).append(packed)
            for address, batch in batches.items():
                link = await self._link(address, bulk=True)
                await link.ask_all(b"".join(batch), len(batch))

    async def run(self) -> str:
        """Return the ids of the server processes that are asked; where they change, what they had may be lost.

        Hosted servers that do not tell have none; a fail-over of theirs goes unnoticed.
        """
        async with self._minding_failures(COMMAND_TIMEOUT_S):
            primaries = (await self._slot_map()).primaries
            return " ".join([await _run_of(await self._link(address), address) for address in primaries])

    async def publish(self, channel: str, message: bytes) -> None:
        """Send a message to all that listen; in a cluster, at whichever node."""
        await self.ask(b"", "PUBLISH", channel, message)

    async def listen(self, channel: str, patience_s: float) -> AsyncIterator[bytes]:
        """Yield the messages of a channel.

        Raises:
            TimeoutError: there was none for ``patience_s``.
        """
        async with self._minding_failures(COMMAND_TIMEOUT_S):
            link = await self._open(await self._address(b""))
        try:
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                await link.ask(pack("SUBSCRIBE", channel))
            while True:
                async with asyncio.timeout(patience_s):
                    _, _, message = await link.unasked()
                yield message
        finally:
            link.close()

    async def close(self) -> None:
        """Close all connections."""
        self._disconnect()

    async def _link(self, address: Address, bulk: bool = False) -> Link:
        link = self._links.get((address, bulk))
        if link is None or not link.is_open:
            async with self._looking:
                link = self._links.get((address, bulk))
                if link is None or not link.is_open:
                    link = self._links[address, bulk] = await self._open(address)
        return link

    async def _open(self, address: Address) -> Link:
        config, place = self._config, self._place
        file = config.password_file
        password = file.read_text().strip() if file is not None else config.password or place.password
        return await open_link(address, self._tls, config.username or place.username, password, place.db)

    async def _address(self, tag: bytes) -> Address:
        return (self._map or await self._slot_map()).primary_of(tag)

    async def _slot_map(self) -> _SlotMap:
        async with self._looking:
            if self._map is None:
                self._map = await self._ask_the_way()
                for key in [key for key in self._links if key[0] not in self._map.primaries]:
                    self._links.pop(key).close()
            return self._map

    async def _ask_the_way(self) -> _SlotMap:
        failure: BaseException = ConnectionError("no Sentinel knows the primary")
        ask = _primary_by_sentinel if self._place.kind == "sentinel" else _primaries_by_node
        for guide in tuple(self._guides):
            try:
                async with asyncio.timeout(_GUIDE_TIMEOUT_S):
                    link = await self._open_guide(guide)
                    try:
                        found = await ask(link, guide, self._place.service)
                    finally:
                        link.close()
            except UNREACHABLE as error:
                failure = error
                continue
            # The nodes named in the URL may all be gone one day. Sentinels are not found out about.
            others = found.primaries if self._place.kind == "cluster" else ()
            self._guides = list(dict.fromkeys((guide, *others, *self._place.addresses)))
            return found
        raise failure

    async def _open_guide(self, guide: Address) -> Link:
        if self._place.kind == "sentinel":
            return await open_link(guide, self._tls, "", self._config.sentinel_password or "")
        return await self._open(guide)

    @asynccontextmanager
    async def _minding_failures(self, timeout_s: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except UNREACHABLE as error:
            if isinstance(error, TimeoutError):  # the server may be gone without a word
                self._disconnect()
            self._look_again(error)
            raise

    def _look_again(self, error: BaseException) -> None:
        if self._place.kind == "one":
            return
        self._map = None
        if str(error).startswith("MOVED "):  # the node that it names knows best
            host, _, port = str(error).rpartition(" ")[2].rpartition(":")
            self._guides.insert(0, Address(host or self._guides[0].host, int(port)))

    def _disconnect(self) -> None:
        while self._links:
            self._links.popitem()[1].close()


class _SlotMap:
    """Which primary has which hash slots.

    Args:
        ranges: first slot and primary of each range of slots; a range ends where the next begins.
    """

    def __init__(self, ranges: Sequence[tuple[int, Address]]) -> None:
        in_order = sorted(ranges)
        self._starts = [start for start, _ in in_order]
        self._owners = [owner for _, owner in in_order]
        self.primaries: Sequence[Address] = sorted(set(self._owners))

    def primary_of(self, tag: bytes) -> Address:
        if len(self._owners) == 1:
            return self._owners[0]
        slot = crc_hqx(tag, 0) % _CLUSTER_SLOTS
        return self._owners[max(0, bisect_right(self._starts, slot) - 1)]


async def _primary_by_sentinel(link: Link, _sentinel: Address, service: str) -> _SlotMap:
    answer = await link.ask(pack("SENTINEL", "GET-MASTER-ADDR-BY-NAME", service))
    if answer is None:
        raise ConnectionError(f"the Sentinels know no primary of {service!r}")
    host, port = answer
    return _SlotMap([(0, Address(host.decode(), int(port)))])


async def _primaries_by_node(link: Link, node: Address, _service: str) -> _SlotMap:
    ranges = [
        (start, Address(host.decode() or node.host, port))
        for start, _, (host, port, *_), *_ in await link.ask(pack("CLUSTER", "SLOTS"))
    ]
    if not ranges:
        raise ConnectionError("the cluster has given no slots to its nodes")
    return _SlotMap(ranges)


async def _run_of(link: Link, address: Address) -> str:
    try:
        role = (await link.ask(pack("ROLE")))[0]
        info = await link.ask(pack("INFO", "server"))
    except RedisError as error:
        if str(error).startswith(_NOT_ALLOWED):
            return ""
        raise
    if role != b"master":
        raise ConnectionError(f"{address.host}:{address.port} is a replica; the primary is needed")
    return next((line[7:].decode() for line in info.splitlines() if line.startswith(b"run_id:")), "")


def _tls_context(config: IndexConfig) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=config.tls_ca)
        if config.tls_cert is not None:
            context.load_cert_chain(config.tls_cert, config.tls_key)
    except OSError as error:
        raise ConfigError(f"index.tls_ca, tls_cert or tls_key cannot be used: {error}") from None
    if config.tls_verify != "full":
        context.check_hostname = False
    if config.tls_verify == "none":
        context.verify_mode = ssl.CERT_NONE
    return context
