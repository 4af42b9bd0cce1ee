"""Tells clients how much of their prompt was cached where it was prefilled, which is not where it was decoded."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import msgspec

from gateway.relay.chunked import LAST_CHUNK, chunk
from gateway.relay.head import Framing, ResponseHead
from gateway.relay.retry import Failure
from gateway.relay.sse import split_events
from gateway.relay.upstream import Receiver

_KEY: Final = b'"cached_tokens"'
_COUNT: Final = re.compile(rb'("cached_tokens"\s*:\s*)(?:\d+|null)')  # generated text cannot contain it unescaped
_LENGTH: Final = re.compile(rb"(?i)(\r\ncontent-length:)[^\r]*")
_MAX_BYTES: Final = 16 * 2**20  # of an answer that is not streamed, and of one event; longer ones pass as they are


class CachedTokens:
    """Passes a decode worker's answer on, ``cached_tokens`` in its usage replaced.

    A stream passes event by event, in chunks of our own. An answer that is not streamed comes all at once anyway: it
    is kept until it is complete, because its length may change.

    Args:
        inner: whom it is passed on to.
        tokens: returns what to report, None for what the worker reports.
    """

    def __init__(self, inner: Receiver, tokens: Callable[[], int | None]) -> None:
        self._inner = inner
        self._tokens = tokens
        self._head: ResponseHead | None = None  # of an answer that is kept
        self._streams = False
        self._kept = b""

    def on_upstream_head(self, head: ResponseHead) -> None:
        """The answer begins."""
        self._streams = head.status == 200 and head.is_event_stream and head.framing is Framing.CHUNKED
        if head.status == 200 and head.is_readable and head.framing is Framing.LENGTH:
            self._head = head
        else:
            self._inner.on_upstream_head(head)

    def on_upstream_payload(self, payload: bytes) -> None:
        """A piece of the body."""
        if self._streams or self._head is not None:
            self._kept += payload
        else:
            self._inner.on_upstream_payload(payload)

    def on_upstream_data(self, data: bytes) -> None:
        """Bytes of the body, whose payload is known already."""
        if self._streams:
            events, rest = split_events(self._kept)
            if len(rest) > _MAX_BYTES:
                events, rest = [*events, rest], b""
            whole = self._kept[: len(self._kept) - len(rest)]
            self._kept = rest
            if whole:
                passed = self._rewritten(whole)
                self._inner.on_upstream_payload(passed)
                self._inner.on_upstream_data(chunk(passed))
        elif self._head is None:
            self._inner.on_upstream_data(data)
        elif len(self._kept) > _MAX_BYTES:
            self._release(self._head, self._kept)

    def on_upstream_end(self) -> None:
        """It is complete."""
        if self._streams:
            if self._kept:
                self._inner.on_upstream_payload(self._kept)
                self._inner.on_upstream_data(chunk(self._kept))
            self._inner.on_upstream_data(LAST_CHUNK)
        elif self._head is not None:
            body = self._rewritten(self._kept)
            raw = _LENGTH.sub(rb"\1 %d" % len(body), self._head.raw)
            self._release(msgspec.structs.replace(self._head, raw=raw), body)
        self._inner.on_upstream_end()

    def on_upstream_lost(self, failure: Failure) -> None:
        """It ended before that."""
        self._inner.on_upstream_lost(failure)

    def _release(self, head: ResponseHead, body: bytes) -> None:
        self._head, self._kept = None, b""
        self._inner.on_upstream_head(head)
        if body:
            self._inner.on_upstream_payload(body)
            self._inner.on_upstream_data(body)

    def _rewritten(self, body: bytes) -> bytes:
        tokens = self._tokens() if _KEY in body else None
        return body if tokens is None else _COUNT.sub(rb"\g<1>%d" % tokens, body)
