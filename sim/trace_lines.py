"""Lines of a trace file, compressed or not, and what is wrong with them."""

from __future__ import annotations

import gzip
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar, cast

import msgspec

_GZIP: Final = b"\x1f\x8b"
_MAX_LINE: Final = 256 * 2**20
MOST_TOKENS: Final = 2**26
"""More than any model takes, and they still fit memory."""

Line = TypeVar("Line")


class TraceError(ValueError):
    """A trace cannot be read; the message names file and line and says what was expected."""


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file that are not empty, with their numbers from 1, without line ends or byte order mark.

    Raises:
        TraceError: the file cannot be read or decompressed, or a line is absurdly long.
    """
    number = 0
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == _GZIP
            raw.seek(0)
            file = cast("BinaryIO", gzip.GzipFile(fileobj=raw)) if packed else raw
            while line := file.readline(_MAX_LINE):
                number += 1
                if len(line) == _MAX_LINE:
                    raise TraceError(f"{path}:{number}: longer than {_MAX_LINE // 2**20} MiB; this is no trace")
                line = (line.removeprefix(BOM_UTF8) if number == 1 else line).strip()
                if line:
                    yield number, line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}:{number + 1}: the compressed file is broken or cut short ({error})") from None
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None


def decode(decoder: msgspec.json.Decoder[Line], path: Path, number: int, line: bytes) -> Line:
    """Return a line as what the decoder makes of it.

    Raises:
        TraceError: it is no JSON, or lacks a field, or one is out of range.
    """
    try:
        return decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(f"{path}:{number}: {error}") from None


def decoder_of(line: type[Line]) -> msgspec.json.Decoder[Line]:
    """Return a decoder of lines of one type."""
    return msgspec.json.Decoder(line)


def first_object(path: Path) -> dict[str, Any] | bytes:
    """Return the first line: parsed where it is a JSON object, as it is otherwise.

    Raises:
        TraceError: there is none, or the file cannot be read.
    """
    for _, line in lines(path):
        try:
            found = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return line
        return found if isinstance(found, dict) else line
    raise TraceError(f"{path}: the file is empty")
