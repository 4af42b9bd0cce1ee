"""Workers' events, from their sockets into the index."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from gateway.config import IndexConfig, KvEventsConfig, WorkerConfig
from gateway.events.feeds import EventFeeds
from gateway.fleet.registry import NO_SLOT, Registry, Worker
from gateway.index.memory import MemoryIndex
from gateway.index.pools import PooledIndex
from policies.base import Tier
from policies.chunks import ChunkHasher
from tests import golden
from tests.events_rig import CLEARED, MODEL, Publisher, batch, chunks_of, free_endpoint, removed, stored, tokens, until

CHUNK = 4
PROMPT = tokens(8)
WHOLE_PROMPT = stored([1, 2, 3, 4], PROMPT)


class DoubtfulIndex(MemoryIndex):
    """A memory index that can be slow, or fail once."""

    def __init__(self) -> None:
        super().__init__(IndexConfig())
        self.open = asyncio.Event()
        self.open.set()
        self.failures = 0

    async def store(self, slot: int, chunks: Sequence[bytes], tier: Tier, root: bytes | None = None) -> None:
        await self.open.wait()
        if self.failures:
            self.failures -= 1
            raise RuntimeError("the index has a bad day")
        await super().store(slot, chunks, tier, root)


class Fleet:
    """Workers in a registry, an index, and the feeds between them."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.index = DoubtfulIndex()
        self.hasher = ChunkHasher(CHUNK)
        self.feeds = EventFeeds(self.registry, self.index, self.hasher, silence_s=0.05)
        self.publishers: list[Publisher] = []

    def publisher(self, **settings: Any) -> Publisher:
        self.publishers.append(Publisher(**settings))
        return self.publishers[-1]

    def join(self, publisher: Publisher | None, name: str = "worker", models: Sequence[str] = (MODEL,)) -> Worker:
        events = publisher and KvEventsConfig(endpoint=publisher.endpoint, replay_endpoint=publisher.replay_endpoint)
        return self.join_with(events, name, models)

    def join_with(
        self, events: KvEventsConfig | None, name: str = "worker", models: Sequence[str] = (MODEL,), **fields: Any
    ) -> Worker:
        config = WorkerConfig(url="http://127.0.0.1:1", name=name, models=tuple(models), kv_events=events, **fields)
        worker = Worker.from_config(config)
        self.registry.add(worker)
        return worker

    async def held(self, worker: Worker, ids: Sequence[int] = PROMPT, **identity: str) -> int:
        """Return the leading tokens of ``ids`` that the index believes ``worker`` to hold."""
        chunks = chunks_of(self.hasher, ids, **identity)
        residency = await self.index.residency(chunks, [worker.slot], CHUNK)
        return int(residency.hit_tokens[0])

    async def until_held(self, worker: Worker, count: int, ids: Sequence[int] = PROMPT, **identity: str) -> None:
        async def as_expected() -> bool:
            return await self.held(worker, ids, **identity) == count

        await until(as_expected)


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    fleet = Fleet()
    await fleet.feeds.start()
    yield fleet
    await fleet.feeds.close()
    for publisher in fleet.publishers:
        await publisher.close()
    await fleet.index.close()


async def test_a_worker_that_joins_late_is_known_whole(fleet):
    publisher = fleet.publisher()
    await publisher.publish(WHOLE_PROMPT)
    await publisher.publish(removed([4]))
    worker = fleet.join(publisher)
    await fleet.until_held(worker, 4)
    stats = fleet.feeds.stats["worker"]
    assert (stats.batches, stats.replayed, stats.events, stats.blocks) == (2, 2, 2, 5)


async def test_events_are_followed_as_they_happen(fleet):
    publisher = fleet.publisher()
    worker = fleet.join(publisher)
    await publisher.publish(WHOLE_PROMPT)
    await fleet.until_held(worker, 8)
    await publisher.publish(removed([4]), stored([5], tokens(2, start=900), parent=3))
    await fleet.until_held(worker, 8, PROMPT[:6] + tokens(2, start=900))
    assert await fleet.held(worker) == 4
    await publisher.publish(CLEARED)
    await fleet.until_held(worker, 0)


async def test_the_recorded_frames_are_understood_over_real_sockets(fleet):
    publisher = fleet.publisher()
    worker = fleet.join(publisher)
    requests = [request for request in golden.requests() if request.path == "/v1/completions"]
    for request in golden.requests():
        for message in request.messages:
            await publisher.publish_payload(message.raw[2])
    for ids, salt in [
        (r.body["prompt"], r.body.get("cache_salt")) for r in requests if isinstance(r.body["prompt"], list)
    ]:
        identity = {"salt": salt} if salt else {}
        await fleet.until_held(worker, len(ids) // golden.BLOCK_SIZE * golden.BLOCK_SIZE, ids, **identity)


async def test_ten_holders_of_a_shared_prefix_are_all_known(fleet):
    publishers = [fleet.publisher() for _ in range(10)]
    workers = [fleet.join(publisher, f"worker-{number}") for number, publisher in enumerate(publishers)]
    for number, publisher in enumerate(publishers):
        await publisher.publish(stored([10 * number + at for at in range(4)], PROMPT))
    for worker in workers:
        await fleet.until_held(worker, 8)
    assert len({worker.slot for worker in workers}) == 10


COPY_WITHOUT_SALT = stored([1, 2, 3, 4], PROMPT, medium="CPU")


async def test_a_tenants_copies_do_not_count_for_others_where_its_blocks_were_announced_unheard(fleet):
    publisher = fleet.publisher(buffer=2)
    await publisher.publish(stored([1, 2, 3, 4], PROMPT, extra_keys=[["tenant"], None, None, None]))
    await publisher.publish(COPY_WITHOUT_SALT)
    await publisher.publish(stored([9], tokens(4, start=900)))
    worker = fleet.join(publisher)
    await fleet.until_held(worker, 4, tokens(4, start=900))
    assert await fleet.held(worker) == 0
    assert await directory(fleet, 1, "store", PROMPT) == {"batches": 1, "ignored": 0}
    assert await fleet.held(worker) == 8  # such a server tells the salt, or that there is none


@pytest.mark.parametrize("bad", [{"type": "BlockStored"}, None], ids=["an event", "a batch"])
async def test_nor_where_they_could_not_be_read(fleet, bad):
    publisher = fleet.publisher()
    await publisher.publish(*[bad] if bad else [], payload=None if bad else b"\xc1")
    await publisher.publish(COPY_WITHOUT_SALT)
    await publisher.publish(stored([9], tokens(4, start=900)))
    worker = fleet.join(publisher)
    await fleet.until_held(worker, 4, tokens(4, start=900))
    assert await fleet.held(worker) == 0


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.events.subscriber.REPLAY_TIMEOUT_S", 0.02)
    monkeypatch.setattr("gateway.events.subscriber.MAX_SILENCE_S", 0.05)


async def test_a_buffer_that_answers_late_is_read_from_its_beginning(fleet, impatient):
    publisher = fleet.publisher()
    publisher.silent = True
    await publisher.publish(WHOLE_PROMPT)
    worker = fleet.join(publisher)
    await publisher.subscribed.wait()
    await until(lambda: worker.slot != NO_SLOT)
    await publisher.publish(stored([9], tokens(4, start=900)))
    await fleet.until_held(worker, 4, tokens(4, start=900))
    assert await fleet.held(worker) == 0
    publisher.silent = False
    await fleet.until_held(worker, 8)
    await fleet.until_held(worker, 4, tokens(4, start=900))


async def test_nor_is_a_gap_a_loss_for_ever_if_the_buffer_answers_late(fleet, impatient):
    publisher = fleet.publisher()
    worker = fleet.join(publisher)
    await publisher.subscribed.wait()
    await publisher.publish(WHOLE_PROMPT)
    await fleet.until_held(worker, 8)
    publisher.silent = True
    await publisher.publish(removed([4]), drop=True)
    await publisher.publish(stored([9], tokens(4, start=900)))
    await fleet.until_held(worker, 4, tokens(4, start=900))
    assert await fleet.held(worker) == 0
    publisher.silent = False
    await fleet.until_held(worker, 4)
    await fleet.until_held(worker, 4, tokens(4, start=900))


async def test_a_buffer_that_answers_late_and_has_nothing_earlier_changes_nothing(fleet, impatient):
    publisher = fleet.publisher(buffer=1)
    publisher.silent = True
    await publisher.publish(WHOLE_PROMPT)
    worker = fleet.join(publisher)
    await publisher.subscribed.wait()
    await until(lambda: worker.slot != NO_SLOT)
    await publisher.publish(stored([9], tokens(4, start=900)))
    await fleet.until_held(worker, 4, tokens(4, start=900))
    slot = worker.slot
    assert set(publisher.replays_asked) == {0}
    publisher.silent = False
    await until(lambda: publisher.replays_asked.count(1) > 1)  # it is asked as usual again
    assert worker.slot == slot


async def test_lost_removals_are_not_believed_to_be_still_there(fleet):
    publisher = fleet.publisher(buffer=1)
    worker = fleet.join(publisher)
    await publisher.publish(WHOLE_PROMPT)
    await fleet.until_held(worker, 8)
    slot = worker.slot
    await publisher.publish(removed([1, 2, 3, 4]), drop=True)
    await publisher.publish(stored([7, 8], tokens(4, start=500)))
    await fleet.until_held(worker, 4, tokens(4, start=500))
    assert await fleet.held(worker) == 0
    assert worker.slot == slot
    assert fleet.feeds.stats["worker"].lost == 1


async def test_a_restarted_engine_gets_a_new_slot_and_the_old_one_is_void(fleet):
    publisher = fleet.publisher()
    worker = fleet.join(publisher)
    await publisher.publish(WHOLE_PROMPT)
    await fleet.until_held(worker, 8)
    slot, version = worker.slot, fleet.registry.version
    await publisher.close()
    again = fleet.publisher(endpoints=(publisher.endpoint, publisher.replay_endpoint))
    await until(lambda: worker.slot not in (slot, NO_SLOT))
    assert fleet.registry.version > version
    assert await fleet.held(worker) == 0
    old = await fleet.index.residency(chunks_of(fleet.hasher, PROMPT), [slot], CHUNK)
    assert old.hit_tokens[0] == 0
    await again.publish(stored([1, 2], PROMPT[:4]))
    await fleet.until_held(worker, 4)
    assert fleet.feeds.stats["worker"].restarts == 1


async def test_a_restart_that_the_metrics_show_gives_a_new_slot_too(fleet):
    publisher = fleet.publisher()
    worker = fleet.join(publisher)
    await publisher.publish(WHOLE_PROMPT)
    await fleet.until_held(worker, 8)
    slot = worker.slot
    fleet.feeds.restarted(worker)
    await until(lambda: worker.slot not in (slot, NO_SLOT))
    await fleet.until_held(worker, 8)


async def test_a_worker_without_events_has_a_slot_of_its_own(fleet):
    worker = fleet.join(None)
    await until(lambda: worker.slot != NO_SLOT)
    await fleet.index.store(worker.slot, chunks_of(fleet.hasher, PROMPT), Tier.HBM)
    assert fleet.feeds.describe(worker) is None
    slot = worker.slot
    fleet.feeds.restarted(worker)
    await until(lambda: worker.slot not in (slot, NO_SLOT))
    assert await fleet.held(worker) == 0


async def test_a_worker_that_leaves_gives_its_slot_back(fleet):
    publisher = fleet.publisher()
    worker = fleet.join(publisher)
    await publisher.publish(WHOLE_PROMPT)
    await fleet.until_held(worker, 8)
    slot = worker.slot
    fleet.registry.remove("worker")
    await until(lambda: worker.slot == NO_SLOT)
    assert fleet.feeds.stats == {}
    assert (await fleet.index.residency(chunks_of(fleet.hasher, PROMPT), [slot], CHUNK)).hit_tokens[0] == 0


async def test_a_worker_that_is_replaced_under_its_name_begins_anew(fleet):
    publisher = fleet.publisher()
    first = fleet.join(publisher)
    await publisher.publish(WHOLE_PROMPT)
    await fleet.until_held(first, 8)
    second = fleet.join(publisher)
    await fleet.until_held(second, 8)
    await until(lambda: first.slot == NO_SLOT)


async def test_chunks_wait_for_the_model_they_are_hashed_under(fleet):
    publisher = fleet.publisher()
    await publisher.publish(WHOLE_PROMPT)
    worker = fleet.join(publisher, models=())
    await until(lambda: worker.slot != NO_SLOT)
    worker.models = {"adapter": MODEL, MODEL: MODEL}
    await fleet.until_held(worker, 8)


async def test_a_worker_that_comes_to_serve_another_model_is_indexed_anew(fleet):
    publisher = fleet.publisher()
    await publisher.publish(WHOLE_PROMPT)
    worker = fleet.join(publisher)
    await fleet.until_held(worker, 8)
    worker.models = {"other": "other"}
    await fleet.until_held(worker, 8, model="other")
    assert await fleet.held(worker) == 0


async def test_bad_events_and_batches_cost_nothing_but_themselves(fleet):
    publisher = fleet.publisher()
    await publisher.publish_payload(b"\xc1 is no msgpack")
    await publisher.publish({"type": "BlockStored"}, WHOLE_PROMPT, {"type": "of next year"})
    worker = fleet.join(publisher)
    await fleet.until_held(worker, 8)
    stats = fleet.feeds.stats["worker"]
    assert (stats.bad_events, stats.skipped_events, stats.events, stats.batches) == (2, 1, 1, 1)


async def test_the_lag_is_the_age_of_the_last_batch_that_was_not_read_from_a_buffer(fleet):
    publisher = fleet.publisher()
    await publisher.publish(WHOLE_PROMPT)
    worker = fleet.join(publisher)
    await fleet.until_held(worker, 8)
    description = fleet.feeds.describe(worker)
    assert (description["lag_s"], description["known_blocks"], description["orphan_blocks"]) == (0, 4, 0)
    await publisher.publish(WHOLE_PROMPT)
    await until(lambda: fleet.feeds.describe(worker)["lag_s"] > 1e9)  # the test's batches say that they are from 1970


async def test_a_slow_index_loses_no_events(fleet):
    publisher = fleet.publisher()
    worker = fleet.join(publisher)
    await publisher.publish(stored([0], PROMPT[:2]))
    await until(lambda: fleet.feeds.stats["worker"].batches == 1)
    fleet.index.open.clear()
    ids = tokens(2000)
    for number in range(1000):
        await publisher.publish(stored([number + 1], ids[2 * number : 2 * number + 2], parent=number or None))
    fleet.index.open.set()
    await fleet.until_held(worker, 2000, ids)
    assert fleet.feeds.stats["worker"].lost == 0


async def test_after_an_unexpected_failure_the_worker_is_indexed_anew(fleet):
    publisher = fleet.publisher()
    fleet.index.failures = 1
    await publisher.publish(WHOLE_PROMPT)
    worker = fleet.join(publisher)
    await fleet.until_held(worker, 8)


async def test_an_endpoint_in_use_is_tried_again(fleet):
    endpoint = free_endpoint()
    config = KvEventsConfig(endpoint=endpoint, mode="bind")
    fleet.join_with(config, "first")
    await until(lambda: fleet.feeds.stats)
    worker = fleet.join_with(config, "second")
    publisher = fleet.publisher(connect_to=endpoint)
    fleet.registry.remove("first")

    async def heard() -> bool:
        await publisher.publish(WHOLE_PROMPT)
        return await fleet.held(worker) == 8

    await until(heard)


async def test_workers_that_were_there_before_the_start_are_followed(fleet):
    publisher = fleet.publisher()
    await publisher.publish(WHOLE_PROMPT)
    registry = Registry()
    worker = Worker.from_config(fleet.join(publisher).config)
    registry.add(worker)
    feeds = EventFeeds(registry, fleet.index, fleet.hasher)
    await feeds.start()
    await fleet.until_held(worker, 8)
    await feeds.close()
    assert worker.slot == NO_SLOT
    registry.remove("worker")


def test_feeds_that_never_started_close_cleanly():
    feeds = EventFeeds(Registry(), MemoryIndex(IndexConfig()), ChunkHasher(CHUNK))
    asyncio.run(feeds.close())


@pytest.mark.parametrize(("medium", "pool_tiers"), [("EXTERNAL", ("remote",)), ("cpu", ("host", "remote"))])
async def test_what_one_worker_puts_into_a_shared_pool_is_there_for_another(fleet, medium, pool_tiers):
    workers = []
    for name in "ab":
        publisher = fleet.publisher()
        events = KvEventsConfig(endpoint=publisher.endpoint, replay_endpoint=publisher.replay_endpoint)
        workers.append(fleet.join_with(events, name, pool="store", pool_tiers=pool_tiers))
        await publisher.subscribed.wait()
    await until(lambda: all(worker.slot != NO_SLOT for worker in workers))
    index = PooledIndex(fleet.index, fleet.feeds.pools, fleet.registry)
    slots = [worker.slot for worker in workers]

    async def tiers() -> list[list[int]]:
        return (await index.residency(chunks_of(fleet.hasher, PROMPT), slots, CHUNK)).tiers()

    async def are(*expected: list[int]) -> None:
        async def so() -> bool:
            return await tiers() == list(expected)

        await until(so)

    await fleet.publishers[0].publish(stored([1, 2, 3, 4], PROMPT, medium=medium), stored([1, 2], PROMPT[:4]))
    await are([4, 0, 0, 4], [0, 0, 0, 8])
    await fleet.publishers[0].publish(removed([4], medium=medium))
    await are([4, 0, 0, 0], [0, 0, 0, 4])


async def directory(fleet: Fleet, seq: int, kind: str, ids: Sequence[int], incarnation: int = 1, **fields: Any) -> Any:
    """Tell of the chunks of ``ids`` as the LMCache server of the worker ``worker``."""
    entries = [
        {"key": {"chunk_hash_hex": f"{start:02x}"}, "token_ids": ids[start : start + CHUNK], "token_offset": start}
        for start in range(0, len(ids), CHUNK)
    ]
    batch = {"instance_id": "worker", "incarnation": incarnation, "seq": seq, "event_type": kind, "entries": entries}
    return await fleet.feeds.take_directory(json.dumps({"batches": [batch | fields]}).encode())


async def test_an_lmcache_server_fills_the_lower_tiers_of_its_worker(fleet):
    publisher = fleet.publisher()
    worker = fleet.join(publisher)
    await publisher.subscribed.wait()
    await publisher.publish(stored([1, 2], PROMPT[:4]))
    await fleet.until_held(worker, 4)
    assert await directory(fleet, 1, "store", PROMPT) == {"batches": 1, "ignored": 0}
    assert await fleet.held(worker) == 8
    await directory(fleet, 1, "delete", PROMPT)  # its number says that this was heard already
    assert await fleet.held(worker) == 8
    await directory(fleet, 2, "delete", PROMPT)
    assert await fleet.held(worker) == 4


@pytest.mark.parametrize(("seq", "incarnation"), [(3, 1), (1, 2)], ids=["a gap", "a restart"])
async def test_what_an_lmcache_server_held_is_void_after(fleet, seq, incarnation):
    publisher = fleet.publisher()
    worker = fleet.join(publisher)
    await publisher.subscribed.wait()
    await publisher.publish(stored([1, 2], PROMPT[:4]))
    await fleet.until_held(worker, 4)
    await directory(fleet, 1, "store", PROMPT)
    await directory(fleet, seq, "access", [], incarnation)
    assert await fleet.held(worker) == 4


async def test_an_lmcache_server_has_a_chunk_or_not_however_often_it_says_so(fleet):
    publisher = fleet.publisher()
    worker = fleet.join(publisher)
    await publisher.subscribed.wait()
    await until(lambda: worker.slot != NO_SLOT)
    await directory(fleet, 1, "store", PROMPT)
    await directory(fleet, 2, "store", PROMPT)
    assert await fleet.held(worker) == 8
    await directory(fleet, 3, "delete", PROMPT)
    assert await fleet.held(worker) == 0


async def test_what_one_of_its_backends_drops_another_of_the_same_tier_still_has(fleet):
    publisher = fleet.publisher()
    worker = fleet.join(publisher)
    await publisher.subscribed.wait()
    await until(lambda: worker.slot != NO_SLOT)
    await directory(fleet, 1, "store", PROMPT, tier="l2", backend="valkey")
    await directory(fleet, 2, "store", PROMPT[:4], tier="l2", backend="s3")
    await directory(fleet, 3, "delete", PROMPT, tier="l2", backend="valkey")
    assert await fleet.held(worker) == 4
    await directory(fleet, 4, "delete", PROMPT[:4], tier="l2", backend="s3")
    assert await fleet.held(worker) == 0


async def test_what_an_lmcache_server_said_in_an_earlier_life_comes_too_late(fleet):
    publisher = fleet.publisher()
    worker = fleet.join(publisher)
    await publisher.subscribed.wait()
    await until(lambda: worker.slot != NO_SLOT)
    await directory(fleet, 1, "store", PROMPT[:4], incarnation=2)
    await directory(fleet, 7, "store", PROMPT, incarnation=1)
    assert await fleet.held(worker) == 4


@pytest.mark.parametrize("said_by", ["a", "b", "c"])
async def test_what_any_member_drops_from_a_pool_none_has_any_more(fleet, said_by):
    publishers, workers = {}, {}
    for name in "abc":
        publishers[name] = publisher = fleet.publisher()
        events = KvEventsConfig(endpoint=publisher.endpoint, replay_endpoint=publisher.replay_endpoint)
        workers[name] = fleet.join_with(events, name, pool="store")
        await publisher.subscribed.wait()
    index = PooledIndex(fleet.index, fleet.feeds.pools, fleet.registry)

    async def tokens_held() -> list[int]:
        slots = [worker.slot for worker in workers.values()]
        return (await index.residency(chunks_of(fleet.hasher, PROMPT), slots, CHUNK)).hit_tokens.tolist()

    async def all_hold(count: int) -> bool:
        return await tokens_held() == [count] * 3

    for name in "ab":  # to b it was announced twice
        await publishers[name].publish(*[stored([1, 2, 3, 4], PROMPT, medium="EXTERNAL")] * (1 + (name == "b")))
        await until(lambda name=name: fleet.feeds.stats[name].events)
    await until(lambda: all_hold(8))
    await publishers[said_by].publish(*[removed([3, 4], medium="EXTERNAL")] * (1 + (said_by == "b")))
    await until(lambda: all_hold(4))


OTHER = tokens(8, start=500)


class PoolOfTwo:
    """Workers a and b with a pool that removes: a has put in all of a prompt, b half of it and half of another."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.engines = {name: fleet.publisher(buffer=3) for name in "ab"}
        self.pooled = PooledIndex(fleet.index, fleet.feeds.pools, fleet.registry)

    async def start(self) -> None:
        for name, engine in self.engines.items():
            events = KvEventsConfig(endpoint=engine.endpoint, replay_endpoint=engine.replay_endpoint)
            self.fleet.join_with(events, name, pool="store")
            await engine.subscribed.wait()
        await self.tell("a", stored([1, 2, 3, 4], PROMPT, medium="EXTERNAL"))
        await self.tell("b", stored([1, 2], PROMPT[:4], medium="EXTERNAL"), stored([5, 6], OTHER, medium="EXTERNAL"))
        await self.tell("b", removed([6], medium="EXTERNAL"))
        await self.holds(8, 4)

    async def tell(self, name: str, *events: Any, drop: bool = False, ahead_s: float = 0) -> None:
        await self.engines[name].publish(payload=batch(*events, at=time.time() + ahead_s), drop=drop)

    async def holds(self, *expected: int) -> None:
        """Wait until both workers are believed to reach so many tokens of the prompt, and of the other one."""

        async def so() -> bool:
            slots = [worker.slot for worker in self.fleet.registry.workers.values()]
            chains = [chunks_of(self.fleet.hasher, ids) for ids in (PROMPT, OTHER)]
            found = [(await self.pooled.residency(chain, slots, CHUNK)).hit_tokens.tolist() for chain in chains]
            return found == [[count] * 2 for count in expected]

        await until(so)


@pytest.fixture
async def pool(fleet: Fleet) -> PoolOfTwo:
    pool = PoolOfTwo(fleet)
    await pool.start()
    return pool


async def test_what_only_a_member_put_into_a_pool_that_removes_goes_with_its_process(pool):
    engine = pool.engines["a"]
    await engine.close()
    pool.engines["a"] = pool.fleet.publisher(endpoints=(engine.endpoint, engine.replay_endpoint))
    await pool.tell("a", stored([99], [1, 2]))
    await pool.holds(4, 4)


async def test_what_only_a_member_put_into_a_pool_that_removes_goes_when_it_is_reset(pool):
    await pool.tell("a", CLEARED, stored([7, 8], OTHER, medium="EXTERNAL"))
    await pool.holds(4, 8)


async def test_a_pool_that_removes_begins_anew_when_events_of_a_member_are_lost(pool):
    await pool.tell("a", removed([2], medium="EXTERNAL"), drop=True)
    for _ in range(3):
        await pool.tell("a", stored([99], [1, 2]), drop=True)
    await pool.tell("a", stored([99], [1, 2]))
    await pool.holds(0, 0)


async def test_what_a_member_is_read_anew_to_have_put_into_a_pool_may_be_gone_since(pool):
    await pool.tell("b", removed([3, 4], medium="EXTERNAL"))
    await pool.holds(4, 4)
    assert pool.fleet.feeds.resync(pool.fleet.registry.workers["a"])
    await until(lambda: pool.fleet.feeds.stats["a"].replayed)
    await pool.tell("a", stored([7, 8], OTHER, medium="EXTERNAL"))
    await pool.holds(4, 8)


async def test_what_a_member_whose_clock_is_ahead_drops_from_a_pool_can_be_announced_again(pool):
    await pool.tell("b", removed([3, 4], medium="EXTERNAL"), ahead_s=3600)
    await pool.holds(4, 4)
    await pool.tell("a", stored([3, 4], PROMPT[4:], parent=2, medium="EXTERNAL"))
    await pool.holds(8, 4)


async def test_an_lmcache_server_of_nobody_is_ignored(fleet):
    fleet.join(None)
    assert await directory(fleet, 1, "store", PROMPT) == {"batches": 0, "ignored": 1}
    assert await directory(fleet, 1, "store", PROMPT, instance_id="stranger") == {"batches": 0, "ignored": 1}


async def test_only_a_worker_with_events_can_be_read_anew(fleet):
    publisher = fleet.publisher()
    worker, modelled = fleet.join(publisher), fleet.join(None, "modelled")
    await publisher.subscribed.wait()
    await publisher.publish(WHOLE_PROMPT)
    await fleet.until_held(worker, 8)
    slots = worker.slot, modelled.slot
    assert not fleet.feeds.resync(modelled)
    assert fleet.feeds.resync(worker)
    await until(lambda: worker.slot not in (NO_SLOT, slots[0]))
    await fleet.until_held(worker, 8)
    assert modelled.slot == slots[1]
    assert fleet.feeds.stats["worker"].resyncs == 1
