"""What replicas share through Redis."""

from __future__ import annotations

import asyncio
import random

import pytest
import redis

from gateway.index.publisher import FIRST_PRIVATE_SLOT
from gateway.index.redis import RedisIndex
from policies.base import Tier
from tests.index_rig import Replica, began, says, until
from tests.residency import hits, prompt
from tests.valkey import Valkey


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
    await until(lambda: began(survivor, 1))
    await until(lambda: began(reader, 1))
    await until(lambda: says(reader, chunks, slot, 30))
    newcomer = await survivor.acquire_slot("n")
    assert newcomer == 2
    assert await hits(reader, chunks, [slot, newcomer]) == [30, 0]


async def test_a_slot_that_was_given_away_is_written_no_more(replica: Replica, admin: redis.Redis) -> None:
    one, other = replica(namespace="lost"), replica(namespace="lost")
    slot, reader = await one.acquire_slot("a"), await other.acquire_slot("b")
    assert (slot, reader) == (0, 1)
    chunks = prompt(5)
    admin.hset("lost:{slots}:owners", "0", "another replica")
    await until(lambda: _has_number(one, slot, 2))
    await one.store(slot, chunks, Tier.HBM)
    await until(lambda: says(other, chunks, 2, 5))
    assert await hits(one, chunks, [slot]) == [5]
    assert await hits(other, chunks, [0]) == [0]


async def test_what_is_written_under_a_slot_that_the_server_forgot_is_not_its_next_owners(
    replica: Replica, admin: redis.Redis
) -> None:
    one, other = replica(namespace="forgotten"), replica(namespace="forgotten")
    slot = await one.acquire_slot("a")
    chunks = prompt(5)
    await one.store(slot, chunks, Tier.HBM)
    await one.flush()
    await until(lambda: says(other, chunks, 0, 5))
    admin.delete("forgotten:{slots}:owners")  # as a full server may
    await until(lambda: says(other, chunks, 0, 0))
    await until(lambda: says(other, chunks, 1, 5))


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
    assert "redis.credentials" not in {record.name for record in caplog.records}  # it warned at every connection


async def _has_number(index: RedisIndex, slot: int, number: int) -> bool:
    return index.number(slot) == number


async def test_prompts_that_a_slot_of_ours_is_answering_are_known(replica: Replica) -> None:
    index = replica()
    slot = await index.acquire_slot("a")
    speculation = index.speculate(slot, prompt(3))
    assert index.running(slot) == set()
    speculation.answered()
    assert index.running(slot) == set(prompt(3))
    speculation.cancel()
    assert index.running(slot) == set()
