"""The index: which worker holds which chunk, in which tier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from policies.base import Residency, Tier


class Speculation(Protocol):
    """A prompt on its way: its chunks count as held by the worker it was sent to, until events say so themselves."""

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
            chunks: the prompt's chunk hashes, in order.
            slots: one slot per row of the result; -1 stands for a worker without a slot (holds nothing).
            chunk_tokens: tokens per chunk, to return tokens.
        """
        ...

    def speculate(self, slot: int, chunks: Sequence[bytes]) -> Speculation:
        """Count ``chunks`` as held by ``slot`` (in HBM) from now on, in this process and without suspending.

        The caller settles or cancels what it gets back, exactly once.
        """
        ...

    async def store(self, slot: int, chunks: Sequence[bytes], tier: Tier) -> None:
        """``slot`` now holds ``chunks`` in ``tier``, whatever else it holds."""
        ...

    async def remove(self, slot: int, chunks: Sequence[bytes], tier: Tier | None) -> None:
        """``slot`` no longer holds ``chunks`` in ``tier`` (None: in any tier)."""
        ...

    async def clear(self, slot: int) -> None:
        """``slot`` holds nothing any more, but stays acquired."""
        ...

    async def close(self) -> None:
        """Release connections."""
        ...
