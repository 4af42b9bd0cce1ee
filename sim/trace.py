"""Reads traces of traffic. The format is recognised by the first line.

==============  ======================================================================================================
Mooncake        JSON lines with ``timestamp`` (ms), ``input_length``, ``output_length`` and ``hash_ids`` of 512 tokens
Claude Code     JSON lines, one coding session each, with nested sub-agents (``sim.trace_sessions``)
Azure           CSV with ``TIMESTAMP``, ``ContextTokens`` and ``GeneratedTokens``; nothing is known of its prefixes
kvway           what the gateway's recorder wrote, a file or a folder of them (``sim.trace_recording``)
==============  ======================================================================================================
"""

from __future__ import annotations

import csv
import os
import random
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Final

import msgspec

from sim.requests import SimRequest, Trace, with_small_ids
from sim.trace_lines import MOST_TOKENS, TraceError, decode, decoder_of, first_object, lines
from sim.trace_recording import read_recording
from sim.trace_sessions import read_sessions

__all__ = ["TraceError", "read_trace"]

_MOONCAKE_BLOCK: Final = 512
_MOONCAKE_TICK_S: Final = 3.0  # what the published timestamps were rounded to, most of them
_ROUNDED_S: Final = 0.002  # so near a tick
_AZURE_BLOCK: Final = 512
_AZURE_HEADER: Final = "TIMESTAMP,ContextTokens,GeneratedTokens"


def read_trace(
    path: Path, *, closed_loop: bool | None = None, spread_s: float = 3600.0, block_tokens: int = 512, seed: int = 0
) -> Trace:
    """Read a trace.

    Args:
        path: the file, gzipped or not; for kvway's own recordings a folder, too.
        closed_loop: whether a session's next request waits for its answer; None: where the trace has sessions that
            tell how long their users thought.
        spread_s: Claude Code: the sessions, recorded apart, begin at random within this time.
        block_tokens: Claude Code: blocks of 64 tokens are joined into blocks of so many.
        seed: for what is drawn by chance: the beginnings of sessions, and arrivals within Mooncake's 3 s ticks.

    Raises:
        TraceError: the file is no trace, or a line is wrong; the message names it.
    """
    if os.path.isdir(path):  # noqa: PTH112 - a path that is too long is none, and no error here
        return read_recording(path, closed_loop)
    first = first_object(path)
    if isinstance(first, dict):
        if "kvway_trace" in first:
            return read_recording(path, closed_loop)
        if "requests" in first:
            trace = read_sessions(path, block_tokens, spread_s, seed)
            trace.closed_loop = closed_loop is not False
            return trace
        if "hash_ids" in first or "input_length" in first:
            return _without_sessions(path, _spread(list(_mooncake(path)), seed), _MOONCAKE_BLOCK, closed_loop)
    elif first.decode("utf-8", "replace").lstrip("\ufeff") == _AZURE_HEADER:
        return _without_sessions(path, list(_azure(path)), _AZURE_BLOCK, closed_loop)
    raise TraceError(
        f"{path}:1: no known trace format. Known are Mooncake JSON lines (timestamp, input_length, output_length, "
        f"hash_ids), Claude Code sessions (requests, block_size), Azure CSV ({_AZURE_HEADER}), and kvway's recordings"
    )


def _without_sessions(path: Path, requests: list[SimRequest], block_tokens: int, closed_loop: bool | None) -> Trace:
    if closed_loop:
        raise TraceError(f"{path}: the trace does not tell which requests make a session; it runs in an open loop only")
    if not requests:
        raise TraceError(f"{path}: the trace has no requests")
    requests.sort(key=lambda request: request.arrival_s)
    origin = requests[0].arrival_s
    for request in requests:
        request.arrival_s -= origin
    with_small_ids(requests)
    return Trace(requests, block_tokens, name=path.name)


class _MooncakeLine(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]
    output_length: Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]]


def _mooncake(path: Path) -> Iterator[SimRequest]:
    decoder = decoder_of(_MooncakeLine)
    for number, line in lines(path):
        read = decode(decoder, path, number, line)
        most = -(-read.input_length // _MOONCAKE_BLOCK)
        if len(read.hash_ids) > most:
            raise TraceError(
                f"{path}:{number}: {len(read.hash_ids)} hash_ids for {read.input_length} tokens, "
                f"which make {most} blocks of {_MOONCAKE_BLOCK}"
            )
        yield SimRequest(read.timestamp / 1e3, read.hash_ids, read.input_length, max(1, read.output_length))


def _spread(requests: list[SimRequest], seed: int) -> list[SimRequest]:
    """Spread arrivals that were rounded within their tick; those of a trace that is exact stay where they are."""
    ticks = [round(request.arrival_s / _MOONCAKE_TICK_S) * _MOONCAKE_TICK_S for request in requests]
    near = sum(abs(each.arrival_s - tick) < _ROUNDED_S for each, tick in zip(requests, ticks, strict=True))
    if 2 * near > len(requests):
        rng = random.Random(seed)
        for request in requests:
            request.arrival_s += rng.uniform(0, _MOONCAKE_TICK_S)
    return requests


def _azure(path: Path) -> Iterator[SimRequest]:
    numbered = lines(path)
    next(numbered)
    for number, line in numbered:
        row = line.decode("utf-8", "replace")
        try:
            moment, prompt, output = next(csv.reader([row]))
            arrival_s, prompt_tokens, output_tokens = _epoch(moment), int(prompt), int(output)
        except (ValueError, csv.Error):
            raise TraceError(f"{path}:{number}: {row[:100]!r} is not a row of {_AZURE_HEADER}") from None
        if not (1 <= prompt_tokens <= MOST_TOKENS and 0 <= output_tokens <= MOST_TOKENS):
            raise TraceError(
                f"{path}:{number}: needs at least one prompt token, no negative number of others, and of neither more "
                f"than {MOST_TOKENS:,}"
            )
        yield SimRequest(arrival_s, (), prompt_tokens, max(1, output_tokens))


def _epoch(moment: str) -> float:
    whole, _, fraction = moment.partition(".")
    return datetime.fromisoformat(f"{whole}+00:00").timestamp() + (float(f"0.{fraction}") if fraction else 0.0)
