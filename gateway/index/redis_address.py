"""What ``index.url`` says about where Redis or Valkey is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from gateway.errors import ConfigError

_REDIS_PORT: Final = 6379
_SENTINEL_PORT: Final = 26379

Kind = Literal["one", "sentinel", "cluster"]


class Address(NamedTuple):
    """Where to connect to: host and port, or the path of a Unix socket and -1."""

    host: str
    port: int


@dataclass(slots=True, frozen=True)
class Place:
    """A parsed URL.

    Attributes:
        kind: what answers at ``addresses``: the one server, Sentinels, or nodes of a cluster.
        addresses: at least one.
        service: what the Sentinels call the primary.
        db: number of the database; always 0 in a cluster.
        tls: whether to connect with TLS.
        username: from the URL; empty for the default user.
        password: from the URL; empty for none.
    """

    kind: Kind
    addresses: tuple[Address, ...]
    service: str = ""
    db: int = 0
    tls: bool = False
    username: str = ""
    password: str = ""


def parse_url(url: str) -> Place:
    """Parse a URL as ``index.url`` describes it.

    Raises:
        ConfigError: it cannot be understood. The message repeats no password.
    """
    scheme, _, rest = url.partition("://")
    if scheme == "unix":
        path = urlsplit(url)
        return Place("one", (Address(unquote(path.path), -1),), db=_db(parse_qs(path.query).get("db", [""])[0]))
    network, _, path_in_it = rest.partition("/")
    user, _, hosts = network.rpartition("@")
    username, _, password = user.partition(":")
    protocol, _, topology = scheme.partition("+")
    kind: Kind = "sentinel" if topology == "sentinel" else "cluster" if topology == "cluster" else "one"
    default_port = _SENTINEL_PORT if kind == "sentinel" else _REDIS_PORT
    addresses = tuple(_address(host, default_port) for host in hosts.split(","))
    service = ""
    if kind == "sentinel":
        service, _, path_in_it = path_in_it.partition("/")
        if not service:
            raise ConfigError("index.url: name the service that the Sentinels watch, as in .../mymaster")
    elif kind == "cluster" and path_in_it not in ("", "0"):
        raise ConfigError("index.url: a cluster has no database but 0")
    elif kind == "one" and len(addresses) > 1:
        raise ConfigError("index.url: for several servers, write redis+sentinel:// or redis+cluster://")
    tls = protocol == "rediss"
    return Place(kind, addresses, unquote(service), _db(path_in_it), tls, unquote(username), unquote(password))


def _address(host: str, default_port: int) -> Address:
    try:
        parts = urlsplit(f"//{host}")
        name, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"index.url: {host!r}: {error}") from None
    if not name:
        raise ConfigError("index.url: there is no host")
    return Address(name, default_port if port is None else port)


def _db(text: str) -> int:
    if text and not text.isdecimal():
        raise ConfigError(f"index.url: {text!r} is not the number of a database; other settings are keys of their own")
    return int(text or 0)
