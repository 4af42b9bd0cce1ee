"""Which replica follows which worker's cache.

Every live replica ranks all live replicas for each worker by a hash (rendezvous hashing), so that all agree on who
should follow it without asking each other, and a replica that comes or goes moves only its own share. A lease in Redis
makes it certain. A new owner fills a slot of its own while the old slot goes on answering.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

import mmh3

from gateway.events.feeds import EventFeeds
from gateway.fleet.registry import NO_SLOT, Registry, Worker
from gateway.index.redis import RedisIndex
from gateway.sharing.store import NOT_CLAIMED, Record

_GRACE_S: Final = 2.0  # after so long without an owner anybody may have a worker: its first choice does not know it


class Ownership:
    """Follows the workers that are ours, and shows the others' slots.

    Args:
        replica: who we are.
        registry: the workers.
        feeds: follows them.
        index: where slots come from.
    """

    def __init__(self, replica: str, registry: Registry, feeds: EventFeeds, index: RedisIndex) -> None:
        self._replica = replica
        self._registry = registry
        self._feeds = feeds
        self._index = index
        self._records: Mapping[str, Record] = {}
        index.on_owners(self._show_all)
        self._retained: dict[int, Worker] = {}  # slots of ours that answer until the worker's next owner has one

    @property
    def owned(self) -> int:
        """Number of workers that are followed here."""
        return sum(map(self._feeds.follows, self._registry.workers.values()))

    def follows(self, worker: Worker) -> bool:
        """Return whether a worker is followed here."""
        return self._feeds.follows(worker)

    def claims(self, replicas: Collection[str]) -> dict[str, int]:
        """Return what to claim, as ``SharingStore.beat`` takes it, when ``replicas`` are alive."""
        return {name: self._claim(worker, replicas) for name, worker in self._registry.workers.items()}

    def no_claims(self) -> dict[str, int]:
        """Return the claims of a replica that wants no worker."""
        return dict.fromkeys(self._registry.workers, NOT_CLAIMED)

    async def take(self, records: Mapping[str, Record]) -> None:
        """Act on what Redis says about owners."""
        self._records = records
        for name, worker in list(self._registry.workers.items()):
            if (record := records.get(name)) is None:
                continue
            has_owner = record.left_s > 0
            if has_owner and record.owner == self._replica:
                self._feeds.follow(worker)
                continue
            if has_owner and self._feeds.follows(worker):
                self._retained[await self._feeds.unfollow(worker)] = worker
        self._show_all()
        if any(map(self._is_unknown, self._registry.workers.values())):
            self._index.learn_owners()
        await self._release_unused()

    def follow_all(self) -> None:
        """Follow every worker: there is nobody else, as far as we can tell."""
        for worker in self._registry.workers.values():
            self._feeds.follow(worker)

    def _claim(self, worker: Worker, replicas: Collection[str]) -> int:
        record = self._records.get(worker.name)
        wanted = first_choice(worker.name, replicas) == self._replica
        if not wanted and record is not None:
            is_ours = record.owner == self._replica and record.left_s > 0
            wanted = (is_ours and not _can_move(worker)) or record.left_s < -_GRACE_S
        if not wanted:
            return NOT_CLAIMED
        return self._index.number(worker.slot) if self._feeds.follows(worker) else -1

    def _show_all(self) -> None:
        """Let workers have the slots that other replicas have for them, as far as these still are theirs."""
        for worker in self._registry.workers.values():
            slot = self._slot_elsewhere(worker)
            if self._feeds.follows(worker) or not self._index.is_others(slot, worker.name):
                is_its_own = self._index.owns(worker.slot) or self._index.is_others(worker.slot, worker.name)
                slot = worker.slot if is_its_own else NO_SLOT
            if slot != worker.slot:
                worker.slot = slot
                self._registry.touch()

    def _slot_elsewhere(self, worker: Worker) -> int:
        record = self._records.get(worker.name)
        return NO_SLOT if record is None else self._index.called(record.slot)

    def _is_unknown(self, worker: Worker) -> bool:
        """Whether another replica has a slot for ``worker`` that the index does not know to be its."""
        slot = self._slot_elsewhere(worker)
        if slot < 0 or self._feeds.follows(worker) or self._index.number(slot) == self._index.number(worker.slot):
            return False
        return not self._index.is_others(slot, worker.name)

    async def _release_unused(self) -> None:
        for slot, worker in list(self._retained.items()):
            if worker.slot != slot or worker.row < 0:
                del self._retained[slot]
                await self._index.release_slot(slot)


def first_choice(worker: str, replicas: Collection[str]) -> str:
    """Return the replica that should follow ``worker``: the highest hash of both names (rendezvous hashing)."""
    return max(replicas, key=lambda replica: weight(replica, worker))


def weight(replica: str, name: str) -> tuple[int, str]:
    """Return what a replica weighs for a worker, or whatever else one of them is to look after: the heaviest does."""
    return mmh3.hash128(f"{replica} {name}"), replica


def _can_move(worker: Worker) -> bool:
    """Whether another replica can take over from a living one without loss: it must be able to replay the events."""
    events = worker.config.kv_events
    return events is not None and events.replay_endpoint is not None and events.mode == "connect"
