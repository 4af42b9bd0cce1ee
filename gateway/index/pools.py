"""Remote tiers that several workers read: LMCache's remote backends, the Mooncake store.

What any member of a pool announces in its REMOTE tier counts for all of them, at that tier's cost. A pool has a slot of
its own, so that a member's restart takes nothing from it. It is asked for in the same look-up as the workers, and
lengthens the run of a member that holds less: the sum of two runs from the beginning, of which the longer counts. Where
a worker's own chunks go on behind those of the pool, that is less than it has, never more.

A removal by any member is a removal from the pool. Whatever is in a pool that removes is of the present life of a
member that is followed here: of what others announced, nobody could tell which chunk a removal means. Pools whose
members never remove anything (the Mooncake store of vLLM) forget by age what is not announced again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from time import monotonic
from typing import Final

from gateway.events.changes import ChunkRun, runs_of
from gateway.fleet.registry import NO_SLOT, Registry
from gateway.index.base import ChunkIndex, Speculation
from policies.base import Residency, Tier

AGE_S: Final = 1800.0  # what a pool announces and never removes is believed for once to twice this long
_MAX_LISTS: Final = 64


class Pool:
    """One pool, filled by those of its members that are followed here.

    Args:
        name: as in the configuration.
        index: where it has its slot.
        max_chunks: bound on the chunks whose age is kept; beyond it the pool begins anew.
        clock: monotonic seconds.

    Attributes:
        removing: whether any member was ever heard to remove something.
    """

    def __init__(
        self, name: str, index: ChunkIndex, max_chunks: int = 4_000_000, clock: Callable[[], float] = monotonic
    ) -> None:
        self.name = name
        self.slot = NO_SLOT
        self._index = index
        self._max_chunks = max_chunks
        self.removing = False
        self._in_turn = asyncio.Lock()  # members wait here while the slot is acquired, and go on in their order
        self._clock = clock
        self._age_at = clock() + AGE_S
        self._announced: dict[Hashable, dict[bytes, bytes]] = {}  # member → chunk → root, in its present life
        # Chunk → root: announced since the last ageing, and before. Empty once the pool is seen to remove.
        self._young: dict[bytes, bytes] = {}
        self._old: dict[bytes, bytes] = {}

    @property
    def owner(self) -> str:
        """What its slot is acquired for."""
        return f"pool:{self.name}"

    async def write(self, member: Hashable, stored: Iterable[ChunkRun], removed: Iterable[ChunkRun]) -> None:
        """Take over what a member's remote tier has gained and lost."""
        async with self._in_turn:
            await self._write(self._announced.setdefault(member, {}), stored, removed)

    async def _write(
        self, announced: dict[bytes, bytes], stored: Iterable[ChunkRun], removed: Iterable[ChunkRun]
    ) -> None:
        for run in stored:
            if run.tier is Tier.REMOTE:
                if self.slot == NO_SLOT:
                    self.slot = await self._index.acquire_slot(self.owner)
                chunks = dict.fromkeys(run.chunks, run.root)
                announced |= chunks
                if not self.removing:
                    self._young |= chunks
                await self._index.store(self.slot, run.chunks, Tier.REMOTE, run.root)
        for run in removed:
            if run.tier is Tier.REMOTE and self.slot != NO_SLOT:
                for chunk in run.chunks:
                    announced.pop(chunk, None)
                await self._index.remove(self.slot, run.chunks, Tier.REMOTE, run.root)
        if len(self._young) + len(self._old) > self._max_chunks:
            await self._clear()
        if self._clock() >= self._age_at:
            self._age_at = self._clock() + AGE_S
            await self._age()

    async def removes(self) -> None:
        """A member has removed something: the pool says what it drops, and need not be forgotten by age."""
        if self.removing:
            return
        async with self._in_turn:
            self.removing = True
            past = self._old | self._young
            self._young, self._old = {}, {}
            await self._take_out(self._nobodys(past))

    async def ended(self, member: Hashable) -> list[ChunkRun]:
        """A member's cache begins anew: which chunk a removal means that only it has announced, nobody knows any more.

        Returns:
            What it had announced, where the pool removes.
        """
        async with self._in_turn:
            announced = self._announced.pop(member, {})
            if not self.removing:
                return []
            await self._take_out(self._nobodys(announced))
            return runs_of({Tier.REMOTE: announced})

    async def left(self, member: Hashable) -> list[ChunkRun]:
        """A member is no longer followed here; see ``ended``. Without any member, nothing would be forgotten by age."""
        announced = await self.ended(member)
        async with self._in_turn:
            if not self._announced:
                await self._clear()
        return announced

    async def clear(self) -> None:
        """Begin anew."""
        async with self._in_turn:
            await self._clear()

    async def _clear(self) -> None:
        self._young, self._old = {}, {}
        for announced in self._announced.values():
            announced.clear()
        if self.slot != NO_SLOT:
            await self._index.clear(self.slot)

    async def _age(self) -> None:
        """Where nothing is ever removed: forget what was not announced again since the last time."""
        gone = {chunk: root for chunk, root in self._old.items() if chunk not in self._young}
        self._old, self._young = self._young, {}
        for announced in self._announced.values():
            for chunk in gone:
                announced.pop(chunk, None)
        await self._take_out(gone)

    def _nobodys(self, chunks: dict[bytes, bytes]) -> dict[bytes, bytes]:
        """Return those of ``chunks`` that no member has announced in its present life."""
        others = self._announced.values()
        return {chunk: root for chunk, root in chunks.items() if not any(chunk in other for other in others)}

    async def _take_out(self, chunks: dict[bytes, bytes]) -> None:
        for run in runs_of({Tier.REMOTE: chunks}):
            await self._index.remove(self.slot, run.chunks, run.tier, run.root)


class SharedPools:
    """All pools, by name.

    Args:
        index: where they have their slots.
    """

    def __init__(self, index: ChunkIndex) -> None:
        self._index = index
        self._pools: dict[str, Pool] = {}

    def named(self, name: str) -> Pool | None:
        """Return a pool, made when it is first asked for; None for no name."""
        if name and name not in self._pools:
            self._pools[name] = Pool(name, self._index)
        return self._pools.get(name)


class PooledIndex:
    """An index whose ``residency`` counts what a worker's pool holds as well; all else is the index's own.

    Args:
        index: what is known of each worker, and of each pool.
        pools: filled by the events.
        registry: says which slot is a worker of which pool.
        slots_of: returns the slots that other replicas have for an owner.
    """

    def __init__(
        self,
        index: ChunkIndex,
        pools: SharedPools,
        registry: Registry,
        slots_of: Callable[[str], list[int]] = lambda _owner: [],
    ) -> None:
        self._index = index
        self._pools = pools
        self._registry = registry
        self._slots_of = slots_of
        self._asked: dict[int, tuple[Sequence[int], _Question]] = {}

    async def residency(self, chunks: Sequence[bytes], slots: Sequence[int], chunk_tokens: int) -> Residency:
        """Return the leading run that each slot holds, or its pool where that is longer; see ``ChunkIndex``."""
        question = self._question(slots)
        if not question.pools:
            return await self._index.residency(chunks, slots, chunk_tokens)
        tiers = (await self._index.residency(chunks, question.slots, chunk_tokens)).tiers()
        n = len(slots)
        held = {pool: max(sum(tiers[row]) for row in rows) for pool, rows in question.pools.items()}
        answer = []
        for row, pool in zip(tiers[:n], question.pool_of, strict=True):
            more = held.get(pool, 0) - sum(row)
            answer.append([*row[: Tier.REMOTE], row[Tier.REMOTE] + more] if more > 0 else row)
        return Residency.of_lists(answer)

    def _question(self, slots: Sequence[int]) -> _Question:
        """Return what to ask for these slots, the same as last time if nothing changed: the index knows lists again."""
        known = self._asked.get(id(slots))
        pool_of = known[1].pool_of if known is not None else self._pools_of(slots)
        wanted = {name: self._slots(name) for name in dict.fromkeys(pool_of) if name}
        if known is not None and known[1].wanted == wanted:
            return known[1]
        question = _Question(slots, pool_of, wanted)
        if len(self._asked) >= _MAX_LISTS:
            self._asked.clear()
        self._asked[id(slots)] = slots, question  # holds the list: its id is not given to another one
        return question

    def _pools_of(self, slots: Sequence[int]) -> list[str]:
        by_slot = {worker.slot: worker.config.pool for worker in self._registry.workers.values()}
        by_slot[NO_SLOT] = ""
        return [by_slot.get(slot, "") for slot in slots]

    def _slots(self, name: str) -> list[int]:
        pool = self._pools.named(name)
        assert pool is not None
        return [*([pool.slot] if pool.slot != NO_SLOT else []), *self._slots_of(pool.owner)]

    async def acquire_slot(self, worker: str) -> int:
        """See ``ChunkIndex``."""
        return await self._index.acquire_slot(worker)

    async def release_slot(self, slot: int) -> None:
        """See ``ChunkIndex``."""
        await self._index.release_slot(slot)

    def speculate(self, slot: int, chunks: Sequence[bytes]) -> Speculation:
        """See ``ChunkIndex``."""
        return self._index.speculate(slot, chunks)

    def running(self, slot: int) -> Set[bytes]:
        """See ``ChunkIndex``."""
        return self._index.running(slot)

    async def store(self, slot: int, chunks: Sequence[bytes], tier: Tier, root: bytes | None = None) -> None:
        """See ``ChunkIndex``."""
        await self._index.store(slot, chunks, tier, root)

    async def remove(self, slot: int, chunks: Sequence[bytes], tier: Tier | None, root: bytes | None = None) -> None:
        """See ``ChunkIndex``."""
        await self._index.remove(slot, chunks, tier, root)

    async def clear(self, slot: int) -> None:
        """See ``ChunkIndex``."""
        await self._index.clear(slot)

    async def close(self) -> None:
        """See ``ChunkIndex``."""
        await self._index.close()


class _Question:
    """Slots to ask for: those of the workers, then those of their pools.

    Attributes:
        slots: all of them.
        pool_of: of each worker, the name of its pool, or an empty one.
        pools: name → rows of the answer; only pools of which something is known.
        wanted: name → slots.
    """

    __slots__ = ("pool_of", "pools", "slots", "wanted")

    def __init__(self, workers: Sequence[int], pool_of: list[str], wanted: dict[str, list[int]]) -> None:
        self.pool_of = pool_of
        self.wanted = wanted
        self.slots = list(workers)
        self.pools: dict[str, range] = {}
        for name, slots in wanted.items():
            if slots:
                self.pools[name] = range(len(self.slots), len(self.slots) + len(slots))
                self.slots += slots
