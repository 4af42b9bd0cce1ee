"""Chunk → mask, kept by runs of chunks that share one.

What was stored together is mostly looked up together. So a chunk leads to its *run*, a guess at the chunks that follow
it in prompts, and to the one mask of them all: a lookup then compares a stretch of the prompt with the run's chunks,
instead of finding each of them in a table larger than the processor's caches. A guess may be wrong, which costs time
and nothing else. One that was right need not be compared again: a chunk's hash settles all the chunks before it, so a
prompt that has the run's last chunk, just as far on as the run is long, has all of them.

The runs are untracked by the garbage collector, which would stall the event loop walking a million of them. Nor may a
dict grow too large: to grow or compact it takes some 50 ns per entry. Hence several, of ``_SHARD_CHUNKS`` or so; a
chunk's last byte says which. A dict doubles when it is full. So the last one takes twice as many chunks as the first,
and those between follow evenly: then they grow one after the other, and never are all of them half empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

_SHARD_CHUNKS: Final = 131_072
_MAX_SHARDS: Final = 128
_RUN_CHUNKS: Final = 64
"""Longer runs would make a lookup no cheaper, and taking single chunks out of a run dearer."""


class _Run(msgspec.Struct, gc=False, eq=False):
    """Chunks with the same mask. One without chunks is dead.

    Attributes:
        in_order: whether some prompt is known to have them all, in this order; others may have been between them.
    """

    chunks: tuple[bytes, ...]
    mask: int
    in_order: bool = False


_NO_RUN: Final = _Run((), 0)


class RunTable:
    """A bounded table from chunk to mask; chunks whose mask is 0 are not kept.

    Args:
        max_chunks: bound on the number of chunks; those stored first go first.
        evicted: called with the chunks that go, and their mask.
    """

    def __init__(self, max_chunks: int, evicted: Callable[[Sequence[bytes], int], None]) -> None:
        n_shards = min(max(1, max_chunks // _SHARD_CHUNKS), _MAX_SHARDS)
        self._shards: list[dict[bytes, _Run]] = []
        self._shard_of: list[dict[bytes, _Run]] = []  # by the last byte of a chunk
        self._limit_of: list[int] = []  # the same: how many chunks fit
        for number in range(1, n_shards + 1):
            n_bytes = round(256 * (2 ** (number / n_shards) - 1)) - len(self._shard_of)
            self._shards.append({})
            self._shard_of += [self._shards[-1]] * n_bytes
            self._limit_of += [max_chunks * n_bytes // 256 - _RUN_CHUNKS] * n_bytes
        self._evicted = evicted
        # By the bits that were set or cleared, the run that this made last: the next chunks are likely to follow it.
        self._after_set: dict[int, _Run] = {}
        self._after_clear: dict[int, _Run] = {}

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    def mask(self, chunk: bytes) -> int:
        """Return the mask of one chunk."""
        return self._find(chunk).mask

    def masks(self, chunks: Sequence[bytes]) -> Iterator[tuple[int, int]]:
        """Yield the masks of a prompt's chunks, in order from its first, as (mask, number of chunks that have it)."""
        chunks, shard_of = tuple(chunks), self._shard_of
        start, n = 0, len(chunks)
        while start < n:
            chunk = chunks[start]
            run = shard_of[chunk[-1]].get(chunk, _NO_RUN)
            known = run.chunks
            length = 1
            if len(known) > 1:
                skipped = 0 if known[0] == chunk else known.index(chunk)
                length = len(known) - skipped
                stop = start + length
                if not run.in_order or stop > n or chunks[stop - 1] != known[-1]:
                    ahead = chunks[start:stop]
                    if ahead != (known[skipped:] if skipped else known):
                        length = _n_common(ahead, known[skipped:])
                    elif not skipped:
                        run.in_order = True
            yield run.mask, length
            start += length

    def set(self, chunks: Sequence[bytes], bits: int) -> None:
        """Add ``bits`` to the masks of ``chunks``."""
        for run, group in self._by_run(chunks):
            if run.mask & bits != bits:
                self._change(run, group, run.mask | bits, self._after_set, bits)

    def clear(self, chunks: Sequence[bytes], bits: int) -> None:
        """Take ``bits`` out of the masks of ``chunks``."""
        for run, group in self._by_run(chunks):
            if run.mask & bits:
                self._change(run, group, run.mask ^ (run.mask & bits), self._after_clear, bits)

    def clear_run(self, chunk: bytes, bits: int) -> tuple[Sequence[bytes], int]:
        """Take ``bits`` out of the masks of a chunk's whole run.

        Returns:
            The chunks of the run, and those of ``bits`` that they had.
        """
        run = self._find(chunk)
        gone, chunks = run.mask & bits, run.chunks
        if gone == run.mask:
            self._drop(run)
        else:
            run.mask ^= gone
        return chunks, gone

    def in_steps(self, n_chunks: int) -> Iterator[list[bytes]]:
        """Yield all chunks, some at a time; of what is added meanwhile some may be missing."""
        for shard in self._shards:
            chunks = list(shard)
            for start in range(0, len(chunks), n_chunks):
                yield chunks[start : start + n_chunks]

    def _find(self, chunk: bytes) -> _Run:
        return self._shard_of[chunk[-1]].get(chunk, _NO_RUN)

    def _by_run(self, chunks: Sequence[bytes]) -> Iterator[tuple[_Run, tuple[bytes, ...]]]:
        """Yield neighbours of the same run together, each chunk once."""
        shard_of = self._shard_of
        start, n = 0, len(chunks)
        while start < n:
            run = self._find(chunks[start])
            stop, most = start + 1, min(n, start + _RUN_CHUNKS)
            while stop < most and shard_of[(chunk := chunks[stop])[-1]].get(chunk, _NO_RUN) is run:
                stop += 1
            yield run, tuple(dict.fromkeys(chunks[start:stop]))
            start = stop

    def _change(self, run: _Run, group: tuple[bytes, ...], mask: int, latest: dict[int, _Run], bits: int) -> None:
        """Give the mask to some chunks of ``run``, or to new ones if that is ``_NO_RUN``."""
        if group == run.chunks and mask:
            run.mask = mask
            latest[bits] = run
            return
        if run is _NO_RUN:
            self._make_room(group)
        else:
            moved = frozenset(group)
            run.chunks = tuple([chunk for chunk in run.chunks if chunk not in moved])
        if not mask:
            for chunk in group:
                del self._shard_of[chunk[-1]][chunk]
            return
        target = latest.get(bits, _NO_RUN)
        if target.mask == mask and 0 < len(target.chunks) <= _RUN_CHUNKS - len(group):
            # Prompts are stored from their beginning and evicted from their end.
            target.chunks = target.chunks + group if latest is self._after_set else group + target.chunks
            target.in_order = False
        else:
            target = latest[bits] = _Run(group, mask)
        for chunk in group:
            self._shard_of[chunk[-1]][chunk] = target

    def _make_room(self, group: Sequence[bytes]) -> None:
        for chunk in group:
            shard = self._shard_of[chunk[-1]]
            while len(shard) > self._limit_of[chunk[-1]]:
                run = next(iter(shard.values()))
                chunks = run.chunks
                self._drop(run)
                self._evicted(chunks, run.mask)

    def _drop(self, run: _Run) -> None:
        for chunk in run.chunks:
            del self._shard_of[chunk[-1]][chunk]
        run.chunks = ()


def _n_common(chunks: Sequence[bytes], known: Sequence[bytes]) -> int:
    """Return how many leading chunks two sequences have in common."""
    for number, (chunk, other) in enumerate(zip(chunks, known, strict=False)):
        if chunk != other:
            return number
    return len(chunks)
