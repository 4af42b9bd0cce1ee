"""Whether prefill and decode should go to two workers, and to which two; seconds, tokens and bytes throughout.

A request that stays whole waits for the prefills before it and delays every request that decodes on its worker. One
whose prefill is done elsewhere pays for moving its KV cache. Neither is right always: a prompt that is mostly cached
where it is decoded is best left there, a long new one in front of a busy decode worker is not. With ``p`` of ``n``
prefill workers and ``d`` of ``m`` decode workers, in seconds of TTFT::

    whole(d)    = wait_d + work_d·(1 + interference·running_d) + decode_d
    apart(p, d) = max(wait_p + work_p + transfer_pd, wait_d) + step_d + decode_d
    step_d      = a_d + read_s·context_d
    decode_d    = itl_weight·read_s·context_d + b_d·excess_d

The prefill worker's token is thrown away, so that the first one takes a ``step`` of the decode worker. ``decode`` is
what a place in its batch costs: ITL, which grows with the context that every step reads, and tokens in excess of the KV
cache, which some request will have to prefill again. Both workers of a pair are chosen together: the prefill worker
that holds most of the prompt may stand far from every decode worker that has room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, isfinite, log
from typing import Final, NamedTuple

import numpy as np

from policies.base import FleetView, Floats, Residency, RoutingRequest, Tier
from policies.cost import prefill_seconds, reload_seconds
from policies.ring import ring_for

_GAIN: Final = 0.2
"""Weight of the newest transfer in a link's learned bandwidth."""
_SLACK: Final = 0.1
"""Prefill workers whose best pairs differ by less than this share of the prompt's work are equal."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Weights:
    """What else than its own TTFT a request costs, in seconds of TTFT.

    Attributes:
        interference: a second of prefill, to every request that runs beside it.
        itl_weight: a second of ITL: the ratio of the two targets, 100 for 2 s and 20 ms.
        read_s: seconds that a decode step takes per token of context.
    """

    interference: float = 0.1
    itl_weight: float = 100.0
    read_s: float = 27e-9


class Fetch(NamedTuple):
    """KV of a prompt's beginning that workers can fetch from where it lies, instead of computing it.

    Attributes:
        tokens: how much of it.
        token_s: ``[n]``, seconds per token to each worker.
    """

    tokens: int
    token_s: Floats


class Prospects(NamedTuple):
    """What a prompt would meet on each of ``n`` workers; all ``[n]``.

    Attributes:
        held_tokens: leading tokens that it would not compute, and never the last one.
        wait_s: prefills before it.
        work_s: its own, and what brings the held tokens into HBM.
        running: requests there.
        step_s: a step that decodes.
        decode_s: a place in the batch.
    """

    held_tokens: Floats
    wait_s: Floats
    work_s: Floats
    running: Floats
    step_s: Floats
    decode_s: Floats


class Comparison(NamedTuple):
    """One request over each pair of ``n`` prefill and ``m`` decode workers, and whole on each of the latter.

    Attributes:
        there: on the prefill workers.
        here: on the decode workers.
        transfer_s: ``[n, m]``.
        apart_s: ``[n, m]``, costs of the pairs.
        whole_s: ``[m]``, costs of staying whole.
    """

    there: Prospects
    here: Prospects
    transfer_s: Floats
    apart_s: Floats
    whole_s: Floats

    @property
    def possible(self) -> bool:
        """Whether any two workers can hand KV over."""
        return bool(np.isfinite(self.transfer_s).any())

    @property
    def pays(self) -> bool:
        """Whether the cheapest pair is cheaper than the cheapest single worker."""
        return bool(self.apart_s.min() < self.whole_s.min())


def prospects(
    fleet: FleetView, residency: Residency, prompt_tokens: int, now: float, weights: Weights, fetch: Fetch | None = None
) -> Prospects:
    """Return what a prompt would meet on each of a fleet's ``n`` workers.

    Args:
        fleet: the workers.
        residency: what each of them holds of the prompt.
        prompt_tokens: its length.
        now: on the clock of the fleet's times; the prefill under way has been computed in part.
        weights: for the place in the batch.
        fetch: what they can fetch.
    """
    pending_tokens, pending_s, since, running, decode_tokens, _, _, _, capacity, *speed = fleet.state
    a_s, b_s, c_s, host_s, disk_s, remote_s = speed
    held = np.minimum(residency.hit_tokens, prompt_tokens - 1.0)
    brought_s: Floats | float = 0.0
    if residency.by_tier[:, Tier.HOST :].any():
        _, host, disk, remote = residency.by_tier.T
        brought_s = reload_seconds(host, disk, remote, host_s, disk_s, remote_s)
    if fetch is not None:
        more = np.maximum(min(fetch.tokens, prompt_tokens - 1) - held, 0.0)
        held, brought_s = held + more, brought_s + more * fetch.token_s
    work_s = prefill_seconds(prompt_tokens - held, held, a_s, b_s, c_s) + brought_s
    wait_s = np.maximum(pending_s + (since - now), 0.0)
    context = pending_tokens + decode_tokens + prompt_tokens
    excess = np.maximum(context - capacity, 0.0) * (capacity > 0)
    read_s = weights.read_s * context
    decode_s = weights.itl_weight * read_s + excess * b_s
    return Prospects(held, wait_s, work_s, running, a_s + read_s, decode_s)


def compare(there: Prospects, here: Prospects, transfer_s: Floats, interference: float) -> Comparison:
    """Weigh every pair of workers against every single one.

    Args:
        there: on the prefill workers.
        here: on the decode workers.
        transfer_s: ``[n, m]``, for the prompt's KV from one to the other; infinite where that cannot be.
        interference: of ``Weights``.
    """
    arrives_s = (there.wait_s + there.work_s)[:, np.newaxis] + transfer_s
    whole_s = here.wait_s + here.work_s * (1 + interference * here.running) + here.decode_s
    return Comparison(there, here, transfer_s, decoding_cost_s(here, arrives_s), whole_s)


def decoding_cost_s(here: Prospects, arrives_s: Floats) -> Floats:
    """Return what it costs to decode a prompt on each of ``m`` workers: ``max(arrives, wait) + step + decode``.

    Args:
        here: on these workers.
        arrives_s: ``[…, m]``, when its KV has arrived there.
    """
    return np.maximum(arrives_s, here.wait_s) + (here.step_s + here.decode_s)


def choose_pair(
    comparison: Comparison, request: RoutingRequest, prefills: FleetView, costs: Floats
) -> tuple[int, int] | None:
    """Return the rows of the cheapest pair; None where no pair is possible.

    Among prefill workers that are as good as equal, prompts that begin alike meet at one of them, and others spread
    over all their caches: the ring decides, by the first chunk that none of them holds.

    Args:
        comparison: of the pairs.
        request: for its chunks.
        prefills: the prefill workers.
        costs: ``[n, m]``, its ``apart_s``, infinite for pairs that are out of the question.
    """
    of_prefills = costs.min(axis=1)
    row = int(of_prefills.argmin())
    least = float(of_prefills[row])
    if not isfinite(least):
        return None
    there = comparison.there
    near = np.flatnonzero(of_prefills <= least + _SLACK * there.work_s[row])
    if len(near) > 1:
        chunks = request.chunks
        known = int(there.held_tokens.max()) // request.chunk_tokens
        key = request.ring_key or (chunks[min(known, len(chunks) - 1)] if chunks else request.key())
        row = ring_for(prefills).first(key, near.tolist())
    return row, int(costs[row].argmin())


class LinkRates:
    """Bandwidth between pairs of workers, learned from what was moved; logarithms are averaged.

    Until something was moved, it follows from where the two stand: places are paths, widest level first, as in
    ``zone-a/rack-3/node-7``, and what counts is how many leading levels they share.

    Args:
        starts: bytes per second by number of shared levels, from none; the last one holds for more, too.
        latency_s: what a transfer takes besides.
    """

    def __init__(self, starts: Sequence[float], latency_s: float) -> None:
        self._starts = [log(rate) for rate in starts]
        self._latency_s = latency_s
        self._places: dict[str, list[str]] = {}
        self._links: dict[tuple[str, str], float] = {}

    def join(self, worker: str, place: str) -> None:
        """Note where a worker stands."""
        self._places[worker] = [level for level in place.split("/") if level]

    def leave(self, worker: str) -> None:
        """Forget a worker and its links."""
        self._places.pop(worker, None)
        for link in [link for link in self._links if worker in link]:
            del self._links[link]

    def observe(self, source: str, target: str, size_bytes: float, seconds: float) -> None:
        """Learn from one transfer; one of nothing, in no time, or of a worker that has left says nothing."""
        seconds -= self._latency_s
        if size_bytes > 0 and seconds > 0 and source in self._places and target in self._places:
            known = self._log_rate(source, target)
            self._links[source, target] = known + _GAIN * (log(size_bytes / seconds) - known)

    def bytes_per_s(self, source: str, target: str) -> float:
        """Return a link's bandwidth."""
        return exp(self._log_rate(source, target))

    def _log_rate(self, source: str, target: str) -> float:
        known = self._links.get((source, target))
        if known is not None:
            return known
        shared = 0
        for level, other in zip(self._places.get(source, ()), self._places.get(target, ()), strict=False):
            if level != other:
                break
            shared += 1
        return self._starts[min(shared, len(self._starts) - 1)]
