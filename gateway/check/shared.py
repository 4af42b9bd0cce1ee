"""Whether the shared index can be reached, and used under its namespace."""

from __future__ import annotations

import asyncio
from typing import Final
from urllib.parse import urlsplit
from uuid import uuid4

from redis.exceptions import OutOfMemoryError, ReadOnlyError, ResponseError

from gateway.check.findings import Notebook
from gateway.config import IndexConfig
from gateway.errors import ConfigError
from gateway.index.redis_client import TIMED_OUT, UNREACHABLE, RedisClient
from gateway.index.redis_store import RedisStore, tagged
from gateway.sharing.news import News, encode
from gateway.sharing.store import SharingStore
from policies.base import N_TIERS

_LEAST_VERSION: Final = (6, 2)
_KEY_LIFE_S: Final = 5
_HOLDERS: Final = 20  # of the chunk that is written: too many for a list of them
_PAUSE_S: Final = 0.1
_ANSWERS: Final = 10  # of the server, about


async def look_at_redis(config: IndexConfig, notes: Notebook, timeout_s: float) -> None:
    """Do once what gateways do all the time, with a key that is none of theirs; nothing is listed."""
    where = urlsplit(config.url).netloc.rpartition("@")[2] or config.url
    try:
        redis = RedisClient(config)
    except ConfigError as error:
        notes.problem("reachable", str(error), "correct the section index; docs/configuration.md has its keys")
        return
    try:
        async with asyncio.timeout(2 * timeout_s):
            usable = await _look_at_server(redis, notes, where)
    except UNREACHABLE as error:
        mend = "start it, or correct index.url (host, port, rediss:// for TLS), index.password, index.tls_ca"
        notes.problem("reachable", f"{where}: {error or type(error).__name__}", mend)
        return
    finally:
        await redis.close()
    if usable:
        await _look_at_namespace(config, notes, timeout_s)


async def _look_at_server(redis: RedisClient, notes: Notebook, where: str) -> bool:
    """Note what the server tells of itself; False if it cannot be used as it is configured."""
    await redis.commands.ping()
    notes.ok("reachable", f"{where} answers")
    try:
        server, memory, cluster = [(await redis.infos(section))[0] for section in ("server", "memory", "cluster")]
    except ResponseError:
        server = memory = cluster = {}  # some hosted servers do not tell
    version = server.get("redis_version", "")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if len(numbers) == len(_LEAST_VERSION) and numbers < _LEAST_VERSION:
        notes.problem("version", f"Redis {version} is too old", "use Redis 6.2 or later, or Valkey")
    elif version:
        notes.ok("version", f"speaks as Redis {version}")
    if memory.get("maxmemory") and memory.get("maxmemory_policy") == "noeviction":
        mend = "set maxmemory-policy allkeys-lru, if nothing else is kept there"
        notes.note("memory", "when it is full, new chunks are refused: maxmemory-policy is noeviction", mend)
    if cluster.get("cluster_enabled") and not redis.is_cluster:
        message = f"{where} is a node of a cluster, and takes the keys of its own hash slots only"
        notes.problem("topology", message, f"write index.url as redis+cluster://{where}")
        return False
    return True


async def _look_at_namespace(config: IndexConfig, notes: Notebook, timeout_s: float) -> None:
    namespace = config.namespace
    ourselves = uuid4().hex  # another replica each time: what one tells is numbered, and gaps are noticed
    trial = {"namespace": f"{namespace}:check:{ourselves}", "ttl_s": _KEY_LIFE_S}
    index, sharing = RedisStore(config.model_copy(update=trial)), SharingStore(config, ourselves)
    try:
        async with asyncio.timeout(_ANSWERS * timeout_s):
            same = await _write_and_read(index, ourselves)
            await _come_and_go(sharing, ourselves)
    except UNREACHABLE as error:
        message = f"keys that begin with {namespace}: cannot be used: {error or type(error).__name__}"
        notes.problem("namespace", message, _mend(error, namespace))
        return
    finally:
        await index.close()
        await sharing.close()
    if same:
        notes.ok("namespace", f"keys that begin with {namespace}: can be written and read")
    else:
        notes.problem("namespace", "a key that was written reads otherwise", "is index.url a replica, or a proxy?")


async def _write_and_read(index: RedisStore, owner: str) -> bool:
    """Store a chunk for many slots, and remove it; True if it reads as it was written."""
    await index.renew({}, begin=False)
    slot = await index.claim(owner)
    chunk = uuid4().bytes
    await index.write({(holder, 1): tagged([chunk], chunk) for holder in range(_HOLDERS)})
    masks = list(await index.read([chunk], chunk))
    await index.write({(holder, 0): tagged([chunk], chunk) for holder in range(_HOLDERS)})
    await index.free(slot, owner)
    return masks == [(sum(1 << N_TIERS * holder for holder in range(_HOLDERS)), 1)]


async def _come_and_go(sharing: SharingStore, replica: str) -> None:
    """Be a replica that leaves, which the others forget at once, and listen for a moment."""
    await sharing.beat({}, life_s=0)
    await sharing.tell(encode(News(replica, whole=True, loads={}, leaving=True)))
    try:
        await anext(sharing.listen(_PAUSE_S))
    except TimeoutError:  # nobody has said anything
        return


def _mend(error: BaseException, namespace: str) -> str:
    if isinstance(error, TIMED_OUT):
        return "it is slow or far away: look at its load and at the network; gateways do not wait for it"
    if isinstance(error, OutOfMemoryError):
        return "it is full: raise maxmemory, or set maxmemory-policy allkeys-lru if nothing else is kept there"
    if isinstance(error, ReadOnlyError) or str(error).startswith("NOREPLICAS"):
        return "index.url must lead to a primary that takes writes"
    return (
        f"let the user use keys and channel of ours: ACL SETUSER … ~{namespace}:* &{namespace}:news +@all; "
        "docs/replicas.md names the commands"
    )
