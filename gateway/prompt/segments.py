"""Segments: pieces of a text that tokenize on their own, and the cache of their ids.

A text may be cut before an added token if that token is certain to be matched there, whatever surrounds it, because
tokenizers normalise and pre-tokenize the text between added tokens piece by piece. Each segment but the first begins
with such a token and keeps it, so that rules for the beginning of a text apply to the first segment alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from itertools import combinations, count, pairwise
from typing import Final

from gateway.prompt.cache import ByteCache, Entry
from gateway.prompt.plan import Pieces, whole
from gateway.prompt.tokenizer import AddedToken, Encoder
from gateway.tasks import spawn
from policies.chunks import TOKEN_BYTES

_SEGMENT_OVERHEAD: Final = 300  # bytes of Python objects per cached segment

_numbers = count()


class Segment(Entry):
    """Token ids of one segment of text.

    Attributes:
        ids: packed little-endian u32.
        number: names this segment; never used for another one.
    """

    __slots__ = ("ids", "number")

    def __init__(self, text: Pieces, ids: bytes) -> None:
        pieces = (text,) if isinstance(text, str) else text
        self.cost = sum(piece.__sizeof__() for piece in pieces) + len(ids) + _SEGMENT_OVERHEAD
        self.used = False
        self.ids = ids
        self.number = next(_numbers)

    def __len__(self) -> int:
        return len(self.ids) // TOKEN_BYTES


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
        self._pending: dict[Pieces, asyncio.Future[Segment]] = {}

    def find(self, texts: Sequence[Pieces]) -> list[Segment] | None:
        """Return the segments of ``texts`` if they are known or quick to encode; else None, see ``tokenize``."""
        found, missing = self._look_up(texts)
        if not missing:
            return self._filled(texts, found, {})
        strings = list(map(whole, missing))
        if sum(map(len, strings)) > self._encoder.inline_chars:
            return None
        return self._filled(texts, found, self._keep(missing, self._encoder.encode(strings)))

    async def get(self, texts: Sequence[Pieces]) -> list[Segment]:
        """Return the segments of ``texts``, at once if possible."""
        found = self.find(texts)
        return await self.tokenize(texts) if found is None else found

    async def tokenize(self, texts: Sequence[Pieces]) -> list[Segment]:
        """Return the segments of ``texts``; what is not known is encoded in a thread, once for all who wait for it."""
        found, missing = self._look_up(texts)
        unclaimed = [text for text in missing if text not in self._pending]
        if unclaimed:
            loop = asyncio.get_running_loop()
            self._pending.update((text, loop.create_future()) for text in unclaimed)
            # a task of its own: a request that is cancelled must not take the others' result with it
            spawn(self._encode_in_thread(unclaimed), "tokenize")
        waiting = {text: self._pending[text] for text in missing}
        fresh = {text: await asyncio.shield(future) for text, future in waiting.items()}
        return self._filled(texts, found, fresh)

    def _look_up(self, texts: Sequence[Pieces]) -> tuple[list[Segment | None], list[Pieces]]:
        """Return the segments, None for those that are not known, and the texts that are not, each once."""
        lookup = self.known.entries.get
        found: list[Segment | None] = []
        missing: dict[Pieces, None] = {}
        for text in texts:
            segment = lookup(text)
            if segment is None:
                segment = self._found_whole(text)
            if segment is None:
                missing[text] = None
            else:
                segment.used = True
            found.append(segment)
        return found, list(missing)

    def _found_whole(self, text: Pieces) -> Segment | None:
        """Return the segment of a text in pieces that was met in one piece before, when the template rendered it."""
        segment = None if isinstance(text, str) else self.known.entries.get(whole(text))
        if segment is not None:
            self.known.put(text, segment)
        return segment

    @staticmethod
    def _filled(
        texts: Sequence[Pieces], found: Sequence[Segment | None], fresh: Mapping[Pieces, Segment]
    ) -> list[Segment]:
        return [fresh[text] if segment is None else segment for text, segment in zip(texts, found, strict=True)]

    async def _encode_in_thread(self, texts: list[Pieces]) -> None:
        loop = asyncio.get_running_loop()
        try:
            ids = await loop.run_in_executor(self._executor, self._encoder.encode, list(map(whole, texts)))
            fresh = self._keep(texts, ids)
            for text in texts:
                self._pending[text].set_result(fresh[text])
        except Exception as error:
            for text in texts:
                self._pending[text].set_exception(error)
                self._pending[text].exception()  # whoever waits gets it; that nobody does any more is no fault
        finally:
            for text in texts:
                self._pending.pop(text).cancel()  # no effect on those that are done

    def _keep(self, texts: list[Pieces], ids: list[bytes]) -> dict[Pieces, Segment]:
        fresh = {text: Segment(text, packed) for text, packed in zip(texts, ids, strict=True)}
        for text, segment in fresh.items():
            self.known.put(text, segment)
        return fresh
