"""Chunked bodies, where they cannot pass through as they are: HTTP/1.0 clients, and an event of our own at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import httptools

LAST_CHUNK: Final = b"0\r\n\r\n"


def chunk(payload: bytes) -> bytes:
    """Return ``payload`` (not empty) as one HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)


class Dechunker:
    """Takes the framing off a chunked body.

    Args:
        write: is given the payload, piece by piece.
    """

    __slots__ = ("_parser", "on_body")

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self.on_body = write  # by this name httptools finds it
        self._parser = httptools.HttpResponseParser(self)
        self._parser.feed_data(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")

    def feed(self, data: bytes) -> None:
        """Write what the next bytes of the chunked body carry."""
        self._parser.feed_data(data)
