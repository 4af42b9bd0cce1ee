"""Tells clients how much of their prompt was cached before anything was done for them.

Their engine's word is not that where the prompt was prefilled by another one, or in pieces before it came itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import msgspec

from gateway.relay.chunked import LAST_CHUNK, chunk
from gateway.relay.head import Framing, ResponseHead
from gateway.relay.retry import Failure
from gateway.relay.sse import end_of_events
from gateway.relay.upstream import Receiver

# Generated text cannot contain the keys: quotes are escaped there.
_USAGE: Final = re.compile(rb'"usage"\s*:\s*\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}')
_CACHED: Final = re.compile(rb'("(?:cached_tokens|cache_read_input_tokens)"\s*:\s*)(\d+|null)')
_CREATED: Final = re.compile(
    rb'("(?:created_cache_tokens|cache_write_tokens|cache_creation_input_tokens)"\s*:\s*)(\d+)'
)
_BESIDES: Final = re.compile(rb'("input_tokens"\s*:\s*)(\d+)')
_LENGTH: Final = re.compile(rb"(?i)(\r\ncontent-length:)[^\r]*")
_MAX_BYTES: Final = 16 * 2**20  # of an answer that is not streamed, and of one event; longer ones pass as they are


class CachedTokens:
    """Passes a worker's answer on, the cached tokens in its usage replaced.

    A stream passes event by event, in chunks of our own. An answer that is not streamed comes all at once anyway: it
    is kept until it is complete, because its length may change.

    Args:
        inner: whom it is passed on to.
        tokens: given what the worker reports, None for nothing, returns what to report, None for the same.
    """

    def __init__(self, inner: Receiver, tokens: Callable[[int | None], int | None]) -> None:
        self._inner = inner
        self._tokens = tokens
        self._head: ResponseHead | None = None  # of an answer that is kept
        self._streams = False
        self._kept = bytearray()
        self._seen = 0  # bytes of it that were looked at

    def on_upstream_head(self, head: ResponseHead) -> None:
        """The answer begins."""
        self._streams = head.status == 200 and head.is_event_stream and head.framing is Framing.CHUNKED
        if head.status == 200 and head.is_readable and head.framing is Framing.LENGTH:
            self._head = head
        else:
            self._inner.on_upstream_head(msgspec.structs.replace(head, reframed=True) if self._streams else head)

    def on_upstream_payload(self, payload: bytes) -> None:
        """A piece of the body."""
        if self._streams or self._head is not None:
            self._kept += payload
        else:
            self._inner.on_upstream_payload(payload)

    def on_upstream_data(self, data: bytes) -> None:
        """Bytes of the body, whose payload is known already."""
        if self._streams:
            end = end_of_events(self._kept, self._seen)
            if len(self._kept) - end > _MAX_BYTES:
                end = len(self._kept)
            whole = bytes(self._kept[:end])
            del self._kept[:end]
            self._seen = len(self._kept)
            if whole:
                passed = _USAGE.sub(self._rewritten, whole)
                self._inner.on_upstream_payload(passed)
                self._inner.on_upstream_data(chunk(passed))
        elif self._head is None:
            self._inner.on_upstream_data(data)
        elif len(self._kept) > _MAX_BYTES:
            self._release(self._head, bytes(self._kept))

    def on_upstream_end(self) -> None:
        """It is complete."""
        if self._streams:
            if self._kept:
                self._inner.on_upstream_payload(bytes(self._kept))
                self._inner.on_upstream_data(chunk(bytes(self._kept)))
            self._inner.on_upstream_data(LAST_CHUNK)
        elif self._head is not None:
            body = _USAGE.sub(self._rewritten, bytes(self._kept))
            raw = _LENGTH.sub(rb"\1 %d" % len(body), self._head.raw)
            self._release(msgspec.structs.replace(self._head, raw=raw), body)
        self._inner.on_upstream_end()

    def on_upstream_lost(self, failure: Failure) -> None:
        """It ended before that."""
        self._inner.on_upstream_lost(failure)

    def _release(self, head: ResponseHead, body: bytes) -> None:
        self._head, self._kept = None, bytearray()
        self._inner.on_upstream_head(head)
        if body:
            self._inner.on_upstream_payload(body)
            self._inner.on_upstream_data(body)

    def _rewritten(self, found: re.Match[bytes]) -> bytes:
        usage = found[0]
        cached = _CACHED.search(usage)
        if cached is None:
            return usage
        reported = None if cached[2] == b"null" else int(cached[2])
        tokens = self._tokens(reported)
        if tokens is None:
            return usage
        computed = (reported or 0) - tokens

        def more(count: re.Match[bytes]) -> bytes:
            return b"%b%d" % (count[1], max(0, int(count[2]) + computed))

        usage, said = _CREATED.subn(more, usage)
        if not said and b"cache_read" in cached[1]:  # Anthropic's API counts what is cached besides the input
            usage = _BESIDES.sub(more, usage)
        return _CACHED.sub(rb"\g<1>%d" % tokens, usage)
