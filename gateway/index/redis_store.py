"""What kvway keeps in Redis or Valkey, and the commands on it.

* ``{namespace}:{generation}:{tag}chunk``, a string: the chunk's mask, one nibble per slot, one bit per tier. With few
  holders it is a list of (slot, two bytes; nibble, one byte) by slot; with more it is spread, and has half a byte for
  every slot. Their lengths tell them apart.
* ``{namespace}:{slots}:leases``, a sorted set: slot → end of its lease, Unix milliseconds by the server's clock.
* ``{namespace}:{slots}:owners``, a hash: slot → who has it (replica and worker).
* ``{namespace}:{slots}:generation``, a hash: its ``number``, the ``run`` (ids of the server processes) it began in, and
  the ``version`` of the owners, which counts their changes.

The tag in braces is made from a chain's first chunk and keeps the chain on one slot of a Redis Cluster. The strings are
read with ``MGET`` and written nibble by nibble, each by the one replica that has the slot. Where a mask is spread, its
nibbles are swapped in pairs, so that ``int.from_bytes(value, "little")`` is the mask.

A new *generation* leaves all chunk keys behind to expire, and every replica writes what its slots hold under new keys.
So the index begins afresh when it cannot be trusted (server flushed, restarted or failed over; writes given up), and so
slots become free whose owner died without sweeping them. Nobody ever has to search the keyspace, which may hold more
than ours.

A replica that was cut off must not take a slot for a worker's that has been given to another since. So what it knows
of owners comes with the generation that it reads, counts for ``TRUST_S``, and a slot that was freed stays free for
longer than that.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, groupby
from typing import Any, Final

from redis.exceptions import ResponseError

from gateway.config import IndexConfig
from gateway.index.redis_client import UNREACHABLE, RedisClient
from policies.base import N_TIERS
from policies.chunks import DIGEST_BYTES

LEASE_S: Final = 10.0
TRUST_S: Final = 5.0
"""A replica that has not heard for so long who has which slot does not read the masks."""

FREED_S: Final = 2 * TRUST_S
"""So long a slot that was freed is not given out again: by then, no replica takes it for its former owner's."""

_WRITE_TIMEOUT_S: Final = 10.0  # long: a write that is given up may still be carried out, and later than the next one
_TAG_BYTES: Final = 2  # 65,536 tags for the 16,384 slots of a cluster
_KEYS_PER_CALL: Final = 128  # a script keeps all other clients waiting, some 2 µs per key
# Servers that know what is asked next fetch it from memory meanwhile: Valkey (9) as many keys at a time, of commands
# that came together, by its default `prefetch-batch-max-size`.
_KEYS_PER_MGET: Final = 16
_ENTRY_BYTES: Final = 3
_LISTED_BYTES: Final = 12 * _ENTRY_BYTES  # shorter values are lists, longer ones are spread
_MAX_LISTS: Final = 4096
_FIRST_GENERATIONS: Final = 1 << 20
_ON_THE_MOVE: Final = ("ASK ", "TRYAGAIN")  # a cluster moves these keys from one node to another

# Of a value no more is read than the list, or enough to tell that it is none.
_WRITE: Final = f"""
local slot, nibble, ttl_ms, longest = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3], {_LISTED_BYTES}
local entry = nibble > 0 and string.char(math.floor(slot / 256), slot % 256, nibble) or ''

local function slot_at(list, at)
  local high, low = string.byte(list, at, at + 1)
  return high * 256 + low
end
local function set_spread(key, slot, nibble)
  redis.call('BITFIELD', key, 'SET', 'u4', '#' .. (slot + 1 - 2 * (slot % 2)), nibble)
end

for _, key in ipairs(KEYS) do
  local list = redis.call('GETRANGE', key, 0, longest)
  if #list <= longest then
    local at = 1
    while at < #list and slot_at(list, at) < slot do at = at + {_ENTRY_BYTES} end
    local is_listed = at < #list and slot_at(list, at) == slot
    list = string.sub(list, 1, at - 1) .. entry .. string.sub(list, is_listed and at + {_ENTRY_BYTES} or at)
    if list == '' then
      redis.call('UNLINK', key)
    elseif #list <= longest then
      redis.call('SET', key, list, 'PX', ttl_ms)
    else
      redis.call('SET', key, string.rep('\\0', longest + 1), 'PX', ttl_ms)
      for at = 1, #list, {_ENTRY_BYTES} do set_spread(key, slot_at(list, at), string.byte(list, at + 2)) end
    end
  elseif nibble > 0 then
    set_spread(key, slot, nibble)
    redis.call('PEXPIRE', key, ttl_ms)
  elseif redis.call('STRLEN', key) * 2 > slot then
    set_spread(key, slot, 0)
    if redis.call('BITCOUNT', key) == 0 then redis.call('UNLINK', key) end
  end
end
"""

_NOW: Final = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""

# Only who knows the present generation may claim: else it would write under keys that others still read as they were.
_CLAIM: Final = f"""{_NOW}
local generation = redis.call('HMGET', KEYS[3], 'number', 'run')
if generation[1] ~= ARGV[4] or generation[2] ~= ARGV[5] then return -1 end
local slot = 0
while true do
  local till = redis.call('ZSCORE', KEYS[1], slot)
  if not till or tonumber(till) <= now and redis.call('HEXISTS', KEYS[2], slot) == 0 then break end
  slot = slot + 1
end
redis.call('ZADD', KEYS[1], now + ARGV[2], slot)
redis.call('HSET', KEYS[2], slot, ARGV[1])
redis.call('HINCRBY', KEYS[3], 'version', 1)
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ARGV[3]) end
return slot
"""

_FREE: Final = f"""{_NOW}
if redis.call('HGET', KEYS[2], ARGV[1]) == ARGV[2] then
  redis.call('ZADD', KEYS[1], now + ARGV[3], ARGV[1])
  redis.call('HDEL', KEYS[2], ARGV[1])
  redis.call('HINCRBY', KEYS[3], 'version', 1)
end
"""

# A slot whose lease is over is dead: it stays taken, since nobody swept it, until the next generation. A generation
# begins early when the dead are more than the living, so that the masks do not become wider and wider. What is to end
# later than a lease from now was written before the clock went back.
_RENEW: Final = f"""{_NOW}
local lease_ms, ttl_ms, run, known, begin = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5] == '1'
local lost, changed = {{}}, false
for i = 7, #ARGV, 2 do
  local owner = redis.call('HGET', KEYS[2], ARGV[i])
  if not owner and not redis.call('ZSCORE', KEYS[1], ARGV[i]) then
    redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1])
    owner, changed = ARGV[i + 1], true
  end
  if owner == ARGV[i + 1] then
    redis.call('ZADD', KEYS[1], now + lease_ms, ARGV[i])
  else
    table.insert(lost, tonumber(ARGV[i]))
  end
end
for _, slot in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. now + lease_ms, '+inf')) do
  redis.call('ZADD', KEYS[1], now + lease_ms, slot)
end
local dead = {{}}
for _, slot in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now)) do
  if redis.call('HEXISTS', KEYS[2], slot) == 1 then table.insert(dead, slot) else redis.call('ZREM', KEYS[1], slot) end
end
local living = redis.call('ZCARD', KEYS[1]) - #dead
local number = tonumber(redis.call('HGET', KEYS[3], 'number'))
if begin or not number or redis.call('HGET', KEYS[3], 'run') ~= run or #dead > math.max(64, living) then
  number, changed = math.max(number or 0, known) + 1, true
  redis.call('HSET', KEYS[3], 'number', number, 'run', run)
  for _, slot in ipairs(dead) do
    redis.call('ZREM', KEYS[1], slot)
    redis.call('HDEL', KEYS[2], slot)
  end
  dead = {{}}
end
if changed then redis.call('HINCRBY', KEYS[3], 'version', 1) end
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ttl_ms) end
local version = tonumber(redis.call('HGET', KEYS[3], 'version'))
local owners = (number ~= known or version ~= tonumber(ARGV[6])) and redis.call('HGETALL', KEYS[2])
return {{number, lost, version, owners, dead}}
"""


def tagged(chunks: Iterable[bytes], root: bytes) -> list[bytes]:
    """Return ``{tag}chunk`` for chunks of the chain that begins with ``root``."""
    tag = b"{%b}" % _tag(root)
    return [tag + chunk for chunk in chunks]


class RedisStore:
    """The commands. Each raises one of ``UNREACHABLE`` when it fails or takes too long.

    Args:
        config: URL, namespace and times.

    Attributes:
        generation: the generation that is read and written; 0 before the first ``renew``.
        owners: slot → who has it, as of the last ``renew``.
        dead: those of them whose lease was over by then: nobody keeps them right any more.

    Raises:
        ConfigError: see ``RedisClient``.
    """

    def __init__(self, config: IndexConfig) -> None:
        self._redis = RedisClient(config)
        self._writer = RedisClient(config, _WRITE_TIMEOUT_S)
        self._namespace = config.namespace
        slots = f"{config.namespace}:{{slots}}"
        self._slots = f"{slots}:leases", f"{slots}:owners", f"{slots}:generation"
        self._chunk_ttl_ms = int(max(1.0, config.ttl_s) * 1000)
        # The slots outlive every chunk key of their generation: else its number could come again too soon.
        self._slots_ttl_ms = 2 * self._chunk_ttl_ms + int(LEASE_S * 1000)
        # An empty server begins with a number that nobody else is likely to remember from before it was emptied.
        self._known_generation = random.randrange(1, _FIRST_GENERATIONS)
        self._version = 0
        self.owners: dict[int, str] = {}
        self.dead: frozenset[int] = frozenset()
        self.generation = 0
        self._prefix = b""

    async def read(self, chunks: Sequence[bytes], root: bytes) -> Iterator[tuple[int, int]]:
        """Return the masks as (mask, number of chunks that have it). Waits as long as the caller lets it."""
        tag = _tag(root)
        prefix = b"%b{%b}" % (self._prefix, tag)
        try:
            answers = await self._redis.link(tag).ask_all(_mgets(prefix, chunks))
        except ResponseError as error:
            if str(error).startswith(_ON_THE_MOVE):
                return iter(())
            if not str(error).startswith("MOVED "):
                raise
            answers = [await self._redis.commands.mget([prefix + chunk for chunk in chunks])]  # it learns the way
        return _masks(chain.from_iterable(answers))

    async def write(self, keys_by_nibble: Mapping[tuple[int, int], Sequence[bytes]]) -> None:
        """Set nibbles; a mask that becomes all zeros is deleted.

        Args:
            keys_by_nibble: (slot, its nibble) → keys as ``tagged`` returns them.
        """
        pipeline = self._writer.commands.pipeline(transaction=False)
        for (slot, nibble), keys in keys_by_nibble.items():
            by_tag = groupby(sorted(keys), _tag_of) if self._writer.is_cluster else [(b"", iter(keys))]
            for _, group in by_tag:
                names = [self._prefix + key for key in group]
                for start in range(0, len(names), _KEYS_PER_CALL):
                    some = names[start : start + _KEYS_PER_CALL]
                    pipeline.eval(_WRITE, len(some), *some, slot, nibble, self._chunk_ttl_ms)
        try:
            await pipeline.execute()
        except UNREACHABLE:
            await (
                self._writer.close()
            )  # a pipeline of redis-py does not by itself look afresh where a cluster's nodes are
            raise

    async def claim(self, owner: str) -> int:
        """Return the lowest slot that is free, leased to ``owner``; -1 if another generation has begun."""
        run = await self._redis.run()
        args = owner, int(LEASE_S * 1000), self._slots_ttl_ms, self.generation, run
        return int(await self._eval(_CLAIM, *args))

    async def free(self, slot: int, owner: str) -> None:
        """Give back a slot of which nothing is left in the masks."""
        await self._eval(_FREE, slot, owner, int(FREED_S * 1000))

    async def abandon(self, slots: Iterable[int]) -> None:
        """End the leases of slots that are not swept, instead of letting them run out."""
        await self._redis.commands.zadd(self._slots[0], dict.fromkeys(map(str, slots), 0), xx=True)

    async def renew(self, owners: Mapping[int, str], begin: bool) -> tuple[set[int], set[int]]:
        """Renew leases, and learn the present generation and who has which slot.

        Args:
            owners: this replica's slots, with the owner each was claimed for.
            begin: begin a new generation.

        Returns:
            Slots of ours that have become somebody else's, and must not be written any more; slots that have another
            owner than before.
        """
        try:
            run = await self._redis.run()
            number, lost, version, table, dead = await self._eval(
                _RENEW,
                int(LEASE_S * 1000),
                self._slots_ttl_ms,
                run,
                self._known_generation,
                int(begin),
                self._version,
                *(part for lease in owners.items() for part in lease),
            )
            await self._redis.open_links()
        except UNREACHABLE:
            self._redis.close_links()
            raise
        self.generation = self._known_generation = number
        self._prefix = f"{self._namespace}:{number:x}:".encode()
        self._version = version
        self.dead = frozenset(map(int, dead))
        before = self.owners
        if table is not None:
            names = [part.decode() for part in table]
            self.owners = dict(zip(map(int, names[::2]), names[1::2], strict=True))
        return set(lost), {slot for slot, _ in before.items() ^ self.owners.items()}

    async def close(self) -> None:
        """Close all connections."""
        await self._redis.close()
        await self._writer.close()

    async def _eval(self, script: str, *args: str | int) -> Any:
        return await self._redis.commands.eval(script, len(self._slots), *self._slots, *args)


def _tag(root: bytes) -> bytes:
    return root[:_TAG_BYTES].hex().encode()


def _tag_of(key: bytes) -> bytes:
    return key[1 : 1 + 2 * _TAG_BYTES]


def _mgets(prefix: bytes, chunks: Sequence[bytes]) -> list[bytes]:
    """Return the commands that read ``prefix + chunk`` for all chunks. As all are equally long, a join packs them."""
    before_chunk = b"$%d\r\n%b" % (len(prefix) + DIGEST_BYTES, prefix)
    keys = before_chunk + (b"\r\n" + before_chunk).join(chunks) + b"\r\n"
    key_bytes = len(before_chunk) + DIGEST_BYTES + len(b"\r\n")
    if len(keys) != len(chunks) * key_bytes:
        raise ValueError(f"a chunk hash is not {DIGEST_BYTES} bytes long")
    some, rest = _KEYS_PER_MGET * key_bytes, len(chunks) % _KEYS_PER_MGET
    whole = len(keys) - rest * key_bytes
    mget = _mget(_KEYS_PER_MGET)
    commands = [mget + keys[start : start + some] for start in range(0, whole, some)]
    if rest:
        commands.append(_mget(rest) + keys[whole:])
    return commands


def _mget(n_keys: int) -> bytes:
    """Return what comes before the keys."""
    return b"*%d\r\n$4\r\nMGET\r\n" % (1 + n_keys)


def _masks(values: Iterable[bytes | None]) -> Iterator[tuple[int, int]]:
    for value, same in groupby(values):
        mask = int.from_bytes(value, "little") if value and len(value) > _LISTED_BYTES else _listed(value or b"")
        yield mask, len(list(same))


@lru_cache(_MAX_LISTS)
def _listed(value: bytes) -> int:
    """Return the mask of a list. Most chunks have one holder or two, so the same lists come again and again."""
    mask = 0
    for at in range(0, len(value), _ENTRY_BYTES):
        mask |= value[at + 2] << N_TIERS * (value[at] << 8 | value[at + 1])
    return mask
