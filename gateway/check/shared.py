"""Whether the shared index can be reached, and used under its namespace."""

from __future__ import annotations

import asyncio
from typing import Final
from urllib.parse import urlsplit
from uuid import uuid4

from redis.exceptions import ResponseError

from gateway.check.findings import Notebook
from gateway.config import IndexConfig
from gateway.errors import ConfigError
from gateway.index.redis_client import UNREACHABLE, RedisClient

_LEAST_VERSION: Final = (6, 2)
_KEY_LIFE_S: Final = 5


async def look_at_redis(config: IndexConfig, notes: Notebook, timeout_s: float) -> None:
    """Write, read and delete one key of ours; nothing else is touched or listed."""
    where = urlsplit(config.url).netloc.rpartition("@")[2] or config.url
    try:
        redis = RedisClient(config)
    except ConfigError as error:
        notes.problem("reachable", str(error), "correct the section index; docs/configuration.md has its keys")
        return
    try:
        async with asyncio.timeout(2 * timeout_s):
            await _look(redis, config, notes, where)
    except UNREACHABLE as error:
        mend = "start it, or correct index.url (host, port, rediss:// for TLS), index.password, index.tls_ca"
        notes.problem("reachable", f"{where}: {error or type(error).__name__}", mend)
    finally:
        await redis.close()


async def _look(redis: RedisClient, config: IndexConfig, notes: Notebook, where: str) -> None:
    key = f"{config.namespace}:check:{uuid4().hex}"
    await redis.commands.ping()
    notes.ok("reachable", f"{where} answers")
    try:
        (server, *_), (memory, *_) = await redis.infos("server"), await redis.infos("memory")
    except ResponseError:
        server = memory = {}  # some hosted servers do not tell
    version = server.get("redis_version", "")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if len(numbers) == len(_LEAST_VERSION) and numbers < _LEAST_VERSION:
        notes.problem("version", f"Redis {version} is too old", "use Redis 6.2 or later, or Valkey")
    elif version:
        notes.ok("version", f"speaks as Redis {version}")
    if memory.get("maxmemory") and memory.get("maxmemory_policy") == "noeviction":
        mend = "set maxmemory-policy allkeys-lru, if nothing else is kept there"
        notes.note("memory", "when it is full, new chunks are refused: maxmemory-policy is noeviction", mend)
    await _look_at_namespace(redis, config.namespace, key, notes)


async def _look_at_namespace(redis: RedisClient, namespace: str, key: str, notes: Notebook) -> None:
    value = uuid4().bytes
    try:
        await redis.commands.set(key, value, ex=_KEY_LIFE_S)
        same = await redis.commands.get(key) == value
        await redis.commands.delete(key)
    except ResponseError as error:
        mend = f"let the user read and write keys of ours: ACL SETUSER … ~{namespace}:* +@all"
        notes.problem("namespace", f"keys that begin with {namespace}: cannot be used: {error}", mend)
        return
    if same:
        notes.ok("namespace", f"keys that begin with {namespace}: can be written and read")
    else:
        notes.problem("namespace", "a key that was written reads otherwise", "is index.url a replica, or a proxy?")
