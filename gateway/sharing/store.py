"""What replicas keep in Redis or Valkey to act as one, and the commands on it.

* ``{namespace}:{sharing}:replicas``, a sorted set: replica → until when it counts as alive.
* ``{namespace}:{sharing}:leases``, a sorted set: worker → end of its owner's lease.
* ``{namespace}:{sharing}:owners``, a hash: worker → ``owner slot``, the replica that follows it and its slot.
* ``{namespace}:news``, a pub/sub channel.

Times are Unix milliseconds by the server's clock.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Final

from gateway.config import IndexConfig
from gateway.index.redis_client import RedisClient

LIFE_S: Final = 2.0
"""A replica that has not said for so long that it is alive has lost its workers to the others."""

NOT_CLAIMED: Final = -2
"""In ``SharingStore.beat``: the worker is known here, but another replica should have it."""

_KEEP_S: Final = 60.0  # a record that nobody claims is of no worker that anybody knows
_TAG: Final = "sharing"
_TTL_S: Final = 3600.0

# A worker that its owner does not claim is given up; its slot goes on answering until the next owner names another.
# What is to end later than a life from now was written before the clock went back, or by a server whose clock is ahead.
_BEAT: Final = """
local replicas, leases, owners = KEYS[1], KEYS[2], KEYS[3]
local me, life_ms, keep_ms, ttl_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local longest_ms = tonumber(ARGV[5])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

for _, key in ipairs({replicas, leases}) do
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', key, '(' .. now + longest_ms, '+inf')) do
    redis.call('ZADD', key, now + longest_ms, name)
  end
end
redis.call('ZREMRANGEBYSCORE', replicas, '-inf', now)
if life_ms > 0 then redis.call('ZADD', replicas, now + life_ms, me) else redis.call('ZREM', replicas, me) end
for _, worker in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', now - keep_ms)) do
  redis.call('ZREM', leases, worker)
  redis.call('HDEL', owners, worker)
end

local function record(worker)
  return string.match(redis.call('HGET', owners, worker) or '- -1', '^(%S+) (%S+)$')
end
local claimed = {}
for i = 6, #ARGV, 2 do
  local worker, slot = ARGV[i], tonumber(ARGV[i + 1])
  local owner, last_slot = record(worker)
  local lease_end = tonumber(redis.call('ZSCORE', leases, worker) or -1)
  if slot == -2 then
    if lease_end < 0 then
      redis.call('HSET', owners, worker, '- -1')
      redis.call('ZADD', leases, now, worker)
    end
  elseif owner == me or lease_end <= now then
    claimed[worker] = true
    redis.call('HSET', owners, worker, me .. ' ' .. (slot < 0 and last_slot or slot))
    redis.call('ZADD', leases, now + life_ms, worker)
  end
end

local reply = {}
local ends = redis.call('ZRANGE', leases, 0, -1, 'WITHSCORES')
for i = 1, #ends, 2 do
  local worker, left_ms = ends[i], tonumber(ends[i + 1]) - now
  local owner, slot = record(worker)
  if owner == me and not claimed[worker] and left_ms > 0 then
    redis.call('ZADD', leases, now, worker)
    left_ms = 0
  end
  table.insert(reply, {worker, owner, tonumber(slot), left_ms})
end
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ttl_ms) end
return {redis.call('ZRANGE', replicas, 0, -1), reply}
"""


@dataclass(slots=True, frozen=True)
class Record:
    """Who follows a worker.

    Attributes:
        owner: the replica.
        slot: the worker's slot in the index, -1 while it has none.
        left_s: seconds until the owner's lease ends; how long ago it ended where negative.
    """

    owner: str
    slot: int
    left_s: float


class SharingStore:
    """The commands. Each raises one of ``index.redis_client.UNREACHABLE`` when it fails.

    Args:
        config: URL and namespace.
        replica: who we are.

    Raises:
        ConfigError: see ``RedisClient``.
    """

    def __init__(self, config: IndexConfig, replica: str) -> None:
        self._redis = RedisClient(config)
        prefix = f"{config.namespace}:{{{_TAG}}}"
        self._keys = f"{prefix}:replicas", f"{prefix}:leases", f"{prefix}:owners"
        self._channel = f"{config.namespace}:news"
        self._replica = replica

    async def beat(self, claims: Mapping[str, int], life_s: float = LIFE_S) -> tuple[set[str], dict[str, Record]]:
        """Say that we are alive, claim workers, and learn who else is alive and who has which worker.

        Args:
            claims: worker → the slot we have for it, -1 for none yet, ``NOT_CLAIMED`` if it should be another's.
                A worker of ours that is not claimed is given up.
            life_s: how long we count as alive from now on; 0 says good-bye.
        """
        milliseconds = (int(seconds * 1000) for seconds in (life_s, _KEEP_S, _TTL_S, LIFE_S))
        args = (self._replica, *milliseconds, *(part for claim in claims.items() for part in claim))
        replicas, records = await self._redis.commands.eval(_BEAT, len(self._keys), *self._keys, *args)
        return {name.decode() for name in replicas}, {
            worker.decode(): Record(owner.decode(), slot, left_ms / 1000) for worker, owner, slot, left_ms in records
        }

    async def tell(self, message: bytes) -> None:
        """Send a message to all replicas that listen, ourselves included."""
        await self._redis.commands.execute_command("PUBLISH", self._channel, message)  # publish() is not for clusters

    def listen(self, patience_s: float) -> AsyncIterator[bytes]:
        """Yield messages.

        Raises:
            TimeoutError: there was none for ``patience_s``, not even one of our own.
        """
        return self._redis.listen(self._channel, _TAG, patience_s)

    async def close(self) -> None:
        """Close all connections."""
        await self._redis.close()
