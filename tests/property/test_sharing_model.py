"""Replicas' views of load against the truth, whatever is lost between them."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from gateway.config import IndexConfig, WorkerConfig
from gateway.fleet.ledger import Flight, Ledger
from gateway.fleet.registry import Registry, State, Worker
from gateway.index.memory import MemoryIndex
from gateway.sharing.news import LOAD_COLUMNS, News, Outbox, decode, encode
from gateway.sharing.peers import Peers

WORKERS = ["a", "b", "c"]


class Replica:
    def __init__(self, name: str) -> None:
        self.registry = Registry()
        for worker in WORKERS:
            self.registry.add(Worker.from_config(WorkerConfig(url="http://127.0.0.1:1", name=worker, models=("m",))))
            self.registry.set_state(self.registry.workers[worker], State.READY)
        self.ledger = Ledger(self.registry)
        self.outbox = Outbox(name, self.registry)
        self.peers = Peers(self.registry, MemoryIndex(IndexConfig()), self._ignore)
        self.flights: list[Flight] = []

    async def _ignore(self, *_: object) -> None: ...

    def act(self, worker: str, kind: int, now: float) -> None:
        if kind == 0 or not self.flights:
            self.flights.append(self.ledger.dispatch(self.registry.workers[worker], 100, 30, 0.25, now))
        elif kind == 1:
            self.flights[-1].first_byte(now)
        else:
            self.flights.pop(0).end(now)


STEP = st.tuples(st.integers(0, 2), st.sampled_from(WORKERS), st.integers(0, 2), st.booleans())


@given(st.lists(STEP, max_size=40))
def test_after_whole_news_every_replica_sees_the_load_of_all(steps: list[tuple[int, str, int, bool]]) -> None:
    replicas = [Replica(name) for name in ("x", "y", "z")]

    def tell(sender: Replica, whole: bool, lost: bool) -> None:
        news = sender.outbox.take(whole)
        if news is not None and not lost:
            for receiver in replicas:
                if receiver is not sender:
                    asyncio.run(_hear(receiver, decode(encode(news))))

    for now, (number, worker, kind, lost) in enumerate(steps):
        replicas[number].act(worker, kind, float(now))
        tell(replicas[number], whole=False, lost=lost)
    for replica in replicas:
        tell(replica, whole=True, lost=False)
    for column in LOAD_COLUMNS:
        truth = sum(replica.registry.fleet.column(column) for replica in replicas)
        for replica in replicas:
            assert replica.registry.candidates("m").fleet.column(column).tolist() == truth.tolist()


async def _hear(receiver: Replica, news: News) -> None:
    await receiver.peers.hear(news, 0.0)
