"""``expected-cost`` with parts of the future known: how far it is from what could be reached, and by what.

What the policy and the engines can only guess at is taken from the trace instead:

**Worker known best.** What a request pushes out of a cache is charged by the next use of every context that lies there,
not by a probability: what would have been found again without the request, and is gone with it.

**Eviction known best.** Workers let go first what will be used the farthest in the future, or never again (Belady).

**Both known best.**

When a conversation goes on depends on when it is answered: its next request comes the recorded pause after the end of
the answer, and until there is one, as much later than recorded as its last request was. What requests need that wait
at a worker is needed before all that is still to come, in the order of their release. A conversation is taken to go on
where it was last; prefixes that several share are needed wherever one of them is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import nlargest
from itertools import count, islice
from math import inf
from typing import Any, Final, Literal

from policies.base import COLUMNS, Decision, FleetView, Residency, RoutingRequest
from policies.expected_cost import SMALL_FLEET, ExpectedCost, ExpectedCostParams
from policies.order import LeastWorkParams
from policies.traffic import Traffic
from sim.cache import BlockCache, BlockChain, LastUse
from sim.engine import Simulation
from sim.fleet import FleetSettings
from sim.holding import Leg, Live
from sim.requests import Trace
from sim.results import SimResult
from sim.router import Dispatch

Known = Literal["worker", "eviction", "both"]

_CAPACITY: Final = COLUMNS.index("kv_capacity_tokens")
_B, _C = (COLUMNS.index(f"prefill_{letter}_s") for letter in "bc")
_AGEING: Final = LeastWorkParams().ageing
_BEFORE_ALL: Final = 1e9  # seconds by which what waits goes before what is to come


def simulate_knowing(known: Known, trace: Trace, fleet: FleetSettings, seed: int) -> SimResult:
    """Simulate ``expected-cost`` with requests released least work first, with a part of the future known.

    Raises:
        ValueError: the fleet has tiers below HBM, or too many workers.
    """
    if fleet.tiers or fleet.workers > SMALL_FLEET:
        raise ValueError(f"the future is known for fleets of at most {SMALL_FLEET} workers with HBM only")
    return _KnownFuture(known, trace, fleet, seed).run()


class Future:
    """When every chunk will be used next.

    Args:
        trace: what is to come.
        workers: how many there are.
    """

    def __init__(self, trace: Trace, workers: int) -> None:
        self._requests = trace.requests
        self._closed_loop = trace.closed_loop
        # chunk → session → its requests that are still to come and use the chunk, last first
        self._uses: dict[int, dict[str | None, list[int]]] = {}
        for number in reversed(range(len(trace.requests))):
            session = self._session(number)
            for chunk in trace.requests[number].chunks:
                self._uses.setdefault(chunk, {}).setdefault(session, []).append(number)
        self._late_s: dict[str | None, float] = {}  # session → by how much later than recorded it goes on
        self._home: dict[str | None, int] = {}  # session → the worker where it was last
        self._wanted: list[dict[int, dict[int, float]]] = [{} for _ in range(workers)]

    def next_use(self, chunk: int, worker: int) -> float:
        """Return when a worker will need a chunk: the later, the larger; infinite: never."""
        if waiting := self._wanted[worker].get(chunk):
            return min(waiting.values()) - _BEFORE_ALL
        requests, late_s, home = self._requests, self._late_s, self._home
        return min(
            [
                requests[turns[-1]].arrival_s + late_s.get(session, 0.0)
                for session, turns in self._uses.get(chunk, {}).items()
                if home.get(session, worker) == worker
            ],
            default=inf,
        )

    def routed(self, number: int, worker: int, rank: float, now: float) -> None:
        """A request has come, and is to be served by a worker when requests of lower rank have been."""
        session = self._session(number)
        wanted = self._wanted[worker]
        for chunk in self._requests[number].chunks:
            wanted.setdefault(chunk, {})[number] = rank
            uses = self._uses[chunk]
            turns = uses[session]
            while turns and turns[-1] <= number:
                turns.pop()
            if not turns:
                del uses[session]
        if self._closed_loop:
            self._home[session] = worker
            self._late_s[session] = now - self._requests[number].arrival_s

    def ended(self, number: int, worker: int, following: int | None, now: float) -> None:
        """A request has been answered; ``following``: the next one of its session."""
        wanted = self._wanted[worker]
        for chunk in self._requests[number].chunks:
            del wanted[chunk][number]
            if not wanted[chunk]:
                del wanted[chunk]
        if following is not None:
            request = self._requests[following]
            self._late_s[request.session] = now + request.think_s - request.arrival_s

    def _session(self, number: int) -> str | None:
        """Return who sends a request; in an open loop nobody waits for answers, and it may be all the same one."""
        return self._requests[number].session if self._closed_loop else None


class KnownQueue:
    """The free blocks of one worker (a ``sim.cache.FreeQueue``), of which it is known when they will be used.

    Args:
        blocks: all of them, holding nothing yet.
        next_use: when a chunk will be needed here.
        farthest: take first what is needed the farthest in the future, not what was used the longest time ago.
    """

    def __init__(self, blocks: Iterable[int], next_use: Callable[[int], float], farthest: bool) -> None:
        self.now = 0.0
        self.next_use = next_use
        self._farthest = farthest
        self._empty = list(reversed(list(blocks)))
        self._idle: dict[int, None] = {}  # least recently used first
        self._chunks: dict[int, int] = {}
        self._positions: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._empty) + len(self._idle)

    def named(self, blocks: Sequence[int], chunks: Sequence[int]) -> None:
        """Blocks hold these chunks now."""
        self._chunks.update(zip(blocks, chunks, strict=True))

    def cached(self, blocks: Sequence[int], first: int) -> None:
        """Note where in their sequence they are."""
        self._positions.update(zip(blocks, range(first, first + len(blocks)), strict=True))

    def empty(self, block: int) -> None:
        """Take this block before any other."""
        self._empty.append(block)

    def idle(self, blocks: Sequence[int], last_use: LastUse) -> None:
        """These were used last, the first of them before the others."""
        self._idle.update(dict.fromkeys(blocks))

    def reuse(self, block: int) -> None:
        """Leave this one alone."""
        del self._idle[block]

    def take(self, count: int) -> list[int]:
        """Take what holds nothing, then what is to go first."""
        taken = [self._empty.pop() for _ in range(min(count, len(self._empty)))]
        evicted = self._first(count - len(taken))
        for block in evicted:
            del self._idle[block]
        return taken + evicted

    def _first(self, count: int) -> list[int]:
        if self._farthest:
            # of equals the earlier ones, so that a sequence loses its tail first
            return nlargest(count, self._idle, key=self._next_use_of)
        return list(islice(self._idle, count))

    def _next_use_of(self, block: int) -> float:
        return self.next_use(self._chunks[block])

    def in_order(self) -> Iterator[tuple[int, int, int]]:
        """Yield ``(blocks that go before it, its chunk, its position)`` of what is idle, in the order of eviction."""
        for ahead, block in enumerate(self._first(len(self._idle)), start=len(self._empty)):
            yield ahead, self._chunks[block], self._positions[block]


class _KnownCache(BlockCache):
    """A cache that tells its queue what blocks hold."""

    def __init__(self, num_blocks: int, block_size: int, queue: KnownQueue) -> None:
        super().__init__(num_blocks, block_size, free=queue)
        self._queue = queue

    def commit(self, chain: BlockChain, blocks: Sequence[int], first: int, last: int) -> None:
        """As in every cache."""
        super().commit(chain, blocks, first, last)
        self._queue.named(blocks[first:last], chain.hashes[first:last])


class KnownDisplacement(ExpectedCost):
    """``expected-cost`` that knows which of the contexts that a request displaces will be missed.

    A cache takes in new tokens at the rate that it has of late. A block that goes after ``d`` more tokens, and is
    needed in ``t`` seconds, is lost because of ``n`` new tokens if ``d − n < rate·t ≤ d``: one that is needed sooner
    will be found all the same, one that is needed later would be gone anyhow.

    Args:
        queues: the workers' free blocks.
        block_tokens: tokens per block.
    """

    def __init__(self, queues: Sequence[KnownQueue], block_tokens: int) -> None:
        super().__init__(ExpectedCostParams(reuse=0.0))
        self._queues = queues
        self._block_tokens = block_tokens
        self._own: set[int] = set()  # chunks of the request that is decided about: it uses them before they can go

    def decide(self, request: RoutingRequest, fleet: FleetView, residency: Residency, now: float) -> Decision:
        """Return the worker of least expected cost."""
        self._own = {int.from_bytes(chunk, "little") for chunk in request.chunks}
        return super().decide(request, fleet, residency, now)

    def _formula(self, prompt: int, now: float, fresh: bool, traffic: Traffic) -> Callable[..., tuple[Any, ...]]:
        weigh = super()._formula(prompt, now, fresh, traffic)
        growth = traffic.growth_tokens() if fresh else 0.0
        rows = count()  # candidates are weighed one by one, in their order

        def weigh_knowing(state: Any, hit: Any, there: Any, tiers: Any, turnover: Any) -> tuple[Any, ...]:
            cost, excess, work, wait, pi, _ = weigh(state, hit, there, tiers, turnover)
            rate = turnover * state[_CAPACITY] / self._params.memory_s
            queue, new = self._queues[next(rows)], prompt - there + growth
            displacement = self.lost_s(queue, new, rate, state[_B], state[_C], now)
            return cost + (pi + 1.0) * displacement, excess, work, wait, pi, displacement

        return weigh_knowing

    def lost_s(self, queue: KnownQueue, new_tokens: float, rate: float, b: float, c: float, now: float) -> float:
        """Return the seconds of prefill that what is lost because of so many new tokens will take."""
        size, lost_s = self._block_tokens, 0.0
        for ahead, chunk, position in queue.in_order():
            if chunk not in self._own:
                until_then = rate * max(0.0, queue.next_use(chunk) - now)
                if ahead * size - new_tokens < until_then <= ahead * size:
                    lost_s += size * (b + c * size * position)
        return lost_s


class _KnownFuture(Simulation):
    """A run of which the future is known."""

    def __init__(self, known: Known, trace: Trace, fleet: FleetSettings, seed: int) -> None:
        super().__init__(trace, fleet, "expected-cost", None, seed, None)
        self._future = Future(trace, fleet.workers)
        queues = []
        for row, worker in enumerate(self.workers):
            blocks = worker.limits.num_blocks
            queue = KnownQueue(range(1, blocks), self._at_worker(row), known in ("eviction", "both"))
            worker.cache = _KnownCache(blocks, trace.block_tokens, queue)
            queues.append(queue)
        if known in ("worker", "both"):
            for router in self.routers:
                router.policy = KnownDisplacement(queues, trace.block_tokens)

    def _at_worker(self, row: int) -> Callable[[int], float]:
        return lambda chunk: self._future.next_use(chunk, row)

    def _count(self, number: int, replica: int, dispatch: Dispatch, leg: Leg) -> Live:
        live = super()._count(number, replica, dispatch, leg)
        rank = dispatch.flight.prefill_s + _AGEING * self.now
        self._future.routed(number, dispatch.worker, rank, self.now)
        return live

    def _end(self, live: Live) -> None:
        super()._end(live)
        number = live.job.number
        self._future.ended(number, live.dispatch.worker, self._next_of.get(number), self.now)
