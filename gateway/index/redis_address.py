"""What ``index.url`` says about where Redis or Valkey is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from redis.asyncio.connection import parse_url as parse_server_url

_REDIS_PORT: Final = 6379
_SENTINEL_PORT: Final = 26379

Kind = Literal["one", "sentinel", "cluster"]


@dataclass(slots=True, frozen=True)
class Place:
    """A parsed URL.

    Attributes:
        kind: what answers at ``addresses``: the one server, Sentinels, or nodes of a cluster.
        addresses: host and port, at least one; none if there is a ``path``.
        path: the one server's Unix socket; empty for none.
        service: what the Sentinels call the primary.
        db: number of the database; always 0 in a cluster.
        tls: whether to connect with TLS.
        username: from the URL; empty for the default user.
        password: from the URL; empty for none.
    """

    kind: Kind
    addresses: tuple[tuple[str, int], ...] = ()
    path: str = ""
    service: str = ""
    db: int = 0
    tls: bool = False
    username: str = ""
    password: str = ""


def parse_url(url: str) -> Place:
    """Parse a URL as ``index.url`` describes it: as redis-py does, but for several hosts, and Sentinels' service.

    Raises:
        ValueError: it cannot be understood. The message repeats no password.
    """
    scheme, _, rest = url.partition("://")
    protocol, _, topology = scheme.partition("+")
    kind: Kind = "sentinel" if topology == "sentinel" else "cluster" if topology == "cluster" else "one"
    if protocol == "unix":
        server = _server(url, rest.rpartition("@")[2])
        return Place(kind, path=server["path"], **_login(server))
    if set(rest.rpartition("@")[0]) & set("/?#"):
        raise ValueError("in a user or password, / ? # are written %2F %3F %23")
    network, _, db = rest.partition("/")
    user, at, hosts = network.rpartition("@")
    service = ""
    if kind == "sentinel":
        service, _, db = db.partition("/")
        if not service:
            raise ValueError("name the service that the Sentinels watch, as in .../mymaster")
    elif kind == "cluster" and db not in ("", "0"):
        raise ValueError("a cluster has no database but 0")
    if "?" in db:
        raise ValueError("what comes behind the ? is set by keys of their own, such as index.password")
    if db and not db.isdecimal():
        raise ValueError(f"{db!r} is not the number of a database")
    servers = [_server(f"{protocol}://{user}{at}{host}/{db}", host) for host in hosts.split(",")]
    if kind == "one" and len(servers) > 1:
        raise ValueError("for several servers, write redis+sentinel:// or redis+cluster://")
    if not all("host" in server for server in servers):
        raise ValueError("there is no host")
    default_port = _SENTINEL_PORT if kind == "sentinel" else _REDIS_PORT
    addresses = tuple((server["host"], server.get("port", default_port)) for server in servers)
    return Place(kind, addresses, service=service, tls=protocol == "rediss", **_login(servers[0]))


def _server(url: str, shown: str) -> dict[str, Any]:
    try:
        return dict(parse_server_url(url))
    except ValueError as error:
        raise ValueError(f"{shown!r}: {error}") from None


def _login(server: dict[str, Any]) -> dict[str, Any]:
    return {key: server[key] for key in ("username", "password", "db") if key in server}
