"""What kvway keeps in Redis or Valkey, and the commands on it.

* ``{namespace}:{generation}:{tag}chunk``, a string: the chunk's mask, one nibble per slot, one bit per tier.
* ``{namespace}:{slots}:leases``, a sorted set: slot → end of its lease, Unix milliseconds by the server's clock.
* ``{namespace}:{slots}:owners``, a hash: slot → who has it (replica and worker).
* ``{namespace}:{slots}:generation``, a hash: its ``number``, and the ``run`` (id of the server process) it began in.

The tag in braces is made from a chain's first chunk and keeps the chain on one slot of a Redis Cluster. The strings are
read with ``MGET`` and written nibble by nibble, each by the one replica that has the slot. Nibbles are swapped in
pairs, so that ``int.from_bytes(value, "little")`` is the mask.

A new *generation* leaves all chunk keys behind to expire, and every replica writes what its slots hold under new keys.
So the index begins afresh when it cannot be trusted (server flushed, restarted or failed over; writes given up), and so
slots become free whose owner died without sweeping them. Nobody ever has to search the keyspace, which may hold more
than ours.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final, cast

import hiredis
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoPermissionError, RedisError

from gateway.config import IndexConfig
from gateway.errors import ConfigError
from policies.chunks import DIGEST_BYTES

UNREACHABLE: Final = (RedisError, OSError, TimeoutError)
"""What every command may raise. It may have been carried out all the same."""

LEASE_S: Final = 10.0
_COMMAND_TIMEOUT_S: Final = 1.0
_WRITE_TIMEOUT_S: Final = 10.0  # long: a write that is given up may still be carried out, and later than the next one
_MAX_CONNECTIONS: Final = 256
_TAG_BYTES: Final = 2  # 65,536 tags for the 16,384 slots of a cluster
_KEYS_PER_CALL: Final = 128  # a script keeps all other clients waiting, some 2 µs per key

_WRITE: Final = """
local index, nibble, ttl_ms = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3]
for _, key in ipairs(KEYS) do
  if nibble > 0 then
    redis.call('BITFIELD', key, 'SET', 'u4', '#' .. index, nibble)
    redis.call('PEXPIRE', key, ttl_ms)
  elseif redis.call('STRLEN', key) * 2 > index then
    redis.call('BITFIELD', key, 'SET', 'u4', '#' .. index, 0)
    if redis.call('BITCOUNT', key) == 0 then redis.call('UNLINK', key) end
  end
end
"""

_NOW: Final = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""

_CLAIM: Final = f"""{_NOW}
local slot = 0
while redis.call('ZSCORE', KEYS[1], slot) do slot = slot + 1 end
redis.call('ZADD', KEYS[1], now + ARGV[2], slot)
redis.call('HSET', KEYS[2], slot, ARGV[1])
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ARGV[3]) end
return slot
"""

_FREE: Final = """
if redis.call('HGET', KEYS[2], ARGV[1]) == ARGV[2] then
  redis.call('ZREM', KEYS[1], ARGV[1])
  redis.call('HDEL', KEYS[2], ARGV[1])
end
"""

# A slot whose lease is over is dead: it stays taken, since nobody swept it, until the next generation. A generation
# begins early when the dead are more than the living, so that the masks do not become wider and wider.
_RENEW: Final = f"""{_NOW}
local lease_ms, ttl_ms, run, known, begin = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5] == '1'
local lost = {{}}
for i = 6, #ARGV, 2 do
  local owner = redis.call('HGET', KEYS[2], ARGV[i])
  if owner and owner ~= ARGV[i + 1] then
    table.insert(lost, tonumber(ARGV[i]))
  else
    if not owner then redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1]) end
    redis.call('ZADD', KEYS[1], now + lease_ms, ARGV[i])
  end
end
local number = tonumber(redis.call('HGET', KEYS[3], 'number'))
local dead = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now)
local living = redis.call('ZCARD', KEYS[1]) - #dead
if begin or not number or redis.call('HGET', KEYS[3], 'run') ~= run or #dead > math.max(64, living) then
  number = math.max(number or 0, known) + 1
  redis.call('HSET', KEYS[3], 'number', number, 'run', run)
  for _, slot in ipairs(dead) do
    redis.call('ZREM', KEYS[1], slot)
    redis.call('HDEL', KEYS[2], slot)
  end
end
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ttl_ms) end
return {{number, lost}}
"""


def tagged(chunks: Iterable[bytes], root: bytes) -> list[bytes]:
    """Return ``{tag}chunk`` for chunks of the chain that begins with ``root``."""
    tag = _tag(root)
    return [tag + chunk for chunk in chunks]


class _Packed(bytes):
    """A whole command as it is sent."""


class _PacksFast:
    """Of redis-py's asyncio connections: lets hiredis pack commands, unless they are packed already."""

    def pack_command(self, name: str, *args: Any) -> list[bytes]:
        if args and isinstance(args[0], _Packed):
            return [args[0]]
        return [hiredis.pack_command((*name.split(), *args))]


class RedisStore:
    """The commands. Each raises one of ``UNREACHABLE`` when it fails or takes too long.

    Args:
        config: URL, namespace and times.

    Attributes:
        generation: the generation that is read and written; 0 before the first ``renew``.

    Raises:
        ConfigError: the URL is not one of Redis.
    """

    def __init__(self, config: IndexConfig) -> None:
        # No retries here: whoever asks has something better to do than to wait.
        try:
            self._redis = Redis.from_url(
                config.url,
                protocol=2,
                retry=Retry(NoBackoff(), 0),
                socket_timeout=None,
                socket_connect_timeout=_COMMAND_TIMEOUT_S,
                max_connections=_MAX_CONNECTIONS,
            )
        except ValueError as error:
            raise ConfigError(f"index.url: {error}") from None
        pool = self._redis.connection_pool
        pool.connection_class = type("FastPackingConnection", (_PacksFast, pool.connection_class), {})
        self._namespace = config.namespace
        slots = f"{config.namespace}:{{slots}}"
        self._leases, self._owners, self._generation = f"{slots}:leases", f"{slots}:owners", f"{slots}:generation"
        self._chunk_ttl_ms = int(max(1.0, config.ttl_s) * 1000)
        # The slots outlive every chunk key of their generation: else its number could come again too soon.
        self._slots_ttl_ms = 2 * self._chunk_ttl_ms + int(LEASE_S * 1000)
        self._use(0)

    async def read(self, chunks: Sequence[bytes], root: bytes) -> Iterator[tuple[int, int]]:
        """Return the masks as (mask, number of chunks that have it). Waits as long as the caller lets it."""
        redis = cast("Any", self._redis)
        return _masks(await redis.execute_command("MGET", _mget(self._prefix + _tag(root), chunks)))

    async def write(self, keys_by_nibble: Mapping[tuple[int, int], Sequence[bytes]]) -> None:
        """Set nibbles; a mask that becomes all zeros is deleted.

        Args:
            keys_by_nibble: (slot, its nibble) → keys as ``tagged`` returns them.
        """
        pipeline = self._redis.pipeline(transaction=False)
        for (slot, nibble), keys in keys_by_nibble.items():
            for start in range(0, len(keys), _KEYS_PER_CALL):
                names = [self._prefix + key for key in keys[start : start + _KEYS_PER_CALL]]
                pipeline.eval(_WRITE, len(names), *names, slot ^ 1, nibble, self._chunk_ttl_ms)
        async with asyncio.timeout(_WRITE_TIMEOUT_S):
            await pipeline.execute()

    async def claim(self, owner: str) -> int:
        """Return the lowest slot that nobody has, leased to ``owner``."""
        keys = self._leases, self._owners
        return int(await self._eval(_CLAIM, keys, owner, int(LEASE_S * 1000), self._slots_ttl_ms))

    async def free(self, slot: int, owner: str) -> None:
        """Give back a slot of which nothing is left in the masks."""
        await self._eval(_FREE, (self._leases, self._owners), slot, owner)

    async def abandon(self, slots: Iterable[int]) -> None:
        """End the leases of slots that are not swept, instead of letting them run out."""
        async with asyncio.timeout(_COMMAND_TIMEOUT_S):
            await self._redis.zadd(self._leases, dict.fromkeys(map(str, slots), 0), xx=True)

    async def renew(self, owners: Mapping[int, str], begin: bool) -> set[int]:
        """Renew leases and learn the present generation.

        Args:
            owners: this replica's slots, with the owner each was claimed for.
            begin: begin a new generation.

        Returns:
            Slots that have become somebody else's; they must not be written any more.
        """
        run = await self._run()
        number, lost = await self._eval(
            _RENEW,
            (self._leases, self._owners, self._generation),
            int(LEASE_S * 1000),
            self._slots_ttl_ms,
            run,
            self.generation,
            int(begin),
            *(part for lease in owners.items() for part in lease),
        )
        self._use(number)
        return set(lost)

    async def close(self) -> None:
        """Close all connections."""
        await self._redis.aclose()

    def _use(self, generation: int) -> None:
        self.generation = generation
        self._prefix = f"{self._namespace}:{generation}:".encode()

    async def _run(self) -> str:
        try:
            async with asyncio.timeout(_COMMAND_TIMEOUT_S):
                return str((await self._redis.info("server")).get("run_id", ""))
        except NoPermissionError:  # some hosted servers do not tell; a fail-over then goes unnoticed
            return ""

    async def _eval(self, script: str, keys: Sequence[str], *args: str | int) -> Any:
        async with asyncio.timeout(_COMMAND_TIMEOUT_S):
            return await cast("Any", self._redis.eval(script, len(keys), *keys, *args))


def _tag(root: bytes) -> bytes:
    return b"{%b}" % root[:_TAG_BYTES].hex().encode()


def _mget(prefix: bytes, chunks: Sequence[bytes]) -> _Packed:
    """Return the command that reads ``prefix + chunk`` for all chunks. As all are equally long, a join packs them."""
    before_chunk = b"\r\n$%d\r\n%b" % (len(prefix) + DIGEST_BYTES, prefix)
    keys = before_chunk.join((b"", *chunks))
    if len(keys) != len(chunks) * (len(before_chunk) + DIGEST_BYTES):
        raise ValueError(f"a chunk hash is not {DIGEST_BYTES} bytes long")
    return _Packed(b"*%d\r\n$4\r\nMGET%b\r\n" % (len(chunks) + 1, keys))


def _masks(values: Iterable[bytes | None]) -> Iterator[tuple[int, int]]:
    for value, same in groupby(values):
        yield int.from_bytes(value or b"", "little"), len(list(same))
