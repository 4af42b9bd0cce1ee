"""TLS to Redis: whoever names a CA trusts no other.

redis-py trusts the system's CAs besides, and has no setting for that. So its connections are replaced by these, which
differ from them in nothing else.
"""

from __future__ import annotations

import ssl
from typing import Any

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.connection import SSLConnection
from redis.asyncio.sentinel import SentinelManagedSSLConnection


class TlsConnection(SSLConnection):
    """A connection of redis-py that trusts ``ssl_ca_certs`` alone, or the system's CAs where that is None."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        wanted = self.ssl_context
        context = ssl.create_default_context(cafile=wanted.ca_certs)
        context.check_hostname = wanted.check_hostname
        context.verify_mode = ssl.VerifyMode(wanted.cert_reqs)
        if wanted.certfile:
            context.load_cert_chain(wanted.certfile, wanted.keyfile)
        wanted.context = context


class SentinelTlsConnection(TlsConnection, SentinelManagedSSLConnection):
    """The same, to the server that the Sentinels name."""


def trust_one(client: Redis) -> None:
    """Let the client of one server connect so."""
    client.connection_pool.connection_class = TlsConnection


def trust_cluster(client: RedisCluster) -> None:
    """Let the client of a cluster connect so: to the nodes that it knows, and to those that it will find."""
    client.get_connection_kwargs()["connection_class"] = TlsConnection
    for node in client.nodes_manager.startup_nodes.values():
        node.connection_class = TlsConnection
