"""A request's body as it arrives, in one piece or in many."""

from __future__ import annotations

from typing import Final

_FRAMING_BYTES: Final = 1024 * 1024
_FRAMING_BYTES_PER_PIECE: Final = 32


class Upload:
    """What has come of one body.

    Attributes:
        size: bytes of it so far.
    """

    __slots__ = ("_kept", "_pieces", "_wire_bytes", "size")

    def __init__(self) -> None:
        self.size = 0
        self._pieces = 0
        self._wire_bytes = 0
        self._kept: bytes | bytearray = b""

    def count(self, piece: bytes) -> None:
        """Count a piece, which someone else may keep."""
        self._pieces += 1
        self.size += len(piece)

    def keep(self, piece: bytes) -> None:
        """Keep a piece that was counted; a body that comes in one is not copied."""
        if self._pieces == 1:
            self._kept = piece
        elif self._pieces == 2:
            self._kept = bytearray(self._kept + piece)
        else:
            self._kept += piece

    def take(self) -> bytes:
        """Return what was kept, and keep it no longer."""
        kept, self._kept = self._kept, b""
        return bytes(kept)  # no copy of what came in one piece

    def wastes(self, received: int) -> bool:
        """Whether a chunked body has spent too much on anything but its payload, as on extensions and trailers.

        Args:
            received: bytes that have come since this was asked last, framing included.
        """
        self._wire_bytes += received
        return self._wire_bytes - self.size > _FRAMING_BYTES + _FRAMING_BYTES_PER_PIECE * self._pieces
