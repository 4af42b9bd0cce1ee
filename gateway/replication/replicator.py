"""Keeps hot prefixes in several failure domains: a look at the prompts of late, and a few warm-ups.

Every ``interval_s`` the prompts since the last look are counted. Of the prefixes that many of them share, those that
the workers of one failure domain alone hold are computed by a worker of another one, too, by a request of our own that
asks for one token. That happens in quiet times only, and for a small share of what the fleet can prefill.

Several replicas each see a part of the prompts and have a part of the allowance. For every prefix all of them agree on
an order: the first warms it as soon as it is hot, the next one only where it still is not held after another interval.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from functools import partial
from math import ceil, inf
from time import monotonic
from typing import Any, Final

import msgspec
import numpy as np

from gateway.config import ReplicationConfig
from gateway.errors import GatewayError, NoWorker
from gateway.fleet.registry import Candidates, State, Worker
from gateway.observe.observer import Observer
from gateway.relay.plan import Plan
from gateway.relay.prefill import PrefillLeg
from gateway.relay.route import count_on, find_residency
from gateway.relay.services import Services
from gateway.replication.seen import SeenPrompt, SeenPrompts
from gateway.replication.warmup import make_warm_up
from gateway.sharing.sharing import Sharing
from gateway.tasks import spawn, stop
from policies.base import Residency, RoutingRequest
from policies.chunks import ChunkHasher
from policies.cost import prefill_seconds
from policies.replication import Allowance, HotPrefix, PrefixUses, new_homes

_MAX_PREFIXES: Final = 256  # of one interval; the most used ones
_COUNTED_AT_ONCE: Final = 64  # prompts, before others have their turn on the event loop
_FULL: Final = 0.9  # of a KV cache in use: what would be warmed there would soon have to go
_REFUSED_S: Final = 300.0  # a worker that refuses warm-ups, for want of a key for instance, gets none for so long
_PRIORITY: Final = -(2**31)  # where requests wait for their worker's turn, warm-ups are behind all others


class HeldPrefix(msgspec.Struct):
    """A hot prefix, as the last look found it.

    Attributes:
        model: whose it is, as clients call it.
        prefix: hash of its last chunk.
        tokens: its length.
        uses: prompts that began with it, of those that this replica saw.
        domains: failure domains of the workers that hold it.
    """

    model: str
    prefix: str
    tokens: int
    uses: int
    domains: list[str]


class _WarmUp(msgspec.Struct):
    """A warm-up under way: what sees it through, the tokens that it computes, and the seconds that takes."""

    leg: PrefillLeg
    tokens: int
    prefill_s: float


class Replicator:
    """The background task.

    Args:
        config: what is hot, and what a copy may cost.
        services: the other rooms.
        hasher: the same as for prompts.
        seen: where prompts are noted.
        sharing: the other replicas, if there may be any.

    Attributes:
        held: the hot prefixes of the last look.
    """

    def __init__(
        self,
        config: ReplicationConfig,
        services: Services,
        hasher: ChunkHasher,
        seen: SeenPrompts,
        sharing: Sharing | None = None,
    ) -> None:
        self.held: list[HeldPrefix] = []
        self._config = config
        self._services = services
        self._hasher = hasher
        self._seen = seen
        self._sharing = sharing
        self._uses: PrefixUses[bytes] = PrefixUses()
        self._allowance = Allowance(config.interval_s, monotonic())
        self._looks_waited: dict[bytes, int] = {}  # prefixes left to other replicas so far
        self._under_way: dict[bytes, _WarmUp] = {}
        self._refused_at: dict[Worker, float] = {}
        self._outcomes: Counter[str] = Counter()
        self._skipped: Counter[str] = Counter()
        self._warmed_tokens = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def under_way(self) -> int:
        """Number of warm-ups that have not ended."""
        return len(self._under_way)

    async def start(self) -> None:
        """Begin to look."""
        self._task = spawn(self._keep_looking(), "replication")

    async def close(self) -> None:
        """Look no more, and give up the warm-ups under way."""
        await stop(self._task)
        legs = [warm_up.leg for warm_up in self._under_way.values()]
        for leg in legs:
            leg.cancel()
        await stop(*(leg.task for leg in legs))

    def expose(self, observer: Observer) -> None:
        """Export what was found and done."""
        observer.gauge(
            "kvway_replication_prefixes", "Hot prefixes by how many domains hold them.", self._by_domains, ("domains",)
        )
        observer.counter(
            "kvway_replication_warmups_total", "Warm-ups by outcome.", lambda: self._outcomes, ("outcome",)
        )
        observer.counter(
            "kvway_replication_warmup_tokens_total", "Tokens computed by warm-ups.", lambda: self._warmed_tokens
        )
        observer.counter(
            "kvway_replication_skipped_total",
            "Prefixes that were not warmed although too few domains hold them, by what was in the way.",
            lambda: self._skipped,
            ("reason",),
        )

    async def look(self) -> None:
        """Count the prompts of late, and begin the warm-ups that are due."""
        config, now = self._config, monotonic()
        replicas = 1 if self._sharing is None else self._sharing.replicas
        self._allowance.earn(config.prefill_share * self._prefill_rate() / replicas, now)
        self._refused_at = {worker: at for worker, at in self._refused_at.items() if now - at < _REFUSED_S}
        waited, self._looks_waited = self._looks_waited, {}
        held = []
        for prefix, seen in await self._hot(max(2, ceil(config.least_uses / replicas))):
            await asyncio.sleep(0)  # a memory index answers without letting others have their turn
            with suppress(GatewayError):  # its model is served no more, or by nobody now
                held.append(await self._keep(prefix, seen, waited.get(prefix.chunks[-1], 0)))
        self.held = held

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(self._config.interval_s)
            try:
                await self.look()
            except Exception:
                self._services.complain("hot prefixes could not be looked at; they are at the next interval")

    async def _hot(self, least_uses: int) -> list[tuple[HotPrefix[bytes], SeenPrompt]]:
        """Return the prefixes that are hot now, each with a prompt that begins with it."""
        prompts: dict[bytes, SeenPrompt] = {}
        for number, seen in enumerate(self._seen.take()):
            if number % _COUNTED_AT_ONCE == 0:
                await asyncio.sleep(0)
            self._uses.count(seen.prompt.chunks)
            prompts[seen.prompt.chunks[-1]] = seen
        least_chunks = self._config.least_tokens / self._hasher.chunk_tokens
        found = [prefix for prefix in self._uses.take(least_uses) if len(prefix.chunks) >= least_chunks]
        return [(prefix, prompts[prefix.example]) for prefix in found[:_MAX_PREFIXES]]

    async def _keep(self, prefix: HotPrefix[bytes], seen: SeenPrompt, looks_waited: int) -> HeldPrefix:
        """See where a prefix is held, and begin a warm-up if that is too few domains."""
        end, tokens = prefix.chunks[-1], len(prefix.chunks) * self._hasher.chunk_tokens
        request = RoutingRequest(
            seen.model, tokens, prefix.chunks, self._hasher.chunk_tokens, output_tokens=1, priority=_PRIORITY
        )
        candidates, residency = await self._find(request)
        domains = [worker.config.domain or worker.name for worker in candidates.workers]
        hits = residency.hits()
        holders = [row for row, hit in enumerate(hits) if hit >= tokens]
        held = HeldPrefix(seen.model, end.hex(), tokens, prefix.uses, sorted({domains[row] for row in holders}))
        if not holders or len(held.domains) >= self._config.domains or end in self._under_way:
            return held
        if self._is_left_to_others(end, looks_waited):
            return held
        now = monotonic()
        self._services.ledger.advance(now)
        homes = new_homes(holders, domains, self._costs(candidates, residency, tokens), self._config.domains)
        if not homes:
            self._skipped["no_room"] += 1
        elif self._queue_s(candidates) > self._config.max_queue_s:
            self._skipped["load"] += 1
        else:
            self._warm(request, seen, candidates, homes[0], min(hits[homes[0]], tokens), now)
        return held

    async def _find(self, request: RoutingRequest) -> tuple[Candidates, Residency]:
        """Return who may hold the prefix and who does: where prefill and decode are apart, of those that prefill."""
        if self._services.registry.apart:
            with suppress(NoWorker):
                return await find_residency(self._services, request.model, request, prefilling=True)
        return await find_residency(self._services, request.model, request)

    def _is_left_to_others(self, end: bytes, looks_waited: int) -> bool:
        """Return whether other replicas are to warm a prefix first, and remember that they were given this look."""
        if self._sharing is None or self._sharing.rank(end.hex()) <= looks_waited:
            return False
        self._looks_waited[end] = looks_waited + 1
        return True

    def _costs(self, candidates: Candidates, residency: Residency, tokens: int) -> list[float]:
        """Return the seconds until each worker could hold a prefix, more where its cache is fuller; infinite: never."""
        fleet = candidates.fleet
        new = np.maximum(tokens - residency.hit_tokens, 0)
        speed = fleet.prefill_a_s, fleet.prefill_b_s, fleet.prefill_c_s
        seconds = fleet.pending_prefill_s + prefill_seconds(new, tokens - new, *speed)
        costs: list[float] = np.where(fleet.kv_usage < _FULL, seconds * (1.0 + fleet.kv_usage), inf).tolist()
        return [
            inf if worker in self._refused_at or not worker.config.answers_alone else cost
            for worker, cost in zip(candidates.workers, costs, strict=True)
        ]

    def _warm(
        self, request: RoutingRequest, seen: SeenPrompt, candidates: Candidates, row: int, hit_tokens: int, now: float
    ) -> None:
        root = self._hasher.root(candidates.model, candidates.lora, seen.cache_salt)
        warm_up = make_warm_up(seen, len(request.chunks), self._hasher, root)
        if warm_up is None:
            self._skipped["unreadable"] += 1
            return
        tokens = warm_up.tokens - hit_tokens
        if not self._allowance.spend(tokens):
            self._skipped["budget"] += 1
            return
        plan = Plan(seen.model, True, request)
        worker = candidates.workers[row]
        route = count_on(self._services, plan, worker, hit_tokens, "warm-up", now)
        leg = PrefillLeg(self._services, warm_up.head_for(worker), plan, route, warm_up.body, is_retried=False)
        self._under_way[request.chunks[-1]] = _WarmUp(leg, tokens, route.flight.prefill_s)
        leg.task.add_done_callback(partial(self._ended, request.chunks[-1]))

    def _ended(self, end: bytes, _: asyncio.Task[Any]) -> None:
        ended = self._under_way.pop(end)
        if ended.leg.answer is not None:
            self._outcomes["completed"] += 1
            self._warmed_tokens += ended.tokens
            return
        self._outcomes["failed"] += 1
        if ended.leg.refused:
            self._refused_at[ended.leg.worker] = monotonic()

    def _queue_s(self, candidates: Candidates) -> float:
        """Return the seconds of prefill that wait at a worker on average, warm-ups of ours aside."""
        ours = sum(warm_up.prefill_s for warm_up in self._under_way.values())
        return (float(np.sum(candidates.fleet.pending_prefill_s)) - ours) / len(candidates.workers)

    def _prefill_rate(self) -> float:
        """Return the tokens per second that the fleet can prefill."""
        fleet = self._services.registry.fleet
        ready = [worker.row for worker in self._services.registry.workers.values() if worker.state is State.READY]
        return float(np.sum(1.0 / np.maximum(fleet.prefill_b_s[ready], 1e-9)))

    def _by_domains(self) -> dict[str, float]:
        counts = dict.fromkeys(map(str, range(self._config.domains + 1)), 0.0)
        for prefix in self.held:
            counts[str(min(len(prefix.domains), self._config.domains))] += 1
        return counts
