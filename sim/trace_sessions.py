"""Claude Code sessions: a session per line, its requests with think times, sub-agents nested among them.

Block ids are local to a session. What sessions share, tool definitions and system prompt, is put back by their sizes:
two sessions of one model with the same number of tool tokens share the tools, with the same system tokens that as well.
A sub-agent is a session of its own, which begins when it was recorded to begin.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from policies.base import Ints
from sim.requests import SimRequest, Trace
from sim.trace_lines import MOST_TOKENS, TraceError, decode, decoder_of, lines

_Id = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct):
    """A request, or a sub-agent with requests of its own."""

    t: _Seconds
    m: str = ""
    input_tokens: _Count = msgspec.field(default=0, name="in")
    output_tokens: _Count = msgspec.field(default=0, name="out")
    runs: list[tuple[_Id, _Count]] = []
    think: _Seconds | None = 0.0
    stop: str | None = None
    type: str | None = None
    tool: _Count = 0
    system: _Count = 0
    requests: "list[_Entry] | None" = None  # noqa: UP037 - its own name


class _Session(msgspec.Struct):
    id: str
    block_size: Annotated[int, msgspec.Meta(ge=1)]
    requests: list[_Entry]
    tool_tokens: _Count = 0
    system_tokens: _Count = 0


@dataclass(slots=True)
class _Shared:
    """What begins the prompts of a session: sizes of its tools and its system prompt, and its first block's id."""

    tool_tokens: int
    system_tokens: int
    first_id: int


class _Ids:
    """Gives blocks ids that hold for the whole trace, each range of them once."""

    def __init__(self) -> None:
        self._next = 0
        self._bases: dict[tuple[str | int, ...], int] = {}

    def base(self, key: tuple[str | int, ...], size: int) -> int:
        """Return where the ``size`` ids of ``key`` begin."""
        base = self._bases.get(key)
        if base is None:
            base = self._bases[key] = self._next
            self._next += size
        return base


def read_sessions(path: Path, block_tokens: int, spread_s: float, seed: int) -> Trace:
    """Read the sessions of a file; see ``sim.trace.read_trace``.

    Raises:
        TraceError: a line is wrong.
    """
    rng = random.Random(seed)
    decoder, ids = decoder_of(_Session), _Ids()
    requests: list[SimRequest] = []
    for number, line in lines(path):
        session = decode(decoder, path, number, line)
        if block_tokens % session.block_size:
            raise TraceError(
                f"{path}:{number}: blocks of {session.block_size} tokens do not make blocks of {block_tokens}; "
                f"choose a multiple of {session.block_size}"
            )
        reader = _Reader(number, session.block_size, block_tokens, _size(session.requests), ids)
        try:
            start_s = rng.uniform(0, spread_s)
            sizes = (session.tool_tokens, session.system_tokens)
            requests += reader.read(session.requests, f"{number}:{session.id}", sizes, start_s)
        except ValueError as error:
            raise TraceError(f"{path}:{number}: {error}") from None
    if not requests:
        raise TraceError(f"{path}: the trace has no requests")
    requests.sort(key=lambda request: request.arrival_s)
    origin = requests[0].arrival_s
    for request in requests:
        request.arrival_s -= origin
    return Trace(requests, block_tokens, closed_loop=True, name=path.name)


def _size(entries: list[_Entry]) -> int:
    """Return one more than the largest block id among the entries."""
    size = 0
    for entry in entries:
        size = max([size, *(first + count for first, count in entry.runs)])
        if entry.requests is not None:
            size = max(size, _size(entry.requests))
    return size


@dataclass(slots=True)
class _Reader:
    number: int  # of the session in the file
    fine_tokens: int
    block_tokens: int
    size: int
    ids: _Ids

    def read(self, entries: list[_Entry], name: str, sizes: tuple[int, int], start_s: float) -> Iterator[SimRequest]:
        """Yield the requests among the entries, then those of the sub-agents; ``ValueError`` for what cannot be."""
        first_id = next((entry.runs[0][0] for entry in entries if entry.runs), 0)
        shared = _Shared(*sizes, first_id)
        arrival_s = start_s
        for entry in entries:
            if entry.requests is None:
                # Clocks were rounded to seconds: keep the order of the turns.
                arrival_s = max(arrival_s, start_s + entry.t)
                yield self._request(entry, name, shared, arrival_s)
        for position, entry in enumerate(entries):
            if entry.requests is not None:
                nested = (entry.tool, entry.system)
                yield from self.read(entry.requests, f"{name}/{position}", nested, start_s + entry.t)

    def _request(self, entry: _Entry, name: str, shared: _Shared, arrival_s: float) -> SimRequest:
        if entry.input_tokens < 1:
            raise ValueError(f"the request at t={entry.t:g} has no field `in` above 0")
        named = sum(count for _, count in entry.runs) * self.fine_tokens
        if named > entry.input_tokens:
            raise ValueError(
                f"the request at t={entry.t:g} names {named} tokens of blocks, but has {entry.input_tokens} tokens"
            )
        return SimRequest(
            arrival_s,
            array("q", self._chunks(entry, shared).tobytes()),
            entry.input_tokens,
            max(1, entry.output_tokens),
            session=name,
            think_s=entry.think or 0.0,
            tool_call=entry.stop == "tool_use",
        )

    def _chunks(self, entry: _Entry, shared: _Shared) -> Ints:
        """Return ids of whole coarse blocks: the last fine id of each, which stands for all before it."""
        factor = self.block_tokens // self.fine_tokens
        runs = [np.arange(first, first + count, dtype=np.int64) for first, count in entry.runs]
        fine = np.concatenate(runs) if runs else np.empty(0, np.int64)
        local = fine[factor - 1 :: factor]
        chunks = local + self.ids.base((self.number, entry.m), self.size)
        ends = np.arange(1, len(local) + 1) * self.block_tokens
        original = local == shared.first_id + ends // self.fine_tokens - 1
        whole = shared.tool_tokens + shared.system_tokens
        positions = np.arange(len(local))
        for tokens, key in (
            (whole, (entry.m, shared.tool_tokens, shared.system_tokens)),
            (shared.tool_tokens, (entry.m, shared.tool_tokens)),
        ):
            inside = original & (ends <= tokens)
            chunks[inside] = positions[inside] + self.ids.base(key, tokens // self.block_tokens)
        return chunks
