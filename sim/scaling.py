"""Makes a trace harder, easier, wider or shorter, without touching what its requests have in common."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import chain

from sim.requests import MOST_REQUESTS, SimRequest, Trace

_COMMON_SHARE = 0.01  # a block in more requests than this is everybody's: it tells no conversations apart
_SHIFT_SHARE = 0.05  # copies of a conversation begin apart by up to this share of the trace's time


def scale_load(trace: Trace, factor: float) -> Trace:
    """Return the trace with ``factor`` times as many requests per second: arrivals and pauses are that much closer.

    Raises:
        ValueError: the factor is not above 0.
    """
    if not 0 < factor < float("inf"):
        raise ValueError(f"load must be above 0 and finite, not {factor}")
    requests = [
        replace(request, arrival_s=request.arrival_s / factor, think_s=request.think_s / factor)
        for request in trace.requests
    ]
    return replace(trace, requests=requests)


def scale_working_set(trace: Trace, factor: float, seed: int = 0) -> Trace:
    """Return a trace with ``factor`` times the working set at the same rate of requests.

    Conversations are copied, each copy with blocks of its own and beginning at another time, and time is stretched by
    the factor; a factor that is no whole number copies some of them once less. Below 1, some are left out.

    Raises:
        ValueError: the factor is not above 0, or leaves nothing, or more than can be held in memory.
    """
    if not 0 < factor < float("inf"):
        raise ValueError(f"ws must be above 0 and finite, not {factor}")
    if factor * len(trace.requests) > MOST_REQUESTS:
        raise ValueError(
            f"ws {factor:g} makes {factor * len(trace.requests):.3g} requests of the {len(trace.requests):,} of trace "
            f"{trace.name!r}; at most {MOST_REQUESTS:,} can be simulated"
        )
    rng = random.Random(seed)
    groups = conversations(trace)
    names = dict.fromkeys(groups)
    copies = {name: int(factor) + (rng.random() < factor % 1) for name in names}
    span_s = trace.requests[-1].arrival_s * factor * _SHIFT_SHARE
    shifts = {name: [0.0, *(rng.uniform(0, span_s) for _ in range(copies[name] - 1))] for name in names}
    width = 1 + max((max(request.chunks) for request in trace.requests if request.chunks), default=0)
    requests = [
        _copy(request, copy, copy * width, request.arrival_s * factor + shifts[name][copy])
        for request, name in zip(trace.requests, groups, strict=True)
        for copy in range(copies[name])
    ]
    return _rearranged(trace, requests)


def subset(trace: Trace, share: float = 1.0, first: int = 0, seed: int = 0) -> Trace:
    """Return a part of the trace: whole conversations, drawn by chance; then the ``first`` requests, 0 for all.

    Raises:
        ValueError: the share is not above 0 and at most 1, or nothing is left.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must be above 0 and at most 1, not {share}")
    requests = list(trace.requests)
    if share < 1:
        rng = random.Random(seed)
        groups = conversations(trace)
        kept = {name: rng.random() < share for name in dict.fromkeys(groups)}
        requests = [request for request, name in zip(requests, groups, strict=True) if kept[name]]
    return _rearranged(trace, [replace(request) for request in requests[: first or None]])


def working_set_tokens(trace: Trace) -> float:
    """Return the tokens that a cache holds on average which keeps every block from its first use to its last.

    That is the least that serves every repetition. Times are those of the trace; a closed loop's are nominal.
    """
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for request in trace.requests:
        arrival_s = request.arrival_s
        for chunk in request.chunks:
            first.setdefault(chunk, arrival_s)
            last[chunk] = arrival_s
    duration_s = trace.requests[-1].arrival_s - trace.requests[0].arrival_s
    if not duration_s:
        return float(len(first) * trace.block_tokens)
    held_s = sum(last.values()) - sum(first.values())
    return held_s / duration_s * trace.block_tokens


def _copy(request: SimRequest, number: int, offset: int, arrival_s: float) -> SimRequest:
    if not number:
        return replace(request, arrival_s=arrival_s)
    session = request.session and f"{request.session}+{number}"
    return replace(request, arrival_s=arrival_s, session=session, chunks=[chunk + offset for chunk in request.chunks])


def _rearranged(trace: Trace, requests: list[SimRequest]) -> Trace:
    if not requests:
        raise ValueError(f"nothing is left of trace {trace.name!r}; take a larger part")
    requests.sort(key=lambda request: request.arrival_s)
    origin = requests[0].arrival_s
    for request in requests:
        request.arrival_s -= origin
    return replace(trace, requests=requests)


def conversations(trace: Trace) -> list[str | int]:
    """Return which conversation each request belongs to: its session, else its first block that is not everybody's."""
    uses = Counter(chain.from_iterable(request.chunks for request in trace.requests))
    common = {chunk for chunk, number in uses.items() if number > _COMMON_SHARE * len(trace.requests)}
    groups: list[str | int] = []
    for number, request in enumerate(trace.requests):
        own = next((chunk for chunk in request.chunks if chunk not in common), None)
        groups.append(request.session or (f"request {number}" if own is None else own))
    return groups
