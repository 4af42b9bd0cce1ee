"""The KV cache of one worker: vLLM's block pool, and a host tier behind it.

A block holds ``block_size`` tokens. It is *in use* while requests refer to it, and *cached* once it is full and known
by its hash; a cached block that nobody uses stays in the free queue, can be hit there, and is evicted when it reaches
the queue's head. Everything that changes what the cache holds is recorded as an event. No I/O, no clock.

Follows ``vllm/v1/core/block_pool.py`` of vLLM 0.32: one block is reserved, a request's blocks are freed tail first,
blocks that were never cached are used again before any other, and equal blocks computed side by side are both kept.
Which cached block goes first is the free queue's business; other rules than vLLM's are in ``sim.eviction``.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple, Protocol, TypeAlias

from policies.base import Tier
from policies.chunks import ChunkHasher

Tokens: TypeAlias = "array[int]"


@dataclass(slots=True, frozen=True)
class BlockChain:
    """What a token sequence is called, block by block.

    Attributes:
        hashes: unsigned 64-bit, one per full block; each depends on all tokens up to the end of its block.
        tokens: the sequence itself (array of u32), at least as long as the blocks; empty where only hashes are known.
        lora: adapter under which it is computed.
        salt: cache salt under which it is computed.
    """

    hashes: Sequence[int]
    tokens: Tokens = field(default_factory=lambda: array("I"))
    lora: str | None = None
    salt: str | None = None


def hash_blocks(
    tokens: Tokens, block_size: int, model: str, lora: str | None = None, salt: str | None = None
) -> BlockChain:
    """Return the chain of a token sequence; equal tokens under another model, adapter or salt have other hashes."""
    hasher = ChunkHasher(block_size)
    digests = hasher.chain(hasher.root(model, lora, salt), tokens.tobytes())
    return BlockChain([int.from_bytes(digest[-8:], "big") for digest in digests], tokens, lora, salt)


@dataclass(slots=True, frozen=True)
class BlocksStored:
    """A run of blocks is now held in ``tier``; ``parent`` is the hash of the block before the first, None at a root.

    ``tokens`` are those of the whole run. ``salt`` is given only where the run begins at the root.
    """

    hashes: Sequence[int]
    parent: int | None
    tokens: Tokens
    lora: str | None
    salt: str | None
    tier: Tier


@dataclass(slots=True)  # not frozen: the simulator makes one per evicted block, and frozen ones take twice as long
class BlockRemoved:
    """A block was evicted from ``tier``."""

    hash: int
    tier: Tier


@dataclass(slots=True, frozen=True)
class AllCleared:
    """The cache was reset: nothing is held in any tier."""


CacheEvent: TypeAlias = BlocksStored | BlockRemoved | AllCleared


@dataclass(slots=True, frozen=True)
class Hit:
    """A prompt's leading run: ``blocks`` lie in HBM, the ``host_blocks`` after them only in host memory."""

    blocks: Sequence[int] = ()
    host_blocks: int = 0

    def __len__(self) -> int:
        return len(self.blocks) + self.host_blocks


_NO_HIT: Final = Hit()


class LastUse(NamedTuple):
    """What is known of a request as it lets go of its blocks.

    Attributes:
        pin_until: until when they had better stay.
        slo_deficit: by how much its TTFT missed the goal, in goals; 0 where it did not.
    """

    pin_until: float = 0.0
    slo_deficit: float = 0.0


PLAIN_USE: Final = LastUse()


class FreeQueue(Protocol):
    """The blocks that no request uses, in the order in which they are to be taken.

    Attributes:
        now: simulated time, kept up to date by whoever has a clock; rules that look at ages need it.
    """

    now: float

    def __len__(self) -> int: ...

    def cached(self, blocks: Sequence[int], first: int) -> None:
        """Blocks became known by their hashes; they are number ``first`` and following of their sequence."""

    def empty(self, block: int) -> None:
        """A block that holds nothing is free."""

    def idle(self, blocks: Sequence[int], last_use: LastUse) -> None:
        """Cached blocks of one sequence, tail first, are used no more."""

    def reuse(self, block: int) -> None:
        """A cached block is in use again."""

    def take(self, count: int) -> list[int]:
        """Take the first ``count`` blocks; there are that many."""
        ...


class LruQueue:
    """Least recently used first, as vLLM.

    Args:
        blocks: all of them, holding nothing yet.
    """

    def __init__(self, blocks: Iterable[int]) -> None:
        self.now = 0.0
        self._blocks: OrderedDict[int, None] = OrderedDict.fromkeys(blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    def cached(self, blocks: Sequence[int], first: int) -> None:
        """Nothing to do: only the order of use counts."""

    def empty(self, block: int) -> None:
        """Take this block before any other."""
        self._blocks[block] = None
        self._blocks.move_to_end(block, last=False)

    def idle(self, blocks: Sequence[int], last_use: LastUse) -> None:
        """Take these after all others."""
        self._blocks.update(dict.fromkeys(blocks))

    def reuse(self, block: int) -> None:
        """Leave this one alone."""
        del self._blocks[block]

    def take(self, count: int) -> list[int]:
        """Take the blocks that were used the longest time ago."""
        pop = self._blocks.popitem
        return [pop(last=False)[0] for _ in range(count)]


class HostTier:
    """Blocks copied to host memory, least recently used first out.

    Args:
        capacity: in blocks; 0 for no host tier.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block_hash: int) -> bool:
        return block_hash in self._blocks

    def touch(self, hashes: Sequence[int]) -> None:
        """Make a run the most recently used, its first block last, so that chains lose their tails first."""
        blocks = self._blocks
        for block_hash in reversed(hashes):
            if block_hash in blocks:
                blocks.move_to_end(block_hash)

    def store(self, hashes: Sequence[int]) -> tuple[list[int], list[int]]:
        """Hold a run of blocks; what does not fit of its end is left out.

        Returns:
            The hashes evicted for it, and the positions within the run that were not held before.
        """
        self.touch(hashes)
        new = [at for at, block_hash in enumerate(hashes) if block_hash not in self._blocks][: self.capacity]
        surplus = len(self._blocks) + len(new) - self.capacity
        evicted = [self._blocks.popitem(last=False)[0] for _ in range(surplus)]
        for at in reversed(new):
            self._blocks[hashes[at]] = None
        return evicted, new

    def clear(self) -> None:
        """Forget everything."""
        self._blocks.clear()


class BlockCache:
    """The pool of HBM blocks of one worker, and its host tier.

    Args:
        num_blocks: blocks in HBM, the reserved one included.
        block_size: tokens per block.
        host_blocks: capacity of the host tier. Blocks are copied there as they are cached in HBM.
        free: an order of eviction other than least recently used; it holds blocks 1 to ``num_blocks - 1``.
    """

    def __init__(self, num_blocks: int, block_size: int, host_blocks: int = 0, free: FreeQueue | None = None) -> None:
        if num_blocks < 2:
            raise ValueError(f"a cache needs at least 2 blocks (one is reserved), not {num_blocks}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.host = HostTier(host_blocks)
        self._users = [0] * num_blocks
        self._hash_of: list[int | None] = [None] * num_blocks
        self._blocks_of: dict[int, list[int]] = {}
        self.free: FreeQueue = free or LruQueue(range(1, num_blocks))
        self._events: list[CacheEvent] = []

    @property
    def free_blocks(self) -> int:
        """Blocks that no request uses, cached ones included."""
        return len(self.free)

    @property
    def usage(self) -> float:
        """Share of the blocks that requests use, 0 to 1."""
        return 1 - len(self.free) / (self.num_blocks - 1)

    def __contains__(self, block_hash: int) -> bool:
        return block_hash in self._blocks_of

    def lookup(self, chain: BlockChain, limit: int) -> Hit:
        """Return the leading run of the chain's first ``limit`` blocks that is held: HBM first, host beyond it."""
        blocks: list[int] = []
        for block_hash in islice(chain.hashes, limit):
            same = self._blocks_of.get(block_hash)
            if same is None:
                break
            blocks.append(same[0])
        host_blocks = 0
        for block_hash in islice(chain.hashes, len(blocks), limit):
            if block_hash not in self.host:
                break
            host_blocks += 1
        return Hit(blocks, host_blocks)

    def fits(self, hit: Hit, new: int) -> bool:
        """Return whether the blocks of ``hit`` and ``new`` others can be in use together with all that are now."""
        idle = sum(1 for block in hit.blocks if not self._users[block])
        return idle + new <= len(self.free)

    def allocate(self, new: int, hit: Hit = _NO_HIT) -> list[int]:
        """Use the blocks of ``hit`` and ``new`` others, taken from the head of the free queue.

        Returns:
            Block numbers, those of the hit first.

        Raises:
            ValueError: they do not fit; nothing has changed.
        """
        if not self.fits(hit, new):
            raise ValueError(f"{new} new blocks do not fit: {len(self.free)} are free")
        for block in hit.blocks:
            if not self._users[block]:
                self.free.reuse(block)
            self._users[block] += 1
        return [*hit.blocks, *self._take(new)]

    def commit(self, chain: BlockChain, blocks: Sequence[int], first: int, last: int) -> None:
        """Make blocks ``first`` to ``last`` (exclusive) of a sequence known by their hashes; they are full now.

        Args:
            chain: the sequence.
            blocks: all its blocks, in order.
            first: the first one that is not yet cached.
            last: one past the last full one.
        """
        hashes = chain.hashes[first:last]
        for block, block_hash in zip(blocks[first:last], hashes, strict=True):
            self._hash_of[block] = block_hash
            self._blocks_of.setdefault(block_hash, []).append(block)
        self.free.cached(blocks[first:last], first)
        self._events.append(self._stored(chain, first, last, Tier.HBM))
        if self.host.capacity:
            evicted, new = self.host.store(hashes)
            self._events.extend(BlockRemoved(block_hash, Tier.HOST) for block_hash in evicted)
            for start, end in _runs(new):
                self._events.append(self._stored(chain, first + start, first + end, Tier.HOST))

    def report(self, chain: BlockChain, last: int) -> None:
        """Announce again the first ``last`` blocks of a sequence, which are in HBM; nothing is held twice by it."""
        self._events.append(self._stored(chain, 0, last, Tier.HBM))

    def release(self, blocks: Sequence[int], last_use: LastUse = PLAIN_USE) -> None:
        """Stop using the blocks of a request: cached ones join the queue tail first, others go to its head.

        Args:
            blocks: all of them, in order.
            last_use: what queues other than least recently used may look at.
        """
        users, hash_of = self._users, self._hash_of
        idle: list[int] = []
        empty: list[int] = []
        for block in reversed(blocks):
            users[block] -= 1
            if not users[block]:
                (empty if hash_of[block] is None else idle).append(block)
        self.free.idle(idle, last_use)
        for block in reversed(empty):
            self.free.empty(block)
        if self.host.capacity:
            self.host.touch([block_hash for block in blocks if (block_hash := hash_of[block]) is not None])

    def reset(self) -> bool:
        """Forget everything in all tiers; refused (False) while any block is in use.

        The event has no tier, so what it announces holds for all of them.
        """
        if len(self.free) != self.num_blocks - 1:
            return False
        self._blocks_of.clear()
        self._hash_of = [None] * self.num_blocks
        self.host.clear()
        self._events.append(AllCleared())
        return True

    def take_events(self) -> list[CacheEvent]:
        """Return what happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _take(self, count: int) -> list[int]:
        taken = self.free.take(count)
        for block in taken:
            block_hash = self._hash_of[block]
            if block_hash is not None:
                self._hash_of[block] = None
                same = self._blocks_of[block_hash]
                same.remove(block)
                if not same:
                    del self._blocks_of[block_hash]
                self._events.append(BlockRemoved(block_hash, Tier.HBM))
            self._users[block] = 1
        return taken

    def _stored(self, chain: BlockChain, first: int, last: int, tier: Tier) -> BlocksStored:
        return BlocksStored(
            hashes=chain.hashes[first:last],
            parent=chain.hashes[first - 1] if first else None,
            tokens=chain.tokens[first * self.block_size : last * self.block_size],
            lora=chain.lora,
            salt=None if first else chain.salt,
            tier=tier,
        )


def _runs(positions: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the unbroken runs of ascending positions as ``(first, one past the last)``."""
    start = 0
    for at in range(1, len(positions) + 1):
        if at == len(positions) or positions[at] != positions[at - 1] + 1:
            yield positions[start], positions[at - 1] + 1
            start = at
