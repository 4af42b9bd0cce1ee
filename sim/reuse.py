"""How much of a trace a cache of some size could have served, whoever routes and however fast: bounds for planning."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from sim.requests import Trace


def lru_hit_rates(trace: Trace, capacities: Sequence[float]) -> list[float]:
    """Return the share of prompt tokens that one LRU cache serves, for each capacity in tokens (``inf``: no bound).

    One cache for the whole fleet is what perfect routing comes near to. Only unbroken prefixes count; a request uses
    the end of its prompt before its beginning, so that leaves go before what they hang on.
    """
    total = sum(request.prompt_tokens for request in trace.requests)
    return [_hit_tokens(trace, capacity / trace.block_tokens) / total for capacity in capacities]


def _hit_tokens(trace: Trace, most_blocks: float) -> int:
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in trace.requests:
        run = 0
        for chunk in request.chunks:
            if chunk not in held:
                break
            run += 1
        hits += min(run * trace.block_tokens, request.prompt_tokens)
        for chunk in reversed(request.chunks):
            held[chunk] = None
            held.move_to_end(chunk)
        while len(held) > most_blocks:
            held.popitem(last=False)
    return hits
