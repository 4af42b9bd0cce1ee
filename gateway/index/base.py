"""The index: which worker holds which chunk, in which tier."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Protocol

from policies.base import Residency, Tier


class Speculation(Protocol):
    """A prompt on its way: its chunks count as held by the worker it was sent to, until events say so themselves."""

    def answered(self) -> None:
        """The worker has begun to answer: the prompt has its room in the cache. Only where there are no events."""
        ...

    def settle(self, now: float) -> None:
        """The worker has prefilled the prompt; forget the speculation ``speculative_ttl_s`` from ``now``."""
        ...

    def cancel(self) -> None:
        """The request did not reach its prefill (error, client gone): forget the speculation at once."""
        ...


class ChunkIndex(Protocol):
    """Where residency is kept. A *slot* is one life of one worker's process: a restart takes a new one.

    Methods are coroutines because the shared index is on the network; the memory index never suspends.
    No method raises for an index that is out of reach: residency is then empty, writes are dropped, and metrics say so.

    A shared index keeps a whole chain on one Redis Cluster slot, by a hash tag made from the chain's first chunk.
    ``residency`` and ``speculate`` take a prompt from its beginning and so see that chunk; ``store`` and ``remove`` are
    told it as ``root`` whenever ``chunks`` begins further down the chain. A wrong root means chunks that nobody finds.
    """

    async def acquire_slot(self, worker: str) -> int:
        """Return a free slot (0, 1, 2 …) for a new incarnation of ``worker``; its residency is empty."""
        ...

    async def release_slot(self, slot: int) -> None:
        """Give a slot back. It is masked at once and swept before it is handed out again."""
        ...

    async def residency(self, chunks: Sequence[bytes], slots: Sequence[int], chunk_tokens: int) -> Residency:
        """Return the leading run each slot holds.

        Args:
            chunks: the prompt's chunk hashes, in order, from its first.
            slots: one slot per row of the result; -1 stands for a worker without a slot (holds nothing). The index
                keeps what it derives from this very list for the next call, so it must not change afterwards.
            chunk_tokens: tokens per chunk, to return tokens.
        """
        ...

    def speculate(self, slot: int, chunks: Sequence[bytes]) -> Speculation:
        """Count ``chunks`` as held by ``slot`` (in HBM) from now on, in this process and without suspending.

        The caller settles or cancels what it gets back, exactly once.
        """
        ...

    def running(self, slot: int) -> Set[bytes]:
        """Return the chunks of the prompts that ``slot``, one that this process has acquired, is answering."""
        ...

    async def store(self, slot: int, chunks: Sequence[bytes], tier: Tier, root: bytes | None = None) -> None:
        """``slot`` now holds ``chunks`` in ``tier``, whatever else it holds.

        Args:
            slot: an acquired slot; what is said of any other is ignored.
            chunks: chunk hashes of one chain; in its order is best, any will do.
            tier: where they lie.
            root: the chain's first chunk; None: it is ``chunks[0]``.
        """
        ...

    async def remove(self, slot: int, chunks: Sequence[bytes], tier: Tier | None, root: bytes | None = None) -> None:
        """``slot`` no longer holds ``chunks`` in ``tier`` (None: in any tier).

        Args:
            slot: as for ``store``.
            chunks: chunk hashes of one chain; in its order is best, any will do. One call per chain.
            tier: where they lay.
            root: the chain's first chunk; None: it is ``chunks[0]``.
        """
        ...

    async def clear(self, slot: int) -> None:
        """``slot`` holds nothing any more, but stays acquired."""
        ...

    async def close(self) -> None:
        """Release connections."""
        ...
