"""What a replica makes of the others' news."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gateway.config import IndexConfig, WorkerConfig
from gateway.fleet.registry import Registry, State, Worker
from gateway.index.memory import MemoryIndex
from gateway.sharing.news import LOAD_COLUMNS, News, Prompt
from gateway.sharing.peers import SILENCE_S, Peers
from tests.residency import hits, prompt


class Replica:
    """One replica's registry, index and view of the others."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.index = MemoryIndex(IndexConfig(), clock=lambda: self.now)
        self.peers = Peers(self.registry, self.index, self._prefilled)
        self.prefilled: list[tuple[str, Sequence[bytes]]] = []
        self.now = 1.0

    async def join(self, *names: str) -> None:
        for name in names:
            worker = Worker.from_config(WorkerConfig(url="http://127.0.0.1:1", name=name, models=("m",)))
            worker.slot = await self.index.acquire_slot(name)
            self.registry.add(worker)
            self.registry.set_state(worker, State.READY)

    async def hear(self, news: News) -> bool:
        return await self.peers.hear(news, self.now)

    def load(self, name: str) -> list[float]:
        """Return a worker's load as policies see it."""
        candidates = self.registry.candidates("m")
        row = candidates.fleet.names.index(name)
        return [float(candidates.fleet.column(column)[row]) for column in LOAD_COLUMNS]

    async def hits(self, chunks: list[bytes]) -> list[int]:
        return await hits(self.index, chunks, [worker.slot for worker in self.registry.workers.values()])

    async def _prefilled(self, worker: Worker, chunks: Sequence[bytes]) -> None:
        self.prefilled.append((worker.name, chunks))


@pytest.fixture
async def replica() -> Replica:
    replica = Replica()
    await replica.join("a", "b")
    return replica


async def test_the_others_load_is_added_to_ours_for_decisions_only(replica: Replica) -> None:
    replica.registry.fleet.column("running")[0] = 1
    await replica.hear(News("x", False, {"a": (10, 0.5, 2, 7)}))
    await replica.hear(News("y", False, {"a": (1, 0.25, 1, 0), "b": (3, 1, 1, 1), "unknown": (1, 1, 1, 1)}))
    assert replica.load("a") == [11, 0.75, 4, 7]
    assert replica.load("b") == [3, 1, 1, 1]
    assert replica.registry.running().tolist() == [4, 1]
    assert replica.registry.fleet.running.tolist() == [1, 0]


async def test_a_subset_of_the_workers_is_seen_with_the_others_load(replica: Replica) -> None:
    replica.registry.set_state(replica.registry.workers["a"], State.DRAINING)
    await replica.hear(News("x", False, {"a": (10, 0.5, 2, 7), "b": (3, 1, 1, 1)}))
    assert replica.load("b") == [3, 1, 1, 1]


async def test_news_replaces_what_was_told_before(replica: Replica) -> None:
    await replica.hear(News("x", False, {"a": (10, 0.5, 2, 7), "b": (3, 1, 1, 1)}))
    await replica.hear(News("x", False, {"a": (0, 0, 1, 7)}))
    assert replica.load("a") == [0, 0, 1, 7]
    assert replica.load("b") == [3, 1, 1, 1]


async def test_without_load_elsewhere_decisions_see_the_live_view_itself(replica: Replica) -> None:
    assert replica.registry.candidates("m").fleet is replica.registry.fleet
    await replica.hear(News("x", False, {"a": (0.1 + 0.2, 0.3, 1, 0)}))
    await replica.hear(News("x", False, {"a": (0, 0, 0, 0)}))
    assert replica.registry.elsewhere is None
    assert replica.registry.candidates("m").fleet is replica.registry.fleet


async def test_whole_news_heals_what_a_lost_message_left_behind(replica: Replica) -> None:
    await replica.hear(News("x", False, {"a": (10, 0.5, 2, 7)}, begun=[Prompt(1, "a", prompt(2))]))
    await replica.hear(News("x", True, {"b": (3, 1, 1, 1)}, live=[2]))
    assert replica.load("a") == [0, 0, 0, 0]
    assert replica.load("b") == [3, 1, 1, 1]
    assert await replica.hits(prompt(2)) == [0, 0]


async def test_the_others_prompts_take_room_from_their_dispatch(replica: Replica) -> None:
    slot = replica.registry.workers["a"].slot
    await replica.hear(News("x", False, {}, begun=[Prompt(1, "a", prompt(2))]))
    assert replica.index.running(slot) == set(prompt(2))
    await replica.hear(News("x", False, {}, settled=[1]))
    assert replica.index.running(slot) == set()


async def test_a_replica_that_falls_silent_is_forgotten_with_all_it_told(replica: Replica) -> None:
    await replica.hear(News("x", False, {"a": (10, 0.5, 2, 7)}, begun=[Prompt(1, "b", prompt(2))]))
    await replica.hear(News("y", False, {"a": (1, 0, 1, 1)}))
    replica.now += SILENCE_S - 0.1
    await replica.hear(News("y", False, {}))
    replica.now += 0.2
    replica.peers.forget_silent(replica.now)
    assert replica.peers.replicas == {"y"}
    assert replica.load("a") == [1, 0, 1, 1]
    assert await replica.hits(prompt(2)) == [0, 0]
    assert await replica.hear(News("x", False, {}))


async def test_a_replica_that_leaves_still_has_load_and_wants_no_workers(replica: Replica) -> None:
    await replica.hear(News("x", False, {"a": (10, 0.5, 2, 7)}, leaving=True))
    assert replica.peers.replicas == set()
    assert replica.load("a") == [10, 0.5, 2, 7]


async def test_prompts_of_others_count_as_held_from_dispatch_on(replica: Replica) -> None:
    chunks = prompt(4)
    await replica.hear(News("x", False, {}, begun=[Prompt(1, "b", chunks), Prompt(2, "gone", chunks)]))
    assert await replica.hits(chunks) == [0, 4]
    await replica.hear(News("x", False, {}, settled=[1]))
    assert await replica.hits(chunks) == [0, 4]
    assert replica.prefilled == [("b", chunks)]
    replica.now += IndexConfig().speculative_ttl_s
    assert await replica.hits(chunks) == [0, 0]


async def test_prompts_that_were_cancelled_count_no_more(replica: Replica) -> None:
    chunks = prompt(4)
    await replica.hear(News("x", False, {}, begun=[Prompt(1, "b", chunks)]))
    await replica.hear(News("y", False, {}, cancelled=[1]))
    assert await replica.hits(chunks) == [0, 4]
    await replica.hear(News("x", False, {}, cancelled=[1, 5], settled=[6]))
    assert await replica.hits(chunks) == [0, 0]
    assert replica.prefilled == []


async def test_the_others_load_stays_with_its_worker_when_the_fleet_changes(replica: Replica) -> None:
    await replica.hear(News("x", False, {"b": (3, 1, 1, 1), "c": (5, 1, 1, 1)}))
    await replica.join("c")
    replica.registry.remove("a")
    assert [replica.load(name) for name in ("b", "c")] == [[3, 1, 1, 1], [5, 1, 1, 1]]
    replica.registry.remove("b")
    replica.registry.remove("c")
    assert replica.registry.elsewhere is not None and replica.registry.elsewhere.size == 0


def test_a_message_that_is_missing_shows_also_after_silence(replica: Replica) -> None:
    assert replica.peers.due(News("x", False, {}, number=7)) is None
    assert replica.peers.due(News("x", False, {}, number=8)) == 8
    replica.peers.forget_silent(replica.now + 2 * SILENCE_S)
    assert replica.peers.due(News("x", False, {}, number=11)) == 9
    assert replica.peers.due(News("x", False, {}, number=12)) == 12
    assert replica.peers.due(News("y", False, {}, number=0)) is None
