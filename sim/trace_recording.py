"""kvway's own recordings: what the gateway's ``recorder`` section writes, as one file or as a folder of them."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import msgspec

from sim.requests import SimRequest, Trace, with_small_ids
from sim.trace_lines import MOST_TOKENS, TraceError, decode, decoder_of, lines

_VERSION = 1
_Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]


class _Head(msgspec.Struct):
    kvway_trace: int
    recording: str
    started: datetime
    chunk_tokens: Annotated[int, msgspec.Meta(ge=1)]


class _Line(msgspec.Struct):
    t: float
    input: _Count
    ids: list[Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]]
    limit: _Count
    duration: Annotated[float, msgspec.Meta(ge=0)]
    output: _Count | None = None
    session: int | None = None


_Timed = tuple[float, _Line]


def read_recording(path: Path, closed_loop: bool | None = None) -> Trace:
    """Read a recording; see ``sim.trace.read_trace``.

    Recordings of several gateways are merged by their clocks; prefixes that they share are seen as such where they were
    made with one ``recorder.salt``. An answer of unknown length counts with the length it might have had. In a closed
    loop, the pause before a turn is the time from the answer before it.

    Raises:
        TraceError: a file is wrong, or the recording has no sessions and a closed loop was asked for.
    """
    files = sorted(path.glob("kvway-*.jsonl*")) if path.is_dir() else [path]
    if not files:
        raise TraceError(f"{path}: the folder has no recordings (kvway-*.jsonl)")
    timed: list[_Timed] = []
    chunk_tokens = 0
    for file in files:
        tokens = _read_file(file, timed)
        if chunk_tokens not in (0, tokens):
            raise TraceError(f"{file}:1: chunks of {tokens} tokens, but {files[0].name} has chunks of {chunk_tokens}")
        chunk_tokens = tokens
    if not timed:
        raise TraceError(f"{path}: the recording has no requests")
    timed.sort(key=lambda each: each[0])
    if closed_loop is None:
        closed_loop = all(line.session is not None for _, line in timed)
    elif closed_loop and all(line.session is None for _, line in timed):
        raise TraceError(f"{path}: no request of the recording belongs to a session; it runs in an open loop only")
    return Trace(_requests(timed), chunk_tokens, closed_loop, path.name)


def _read_file(file: Path, timed: list[_Timed]) -> int:
    """Append the requests of a file with their times of arrival; return the tokens per chunk."""
    numbered = lines(file)
    number, line = next(numbered, (1, b"{}"))
    head = decode(decoder_of(_Head), file, number, line)
    if head.kvway_trace != _VERSION:
        raise TraceError(f"{file}:{number}: version {head.kvway_trace} of the format; this kvway reads {_VERSION}")
    began = head.started.timestamp()
    decoder = decoder_of(_Line)
    for number, line in numbered:
        read = decode(decoder, file, number, line)
        if len(read.ids) * head.chunk_tokens > read.input + (read.output or 0):
            raise TraceError(f"{file}:{number}: {len(read.ids)} chunks for {read.input} prompt tokens")
        if read.input:
            timed.append((began + read.t, read))
    return head.chunk_tokens


def _requests(timed: list[_Timed]) -> list[SimRequest]:
    origin = timed[0][0]
    ended: dict[int, float] = {}
    requests = []
    for arrival, line in timed:
        request = SimRequest(
            arrival - origin,
            line.ids,
            line.input,
            max(1, line.limit if line.output is None else line.output),
            session=None if line.session is None else str(line.session),
        )
        if line.session is not None:
            request.think_s = max(0.0, arrival - ended.get(line.session, arrival))
            ended[line.session] = arrival + line.duration
        requests.append(request)
    with_small_ids(requests)
    return requests
