"""Engine blocks, and what it takes for a tier to hold a chunk that rests on several of them.

A million objects that the garbage collector tracks would stall the event loop some 100 ms per collection. Hence blocks
are untracked structs, and they refer to each other by hash.
"""

from __future__ import annotations

from typing import Final

import msgspec

from gateway.events.decode import Hash
from policies.base import N_TIERS, Tier
from policies.chunks import Medium

# Sets of tiers are bit masks, as in the index. The *standing* of some consecutive blocks is one byte: in its low half
# the tiers that hold all of them, in its high half the slowest that is needed; 0 if a block is held nowhere.
EVERY_TIER: Final = (1 << N_TIERS) - 1
NO_BLOCKS: Final = EVERY_TIER
TIERS_OF: Final = tuple(tuple(tier for tier in Tier if tiers >> tier & 1) for tiers in range(EVERY_TIER + 1))


def holders(standing: int) -> int:
    """Return the tiers that hold a chunk whose blocks have this standing."""
    return standing & EVERY_TIER | standing >> N_TIERS


def holders_with_pool(standing: int) -> int:
    """The same where the remote tier is shared: of a chunk that is only partly there, others could not use the rest."""
    slowest = standing >> N_TIERS
    return standing & EVERY_TIER | (0 if slowest == 1 << Tier.REMOTE else slowest)


def _join(standing: int, tiers: int) -> int:
    """Return the standing of some blocks and one more, which ``tiers`` hold."""
    if not standing or not tiers:
        return 0
    fastest = tiers & -tiers
    return (standing & tiers) | max(standing >> N_TIERS, fastest) << N_TIERS


JOIN: Final = tuple(bytes(_join(standing, tiers) for tiers in range(EVERY_TIER + 1)) for standing in range(256))
"""``JOIN[standing][tiers]``: the standing of some blocks and one more, which ``tiers`` hold."""

ALONE: Final = JOIN[NO_BLOCKS]


class Block(msgspec.Struct, gc=False, eq=False):
    """One engine block.

    Attributes:
        parent: hash of the block before it, None at the beginning of a prompt.
        tokens: packed token ids; dropped once no chunk can reach back over the block.
        media: that reach into it, from its own beginning.
        tiers: those that hold it; none while it only links its children to the beginning.
        standing: of the first chunk that it is part of, as far as its own end.
        chain: hash of the last whole chunk up to its end, or the chain's seed; empty for an orphan, a block whose way
            to the beginning of its prompt is not known.
        root: the chain's first chunk; empty until that is complete.
        open: tokens since the last whole chunk, at its end.
        chunks: those that end in it.
        next: hash of the block attached after it, or a dict of several.
    """

    parent: Hash | None
    tokens: bytes
    media: tuple[Medium, ...] = ()
    tiers: int = 0
    standing: int = 0
    chain: bytes = b""
    root: bytes = b""
    open: int = 0
    chunks: tuple[bytes, ...] = ()
    next: Hash | dict[Hash, None] | None = None

    def link(self, key: Hash) -> None:
        """Note that a block was attached after this one."""
        if self.next is None:
            self.next = key
        elif isinstance(self.next, dict):
            self.next[key] = None
        else:
            self.next = {self.next: None, key: None}

    def unlink(self, key: Hash) -> None:
        """Note that a block after this one is gone."""
        if isinstance(self.next, dict):
            del self.next[key]
            self.next = self.next or None
        else:
            self.next = None

    def onward(self) -> int:
        """Return the standing with which a block after this one begins."""
        if not self.open:
            return NO_BLOCKS
        return ALONE[self.tiers] if self.chunks else self.standing
