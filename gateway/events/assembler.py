"""One worker's engine blocks → the chunks it holds, tier by tier.

Engines speak of blocks by opaque hashes, of 1 to some hundred tokens each; the index knows chunks. A chunk rests on
every block that overlaps it. Prompts that part inside a chunk make two chunks that rest on the same first blocks. Block
sizes may differ and need not divide the chunk; but a prompt that parts inside a block from what is cached is then
credited with the whole chunks up to there, less than a block too much.

What counts as held:

* A tier holds a block as long as the engine has announced it there more often than it has removed it. vLLM stores and
  removes every copy of a block separately, and offloading announces a block once per offloaded chunk that contains it.
  But while engines are asked to report the blocks that they reuse, another announcement in HBM need not be another
  copy: then a block is held or not, and its first removal ends that.
* A tier holds a chunk if it holds every block of it. A chunk whose blocks are spread over tiers can be used once the
  slowest of them has been brought up, so the slowest tier that is needed counts as holding it too.
* A reset empties every tier: the event names none, and too little is the safe side.
* Some publishers (shared pools, file systems) never say what they drop. A tier below HBM in which nothing was ever
  removed forgets by age what is not announced again.
* Of a hybrid model's cache groups, the first that is seen to hold reusable prefixes stands for all.

A block's hash settles its content for the life of the engine, so its first description stays: copies made by
offloading are announced without the salt, the adapter or the images of the original. Where first descriptions may have
been missed, such a copy of a tenant's block cannot be told from a block without salt; then it describes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

from gateway.events.blocks import ALONE, EVERY_TIER, JOIN, NO_BLOCKS, TIERS_OF, Block, holders, holders_with_pool
from gateway.events.changes import Changes, runs_of
from gateway.events.decode import Event, Hash, Removed, Stored
from policies.base import Tier
from policies.chunks import TOKEN_BYTES, ChunkHasher, Medium, media_extra

MAX_BLOCKS: Final = 2_000_000
MAX_ORPHANS: Final = 50_000
_HBM: Final = Tier.HBM  # to look up a member of an enumeration takes longer than most of what is done here
_IN_HBM: Final = 1 << _HBM


class Assembler:
    """Follows the cache of one incarnation of a worker.

    Args:
        hasher: hashes chunks.
        model: the worker's base model.
        max_blocks: more blocks than this are not kept; the oldest branches go first.
        max_orphans: the same for blocks whose parent has not been announced.
        shared_remote: others read the remote tier too, so it holds only chunks that are there as a whole.

    Attributes:
        counts_copies: whether to count what is announced in HBM more than once; not while reports are asked for.
        heard_all: whether no event of the engine was missed, and no block forgotten that it may still hold.
    """

    def __init__(
        self,
        hasher: ChunkHasher,
        model: str,
        max_blocks: int = MAX_BLOCKS,
        max_orphans: int = MAX_ORPHANS,
        shared_remote: bool = False,
    ) -> None:
        self.model = model
        self.counts_copies = True
        self.heard_all = True
        self._hasher = hasher
        self._holders = holders_with_pool if shared_remote else holders
        self._max_blocks = max_blocks
        self._max_orphans = max_orphans
        self._group: int | None = None
        self._block_size = 0  # of what was last announced in HBM
        self._cleared = False
        # Of what tiers hold that have never removed anything: announced since the last `age`, and before.
        self._young: dict[Tier, dict[Hash, None]] = {tier: {} for tier in Tier if tier is not Tier.HBM}
        self._old: dict[Tier, dict[Hash, None]] = {tier: {} for tier in self._young}
        self._reset()

    def _reset(self) -> None:
        self._blocks: dict[Hash, Block] = {}
        self._copies: dict[tuple[Hash, Tier], int] = {}  # announcements beyond the first
        self._orphans: dict[Hash, None] = {}
        self._waiting: dict[Hash, dict[Hash, None]] = {}  # unknown parent → its orphans
        self._holdings: dict[Tier, dict[bytes, int]] = {tier: {} for tier in Tier}  # chunk → blocks that end it
        self._stored: dict[Tier, dict[bytes, bytes]] = {tier: {} for tier in Tier}  # chunk → root
        self._removed: dict[Tier, dict[bytes, bytes]] = {tier: {} for tier in Tier}
        for ages in (self._young, self._old):
            ages.update({tier: {} for tier in ages})

    def __len__(self) -> int:
        """Blocks that are known."""
        return len(self._blocks)

    @property
    def orphans(self) -> int:
        """Blocks whose parent has not been announced."""
        return len(self._orphans)

    @property
    def removes_remote(self) -> bool:
        """Whether the engine has ever said that its remote tier dropped something."""
        return Tier.REMOTE not in self._young

    def held(self, tier: Tier) -> int:
        """Return how many chunks a tier holds."""
        return len(self._holdings[tier])

    def apply(self, events: Iterable[Event], keyed: bool = False) -> None:
        """Follow the engine's cache through ``events``.

        Args:
            events: in the order in which they were published.
            keyed: they are a directory's: whatever sets blocks apart is told with each, and a tier has a block or not,
                however often it is announced.
        """
        for event in events:
            if type(event) is Removed:
                self._remove(event)
            elif type(event) is Stored:
                self._store(event, keyed)
            else:
                self._reset()
                self._cleared = True
        if len(self._orphans) > self._max_orphans:
            for key in list(islice(self._orphans, len(self._orphans) - self._max_orphans * 7 // 8)):
                self._shed(key, EVERY_TIER)
        if len(self._blocks) > self._max_blocks:
            self._trim(self._max_blocks * 63 // 64)

    def age(self) -> None:
        """Where nothing is ever removed: forget what was not announced again since the call before this one."""
        for tier, young in self._young.items():
            for key in self._old[tier].keys() - young.keys():
                self._shed(key, 1 << tier)
            self._old[tier], self._young[tier] = young, {}

    def void(self, tiers: Iterable[Tier]) -> None:
        """What these tiers held is not known any more."""
        mask = sum(1 << tier for tier in tiers)
        for key in [key for key, block in self._blocks.items() if block.tiers & mask]:
            if key in self._blocks:
                self._shed(key, mask)

    def drop(self, keys: Sequence[Hash], tier: Tier) -> None:
        """A tier no longer holds these blocks, somebody else says: none of their copies."""
        for key in keys:
            self._copies.pop((key, tier), None)
        self._remove(Removed(list(keys), tier))

    def take(self) -> Changes:
        """Return what has changed in terms of chunks since the last call. What came and went does not show."""
        changes = Changes(self._cleared, runs_of(self._stored), runs_of(self._removed))
        self._cleared = False
        return changes

    def _store(self, event: Stored, keyed: bool) -> None:
        if event.group != self._group and not self._stands(event.group):
            return
        tokens, extras = event.tokens, event.extras
        if tokens and self._group is None:
            self._group = event.group
        describes = bool(tokens) and (keyed or self._describes(event))
        blocks, tier, parent = self._blocks, event.tier, event.parent
        if parent is None:
            before: Block | None = Block(None, b"", chain=self._hasher.root(self.model, event.lora, event.salt))
        else:
            before = blocks.get(parent)
        size = event.block_size * TOKEN_BYTES
        for number, key in enumerate(event.hashes):
            block = blocks.get(key)
            if block is not None:
                self._hold(key, block, tier, keyed)
            elif describes:
                block = Block(parent, tokens[number * size : (number + 1) * size], extras[number] if extras else ())
                blocks[key] = block
                if before is None or not before.chain:
                    self._await_parent(key, block, 1 << tier)
                else:
                    self._attach(key, block, before, 1 << tier)
                    if key in self._waiting:
                        self._attach_orphans(key, block)
            parent, before = key, block
        if tier in self._young:
            self._young[tier].update(dict.fromkeys(filter(blocks.__contains__, event.hashes)))

    def _remove(self, event: Removed) -> None:
        if event.group != self._group and not self._stands(event.group):
            return
        named = EVERY_TIER if event.tier is None else 1 << event.tier
        if self._young and named != _IN_HBM:
            for tier in TIERS_OF[named]:
                self._young.pop(tier, None)
                self._old.pop(tier, None)
        blocks = self._blocks
        for key in event.hashes:
            block = blocks.get(key)
            if block is None:
                continue
            gone = block.tiers & named
            if self._copies:
                for tier in TIERS_OF[gone]:
                    if self._drop_copy(key, tier):
                        gone &= ~(1 << tier)
            tiers = block.tiers & ~gone
            if tiers or block.next is not None:
                self._change(block, tiers)
            else:
                if block.chunks:
                    self._set(block, 0, NO_BLOCKS)
                self._forget(key, block)

    def _describes(self, event: Stored) -> bool:
        """Whether an event can make unknown blocks known: whether it is sure to tell what sets them apart.

        A copy below HBM may lack that, unless it was never told otherwise or some of it is there. A copy is as long as
        its original: blocks of another length are of a store that has its own.
        """
        if event.tier is _HBM:
            self._block_size = event.block_size
            return True
        if self.heard_all or event.salt is not None or event.extras is not None:
            return True
        return self._block_size not in (0, event.block_size)

    def _stands(self, group: int | None) -> bool:
        """Whether a cache group is the one that stands for all; None where the engine does not say."""
        return group is None or self._group is None or group == self._group

    def _hold(self, key: Hash, block: Block, tier: Tier, keyed: bool) -> None:
        if block.tiers >> tier & 1:
            if keyed or (tier is _HBM and not self.counts_copies):
                return
            self._copies[key, tier] = self._copies.get((key, tier), 0) + 1
        else:
            self._change(block, block.tiers | 1 << tier)

    def _drop_copy(self, key: Hash, tier: Tier) -> bool:
        """Take off one of several copies; False if there is only one."""
        copies = self._copies.get((key, tier), 0)
        if copies > 1:
            self._copies[key, tier] = copies - 1
        elif copies:
            del self._copies[key, tier]
        return copies > 0

    def _await_parent(self, key: Hash, block: Block, tiers: int) -> None:
        """Keep a new block whose way to the beginning of its prompt is not known."""
        assert block.parent is not None
        block.tiers = tiers
        self._orphans[key] = None
        self._waiting.setdefault(block.parent, {})[key] = None

    def _attach_orphans(self, key: Hash, block: Block) -> None:
        """Attach what has waited for a block, and what has waited for that."""
        attached = [(key, block)]
        while attached:
            key, before = attached.pop()
            for child in self._waiting.pop(key, ()):
                del self._orphans[child]
                block = self._blocks[child]
                tiers, block.tiers = block.tiers, 0
                self._attach(child, block, before, tiers)
                attached.append((child, block))

    def _attach(self, key: Hash, block: Block, before: Block, tiers: int) -> None:
        """Carry the chain from ``before``, at whose end ``block`` begins, to the end of ``block``."""
        if before.next is None:
            before.next = key
        else:
            before.link(key)
        block.chain = before.chain
        block.root = before.root
        block.open = before.open + len(block.tokens) // TOKEN_BYTES
        if block.open >= self._hasher.chunk_tokens:
            self._complete(block, before.open)
            self._set(block, tiers, before.onward())
        else:
            block.tiers, block.standing = tiers, JOIN[before.onward()][tiers]

    def _complete(self, block: Block, missing: int) -> None:
        """Hash the chunks that end in ``block``; the first of them began ``missing`` tokens before it."""
        members = [block]
        while missing > 0:
            parent = members[-1].parent
            assert parent is not None
            members.append(self._blocks[parent])
            missing -= len(members[-1].tokens) // TOKEN_BYTES
        members.reverse()
        tokens = b"".join([member.tokens for member in members])
        size = self._hasher.chunk_bytes
        first = -missing * TOKEN_BYTES  # more than 0 if the oldest member began in the chunk before
        own = len(tokens) - len(block.tokens)  # where the block itself begins
        at = 0  # where the first of ``members`` does
        for start in range(first, len(tokens) - size + 1, size):
            extra = b""
            if any(member.media for member in members):
                extra = media_extra(_media(members, (at - start) // TOKEN_BYTES))
            block.chain = self._hasher.next(block.chain, tokens[start : start + size], extra)
            block.root = block.root or block.chain
            block.chunks += (block.chain,)
            members, at = [block], own
        block.open -= len(block.chunks) * self._hasher.chunk_tokens
        if not block.open:
            block.tokens = b""  # no chunk reaches back over it

    def _change(self, block: Block, tiers: int) -> None:
        """Let ``tiers`` hold a block, and see what that means for the blocks after it in the same chunk."""
        if not block.chain:
            block.tiers = tiers
            return
        changed: list[Block] = []
        while True:
            onward = block.onward()
            # If it is held nowhere, it does not matter how it begins.
            begins = NO_BLOCKS if not tiers or block.parent is None else self._blocks[block.parent].onward()
            self._set(block, tiers, begins)
            if block.next is not None and block.onward() != onward:
                keys = block.next if isinstance(block.next, dict) else (block.next,)
                changed += map(self._blocks.__getitem__, keys)
            if not changed:
                return
            block = changed.pop()
            tiers = block.tiers

    def _set(self, block: Block, tiers: int, standing: int) -> None:
        """Let ``tiers`` hold a block that begins with ``standing``, and note what changes for the chunks it ends."""
        before, tiers_before = block.standing, block.tiers
        after = JOIN[standing][tiers]
        block.tiers, block.standing = tiers, after
        for chunk in block.chunks:
            if before != after:
                self._note(chunk, block.root, self._holders(before), self._holders(after))
            before, after = ALONE[tiers_before], ALONE[tiers]  # chunks after the first rest on this block alone

    def _note(self, chunk: bytes, root: bytes, before: int, after: int) -> None:
        """Count the block runs by which each tier holds a chunk; the first and the last make a change."""
        for tier in TIERS_OF[before ^ after]:
            runs = self._holdings[tier]
            if after >> tier & 1:
                runs[chunk] = runs.get(chunk, 0) + 1
                if runs[chunk] == 1 and self._removed[tier].pop(chunk, None) is None:
                    self._stored[tier][chunk] = root
            elif runs[chunk] > 1:
                runs[chunk] -= 1
            else:
                del runs[chunk]
                if self._stored[tier].pop(chunk, None) is None:
                    self._removed[tier][chunk] = root

    def _forget(self, key: Hash, block: Block) -> None:
        """Drop a block that no tier holds and nothing follows, then the parents that were kept for its sake."""
        while True:
            del self._blocks[key]
            parent = block.parent
            if parent is None:
                return
            if not block.chain:
                self._drop_orphan(key, parent)
                return
            before = self._blocks[parent]
            before.unlink(key)
            if before.tiers or before.next is not None:
                return
            key, block = parent, before

    def _drop_orphan(self, key: Hash, parent: Hash) -> None:
        del self._orphans[key]
        siblings = self._waiting[parent]
        del siblings[key]
        if not siblings:
            del self._waiting[parent]

    def _trim(self, n_blocks: int) -> None:
        """Cut back to ``n_blocks`` blocks: the oldest branches, each from its end."""
        leaves = (key for key, block in self._blocks.items() if block.next is None)
        for leaf in list(islice(leaves, len(self._blocks) - n_blocks)):
            key: Hash | None = leaf
            while key is not None and len(self._blocks) > n_blocks:
                block = self._blocks.get(key)
                if block is None or block.next is not None:
                    break
                self._shed(key, EVERY_TIER)
                key = block.parent

    def _shed(self, key: Hash, tiers: int) -> None:
        """Let ``tiers`` no longer hold a block although the engine has not said so: too little is the safe side."""
        block = self._blocks[key]
        for tier in TIERS_OF[tiers]:
            self._copies.pop((key, tier), None)
            if tier in self._young:
                self._young[tier].pop(key, None)
                self._old[tier].pop(key, None)
        self._change(block, block.tiers & ~tiers)
        if not block.tiers and block.next is None:
            self._forget(key, block)
            self.heard_all = False  # copies of it may yet be announced


def _media(blocks: Iterable[Block], at: int) -> Iterator[Medium]:
    """Yield the media of blocks that follow each other; the first begins ``at`` tokens from where media are counted."""
    for block in blocks:
        for name, offset in block.media:
            yield name, at + offset
        at += len(block.tokens) // TOKEN_BYTES
