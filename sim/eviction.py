"""What goes first when HBM is full: rules other than vLLM's least recently used.

Every rule takes blocks that hold nothing first, and a block never before those that continue it: a sequence is handed
over tail first, and whatever makes a block stay makes the blocks before it stay as well.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from math import inf, log2

from sim.cache import FreeQueue, LastUse, LruQueue
from sim.fleet import EvictionSettings
from sim.profiles import Profile


def make_queue(settings: EvictionSettings, profile: Profile, num_blocks: int, block_tokens: int) -> FreeQueue:
    """Return the free queue of a cache of ``num_blocks`` blocks, the reserved one included, all of them empty."""
    blocks = range(1, num_blocks)
    queue: FreeQueue
    if settings.rule == "radix":
        queue = RadixQueue(blocks, settings.pin_uses)
    elif settings.rule == "cost":
        queue = CostQueue(blocks, settings, profile, block_tokens)
    elif settings.rule == "salience":
        queue = SalienceQueue(blocks, -(-settings.sink_tokens // block_tokens), settings.recent_s)
    else:
        queue = LruQueue(blocks)
    if settings.tool_ttl_s:
        queue = PinningQueue(queue, int(settings.tool_share * num_blocks))
    return queue


class RadixQueue:
    """Leaves first, least recently used first; prefixes that many requests have used are pinned.

    A pinned block goes only when nothing else is left.

    Args:
        blocks: all of them, empty.
        pin_uses: requests that must have used a block, the one that computed it included.
    """

    def __init__(self, blocks: Iterable[int], pin_uses: int) -> None:
        self.now = 0.0
        self._pin_uses = pin_uses
        self._common = LruQueue(blocks)
        self._pinned: OrderedDict[int, None] = OrderedDict()
        self._uses: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._common) + len(self._pinned)

    def cached(self, blocks: Sequence[int], first: int) -> None:
        """Count the request that computed them."""
        self._uses.update(dict.fromkeys(blocks, 0))

    def empty(self, block: int) -> None:
        """Take this block before any other."""
        self._common.empty(block)

    def idle(self, blocks: Sequence[int], last_use: LastUse) -> None:
        """Take these after all others of their kind."""
        for block in blocks:
            self._uses[block] += 1
            if self._uses[block] >= self._pin_uses:
                self._pinned[block] = None
            else:
                self._common.idle((block,), last_use)

    def reuse(self, block: int) -> None:
        """Leave this one alone."""
        if block in self._pinned:
            del self._pinned[block]
        else:
            self._common.reuse(block)

    def take(self, count: int) -> list[int]:
        """Take blocks that are not pinned, as far as there are any."""
        taken = self._common.take(min(count, len(self._common)))
        taken += [self._pinned.popitem(last=False)[0] for _ in range(count - len(taken))]
        for block in taken:
            self._uses.pop(block, None)
        return taken


class SalienceQueue:
    """Spares what attention looks at most: the first tokens of every sequence (sinks), and what was used of late.

    The middle of sequences that have been idle for a while goes first, then their sinks, then what is recent; each
    least recently used first.

    Args:
        blocks: all of them, empty.
        sinks: leading blocks of a sequence that are sinks.
        recent_s: how long a block counts as recent.
    """

    def __init__(self, blocks: Iterable[int], sinks: int, recent_s: float) -> None:
        self.now = 0.0
        self._sinks = sinks
        self._recent_s = recent_s
        self._empty: list[int] = list(reversed(list(blocks)))
        self._middle: OrderedDict[int, float] = OrderedDict()  # block → when it was last used
        self._heads: OrderedDict[int, float] = OrderedDict()
        self._position: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._empty) + len(self._middle) + len(self._heads)

    def cached(self, blocks: Sequence[int], first: int) -> None:
        """Note where in their sequence they are."""
        self._position.update(zip(blocks, range(first, first + len(blocks)), strict=True))

    def empty(self, block: int) -> None:
        """Take this block before any other."""
        self._empty.append(block)

    def idle(self, blocks: Sequence[int], last_use: LastUse) -> None:
        """Take these after all others of their kind."""
        for block in blocks:
            (self._heads if self._position[block] < self._sinks else self._middle)[block] = self.now

    def reuse(self, block: int) -> None:
        """Leave this one alone."""
        if self._middle.pop(block, None) is None:
            del self._heads[block]

    def take(self, count: int) -> list[int]:
        """Take empty blocks, then the middle, then the heads of what is not recent, then what is."""
        return [self._empty.pop() if self._empty else self._evict() for _ in range(count)]

    def _evict(self) -> int:
        for kind in (self._middle, self._heads):
            if kind and next(iter(kind.values())) <= self.now - self._recent_s:
                return kind.popitem(last=False)[0]
        return (self._middle or self._heads).popitem(last=False)[0]


class CostQueue:
    """Lowest score first: ``Φ = ω1·recency + ω2·uses + ω3·T_recompute/M − ω4·SLO_deficit``.

    Recency is the time of the last use in units of ``recency_s``: between two blocks the difference of their ages
    counts, whenever they are compared, so that a score holds until a block is used again. Uses count as log2(1 + uses),
    T_recompute/M as milliseconds of prefill per token, which grow with the position of the block by the attention over
    all before it. SLO_deficit is by how much the TTFT of the last use missed its goal, in goals: where not all can be
    served in time, those that are late already give way to those that are not.

    Args:
        blocks: all of them, empty.
        settings: the weights ω.
        profile: how long prefill takes.
        block_tokens: tokens per block.
    """

    def __init__(self, blocks: Iterable[int], settings: EvictionSettings, profile: Profile, block_tokens: int) -> None:
        self.now = 0.0
        self._settings = settings
        self._profile = profile
        self._block_tokens = block_tokens
        self._empty: list[int] = list(reversed(list(blocks)))
        self._heap: list[tuple[float, int, int]] = []  # score, number of the release, block
        self._release_of: dict[int, int] = {}  # idle block → number of its last release
        self._releases = 0
        self._worth: dict[int, float] = {}  # cached block → ω3·T_recompute/M
        self._uses: dict[int, int] = {}
        self._score: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._empty) + len(self._release_of)

    def cached(self, blocks: Sequence[int], first: int) -> None:
        """Work out what computing them again would cost."""
        profile, size = self._profile, self._block_tokens
        for position, block in enumerate(blocks, start=first):
            seconds = profile.prefill_b_s + profile.prefill_c_s * (position + 0.5) * size
            self._worth[block] = self._settings.recompute_weight * seconds * 1e3
            self._uses[block] = 0

    def empty(self, block: int) -> None:
        """Take this block before any other."""
        self._empty.append(block)

    def idle(self, blocks: Sequence[int], last_use: LastUse) -> None:
        """Score these; no block scores less than one that continues it, now or when that was used last."""
        settings = self._settings
        last = settings.recency_weight * self.now / settings.recency_s - settings.slo_weight * last_use.slo_deficit
        least = -inf
        for block in blocks:
            uses = self._uses[block] = self._uses[block] + 1
            score = last + settings.reuse_weight * log2(1 + uses) + self._worth[block]
            least = self._score[block] = max(score, least, self._score.get(block, -inf))
            self._releases += 1
            self._release_of[block] = self._releases
            heappush(self._heap, (least, self._releases, block))
        if len(self._heap) > 2 * len(self._release_of) + 1024:  # mostly blocks that have been used again since
            self._heap = [entry for entry in self._heap if self._release_of.get(entry[2]) == entry[1]]
            heapify(self._heap)

    def reuse(self, block: int) -> None:
        """Leave this one alone."""
        del self._release_of[block]

    def take(self, count: int) -> list[int]:
        """Take empty blocks, then those of the lowest score."""
        return [self._empty.pop() if self._empty else self._evict() for _ in range(count)]

    def _evict(self) -> int:
        while True:
            _, release, block = heappop(self._heap)
            if self._release_of.get(block) == release:
                del self._release_of[block]
                del self._score[block]
                return block


class PinningQueue:
    """Spares the blocks of conversations that wait for a tool, for a time; around any other rule.

    When nothing else is left, or too much is pinned, the pin that would end first is given up.

    Args:
        others: the rule for blocks that are not pinned.
        most: blocks that may be pinned at a time.
    """

    def __init__(self, others: FreeQueue, most: int) -> None:
        self._others = others
        self._most = most
        self._pinned: OrderedDict[int, LastUse] = OrderedDict()  # in the order in which the pins end

    @property
    def now(self) -> float:
        """Simulated time."""
        return self._others.now

    @now.setter
    def now(self, now: float) -> None:
        self._others.now = now

    def __len__(self) -> int:
        return len(self._others) + len(self._pinned)

    def cached(self, blocks: Sequence[int], first: int) -> None:
        """Pass it on."""
        self._others.cached(blocks, first)

    def empty(self, block: int) -> None:
        """Pass it on."""
        self._others.empty(block)

    def idle(self, blocks: Sequence[int], last_use: LastUse) -> None:
        """Pin these, or pass them on."""
        self._expire()
        if last_use.pin_until <= self.now:
            self._others.idle(blocks, last_use)
            return
        self._pinned.update(dict.fromkeys(blocks, last_use))
        while len(self._pinned) > self._most:
            self._unpin()

    def reuse(self, block: int) -> None:
        """Leave this one alone."""
        if self._pinned.pop(block, None) is None:
            self._others.reuse(block)

    def take(self, count: int) -> list[int]:
        """Take what is not pinned, as far as there is any."""
        self._expire()
        while len(self._others) < count:
            self._unpin()
        return self._others.take(count)

    def _expire(self) -> None:
        while self._pinned and next(iter(self._pinned.values())).pin_until <= self.now:
            self._unpin()

    def _unpin(self) -> None:
        """Give up what was pinned together: it was handed over tail first, and is handed on so."""
        block, last_use = self._pinned.popitem(last=False)
        together = [block]
        while self._pinned and next(iter(self._pinned.values())) is last_use:
            together.append(self._pinned.popitem(last=False)[0])
        self._others.idle(together, last_use)
