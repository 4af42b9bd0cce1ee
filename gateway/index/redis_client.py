"""Redis or Valkey, wherever ``index.url`` says it is: one server, the primary that Sentinels name, or a cluster.

redis-py does nearly everything: it finds the servers, connects, authenticates, and carries commands to the node that
has their keys. Only the masks of chunks, which every decision waits for, are read over connections of our own; see
``redis_link``. These go to the servers that redis-py names.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final, cast

from redis.asyncio import Redis, RedisCluster, Sentinel
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import (
    AskError,
    ClusterError,
    MovedError,
    NoPermissionError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

from gateway.config import IndexConfig
from gateway.errors import ConfigError
from gateway.index.redis_address import Place, parse_url
from gateway.index.redis_link import Address, Link, open_link
from gateway.index.redis_tls import SentinelTlsConnection, TlsConnection, trust_cluster, trust_one

UNREACHABLE: Final = (RedisError, RedisClusterException, OSError, TimeoutError, RuntimeError)
"""What every command may raise. It may have been carried out all the same.

``RedisClusterException``, which is no ``RedisError``, says that no node of a cluster answers, or that none has a key;
``RuntimeError`` comes from uvloop where a connection was reset just before the command is sent.
"""

TIMED_OUT: Final = (RedisTimeoutError, TimeoutError)
"""Those of them that say that a server was silent."""

ON_THE_MOVE: Final = (AskError, MovedError, TryAgainError, ClusterError)
"""Those of exactly these types say that a cluster moves the keys from one node to another; all else is well."""

COMMAND_TIMEOUT_S: Final = 1.0
_SENTINEL_TIMEOUT_S: Final = 0.3  # the next one may know the way


class RedisClient:
    """A client of redis-py, and what the three topologies do not have in common.

    Nothing is tried twice, for whoever asks has something better to do than to wait. But after a failure the next
    command looks afresh where the servers are.

    Args:
        config: the URL, and how to authenticate.
        timeout_s: how long a server may be silent.

    Attributes:
        commands: the client. Each of its commands raises one of ``UNREACHABLE`` when it fails. Its type is ``Any``, as
            redis-py declares commands for clients that wait and for clients that do not alike.
        is_cluster: whether only keys with the same tag can be named in one command.

    Raises:
        ConfigError: a file that is named cannot be used.
    """

    def __init__(self, config: IndexConfig, timeout_s: float = COMMAND_TIMEOUT_S) -> None:
        place = parse_url(config.url)
        self._place = place
        self._credentials = _credentials(config, place)
        self._tls = _tls_settings(config) if place.tls else {}
        self._settings: dict[str, Any] = {
            "credential_provider": self._credentials,
            "socket_timeout": timeout_s,
            "socket_connect_timeout": COMMAND_TIMEOUT_S,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
            **self._tls,
        }
        self.is_cluster = place.kind == "cluster"
        self._links: dict[Address, Link] = {}
        self._sentinels: list[Redis] = []
        self.commands = self._connect(config)

    async def run(self) -> str:
        """Return the ids of the server processes that are asked; where they change, what they had may be lost.

        Hosted servers that do not tell have none; a fail-over of theirs goes unnoticed.
        """
        try:
            if not self.is_cluster and (await self.commands.role())[0] != b"master":
                await self.commands.connection_pool.disconnect()  # the Sentinels know another one by now
                raise ConnectionError("the server is a replica; the primary is needed")
            return " ".join([info.get("run_id", "") for info in await self.infos("server")])
        except ResponseError as error:
            if isinstance(error, NoPermissionError) or "unknown command" in str(error):
                return ""
            raise

    async def infos(self, section: str) -> list[dict[str, Any]]:
        """Return a section of what the primaries tell about themselves, each of them."""
        if not self.is_cluster:
            return [await self.commands.info(section)]
        await self.commands.initialize()
        primaries = sorted(self.commands.get_primaries(), key=lambda node: str(node.name))
        return [await self.commands.info(section, target_nodes=node) for node in primaries]

    async def listen(self, channel: str, tag: str, patience_s: float) -> AsyncIterator[bytes]:
        """Yield the messages of a channel.

        Args:
            channel: its name.
            tag: in a cluster, the node that has keys with this tag is listened to. Every node hears every message;
                this one is sure to be alive if commands on such keys are answered.
            patience_s: how long there may be none.

        Raises:
            TimeoutError: there was none for ``patience_s``.
        """
        redis = self.commands
        if self.is_cluster:  # pub/sub of redis-py's clusters is younger than the oldest release we allow
            await redis.initialize()
            node = redis.get_node_from_key(tag)
            redis = self._client(host=node.host, port=node.port)
        try:
            async with redis.pubsub() as pubsub:
                await pubsub.subscribe(channel)
                while (message := await pubsub.get_message(timeout=patience_s)) is not None:
                    if message["type"] == "message":
                        yield message["data"]
        finally:
            if self.is_cluster:
                await redis.aclose()
        raise TimeoutError(f"no message for {patience_s} s")

    def link(self, tag: bytes) -> Link:
        """Return a connection to where keys with ``tag`` are, as far as is known since the last command.

        Raises:
            ConnectionError: there is none; ``open_links`` opens it.
        """
        address = self._address_of(self.commands.get_node_from_key(tag) if self.is_cluster else None)
        link = self._links.get(address)
        if link is None or not link.is_open:
            raise ConnectionError(f"no connection to {address}")
        return link

    async def open_links(self) -> None:
        """Open a connection to each server that has keys. Those that are open to others are closed."""
        nodes = self.commands.get_primaries() if self.is_cluster else [None]
        addresses = {self._address_of(node) for node in nodes}
        for address in self._links.keys() - addresses:
            self._links.pop(address).close()
        tls = _tls_context(self._tls) if self._tls else None
        for address in addresses:
            if address not in self._links or not self._links[address].is_open:
                async with asyncio.timeout(COMMAND_TIMEOUT_S):
                    credentials = self._credentials.get_credentials() if self._credentials is not None else ()
                    self._links[address] = await open_link(address, tls, credentials, self._place.db)

    def close_links(self) -> None:
        """Close what ``open_links`` opened: a server may be gone without a word."""
        while self._links:
            self._links.popitem()[1].close()

    async def close(self) -> None:
        """Close all connections."""
        self.close_links()
        for client in (self.commands, *self._sentinels):
            await client.aclose()

    def _connect(self, config: IndexConfig) -> Any:
        place, settings = self._place, self._settings
        if place.kind == "cluster":
            cluster = RedisCluster(startup_nodes=[ClusterNode(*address) for address in place.addresses], **settings)
            if place.tls:
                trust_cluster(cluster)
            return cluster
        if place.kind == "one":
            host, port = place.addresses[0] if place.addresses else ("", 0)
            return self._client(host=host, port=port, unix_socket_path=place.path or None, db=place.db)
        timeouts = dict.fromkeys(("socket_timeout", "socket_connect_timeout"), _SENTINEL_TIMEOUT_S)
        theirs = {"credential_provider": _credentials_of_sentinels(config)}
        sentinel = cast("Any", Sentinel)(place.addresses, sentinel_kwargs=settings | timeouts | theirs)
        self._sentinels = sentinel.sentinels
        if place.tls:
            for client in self._sentinels:
                trust_one(client)
            settings = settings | {"connection_class": SentinelTlsConnection}
        return sentinel.master_for(place.service, db=place.db, **settings)

    def _client(self, **where: Any) -> Redis:
        """Return a client of one server."""
        client = Redis(**where, **self._settings)
        if self._place.tls:
            trust_one(client)
        return client

    def _address_of(self, node: ClusterNode | None) -> Address:
        if node is not None:
            return node.host, int(node.port)
        if self._place.kind == "sentinel":
            return cast("Address", self.commands.connection_pool.master_address)
        return self._place.path or self._place.addresses[0]


class _Credentials(CredentialProvider):
    """User and password, read anew at every connection."""

    def __init__(self, username: str, password: str, file: Path | None) -> None:
        self._username = username
        self._password = password
        self._file = file

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = self._file.read_text().strip() if self._file is not None else self._password
        return (self._username, password) if self._username else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()  # redis-py's own does the same, with a warning at every connection


def _credentials(config: IndexConfig, place: Place) -> _Credentials | None:
    username, password = config.username or place.username, config.password or place.password
    return _Credentials(username, password, config.password_file) if password or config.password_file else None


def _credentials_of_sentinels(config: IndexConfig) -> _Credentials | None:
    password, file = config.sentinel_password or "", config.sentinel_password_file
    return _Credentials("", password, file) if password or file else None


def _tls_settings(config: IndexConfig) -> dict[str, Any]:
    settings = {
        "ssl": True,
        "ssl_ca_certs": config.tls_ca and str(config.tls_ca),
        "ssl_certfile": config.tls_cert and str(config.tls_cert),
        "ssl_keyfile": config.tls_key and str(config.tls_key),
        "ssl_cert_reqs": "none" if config.tls_verify == "none" else "required",
        "ssl_check_hostname": config.tls_verify == "full",
    }
    try:
        _tls_context(settings)
    except OSError as error:
        raise ConfigError(f"index.tls_ca, tls_cert or tls_key cannot be used: {error}") from None
    return settings


def _tls_context(settings: dict[str, Any]) -> ssl.SSLContext:
    """Return what the connections of redis-py connect with."""
    arguments = {name: value for name, value in settings.items() if name != "ssl"}
    return TlsConnection(**arguments).ssl_context.get()
