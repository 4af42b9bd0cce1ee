"""Redis is down, slow, paused, flushed or full: decisions go on, and the index is whole again afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest
import redis

from gateway.config import IndexConfig
from gateway.index.publisher import FIRST_PRIVATE_SLOT
from gateway.index.redis_client import UNREACHABLE, RedisClient
from gateway.tasks import spawn, stop
from policies.base import Tier
from tests.index_rig import Replica, began, is_down, is_up, says, until
from tests.residency import hits, prompt
from tests.valkey import Valkey


async def test_a_decision_waits_for_a_frozen_server_once_and_no_longer(replica: Replica, valkey: Valkey) -> None:
    one, other = replica(), replica(timeout_s=0.005)
    slot = await one.acquire_slot("a")
    own = await other.acquire_slot("b")
    chunks = prompt(5)
    await one.store(slot, chunks, Tier.HBM)
    await one.flush()
    await until(lambda: says(other, chunks, slot, 5))
    await other.store(own, chunks[:2], Tier.HBM)
    await other.flush()
    timeouts, skipped = other.counters.timeouts, other.counters.skipped
    valkey.freeze()
    assert await hits(other, chunks, [slot, own]) == [0, 2]
    assert other.counters.timeouts == timeouts + 1
    assert not other.up
    for _ in range(10):
        assert await hits(other, chunks, [slot, own]) == [0, 2]
    assert (other.counters.timeouts, other.counters.skipped) == (timeouts + 1, skipped + 10)
    valkey.thaw()
    await until(lambda: says(other, chunks, slot, 5))


async def test_of_a_server_that_is_too_slow_for_decisions_the_log_says_so_once(
    replica: Replica, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.index.publisher._RENEW_S", 60)  # only after a failure, or when told
    caplog.set_level("INFO", "kvway.index")
    one, other = replica(), replica(timeout_s=0)
    slot = await one.acquire_slot("a")
    await other.acquire_slot("b")
    for number in range(1, 6):
        await until(lambda: is_up(other))
        assert await hits(other, prompt(1), [slot]) == [0]
        assert other.counters.timeouts == number
    assert caplog.messages == ["the shared index is out of reach: no answer within index.timeout_s, 0 s"]
    await until(lambda: is_up(other))
    other.learn_owners()
    await until(lambda: has_said(caplog, "the shared index answers again"))


async def test_a_server_that_pauses_is_asked_again_and_nothing_is_written_anew(
    replica: Replica, admin: redis.Redis
) -> None:
    one, other = replica(), replica(timeout_s=0.005)
    slot, _ = await one.acquire_slot("a"), await other.acquire_slot("b")
    await one.store(slot, prompt(5), Tier.HBM)
    await one.flush()
    await until(lambda: says(other, prompt(5), slot, 5))
    written, timeouts = one.counters.written, other.counters.timeouts
    admin.client_pause(300)
    assert await hits(other, prompt(5), [slot]) == [0]
    assert other.counters.timeouts == timeouts + 1
    await until(lambda: says(other, prompt(5), slot, 5))
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
    await until(lambda: is_down(one))
    valkey.thaw()
    await one.flush()
    await until(lambda: says(other, chunks, slot, 3))
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
    await until(lambda: is_down(one))
    await one.remove(slot, chunks[8:], None, chunks[0])
    valkey.thaw()
    await until(lambda: began(one, 1))
    await until(lambda: says(other, chunks, slot, 8))


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
    await until(lambda: says(other, chunks, slot, 50))
    await until(lambda: says(one, chunks, own, 9))
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
    await until(lambda: says(other, chunks, slot, 100))
    assert one.counters.generations == 1
    assert await other.acquire_slot("c") not in (slot, taken)


async def test_a_flushed_server_is_refilled_while_events_never_pause(replica: Replica, admin: redis.Redis) -> None:
    one, other = replica(), replica()
    slot = await one.acquire_slot("a")
    held, passing = prompt(100), prompt(1, seed=1)
    await one.store(slot, held, Tier.HBM)
    await one.flush()

    async def keep_changing() -> None:
        while True:
            await one.store(slot, passing, Tier.HBM)
            await asyncio.sleep(0)
            await one.remove(slot, passing, Tier.HBM)
            await asyncio.sleep(0)

    changing = spawn(keep_changing(), "events")
    for _ in range(2):
        admin.flushall()
        assert await hits(other, held, [slot]) == [0]
        await until(lambda: says(other, held, slot, 100))
    await stop(changing)


async def test_what_changes_while_everything_is_written_anew_does_not_wait_for_it(
    replica: Replica, admin: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.index.publisher._BATCH_CHUNKS", 16)
    monkeypatch.setattr("gateway.index.table._STEP_CHUNKS", 16)
    one = replica()
    large, small = await one.acquire_slot("a"), await one.acquire_slot("b")
    await one.store(large, prompt(2000), Tier.HBM)
    await one.flush()
    batches: list[set[int]] = []
    write = one._store.write

    async def watched(keys_by_nibble: Mapping[tuple[int, int], Sequence[bytes]]) -> None:
        batches.append({slot for slot, _ in keys_by_nibble})
        await write(keys_by_nibble)

    monkeypatch.setattr(one._store, "write", watched)
    admin.flushall()
    await until(lambda: began(one, 1))
    before = len(batches)
    await one.store(small, prompt(3, seed=1), Tier.HBM)
    await one.flush()
    assert len(batches) > before + 50
    assert any(small in batch for batch in batches[before : before + 3])


async def test_a_full_server_means_fail_open_until_there_is_room(replica: Replica, admin: redis.Redis) -> None:
    one, other = replica(), replica()
    slot, _ = await one.acquire_slot("a"), await other.acquire_slot("b")
    chunks = prompt(10)
    await one.store(slot, chunks, Tier.HBM)
    await one.flush()
    admin.config_set("maxmemory", 1)
    try:
        await one.remove(slot, chunks[5:], None, chunks[0])
        await until(lambda: is_down(one))
        await until(lambda: is_down(other))
        assert await hits(one, chunks, [slot]) == [5]
        assert await hits(other, chunks, [slot]) == [0]
    finally:
        admin.config_set("maxmemory", 0)
    await until(lambda: says(other, chunks, slot, 5))


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
    await until(lambda: says(other, chunks, 0, 8))
    assert (one.number(slot), other.number(0)) == (0, 0)
    assert admin.hget("late:{slots}:owners", "0").endswith(b" a")
    assert await other.acquire_slot("b") == 1


async def test_too_many_waiting_writes_are_given_up_and_made_up_for(replica: Replica, valkey: Valkey) -> None:
    one, other = replica(max_chunks=1000), replica()
    slot, _ = await one.acquire_slot("a"), await other.acquire_slot("b")
    await one.store(slot, prompt(50), Tier.HBM)
    await one.flush()
    valkey.freeze()
    await until(lambda: is_down(one))
    await one.remove(slot, prompt(50)[20:], None, prompt(50)[0])
    for seed in range(1, 13):
        await one.store(slot, prompt(100, seed), Tier.HBM)
    assert one.counters.dropped > 1000
    valkey.thaw()
    await until(lambda: says(other, prompt(100, 12), slot, 100))
    for chunks in (prompt(50), *(prompt(100, seed) for seed in range(1, 13))):
        assert await hits(other, chunks, [slot]) == await hits(one, chunks, [slot])
    assert one.counters.generations == 1


async def test_speculations_count_without_a_server(replica: Replica, valkey: Valkey) -> None:
    one, other = replica(), replica()
    slot, own = await one.acquire_slot("a"), await other.acquire_slot("b")
    valkey.kill()
    chunks = prompt(6)
    other.speculate(slot, chunks)
    other.speculate(own, chunks[:3])
    assert await hits(other, chunks, [slot, own]) == [6, 3]


async def test_a_server_that_was_never_there_is_no_error(replica: Replica) -> None:
    index = replica(url="redis://127.0.0.1:1/0", timeout_s=0.005)
    chunks = prompt(3)
    slot = await index.acquire_slot("a")
    await index.store(slot, chunks, Tier.HBM)
    assert await hits(index, chunks, [slot, 0, -1]) == [3, 0, 0]
    await index.clear(slot)
    await index.release_slot(slot)
    assert await hits(index, chunks, [slot]) == [0]


async def test_a_connection_that_is_reset_just_before_a_command_is_a_server_out_of_reach(valkey: Valkey) -> None:
    client = RedisClient(IndexConfig(url=valkey.url))
    connection = await client.commands.connection_pool.get_connection()
    valkey.freeze()
    await connection.send_command("PING")
    valkey.kill()  # what it has not read makes the kernel reset the connection

    async def is_reset() -> bool:
        return connection._writer.is_closing()

    await until(is_reset)
    with pytest.raises(UNREACHABLE):
        await connection.send_command("PING")
    await client.close()


async def has_said(caplog: pytest.LogCaptureFixture, message: str) -> bool:
    return message in caplog.messages
