from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from gateway.config import IndexConfig
from gateway.index.memory import MemoryIndex
from gateway.index.redis import RedisIndex
from gateway.index.speculation import SpeculativePrompt
from tests.property.index_model import MAX_DEPTH, STEPS, TTL_S, Clock, Model, Sent, prompt
from tests.valkey import Valkey

CHUNK_TOKENS = 16
_namespaces = count()


@pytest.fixture(scope="module")
def valkey() -> Iterator[Valkey]:
    with Valkey() as server:
        yield server


class Walk:
    """Takes the same steps with the model and with one or two replicas of a real index, and compares.

    Args:
        replicas: each slot belongs to the replica it was acquired from, in turns.
    """

    def __init__(self, clock: Clock, *replicas: MemoryIndex | RedisIndex) -> None:
        self.clock = clock
        self.model = Model(clock)
        self.replicas = replicas
        self.turn = count()
        self.owner: dict[int, MemoryIndex | RedisIndex] = {}
        self.retired: set[int] = set()
        self.speculations: list[tuple[Sent, SpeculativePrompt]] = []

    async def take(self, step: tuple[Any, ...]) -> None:
        match step:
            case "acquire", _:
                await self.acquire()
            case "settle" | "cancel" as what, which:
                if self.speculations:
                    sent, speculation = self.speculations.pop(which % len(self.speculations))
                    if what == "settle":
                        self.model.settle(sent)
                        speculation.settle(self.clock.now)
                    else:
                        self.model.cancel(sent)
                        speculation.cancel()
            case "wait", seconds:
                self.clock.now += seconds
                await asyncio.sleep(0)  # a step of sweeping
            case "look", path:
                await self.compare(prompt(path))
            case what, who, *rest if self.owner:
                await self.change(what, list(self.owner)[who % len(self.owner)], *rest)

    async def acquire(self) -> None:
        index = self.replicas[next(self.turn) % len(self.replicas)]
        slot = await index.acquire_slot("worker")
        assert slot not in self.owner
        self.owner[slot] = index
        self.model.held[slot] = {}
        self.retired.discard(slot)

    async def change(self, what: str, slot: int, *details: Any) -> None:
        index = self.owner[slot]
        chunks = prompt(details[0] if details else [0] * MAX_DEPTH)
        match what, *details[1:]:
            case "store", tier:
                self.model.store(slot, chunks, tier)
                await index.store(slot, chunks, tier)
            case "store_some", some, tier:
                chosen = [chunks[number % len(chunks)] for number in some]
                self.model.store(slot, chosen, tier)
                await index.store(slot, chosen, tier, chunks[0])
            case "remove", some, tier:
                chosen = [chunks[number % len(chunks)] for number in some]
                self.model.remove(slot, chosen, tier)
                await index.remove(slot, chosen, tier, chunks[0])
            case ("speculate",):
                self.speculations.append((self.model.speculate(slot, chunks), index.speculate(slot, chunks)))
            case ("clear",):
                self.model.wipe(slot)
                await index.clear(slot)
            case ("release",):
                self.model.release(slot)
                await index.release_slot(slot)
                del self.owner[slot]
                self.retired.add(slot)
        await self.compare(chunks)

    async def compare(self, chunks: list[bytes]) -> None:
        """The owner of a slot knows of every step at once, its speculations included."""
        for index in self.replicas:
            slots = [slot for slot, owner in self.owner.items() if owner is index]
            await self.agree(index, chunks, [-1, *slots, *(self.retired if len(self.replicas) == 1 else ())])

    async def agree(
        self, index: MemoryIndex | RedisIndex, chunks: list[bytes], slots: list[int], speculations: bool = True
    ) -> None:
        residency = await index.residency(chunks, slots, CHUNK_TOKENS)
        expected = [self.model.by_tier(chunks, slot, speculations) for slot in slots]
        assert (residency.by_tier // CHUNK_TOKENS).tolist() == expected
        assert residency.hit_tokens.tolist() == [CHUNK_TOKENS * sum(run) for run in expected]


@given(STEPS)
def test_the_memory_index_agrees_with_the_model_after_every_step(steps: list[tuple[Any, ...]]) -> None:
    async def walk() -> None:
        clock = Clock()
        index = MemoryIndex(IndexConfig(speculative_ttl_s=TTL_S), clock)
        going = Walk(clock, index)
        for step in steps:
            await going.take(step)
        await index.swept()
        held = {one for slot in going.model.held.values() for one, tiers in slot.items() if tiers}
        assert len(index) == len(held)
        await index.close()

    asyncio.run(walk())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS)
def test_two_replicas_agree_with_the_model_and_with_each_other(valkey: Valkey, steps: list[tuple[Any, ...]]) -> None:
    async def walk() -> None:
        clock = Clock()
        config = IndexConfig(
            backend="redis",
            url=valkey.url,
            namespace=f"walk-{next(_namespaces)}",
            timeout_s=5,
            speculative_ttl_s=TTL_S,
        )
        one, other = RedisIndex(config, clock), RedisIndex(config, clock)
        going = Walk(clock, one, other)
        for step in [("acquire", 0), ("acquire", 0), *steps]:
            await going.take(step)
        await one.flush()
        await other.flush()
        for path in ([0] * MAX_DEPTH, [1] * MAX_DEPTH, [0, 1, 0, 1, 0], *(step[2] for step in steps if len(step) > 2)):
            for index, neighbour in ((one, other), (other, one)):
                theirs = [slot for slot, owner in going.owner.items() if owner is neighbour]
                await going.agree(index, prompt(path), [*theirs, *going.retired, -1], speculations=False)
        assert one.counters.errors == other.counters.errors == 0
        await one.close()
        await other.close()

    asyncio.run(walk())
