"""The answer of a decode worker, which is one only once it shows that the KV cache has arrived.

Engines answer 500 where it has not. To streams, whose head they send before they know, vLLM says so with an error event
in place of the first token; in chats the event with the role comes before that.
"""

from __future__ import annotations

import re
from typing import Final, Protocol

from gateway.relay.head import ResponseHead
from gateway.relay.retry import Failure
from gateway.relay.sse import data_of, end_of_events, split_events
from gateway.relay.turns import ParamsReader
from gateway.relay.upstream import Receiver

_ROLE: Final = re.compile(rb'"delta"\s*:\s*\{\s*"role"\s*:\s*"\w*"\s*(?:,\s*"content"\s*:\s*(?:""|null)\s*)?[,}]')
_ERROR: Final = re.compile(rb'\{\s*"error"\s*:')
_MAX_OPENING_BYTES: Final = 64 * 1024


class HandOver(Protocol):
    """The hand-over, as the answer sees it."""

    def loaded(self) -> None:
        """The KV has arrived, and the answer begins."""
        ...

    def not_loaded(self, detail: str) -> None:
        """It has not; ``detail`` as in ``Failure``."""
        ...

    def ended(self, reader: ParamsReader) -> None:
        """The answer, which ``reader`` has read, is complete."""
        ...


class DecodeAnswer:
    """Passes a decode worker's answer on as it comes, a stream from its first token on; a ``Receiver``.

    Args:
        inner: whom it is passed on to.
        hand_over: told what it shows.
        reader: reads it, where its worker keeps the KV of answers.
    """

    __slots__ = ("_awaited", "_hand_over", "_inner", "_opens", "_payload", "_reader", "_withheld")

    def __init__(self, inner: Receiver, hand_over: HandOver, reader: ParamsReader | None) -> None:
        self._inner: Receiver | None = inner
        self._hand_over = hand_over
        self._reader = reader
        self._awaited = False  # its head was there, and was no error
        self._opens = False  # it is a stream that may yet be an error
        self._withheld = b""  # of such a stream
        self._payload = b""  # the same without framing

    def drop(self) -> None:
        """Pass nothing on any more."""
        self._inner, self._opens = None, False

    def on_upstream_head(self, head: ResponseHead) -> None:
        """Its head."""
        if self._inner is None:
            return
        if head.status == 500:
            self._fail("answered 500 to a request with handed-over KV")
            return
        self._awaited = head.status == 200
        self._opens = self._awaited and head.is_event_stream
        self._inner.on_upstream_head(head)

    def on_upstream_payload(self, payload: bytes) -> None:
        """A piece of the body."""
        if self._opens:
            self._payload += payload
        elif self._inner is not None:
            if self._reader is not None:
                self._reader.feed(payload)
            self._inner.on_upstream_payload(payload)

    def on_upstream_data(self, data: bytes) -> None:
        """Bytes of the body."""
        if self._opens:
            self._withheld += data
            begins = _begins(self._payload)
            if begins is None:
                return
            if not begins:
                self._fail("began a stream over handed-over KV with an error")
                return
            self._open()
        elif self._inner is not None:
            self._pass_on(self._inner, data)

    def on_upstream_end(self) -> None:
        """It is complete."""
        if self._opens:
            self._open()
        if self._inner is not None:
            self._inner.on_upstream_end()
            if self._reader is not None:
                self._hand_over.ended(self._reader)

    def on_upstream_lost(self, failure: Failure) -> None:
        """It ended before that."""
        if self._inner is not None:
            self._inner.on_upstream_lost(failure)

    def _open(self) -> None:
        """The stream is an answer: pass on what was withheld."""
        self._opens = False
        self.on_upstream_payload(self._payload)
        self.on_upstream_data(self._withheld)
        self._payload = self._withheld = b""

    def _pass_on(self, inner: Receiver, data: bytes) -> None:
        if self._awaited:
            self._awaited = False
            self._hand_over.loaded()
        inner.on_upstream_data(data)

    def _fail(self, detail: str) -> None:
        self.drop()
        self._hand_over.not_loaded(detail)


def _begins(payload: bytes) -> bool | None:
    """Return whether a stream begins with an answer rather than an error; None while that cannot be told."""
    for event in split_events(payload[: end_of_events(payload, 0)]):
        data = data_of(event)
        if _ERROR.match(data):
            return False
        if data and not _ROLE.search(data):
            return True
    return None if len(payload) < _MAX_OPENING_BYTES else True
