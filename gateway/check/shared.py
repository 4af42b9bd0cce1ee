"""Whether the shared index can be reached, and used under its namespace."""

from __future__ import annotations

import asyncio
from typing import Any, Final
from urllib.parse import urlsplit
from uuid import uuid4

from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.check.findings import Notebook
from gateway.config import IndexConfig

_LEAST_VERSION: Final = (6, 2)
_KEY_LIFE_S: Final = 5


async def look_at_redis(config: IndexConfig, notes: Notebook, timeout_s: float) -> None:
    """Write, read and delete one key of ours; nothing else is touched or listed."""
    where = urlsplit(config.url).netloc.rpartition("@")[2] or config.url
    try:
        redis = Redis.from_url(config.url, socket_connect_timeout=timeout_s, socket_timeout=timeout_s)
    except ValueError as error:
        notes.problem("reachable", f"index.url is not one of Redis: {error}", "write redis://host:port/0")
        return
    try:
        async with asyncio.timeout(2 * timeout_s):
            await _look(redis, config, notes, where)
    except (RedisError, OSError, TimeoutError) as error:
        mend = "start it, or correct index.url (host, port, password, rediss:// for TLS)"
        notes.problem("reachable", f"{where}: {error or type(error).__name__}", mend)
    finally:
        await redis.aclose()


async def _look(redis: Redis, config: IndexConfig, notes: Notebook, where: str) -> None:
    await redis.ping()
    notes.ok("reachable", f"{where} answers")
    try:
        info: dict[str, Any] = await redis.info("server") | await redis.info("memory")
    except RedisError:
        info = {}  # some hosted servers do not tell
    version = str(info.get("redis_version", ""))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if len(numbers) == len(_LEAST_VERSION) and numbers < _LEAST_VERSION:
        notes.problem("version", f"Redis {version} is too old", "use Redis 6.2 or later, or Valkey")
    elif version:
        notes.ok("version", f"speaks as Redis {version}")
    policy = info.get("maxmemory_policy")
    if info.get("maxmemory") and policy == "noeviction":
        mend = "set maxmemory-policy allkeys-lru, if nothing else is kept there"
        notes.note("memory", "when it is full, new chunks are refused: maxmemory-policy is noeviction", mend)
    await _look_at_namespace(redis, config.namespace, notes)


async def _look_at_namespace(redis: Redis, namespace: str, notes: Notebook) -> None:
    key, value = f"{namespace}:check:{uuid4().hex}", uuid4().bytes
    try:
        await redis.set(key, value, ex=_KEY_LIFE_S)
        same = await redis.get(key) == value
        await redis.delete(key)
    except RedisError as error:
        mend = f"let the user read and write keys of ours: ACL SETUSER … ~{namespace}:* +@all"
        notes.problem("namespace", f"keys that begin with {namespace}: cannot be used: {error}", mend)
        return
    if same:
        notes.ok("namespace", f"keys that begin with {namespace}: can be written and read")
    else:
        notes.problem("namespace", "a key that was written reads otherwise", "is index.url a replica, or a proxy?")
