"""The least that accounting needs of a body: the token counts an engine reports, found without decoding the rest.

The same reader serves JSON answers and event streams, because it looks for one object, ``"usage": {...}``, wherever the
body happens to be cut. Generated text cannot contain the key: quotes are escaped there.
"""

from __future__ import annotations

import re
from typing import Final

_KEY: Final = b'"usage"'
_VALUE: Final = re.compile(rb'"usage"\s*:\s*(null|\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')
_COUNT: Final = re.compile(
    rb'"(?:(prompt_tokens|input_tokens)|(completion_tokens|output_tokens)|(cached_tokens)'
    rb'|(cache_read_input_tokens)|(cache_creation_input_tokens))"'
    rb"\s*:\s*(\d{1,12})\b"
)
_EVENT_END: Final = re.compile(rb"\r?\n\r?\n")
_EVENT_ENDS: Final = (b"\n\n", b"\r\n\r\n")
_MAX_VALUE_BYTES: Final = 4096


class UsageReader:
    """Finds the last reported token counts in a body that passes by.

    Attributes:
        prompt_tokens: the whole prompt's, None until they are reported; likewise the others.
        output_tokens: tokens generated.
        cached_tokens: prompt tokens the engine found in its cache.
    """

    __slots__ = ("_carry", "cached_tokens", "output_tokens", "prompt_tokens")

    def __init__(self) -> None:
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self.cached_tokens: int | None = None
        self._carry = b""

    @property
    def mid_event(self) -> bool:
        """Whether an event stream has stopped inside an event."""
        return bool(self._carry)

    def feed(self, payload: bytes) -> None:
        """Look at the next bytes of the body."""
        if self._carry:
            payload = self._carry + payload
            self._carry = b""
        at = payload.rfind(_KEY)
        if at >= 0:
            value = _VALUE.match(payload, at)
            if value is None and len(payload) - at < _MAX_VALUE_BYTES:
                self._carry = payload[at:]
                return
            if value is not None:
                self._note(value[1])
        if not payload.endswith(_EVENT_ENDS):  # most pieces are whole events, and need no joining
            self._carry = payload[1 - len(_KEY) :]

    def _note(self, usage: bytes) -> None:
        besides = 0  # Anthropic's API counts what is cached besides the input, OpenAI's counts it in
        prompt_tokens = None
        for prompt, output, cached, read, created, count in _COUNT.findall(usage):
            if prompt:
                prompt_tokens = int(count)
            elif output:
                self.output_tokens = int(count)
            elif cached or read:
                self.cached_tokens = int(count)
            if read or created:
                besides += int(count)
        if prompt_tokens is not None:
            self.prompt_tokens = prompt_tokens + besides


def error_event(error: bytes, path: str, mid_event: bool) -> bytes:
    """Return the event that ends a stream its worker did not.

    Args:
        error: an OpenAI error object as JSON.
        path: of the request. Anthropic's clients pass over events without a name, and take the stream for whole.
        mid_event: the stream was cut inside an event, which is closed first.
    """
    begin = b"\n\n" if mid_event else b""
    if path == "/v1/messages":
        return b'%bevent: error\ndata: {"type":"error",%b\n\n' % (begin, error[1:])
    return b"%bdata: %b\n\n" % (begin, error)


def data_of(event: bytes) -> bytes:
    """Return the data of one event, whose end is left out."""
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    return b"\n".join([line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")])


def end_of_events(payload: bytes | bytearray, seen: int) -> int:
    """Return where the last whole event of a piece of a stream ends; 0 where none does.

    Args:
        payload: the piece.
        seen: bytes at its beginning in which none ends: a long event is not searched again with all that comes of it.
    """
    start = max(0, seen - 2)
    lines, of_crlf = payload.rfind(b"\n\n", start), payload.rfind(b"\n\r\n", start)
    return max(0 if lines < 0 else lines + 2, 0 if of_crlf < 0 else of_crlf + 3)


def split_events(payload: bytes) -> list[bytes]:
    """Return whole events without their ends."""
    return _EVENT_END.split(payload)[:-1]
