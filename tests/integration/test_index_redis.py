from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import count

import pytest
import redis

from gateway.config import IndexConfig
from gateway.errors import ConfigError
from gateway.index.publisher import FIRST_PRIVATE_SLOT
from gateway.index.redis import RedisIndex
from policies.base import Tier
from tests.residency import hits, prompt
from tests.valkey import Valkey

DEADLINE_S = 15
_namespaces = count()


@pytest.fixture
def admin(valkey: Valkey) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(valkey.url) as client:
        yield client


Replica = Callable[..., RedisIndex]


@pytest.fixture
async def replica(valkey: Valkey) -> AsyncIterator[Replica]:
    """Build replicas that share one index, and close them in the end."""
    namespace = f"test-{next(_namespaces)}"
    built: list[RedisIndex] = []

    def build(timeout_s: float = 5, **settings: object) -> RedisIndex:
        config = {"url": valkey.url, "namespace": namespace, "timeout_s": timeout_s, "ttl_s": 60} | settings
        built.append(RedisIndex(IndexConfig.model_validate(config)))
        return built[-1]

    yield build
    for index in built:
        await index.close()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await condition():
            await asyncio.sleep(0.01)


async def test_replicas_share_what_their_slots_hold(replica: Replica) -> None:
    one, other = replica(), replica()
    mine, theirs = await one.acquire_slot("a"), await other.acquire_slot("b")
    chunks, slots = prompt(10), [mine, theirs, -1]
    await one.store(mine, chunks, Tier.HBM)
    await one.store(mine, chunks, Tier.HOST)
    await one.remove(mine, chunks[4:], Tier.HBM, chunks[0])
    await other.store(theirs, chunks[:3], Tier.DISK)
    await one.flush()
    await other.flush()
    for index in (one, other):
        assert (await index.residency(chunks, slots, 1)).by_tier.tolist() == [[4, 6, 0, 0], [0, 0, 3, 0], [0] * 4]


async def test_no_slot_is_handed_out_twice(replica: Replica) -> None:
    replicas = [replica() for _ in range(3)]
    slots = await asyncio.gather(*(index.acquire_slot(f"w{n}") for n in range(20) for index in replicas))
    assert sorted(slots) == list(range(60))


async def test_a_slot_is_free_for_any_replica_once_nothing_is_left_of_it(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.index.redis_store.FREED_S", 0)
    one, other = replica(), replica()
    chunks = prompt(300)
    slot = await one.acquire_slot("a")
    await one.store(slot, chunks, Tier.HBM)
    await one.flush()
    assert await hits(other, chunks, [slot]) == [0]  # its first question may come before it is connected
    await other.acquire_slot("b")
    assert await hits(other, chunks, [slot]) == [300]
    await one.release_slot(slot)
    assert await hits(one, chunks, [slot]) == [0]
    await one.flush()
    assert await hits(other, chunks, [slot]) == [0]
    assert await other.acquire_slot("c") == slot
    assert await hits(one, chunks, [slot]) == await hits(other, chunks, [slot]) == [0]


async def test_a_cleared_slot_holds_only_what_is_stored_afterwards(replica: Replica) -> None:
    one, other = replica(), replica()
    chunks = prompt(50)
    slot = await one.acquire_slot("a")
    await other.acquire_slot("b")
    await one.store(slot, chunks, Tier.HBM)
    await one.flush()
    await one.clear(slot)
    await one.store(slot, chunks[:7], Tier.HOST)
    assert await hits(one, chunks, [slot]) == [7]
    await one.flush()
    assert await hits(other, chunks, [slot]) == [7]


async def test_every_key_is_in_the_namespace_and_has_a_ttl(replica: Replica, admin: redis.Redis) -> None:
    admin.flushall()
    admin.set("somebody else's", "value")
    index = replica(namespace="mine", ttl_s=60)
    slot = await index.acquire_slot("a")
    for seed in range(20):
        await index.store(slot, prompt(10, seed), Tier.HBM)
    await index.flush()
    await index.remove(slot, prompt(10, 3), None)
    await index.flush()
    keys = set(admin.keys("*")) - {b"somebody else's"}
    assert len(keys) == 190 + 3
    assert all(key.startswith(b"mine:") for key in keys)
    assert all(0 < admin.pttl(key) <= 130_000 for key in keys)
    await index.release_slot(slot)
    await index.flush()
    left = {b"mine:{slots}:generation", b"mine:{slots}:leases"}
    assert set(admin.keys("*")) == {b"somebody else's", *left}
    assert all(0 < admin.pttl(key) <= 130_000 for key in left)


async def test_what_is_held_longer_than_the_ttl_is_written_again_in_time(replica: Replica, admin: redis.Redis) -> None:
    index = replica(namespace="renewed", ttl_s=2)
    slot = await index.acquire_slot("a")
    await index.store(slot, prompt(3), Tier.HBM)
    await index.flush()

    async def written_thrice() -> bool:
        return index.counters.written >= 9

    await until(written_thrice)
    assert all(admin.pttl(key) > 1000 for key in admin.keys("renewed:*:{[0-9a-f]*"))


async def test_the_keyspace_is_never_searched(replica: Replica, admin: redis.Redis) -> None:
    admin.config_resetstat()
    index = replica()
    slot = await index.acquire_slot("a")
    await index.store(slot, prompt(100), Tier.HBM)
    await index.clear(slot)
    await index.release_slot(slot)
    await index.flush()
    assert not {"cmdstat_keys", "cmdstat_scan", "cmdstat_randomkey"} & admin.info("commandstats").keys()


async def test_a_chain_lies_on_one_slot_of_a_cluster(replica: Replica, admin: redis.Redis) -> None:
    index = replica(namespace="cluster")
    slot = await index.acquire_slot("a")
    chunks = prompt(40)
    await index.store(slot, chunks[:10], Tier.HBM)
    await index.store(slot, chunks[10:], Tier.HBM, chunks[0])
    await index.flush()
    keys = [key for key in admin.keys("cluster:*") if b"{slots}" not in key]
    assert len(keys) == 40
    tags = {key[key.index(b"{") : key.index(b"}")] for key in keys}
    assert tags == {b"{" + chunks[0][:2].hex().encode()}


async def test_a_decision_waits_for_a_frozen_server_once_and_no_longer(replica: Replica, valkey: Valkey) -> None:
    one, other = replica(), replica(timeout_s=0.005)
    slot = await one.acquire_slot("a")
    own = await other.acquire_slot("b")
    chunks = prompt(5)
    await one.store(slot, chunks, Tier.HBM)
    await one.flush()
    await until(lambda: _says(other, chunks, slot, 5))
    await other.store(own, chunks[:2], Tier.HBM)
    await other.flush()
    before = other.counters.timeouts
    valkey.freeze()
    assert await hits(other, chunks, [slot, own]) == [0, 2]
    assert other.counters.timeouts == before + 1
    assert not other.up
    for _ in range(10):
        assert await hits(other, chunks, [slot, own]) == [0, 2]
    assert (other.counters.timeouts, other.counters.skipped) == (before + 1, 10)
    valkey.thaw()
    await until(lambda: _says(other, chunks, slot, 5))


async def test_a_server_that_pauses_is_asked_again_and_nothing_is_written_anew(
    replica: Replica, admin: redis.Redis
) -> None:
    one, other = replica(), replica(timeout_s=0.005)
    slot, _ = await one.acquire_slot("a"), await other.acquire_slot("b")
    await one.store(slot, prompt(5), Tier.HBM)
    await one.flush()
    await until(lambda: _says(other, prompt(5), slot, 5))
    written, timeouts = one.counters.written, other.counters.timeouts
    admin.client_pause(300)
    assert await hits(other, prompt(5), [slot]) == [0]
    assert other.counters.timeouts == timeouts + 1
    await until(lambda: _says(other, prompt(5), slot, 5))
    assert (one.counters.written, one.counters.generations) == (written, 0)


async def test_what_changes_while_the_server_does_not_answer_is_written_afterwards(
    replica: Replica, valkey: Valkey
) -> None:
    one, other = replica(), replica()
    slot, _ = await one.acquire_slot("a"), await other.acquire_slot("b")
    chunks = prompt(20)
    await one.store(slot, chunks, Tier.HBM)
    await one.flush()
    valkey.freeze()
    await one.remove(slot, chunks[3:], None, chunks[0])
    await one.store(slot, prompt(4, seed=1), Tier.HBM)
    assert await hits(one, chunks, [slot]) == [3]
    await until(lambda: _down(one))
    valkey.thaw()
    await one.flush()
    await until(lambda: _says(other, chunks, slot, 3))
    assert await hits(other, prompt(4, seed=1), [slot]) == [4]


async def test_a_write_that_was_given_up_cannot_undo_a_later_one(
    replica: Replica, valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.index.redis_store._WRITE_TIMEOUT_S", 0.1)
    one, other = replica(), replica()
    slot, _ = await one.acquire_slot("a"), await other.acquire_slot("b")
    chunks = prompt(20)
    valkey.freeze()
    await one.store(slot, chunks, Tier.HBM)
    await until(lambda: _down(one))
    await one.remove(slot, chunks[8:], None, chunks[0])
    valkey.thaw()
    await until(lambda: _began(one, 1))
    await until(lambda: _says(other, chunks, slot, 8))


async def test_a_killed_server_is_refilled_when_it_comes_back(replica: Replica, valkey: Valkey) -> None:
    one, other = replica(), replica()
    slot, own = await one.acquire_slot("a"), await other.acquire_slot("b")
    chunks = prompt(100)
    await one.store(slot, chunks, Tier.HBM)
    await other.store(own, chunks[:9], Tier.HBM)
    await one.flush()
    await other.flush()
    valkey.kill()
    assert await hits(other, chunks, [slot, own]) == [0, 9]
    await one.remove(slot, chunks[50:], None, chunks[0])
    assert await hits(one, chunks, [slot, own]) == [50, 0]
    valkey.start()
    await until(lambda: _says(other, chunks, slot, 50))
    await until(lambda: _says(one, chunks, own, 9))
    assert one.counters.errors and other.counters.errors


async def test_a_flushed_server_is_refilled(replica: Replica, admin: redis.Redis) -> None:
    one, other = replica(), replica()
    slot = await one.acquire_slot("a")
    taken = await other.acquire_slot("b")
    chunks = prompt(100)
    await one.store(slot, chunks, Tier.HBM)
    await one.flush()
    admin.flushall()
    assert await hits(other, chunks, [slot]) == [0]
    await until(lambda: _says(other, chunks, slot, 100))
    assert one.counters.generations == 1
    assert await other.acquire_slot("c") not in (slot, taken)


async def test_a_full_server_means_fail_open_until_there_is_room(replica: Replica, admin: redis.Redis) -> None:
    one, other = replica(), replica()
    slot, _ = await one.acquire_slot("a"), await other.acquire_slot("b")
    chunks = prompt(10)
    await one.store(slot, chunks, Tier.HBM)
    await one.flush()
    admin.config_set("maxmemory", 1)
    try:
        await one.remove(slot, chunks[5:], None, chunks[0])
        await until(lambda: _down(one))
        await until(lambda: _down(other))
        assert await hits(one, chunks, [slot]) == [5]
        assert await hits(other, chunks, [slot]) == [0]
    finally:
        admin.config_set("maxmemory", 0)
    await until(lambda: _says(other, chunks, slot, 5))


async def test_a_slot_acquired_without_a_server_is_shared_when_it_is_back(
    replica: Replica, valkey: Valkey, admin: redis.Redis
) -> None:
    valkey.kill()
    one, other = replica(namespace="late"), replica(namespace="late")
    slot = await one.acquire_slot("a")
    chunks = prompt(8)
    await one.store(slot, chunks, Tier.HBM)
    assert slot >= FIRST_PRIVATE_SLOT
    assert one.number(slot) == -1
    assert await hits(one, chunks, [slot]) == [8]
    valkey.start()
    await until(lambda: _says(other, chunks, 0, 8))
    assert (one.number(slot), other.number(0)) == (0, 0)
    assert admin.hget("late:{slots}:owners", "0").endswith(b" a")
    assert await other.acquire_slot("b") == 1


async def test_too_many_waiting_writes_are_given_up_and_made_up_for(replica: Replica, valkey: Valkey) -> None:
    one, other = replica(max_chunks=1000), replica()
    slot, _ = await one.acquire_slot("a"), await other.acquire_slot("b")
    await one.store(slot, prompt(50), Tier.HBM)
    await one.flush()
    valkey.freeze()
    await until(lambda: _down(one))
    await one.remove(slot, prompt(50)[20:], None, prompt(50)[0])
    for seed in range(1, 13):
        await one.store(slot, prompt(100, seed), Tier.HBM)
    assert one.counters.dropped > 1000
    valkey.thaw()
    await until(lambda: _says(other, prompt(100, 12), slot, 100))
    for chunks in (prompt(50), *(prompt(100, seed) for seed in range(1, 13))):
        assert await hits(other, chunks, [slot]) == await hits(one, chunks, [slot])
    assert one.counters.generations == 1


async def test_slots_of_dead_replicas_stay_taken_until_they_are_too_many(replica: Replica) -> None:
    survivor, reader = replica(), replica()
    slot, _ = await survivor.acquire_slot("s"), await reader.acquire_slot("r")
    chunks = prompt(30)
    await survivor.store(slot, chunks, Tier.HBM)
    for batch in (60, 10):
        dying = replica()
        dead = [await dying.acquire_slot(f"w{number}") for number in range(batch)]
        await dying.store(dead[0], chunks, Tier.HBM)
        await dying.flush()
        assert dead[0] >= 2
        await dying.close()
    await until(lambda: _began(survivor, 1))
    await until(lambda: _began(reader, 1))
    await until(lambda: _says(reader, chunks, slot, 30))
    newcomer = await survivor.acquire_slot("n")
    assert newcomer == 2
    assert await hits(reader, chunks, [slot, newcomer]) == [30, 0]


async def test_a_slot_that_was_given_away_is_written_no_more(replica: Replica, admin: redis.Redis) -> None:
    one, other = replica(namespace="lost"), replica(namespace="lost")
    slot, reader = await one.acquire_slot("a"), await other.acquire_slot("b")
    assert (slot, reader) == (0, 1)
    chunks = prompt(5)
    admin.hset("lost:{slots}:owners", "0", "another replica")
    await until(lambda: _owner(admin, "lost", 2))
    await one.store(slot, chunks, Tier.HBM)
    await one.flush()
    assert one.number(slot) == 2
    assert await hits(one, chunks, [slot]) == [5]
    assert await hits(other, chunks, [0, 2]) == [0, 5]


async def test_speculations_are_seen_where_they_were_made_for_any_replicas_slots(replica: Replica) -> None:
    one, other = replica(), replica()
    slot, own = await one.acquire_slot("a"), await other.acquire_slot("b")
    chunks = prompt(6)
    await one.store(slot, chunks[:2], Tier.HOST)
    await one.flush()
    speculations = [other.speculate(slot, chunks), other.speculate(own, chunks[:3])]
    assert await hits(other, chunks, [slot, own]) == [6, 3]
    assert await hits(one, chunks, [slot, own]) == [2, 0]
    for speculation in speculations:
        speculation.cancel()
    assert await hits(other, chunks, [slot, own]) == [2, 0]


async def test_speculations_count_without_a_server(replica: Replica, valkey: Valkey) -> None:
    one, other = replica(), replica()
    slot, own = await one.acquire_slot("a"), await other.acquire_slot("b")
    valkey.kill()
    chunks = prompt(6)
    other.speculate(slot, chunks)
    other.speculate(own, chunks[:3])
    assert await hits(other, chunks, [slot, own]) == [6, 3]


async def test_hundreds_of_holders_are_all_known_to_the_other_replica(replica: Replica) -> None:
    one, other = replica(), replica()
    slots = await asyncio.gather(*(one.acquire_slot(f"w{number}") for number in range(300)))
    await other.acquire_slot("b")
    chunks = prompt(4)
    for slot in slots:
        await one.store(slot, chunks, Tier(slot % 4))
    await one.flush()
    residency = await other.residency(chunks, slots, 256)
    assert residency.hit_tokens.tolist() == [4 * 256] * 300
    assert residency.by_tier.argmax(1).tolist() == [slot % 4 for slot in slots]


async def test_masks_are_right_while_holders_come_and_go_few_or_many(replica: Replica, admin: redis.Redis) -> None:
    one, other = replica(namespace="masks"), replica(namespace="masks")
    slots = [await one.acquire_slot(f"w{number}") for number in range(40)]
    await other.acquire_slot("b")
    chunks, chance = prompt(4), random.Random(0)
    held: dict[int, Tier] = {}
    n_holders = set()
    for n_wanted in (3, 12, 13, 40, 2, 14, 0, 5, 30, 0):
        while len(held) != n_wanted:
            slot = chance.choice(slots)
            if slot in held and len(held) > n_wanted:
                await one.remove(slot, chunks, held.pop(slot))
            elif slot not in held and len(held) < n_wanted:
                held[slot] = Tier(slot % 4)
                await one.store(slot, chunks, held[slot])
            n_holders.add(len(held))
            await one.flush()
        by_tier = (await other.residency(chunks, slots, 1)).by_tier.tolist()
        assert by_tier == [[4 * (held.get(slot) == tier) for tier in Tier] for slot in slots]
        assert len(admin.keys("masks:*{[0-9a-f]*")) == (4 if held else 0)
    assert n_holders == set(range(41))


async def test_a_server_that_was_never_there_is_no_error(replica: Replica) -> None:
    index = replica(url="redis://127.0.0.1:1/0", timeout_s=0.005)
    chunks = prompt(3)
    slot = await index.acquire_slot("a")
    await index.store(slot, chunks, Tier.HBM)
    assert await hits(index, chunks, [slot, 0, -1]) == [3, 0, 0]
    await index.clear(slot)
    await index.release_slot(slot)
    assert await hits(index, chunks, [slot]) == [0]


async def test_passwords_are_used_and_not_logged(
    replica: Replica, valkey: Valkey, admin: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    admin.config_set("requirepass", "right-one")
    try:
        url = valkey.url.replace("redis://", "redis://:{}@")
        locked_out, let_in = replica(url=url.format("wrong-one")), replica(url=url.format("right-one"))
        assert await locked_out.acquire_slot("a") >= FIRST_PRIVATE_SLOT
        assert await let_in.acquire_slot("b") == 0
    finally:
        admin.config_set("requirepass", "")
    assert "out of reach" in caplog.text
    assert "-one" not in caplog.text


def test_a_url_that_is_not_one_of_redis_is_a_mistake_in_the_configuration() -> None:
    with pytest.raises(ConfigError, match=r"index\.url"):
        RedisIndex(IndexConfig(backend="redis", url="redis://127.0.0.1:none"))


async def _says(index: RedisIndex, chunks: list[bytes], slot: int, expected: int) -> bool:
    return await hits(index, chunks, [slot]) == [expected]


async def _down(index: RedisIndex) -> bool:
    return not index.up


async def _began(index: RedisIndex, generations: int) -> bool:
    return index.counters.generations == generations


async def _owner(admin: redis.Redis, namespace: str, slot: int) -> bool:
    return admin.hget(f"{namespace}:{{slots}}:owners", str(slot)) is not None
