"""Records traffic for ``kvway sim``: lengths, times and salted hashes of prompt chunks. Never a text, never a name.

Files are JSON lines, ``kvway-<start>-<recording>-<number>.jsonl``. The first line of each is a ``TraceHead``, every
other one a ``TraceLine``. A chunk's id is a keyed hash of its chained chunk hash: equal prefixes have equal ids within
a recording, and without the key nobody can find out whether some text was in it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any, BinaryIO, Final

import msgspec

from gateway.config import RecorderConfig
from gateway.errors import ConfigError
from gateway.observe.observer import Observer
from gateway.observe.record import RequestRecord
from gateway.tasks import spawn, stop

log = logging.getLogger("kvway.recorder")

_ID_MASK: Final = 2**53 - 1  # the largest integers that every JSON reader takes exactly
_FILE_NAME: Final = re.compile(r"kvway-\d{8}T\d{6}Z-[0-9a-f]{8}-\d{6}\.jsonl")
_encode: Final = msgspec.json.Encoder().encode


class TraceHead(msgspec.Struct):
    """First line of a file: version of the format, which recording, when it began, tokens per chunk."""

    kvway_trace: int
    recording: str
    started: datetime
    chunk_tokens: int


class TraceLine(msgspec.Struct, omit_defaults=True):
    """One request.

    Attributes:
        t: arrival, seconds since the recording began.
        input: prompt tokens.
        ids: one id per whole chunk of the prompt.
        output: tokens of the answer, where the engine reported them.
        limit: tokens the answer might have had.
        status: HTTP status of the answer.
        session: id of the session the client named.
        duration: seconds until the answer's end.
        ttft: seconds until its first byte, streams only.
        predicted: prompt tokens that were expected to be cached.
        cached: prompt tokens that were, where the engine reported them.
    """

    t: float
    input: int
    ids: list[int]
    limit: int
    status: int
    duration: float
    output: int | None = None
    session: int | None = None
    ttft: float | None = None
    predicted: int = 0
    cached: int | None = None


class Recorder:
    """Takes the records of requests that are over, and writes them in a thread.

    Args:
        config: where to, and how much; its ``directory`` is set.
        chunk_tokens: tokens per chunk of the recorded prompts.

    Attributes:
        recording: whether requests are taken; may be switched while they run.
        written: requests that are in a file.
        dropped: requests that are not: too many were waiting, or the disk refused them.
    """

    def __init__(self, config: RecorderConfig, chunk_tokens: int) -> None:
        assert config.directory is not None
        self._config = config
        self._directory = config.directory
        self._key = hashlib.sha256(config.salt.encode()).digest() if config.salt else secrets.token_bytes(32)
        self._head = TraceHead(1, secrets.token_hex(4), datetime.now(UTC), chunk_tokens)
        self._began_at = monotonic()
        self._waiting: list[RequestRecord] = []
        self._task: asyncio.Task[None] | None = None
        self._file: BinaryIO | None = None
        self._number = 0
        self._refused = False
        self.recording = True
        self.written = 0
        self.dropped = 0

    def record(self, record: RequestRecord) -> None:
        """Take a request that is over; it is not changed any more. Those without a prompt are left out."""
        if record.request is None or not self.recording:
            return
        if len(self._waiting) >= self._config.queue:
            self.dropped += 1
        else:
            self._waiting.append(record)

    def describe(self) -> dict[str, Any]:
        """Return whether it records, the file being written, and how many requests are in files, waiting and lost."""
        return {
            "recording": self.recording,
            "file": None if self._file is None else self._file.name,
            "written": self.written,
            "waiting": len(self._waiting),
            "dropped": self.dropped,
        }

    def expose(self, observer: Observer) -> None:
        """Expose the counters."""
        about = "Requests in the recording, and requests left out of it."
        observer.counter(
            "kvway_recorded_requests_total",
            about,
            lambda: {"written": self.written, "dropped": self.dropped},
            ("outcome",),
        )

    async def start(self) -> None:
        """Begin to write.

        Raises:
            ConfigError: the directory cannot be written to.
        """
        try:
            await asyncio.to_thread(self._open)
        except OSError as error:
            raise ConfigError(f"recorder.directory: {self._directory}: {error.strerror}") from None
        self._task = spawn(self._run(), "record traffic")

    async def close(self) -> None:
        """Write what is waiting, and end."""
        await stop(self._task)
        await self._flush()
        if self._file is not None:
            self._file.close()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._config.flush_s)
            await asyncio.shield(self._flush())

    async def _flush(self) -> None:
        batch, self._waiting = self._waiting, []
        if batch:
            await asyncio.to_thread(self._write, batch)

    # In the thread

    def _write(self, batch: Sequence[RequestRecord]) -> None:
        try:
            if self._file is None or self._file.tell() >= self._config.max_file_bytes or _is_removed(self._file):
                self._open()
            assert self._file is not None
            self._file.write(b"".join(_encode(self._line(record)) + b"\n" for record in batch))
            self._file.flush()
        except OSError as error:
            self.dropped += len(batch)
            self._abandon()
            if not self._refused:
                log.error("the recorder cannot write to %s: %s", self._directory, error.strerror)
            self._refused = True
        else:
            self.written += len(batch)
            self._refused = False

    def _abandon(self) -> None:
        """Leave a file whose last line may be half written; the next batch begins another."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None

    def _open(self) -> None:
        """Begin the next file, and remove the oldest ones beyond the limit."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._directory.mkdir(parents=True, exist_ok=True)
        head = self._head
        name = f"kvway-{head.started:%Y%m%dT%H%M%SZ}-{head.recording}-{self._number:06}.jsonl"
        self._file = (self._directory / name).open("xb")
        self._number += 1
        self._file.write(_encode(head) + b"\n")
        files = [file for file in self._directory.iterdir() if _FILE_NAME.fullmatch(file.name)]
        files.sort(key=_written_at)
        for file in files[: -self._config.max_files]:
            file.unlink(missing_ok=True)

    def _line(self, record: RequestRecord) -> TraceLine:
        request = record.request
        assert request is not None
        received_at = record.received_at
        return TraceLine(
            t=round(received_at - self._began_at, 6),
            input=record.prompt_tokens,
            ids=[self._id(chunk) for chunk in request.chunks],
            limit=request.output_tokens,
            status=record.status,
            duration=round(record.ended_at - received_at, 6),
            output=record.output_tokens,
            session=None if request.session is None else self._id(request.session.encode("utf-8", "surrogatepass")),
            ttft=round(record.first_byte_at - received_at, 6) if record.stream and record.first_byte_at else None,
            predicted=record.predicted_hit_tokens,
            cached=record.cached_tokens,
        )

    def _id(self, value: bytes) -> int:
        digest = hashlib.blake2b(value, digest_size=8, key=self._key).digest()
        return int.from_bytes(digest, "little") & _ID_MASK


def _is_removed(file: BinaryIO) -> bool:
    """Return whether nobody can find a file any more: another process that records there may take it for an old one."""
    return os.fstat(file.fileno()).st_nlink == 0


def _written_at(file: Path) -> float:
    """Return when a file was last written to, 0 where another process has just removed it."""
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return 0.0
