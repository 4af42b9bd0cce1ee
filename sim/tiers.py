"""The tiers below HBM: what they hold, and how long it takes to bring it back.

Copies go down in the background and are given up where a link cannot keep up. A request that is admitted brings back
as much of its prefix as gets it done soonest: reloading is weighed against computing, the wait for links included. The
prefill behind a reload begins with the first layer that is there: with ``L`` layers, reload ``r`` and prefill ``c``
take ``r/L + max(r, c)·(L − 1)/L + c/L`` together.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

from policies.base import Tier
from sim.fleet import FleetSettings, TierSettings
from sim.profiles import Profile

MAX_BACKLOG_S: Final = 1.0
"""A link that is this far behind takes no more copies."""

EVERYONE: Final = -1
"""Stands for all workers, in changes of a shared tier."""


@dataclass(slots=True)
class TierChange:
    """Blocks that a tier holds now, or holds no more."""

    worker: int
    tier: Tier
    hashes: Sequence[int]
    stored: bool


class Channel:
    """One direction of a link: transfers go one after the other.

    Args:
        bytes_per_s: effective bandwidth.
        latency_s: seconds before the first byte of each transfer.

    Attributes:
        free_at: when the transfers so far are through.
        down_until: when it works again, for a link that was lost.
        moved_bytes: bytes moved so far.
    """

    def __init__(self, bytes_per_s: float, latency_s: float) -> None:
        self.free_at = 0.0
        self.down_until = 0.0
        self.moved_bytes = 0.0
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s

    def seconds(self, size: float, now: float) -> float:
        """Return how long ``size`` bytes would take from ``now`` on, the wait for those before them included."""
        return max(0.0, self.free_at - now) + self._latency_s + size / self._bytes_per_s

    def transfer(self, size: float, now: float) -> float:
        """Move ``size`` bytes; return when they are there. The latency passes beside other transfers."""
        end = now + self.seconds(size, now)
        self.free_at = end - self._latency_s
        self.moved_bytes += size
        return end

    def fail(self, until: float) -> None:
        """Nothing is moved until then."""
        self.down_until = max(self.down_until, until)
        self.free_at = max(self.free_at, until)


class TierStore:
    """What one tier holds, least recently used first out, and the link to it.

    Args:
        settings: the tier.
        block_tokens: tokens per block.
        block_bytes: bytes of a block in HBM.
    """

    def __init__(self, settings: TierSettings, block_tokens: int, block_bytes: float) -> None:
        self.settings = settings
        self.capacity = int(settings.capacity_tokens / settings.compression) // block_tokens
        self.read = Channel(settings.read_bytes_per_s, settings.latency_s)
        self.write = Channel(settings.write_bytes_per_s, settings.latency_s)
        self.refused_blocks = 0
        self._most = int(self.capacity * settings.watermark)
        self._moved_bytes = block_bytes * settings.compression
        self._codec_s = block_bytes / settings.codec_bytes_per_s
        self._blocks: OrderedDict[int, float] = OrderedDict()  # → when it was last used; of a copy, complete

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block_hash: int) -> bool:
        return block_hash in self._blocks

    def touch(self, hashes: Sequence[int], now: float) -> None:
        """Make a run the most recently used, its first block last, so that chains lose their tails first."""
        blocks = self._blocks
        for block_hash in reversed(hashes):
            if (used_at := blocks.get(block_hash)) is not None:
                blocks[block_hash] = max(used_at, now)
                blocks.move_to_end(block_hash)

    def store(self, hashes: Sequence[int], now: float, ready_at: float | None = None) -> tuple[list[int], list[int]]:
        """Copy a run of blocks here in the background, as far as it fits and the link is not behind.

        Args:
            hashes: the run.
            now: simulated time.
            ready_at: when the blocks are there, if they come over another link than this tier's own.

        Returns:
            The hashes that were not held before, and those that no longer are, the most recently used first.
        """
        self.touch(hashes, now)
        new = [block_hash for block_hash in hashes if block_hash not in self._blocks][: self._most]
        if not new:
            return [], []
        if ready_at is None:
            if self.write.free_at > now + MAX_BACKLOG_S:
                self.refused_blocks += len(new)
                return [], []
            ready_at = self.write.transfer(len(new) * self._moved_bytes, now)
        self._blocks.update(dict.fromkeys(reversed(new), ready_at))
        return new, self._drop_cold(now)[::-1]

    def _drop_cold(self, now: float) -> list[int]:
        blocks, idle_s = self._blocks, self.settings.idle_s
        gone = []
        while len(blocks) > self._most or (blocks and next(iter(blocks.values())) < now - idle_s):
            gone.append(blocks.popitem(last=False)[0])
        return gone

    def reload_s(self, hashes: Sequence[int], now: float, ahead: int = 0) -> float:
        """Return how long it would take to bring these blocks to HBM, behind ``ahead`` others that come from here too.

        Those still on their way here pass through.
        """
        complete_at = max(self._blocks[block_hash] for block_hash in hashes)  # of complete copies the last use: past
        blocks = ahead + len(hashes)
        return max(complete_at - now, self.read.seconds(blocks * self._moved_bytes, now)) + blocks * self._codec_s

    def reload(self, hashes: Sequence[int], now: float) -> float:
        """Bring these blocks to HBM; return when they are there."""
        end = now + self.reload_s(hashes, now)
        self.read.transfer(len(hashes) * self._moved_bytes, now)
        return end

    def clear(self) -> None:
        """Forget everything."""
        self._blocks.clear()


@dataclass(slots=True, frozen=True)
class Reload:
    """What an admitted request takes from below HBM.

    Attributes:
        runs: tier and blocks of each part, in the order of the prompt.
        ready_at: from when on its prefill runs as if everything were there: see the module's docstring.
    """

    runs: Sequence[tuple[Tier, int]] = ()
    ready_at: float = 0.0

    @property
    def blocks(self) -> int:
        """Blocks of all parts."""
        return sum(blocks for _, blocks in self.runs)


NO_RELOAD: Final = Reload()


class TierStack:
    """The tiers of one worker.

    Args:
        worker: its number.
        stores: fastest first; a shared one is the same object for all workers.
        settings: of the fleet.
        block_tokens: tokens per block.
    """

    def __init__(self, worker: int, stores: Sequence[TierStore], settings: FleetSettings, block_tokens: int) -> None:
        self.stores = stores
        self.worker = worker
        self._layers = settings.layers
        self._offload = settings.offload
        self._prefetch = settings.prefetch
        self._profile: Profile = settings.speed
        self._block_tokens = block_tokens
        self._changes: list[TierChange] = []

    def take_changes(self) -> list[TierChange]:
        """Return what has changed since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def touch(self, hashes: Sequence[int], now: float) -> None:
        """A run has been used in HBM: it is as recent here."""
        for store in self.stores:
            store.touch(hashes, now)

    def computed(self, hashes: Sequence[int], now: float) -> None:
        """A run has come to HBM."""
        if self._offload == "store":
            self._copy_down(hashes, self.stores, now)

    def evicted(self, hashes: Sequence[int], now: float) -> None:
        """A run has left HBM, its last block first; it was copied before, if that is when blocks are copied."""
        if self._offload == "evict":
            self._copy_down(hashes[::-1], self.stores, now)

    def _copy_down(self, hashes: Sequence[int], stores: Sequence[TierStore], now: float) -> None:
        """Copy a run to the first of ``stores``; what each cannot hold any longer goes to the one below it."""
        for store in stores:
            new, gone = store.store(hashes, now)
            self._note(store, new, gone)
            if not gone:
                return
            hashes = gone

    def prefetch(self, hashes: Sequence[int], held: int, now: float) -> None:
        """Bring a run that a waiting request needs from slower tiers to the first one.

        Args:
            hashes: the request's.
            held: how many of them lie in HBM.
            now: simulated time.
        """
        if not self._prefetch:
            return
        nearest, *lower = self.stores
        makes_way: list[int] = []
        for store, first, last in self._runs(hashes, held, len(hashes)):
            if store is not nearest and store.read.down_until <= now:
                run = hashes[first:last]
                new, gone = nearest.store(run, now, ready_at=store.reload(run, now))
                self._note(nearest, new, gone)
                makes_way += gone
        if makes_way:
            self._copy_down(makes_way, lower, now)

    def plan(self, hashes: Sequence[int], held: int, usable: int, tokens: int, now: float) -> Reload:
        """Bring back what is worth it, and say when it is there.

        Args:
            hashes: the request's.
            held: how many of them lie in HBM.
            usable: tokens that a cache can spare the request.
            tokens: tokens that the request has to have computed.
            now: simulated time.
        """
        limit = ceil(usable / self._block_tokens)
        if held >= limit or not self.stores:
            return NO_RELOAD
        best_s = self._profile.ttft_s(tokens - held * self._block_tokens, held * self._block_tokens)
        reload_s = delay_s = 0.0
        runs: list[tuple[TierStore, int, int]] = []
        ahead: Counter[TierStore] = Counter()
        chosen = 0
        for store, first, last in self._runs(hashes, held, limit):
            runs.append((store, first, last))
            reload_s = max(reload_s, store.reload_s(hashes[first:last], now, ahead[store]))
            ahead[store] += last - first
            cached = min(last * self._block_tokens, usable)
            compute_s = self._profile.ttft_s(tokens - cached, cached)
            both_s = self._pipelined_s(reload_s, compute_s)
            if both_s < best_s:
                best_s, chosen, delay_s = both_s, len(runs), both_s - compute_s
        taken = runs[:chosen]
        for store, first, last in taken:
            store.reload(hashes[first:last], now)
            store.touch(hashes[first:last], now)
        return Reload([(store.settings.tier, last - first) for store, first, last in taken], now + delay_s)

    def lose_link(self, name: str, until: float) -> None:
        """The link to the tier of this name is down."""
        for store in self.stores:
            if store.settings.name == name:
                store.read.fail(until)
                store.write.fail(until)

    def lose(self, tiers: Sequence[Tier]) -> None:
        """The worker's own tiers of these kinds are empty."""
        for store in self.stores:
            if store.settings.tier in tiers and not store.settings.shared:
                store.clear()

    def _pipelined_s(self, reload_s: float, compute_s: float) -> float:
        layers = self._layers
        return (reload_s + max(reload_s, compute_s) * (layers - 1) + compute_s) / layers

    def _runs(self, hashes: Sequence[int], first: int, limit: int) -> list[tuple[TierStore, int, int]]:
        """Return what follows the first ``first`` blocks, as parts that lie in one tier: the fastest that has them."""
        runs: list[tuple[TierStore, int, int]] = []
        for at in range(first, min(limit, len(hashes))):
            store = next((store for store in self.stores if hashes[at] in store), None)
            if store is None:
                break
            if runs and runs[-1][0] is store:
                runs[-1] = (store, runs[-1][1], at + 1)
            else:
                runs.append((store, at, at + 1))
        return runs

    def _note(self, store: TierStore, new: Sequence[int], gone: Sequence[int]) -> None:
        """Tell of changes; of two tiers of one kind (host and CXL) either one is enough."""
        tier, worker = store.settings.tier, EVERYONE if store.settings.shared else self.worker
        alike = [other for other in self.stores if other is not store and other.settings.tier is tier]
        gone = [block_hash for block_hash in gone if not any(block_hash in other for other in alike)]
        if gone:
            self._changes.append(TierChange(worker, tier, gone, stored=False))
        if new:
            self._changes.append(TierChange(worker, tier, new, stored=True))


def make_stacks(settings: FleetSettings, block_tokens: int) -> list[TierStack]:
    """Return the tiers of every worker of a fleet."""
    block_bytes = float(settings.speed.kv_bytes_per_token * block_tokens)
    tiers = [tier for tier in settings.tiers if tier.capacity_tokens >= block_tokens]
    shared = {tier.name: TierStore(tier, block_tokens, block_bytes) for tier in tiers if tier.shared}
    return [
        TierStack(
            worker,
            [shared[tier.name] if tier.shared else TierStore(tier, block_tokens, block_bytes) for tier in tiers],
            settings,
            block_tokens,
        )
        for worker in range(settings.workers)
    ]
