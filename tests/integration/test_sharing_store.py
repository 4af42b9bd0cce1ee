"""What replicas keep in Redis about each other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from itertools import count

import pytest
import redis
from redis.exceptions import ConnectionError as RedisConnectionError

from gateway.config import IndexConfig
from gateway.sharing.store import LIFE_S, NOT_CLAIMED, SharingStore
from gateway.tasks import spawn
from tests.events_rig import until
from tests.valkey import Valkey

_namespaces = count()


@pytest.fixture
def namespace() -> str:
    return f"store-{next(_namespaces)}"


Build = Callable[[str], SharingStore]


@pytest.fixture
async def store(valkey: Valkey, namespace: str) -> AsyncIterator[Build]:
    built: list[SharingStore] = []

    def build(replica: str) -> SharingStore:
        built.append(SharingStore(IndexConfig(url=valkey.url, namespace=namespace), replica))
        return built[-1]

    yield build
    for one in built:
        await one.close()


async def test_every_key_is_in_the_namespace_and_has_a_ttl_and_none_is_searched_for(
    store: Build, admin: redis.Redis, namespace: str
) -> None:
    admin.flushall()
    admin.config_resetstat()
    await store("a").beat({"w": 3, "x": NOT_CLAIMED})
    asked = admin.info("commandstats").keys()
    assert not {"cmdstat_keys", "cmdstat_scan", "cmdstat_randomkey"} & asked
    keys = admin.keys("*")
    assert {key.decode() for key in keys} == {
        f"{namespace}:{{sharing}}:{name}" for name in ("replicas", "leases", "owners")
    }
    assert all(0 < admin.pttl(key) <= 3_600_000 for key in keys)


async def test_a_lease_belongs_to_one_replica_until_it_is_given_up_or_over(store: Build) -> None:
    one, other = store("a"), store("b")
    await one.beat({"w": 3})
    _, records = await other.beat({"w": 4})
    assert (records["w"].owner, records["w"].slot) == ("a", 3)
    await one.beat({})
    _, records = await other.beat({"w": -1})
    assert (records["w"].owner, records["w"].slot) == ("b", 3)  # the old slot, until there is a new one
    await other.beat({"w": 4}, life_s=0.001)

    async def taken() -> bool:
        _, records = await one.beat({"w": 5})
        return records["w"].owner == "a"

    await until(taken)


async def test_dead_replicas_and_workers_that_nobody_claims_are_swept(
    store: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.sharing.store._KEEP_S", 0.001)
    await store("a").beat({"w": 3}, life_s=0.001)

    async def swept() -> bool:
        return await store("b").beat({}) == ({"b"}, {})

    await until(swept)


async def test_what_was_written_before_the_clock_went_back_ends_no_later_than_a_life(
    store: Build, admin: redis.Redis, namespace: str
) -> None:
    one, other = store("a"), store("b")
    await one.beat({"w": 3})
    keys = [f"{namespace}:{{sharing}}:{name}" for name in ("replicas", "leases")]
    for key in keys:  # the clock goes back by an hour
        admin.zincrby(key, 3_600_000, admin.zrange(key, 0, -1)[0])
    await other.beat({"w": 4})
    latest = admin.time()[0] * 1000 + 1000 + LIFE_S * 1000
    assert all(end <= latest for key in keys for _, end in admin.zrange(key, 0, -1, withscores=True))


async def test_a_listener_whose_server_dies_learns_it_at_once(store: Build, valkey: Valkey) -> None:
    listener, teller = store("a"), store("b")
    messages = listener.listen(3600)
    hearing = spawn(anext(messages), "listen")

    async def heard() -> bool:
        await teller.tell(b"news")
        return hearing.done()

    await until(heard)
    assert await hearing == b"news"
    valkey.kill()
    with pytest.raises(RedisConnectionError):
        while True:
            await anext(messages)


async def test_a_listener_that_hears_nothing_gives_up(store: Build) -> None:
    with pytest.raises(TimeoutError):
        await anext(store("a").listen(0.01))
