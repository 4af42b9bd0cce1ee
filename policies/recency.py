"""What a worker's prefix cache holds, modelled from the requests it was given: least recently used goes first.

As in the engines, a request's blocks grow old from its end, when it ends: the last chunk of a prompt goes first, and no
chunk goes before those that need it. What running requests hold cannot go, and leaves less room for the rest. What is
cached but can be named by nobody (the rest of a prompt behind its last whole chunk, and the answer) takes room all the
same, and is older than the prompt before it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence, Set
from typing import Generic, TypeVar

import msgspec

Chunk = TypeVar("Chunk", bound=Hashable)


class Prefixes(Generic[Chunk]):
    """The chunks of some prompts. A chunk stands for all before it: what two prompts share is gone through once."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[Chunk, int] = {}  # → chunks after it and prompts that end there

    def add(self, chunks: Sequence[Chunk]) -> None:
        """Count in a prompt."""
        counts = self._counts
        for chunk in reversed(chunks):
            counts[chunk] = counts.get(chunk, 0) + 1
            if counts[chunk] > 1:
                return

    def remove(self, chunks: Sequence[Chunk]) -> None:
        """Count out a prompt that was counted in."""
        counts = self._counts
        for chunk in reversed(chunks):
            counts[chunk] -= 1
            if counts[chunk]:
                return
            del counts[chunk]

    def chunks(self) -> Set[Chunk]:
        """Return the chunks of all of them."""
        return self._counts.keys()


class _Nameless(msgspec.Struct, gc=False, eq=False):
    """Tokens that take room and cannot be found again. As there are many, the garbage collector is kept from them."""

    tokens: int


class PrefixLru(Generic[Chunk]):
    """The model of one worker's cache.

    Args:
        chunk_tokens: tokens per chunk.
    """

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._entries: OrderedDict[Chunk | _Nameless, Chunk | None] = OrderedDict()  # → the chain's first chunk
        self._tokens = 0
        self._capacity_tokens = 0

    @property
    def tokens(self) -> int:
        """Tokens that it holds, those that can be named by nobody included."""
        return self._tokens

    def ended(
        self, chunks: Sequence[Chunk], other_tokens: int, capacity_tokens: int, running: Set[Chunk] = frozenset()
    ) -> tuple[list[Chunk], list[tuple[Chunk, Chunk]]]:
        """A request has ended on the worker.

        Args:
            chunks: its prompt's whole chunks, from the first.
            other_tokens: tokens of the prompt behind them, and of the answer.
            capacity_tokens: size of the worker's cache, now.
            running: chunks of the prompts that the worker is answering. Those that wait there have no room yet.

        Returns:
            The chunks that were not held before, and those that had to go, each with the first chunk of its chain.
            A chunk of a prompt that does not fit is among both.
        """
        entries = self._entries
        new = [chunk for chunk in chunks if chunk not in entries]
        self._tokens += len(new) * self._chunk_tokens
        if other_tokens > 0:
            entries[_Nameless(other_tokens)] = None
            self._tokens += other_tokens
        for chunk in new:
            entries[chunk] = chunks[0]
        for chunk in reversed(chunks):
            entries.move_to_end(chunk)
        self._capacity_tokens = capacity_tokens
        return new, self.make_room(running)

    def make_room(self, running: Set[Chunk]) -> list[tuple[Chunk, Chunk]]:
        """Let go what does not fit any more beside the prompts that the worker is answering.

        Args:
            running: their chunks.

        Returns:
            The chunks that had to go, each with the first chunk of its chain.
        """
        entries = self._entries
        gone: list[tuple[Chunk, Chunk]] = []
        room = self._capacity_tokens
        if self._tokens + len(running) * self._chunk_tokens > room:  # else all that run have room, in any case
            room -= sum(chunk not in entries for chunk in running) * self._chunk_tokens
        while self._tokens > room and entries:
            entry, root = entries.popitem(last=False)
            if isinstance(entry, _Nameless):
                self._tokens -= entry.tokens
            else:
                assert root is not None
                self._tokens -= self._chunk_tokens
                gone.append((entry, root))
        return gone
