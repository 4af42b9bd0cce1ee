"""Segments: pieces of a text that tokenize on their own, and the cache of their ids.

A text may be cut before an added token if that token is certain to be matched there, whatever surrounds it, because
tokenizers normalise and pre-tokenize the text between added tokens piece by piece. Each segment but the first begins
with such a token and keeps it, so that rules for the beginning of a text apply to the first segment alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from itertools import combinations, count, pairwise
from typing import Final

import msgspec

from gateway.prompt.cache import ByteCache
from gateway.prompt.plan import Pieces, whole
from gateway.prompt.tokenizer import AddedToken, Encoder
from gateway.tasks import spawn
from policies.chunks import TOKEN_BYTES

SEGMENTS_AT_ONCE: Final = 500
"""After so many, other streams get their turn."""

_SEGMENT_OVERHEAD: Final = 300  # bytes of Python objects per cached segment


class Segment(msgspec.Struct, gc=False):
    """Token ids of one segment of text. As there are many, the garbage collector is kept from walking them.

    Attributes:
        ids: packed little-endian u32.
        cost: bytes of memory that it takes together with its text.
        used: see ``cache.Cached``.
        number: names this segment; never used for another one.
    """

    ids: bytes
    cost: int = 0
    used: bool = False
    number: int = msgspec.field(default_factory=count().__next__)

    def __len__(self) -> int:
        return len(self.ids) // TOKEN_BYTES


_NONE: Final = Segment(b"")
"""In place of a segment that is not known."""


def is_certain(token: AddedToken, added: Iterable[AddedToken]) -> bool:
    """Return whether a text may be cut before every occurrence of ``token``.

    ``tokenizers`` finds all tokens that are matched before normalisation in one left-most longest pass, so a token is
    certain where it occurs if no other one can overlap or contain it. Its neighbours must not change either: with
    ``lstrip`` it would take space from the segment before; if it began with a space, a token with ``rstrip`` could take
    that; if it began with a letter, a ``single_word`` token before it would be matched only at the end of a segment.
    """
    first = token.content[:1]
    if token.normalized or token.lstrip or token.single_word or not first:
        return False
    if first.isalnum() or first.isspace() or first == "_":
        return False
    return not any(_may_cover(other.content, token.content) for other in added if not other.normalized)


def _may_cover(other: str, token: str) -> bool:
    """Return whether a match of ``other`` that does not begin after an occurrence of ``token`` can reach into it."""
    reaches_in = any(other.endswith(token[:size]) for size in range(1, min(len(other), len(token))))
    return reaches_in or (token in other and token != other)


class Cutter:
    """Cuts texts into segments before the given tokens, all of which must be certain."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self.tokens = tuple(tokens)

    def starts(self, text: str) -> list[int]:
        """Return the positions of the tokens in ``text``."""
        found: list[int] = []
        for token in self.tokens:
            at = text.find(token)
            while at >= 0:
                found.append(at)
                at = text.find(token, at + len(token))
        if len(self.tokens) > 1:
            found.sort()
        return found

    def cut(self, text: str) -> list[str]:
        """Return the segments of ``text``; they join to it."""
        if not text:
            return []
        starts = self.starts(text)
        if not starts or starts[0]:
            starts.insert(0, 0)
        return [text[start:end] for start, end in pairwise([*starts, len(text)])]


def choose_tokens(added: Sequence[AddedToken], example: str, marks: Sequence[str]) -> list[str]:
    """Return the fewest certain tokens (at most two) that part the messages of a conversation from each other.

    Args:
        added: all added tokens of the tokenizer.
        example: an example conversation as rendered by the model's template.
        marks: texts of its messages, each found in it once.
    """
    seen = [token for token in added if token.content in example and is_certain(token, added)]
    names = sorted((token.content for token in seen), key=example.index)
    for tokens in [*((name,) for name in names), *combinations(names, 2)]:
        segments = Cutter(tokens).cut(example)
        if all(sum(mark in segment for mark in marks) <= 1 for segment in segments):
            return list(tokens)
    return names[:2]


class SegmentCache:
    """Ids by text, for one tokenizer; a text is encoded once, however many requests ask for it at the same time.

    A text that comes in pieces is looked up by them, which is cheap where they are the same strings as last time.

    Args:
        encoder: encodes what is not known yet.
        max_bytes: bound on texts and ids together.
        executor: where long texts are encoded.
    """

    def __init__(self, encoder: Encoder, max_bytes: int, executor: Executor) -> None:
        self.known: ByteCache[Pieces, Segment] = ByteCache(max_bytes)
        self._encoder = encoder
        self._executor = executor
        self._pending: dict[Pieces, asyncio.Task[dict[Pieces, Segment]]] = {}

    async def get(self, texts: Sequence[Pieces]) -> list[Segment]:
        """Return the segments of ``texts``: without suspending if they are not many and known, or quick to encode.

        More is encoded in parts, with turns for other streams in between, and very much in a thread: to hand it over
        takes as long as to encode some 100,000 characters.
        """
        if len(texts) > SEGMENTS_AT_ONCE:
            segments: list[Segment] = []
            for start in range(0, len(texts), SEGMENTS_AT_ONCE):
                segments += await self.get(texts[start : start + SEGMENTS_AT_ONCE])
                await asyncio.sleep(0)
            return segments
        found, missing = self._look_up(texts)
        if not missing:
            return found
        sizes = [*map(len, missing.values())]
        if sum(sizes) <= self._encoder.inline_chars:
            fresh = self._keep(missing, self._encoder.encode(list(missing.values())))
        elif sum(sizes) <= self._encoder.loop_chars and max(sizes) <= self._encoder.inline_chars:
            fresh = await self._encoded_in_parts(missing)
        else:
            fresh = await self._encoded(missing)
        return [fresh[text] if segment is _NONE else segment for text, segment in zip(texts, found, strict=True)]

    def _look_up(self, texts: Sequence[Pieces]) -> tuple[list[Segment], dict[Pieces, str]]:
        """Return the segments, ``_NONE`` where they are not known, and those texts, each in one piece, too."""
        lookup = self.known.entries.get
        found: list[Segment] = []
        missing: dict[Pieces, str] = {}
        for text in texts:
            segment = lookup(text)
            if segment is None:
                joined = whole(text)
                segment = self._found_whole(text, joined)
                if segment is _NONE:
                    missing[text] = joined
            else:
                segment.used = True
            found.append(segment)
        return found, missing

    def _found_whole(self, text: Pieces, joined: str) -> Segment:
        """Return the segment of a text in pieces that was met in one piece before, when the template rendered it."""
        segment = None if joined is text else self.known.get(joined)
        if segment is None:
            return _NONE
        self.known.put(text, segment)
        return segment

    async def _encoded_in_parts(self, texts: dict[Pieces, str]) -> dict[Pieces, Segment]:
        """Encode texts on the event loop, ``inline_chars`` at a time."""
        fresh: dict[Pieces, Segment] = {}
        part: dict[Pieces, str] = {}
        chars = 0
        for text, joined in texts.items():
            chars += len(joined)
            if chars > self._encoder.inline_chars:
                fresh |= self._keep(part, self._encoder.encode(list(part.values())))
                part, chars = {}, len(joined)
                await asyncio.sleep(0)
            known = self.known.get(text)  # by now, if another request has it, too
            if known is None:
                part[text] = joined
            else:
                fresh[text] = known
        return fresh | self._keep(part, self._encoder.encode(list(part.values())))

    async def _encoded(self, texts: dict[Pieces, str]) -> dict[Pieces, Segment]:
        """Encode texts in a thread, each once for all who wait for it."""
        unclaimed = {text: joined for text, joined in texts.items() if text not in self._pending}
        if unclaimed:
            # a task of its own: a request that is cancelled must not take the others' result with it
            task = spawn(self._encode_in_thread(unclaimed), "tokenize")
            self._pending.update(dict.fromkeys(unclaimed, task))
        fresh: dict[Pieces, Segment] = {}
        for task in {self._pending[text] for text in texts}:
            fresh |= await asyncio.shield(task)
        return fresh

    async def _encode_in_thread(self, texts: dict[Pieces, str]) -> dict[Pieces, Segment]:
        loop = asyncio.get_running_loop()
        try:
            ids = await loop.run_in_executor(self._executor, self._encoder.encode, list(texts.values()))
            return self._keep(texts, ids)
        finally:
            for text in texts:
                del self._pending[text]

    def _keep(self, texts: dict[Pieces, str], ids: list[bytes]) -> dict[Pieces, Segment]:
        fresh: dict[Pieces, Segment] = {}
        for (text, joined), packed in zip(texts.items(), ids, strict=True):
            segment = fresh[text] = Segment(packed, joined.__sizeof__() + len(packed) + _SEGMENT_OVERHEAD)
            self.known.put(text, segment)
        return fresh
