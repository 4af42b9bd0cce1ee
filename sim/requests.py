"""What a simulation is fed: requests whose prompts are known by the ids of their blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Final

MOST_REQUESTS: Final = 5_000_000
"""More do not fit into the memory of a laptop."""

_LARGEST_ID: Final = 2**40 - 1  # leaves room for millions of copies below 2**63


@dataclass(slots=True)
class SimRequest:
    """One request of a trace.

    Attributes:
        arrival_s: seconds since the trace began; in a closed loop only the first of a session's counts.
        chunks: ids of the blocks of ``Trace.block_tokens`` tokens that make up the prompt and, where it is known, the
            answer; non-negative, below 2**63. An id stands for everything up to the end of its block: prompts that
            share it share all before it. A last block that is not full may be named as well.
        prompt_tokens: length of the prompt, at least 1.
        output_tokens: tokens that are generated, at least 1.
        session: conversation that the request belongs to, or None.
        think_s: closed loop: seconds from the session's answer before to this request.
        priority: larger is more urgent.
        tool_call: the answer calls a tool: the conversation is expected to go on soon.
    """

    arrival_s: float
    chunks: Sequence[int]
    prompt_tokens: int
    output_tokens: int
    session: str | None = None
    think_s: float = 0.0
    priority: int = 0
    tool_call: bool = False


@dataclass(slots=True)
class Trace:
    """Requests in order of arrival.

    Attributes:
        requests: sorted by ``arrival_s``; those of one session in the order of its turns.
        block_tokens: tokens per id in ``SimRequest.chunks``.
        closed_loop: whether a session's next request waits for its answer.
        name: what reports call it.
    """

    requests: Sequence[SimRequest]
    block_tokens: int
    closed_loop: bool = False
    name: str = "trace"

    def check(self) -> None:
        """Raise ValueError, naming the request, if anything in the trace cannot be simulated."""
        if self.block_tokens < 1:
            raise ValueError(f"trace {self.name!r}: block_tokens must be at least 1, not {self.block_tokens}")
        if not self.requests:
            raise ValueError(f"trace {self.name!r} has no requests")
        latest = 0.0
        for number, request in enumerate(self.requests):
            problem = _problem(request, self.block_tokens, latest)
            if problem:
                raise ValueError(f"trace {self.name!r}, request {number}: {problem}")
            latest = request.arrival_s


def _problem(request: SimRequest, block_tokens: int, latest: float) -> str:
    if not (isfinite(request.arrival_s) and request.arrival_s >= latest):
        return f"arrival_s must be finite and not before the request ahead ({latest}), but is {request.arrival_s}"
    if request.prompt_tokens < 1 or request.output_tokens < 1:
        return f"needs prompt and output tokens, but has {request.prompt_tokens} and {request.output_tokens}"
    if not (isfinite(request.think_s) and request.think_s >= 0):
        return f"think_s must be finite and not negative, but is {request.think_s}"
    most = -(-(request.prompt_tokens + request.output_tokens) // block_tokens)
    if len(request.chunks) > most:
        return f"{len(request.chunks)} blocks of {block_tokens} tokens for no more than {most} blocks of text"
    return ""


def named_tokens(request: SimRequest, block_tokens: int) -> int:
    """Return how many leading tokens the request's ids cover.

    Ids that end with the prompt cover no more than the prompt; ids that go on cover the answer as far as they go.
    """
    covered = len(request.chunks) * block_tokens
    if covered < request.prompt_tokens + block_tokens:
        return min(covered, request.prompt_tokens)
    return min(covered, request.prompt_tokens + request.output_tokens)


def with_small_ids(requests: Sequence[SimRequest]) -> None:
    """Number the blocks in place where their ids are hashes: copies of a conversation get ids above all others."""
    if max((max(request.chunks) for request in requests if request.chunks), default=0) <= _LARGEST_ID:
        return
    numbers: dict[int, int] = {}
    for request in requests:
        request.chunks = [numbers.setdefault(chunk, len(numbers)) for chunk in request.chunks]


def next_turns(trace: Trace) -> dict[int, int]:
    """Return for each request the number of the same session's next one."""
    following: dict[int, int] = {}
    latest: dict[str, int] = {}
    for number, request in enumerate(trace.requests):
        if request.session is not None:
            if request.session in latest:
                following[latest[request.session]] = number
            latest[request.session] = number
    return following


def with_chained_ids(requests: Sequence[SimRequest]) -> None:
    """Tell apart in place what one id names behind different blocks: an id is to stand for all before it as well."""
    before_of: dict[int, int] = {}
    others: dict[tuple[int, int], int] = {}
    free = max((max(request.chunks) for request in requests if request.chunks), default=0) + 1
    for request in requests:
        chunks, before = list(request.chunks), -1
        for at, chunk in enumerate(chunks):
            if before_of.setdefault(chunk, before) != before:
                chunks[at] = others.setdefault((before, chunk), free + len(others))
            before = chunks[at]
        request.chunks = chunks
