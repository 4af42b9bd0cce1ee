"""The default policy: the worker where a request costs the least, to itself and to everybody else.

For every candidate, in seconds::

    wait          what is queued there, less the time that its running prefill has already taken
    work          prefill of the uncached tokens, and reload of the tokens that lie below HBM
    pi            how many other requests one more second of work there delays (M/G/1)
    displacement  recomputing what this request pushes out of the cache, and what its conversation will

    cost = wait + (1 + pi)·(work + displacement)

A conversation stays where its cache is as long as moving would cost more than waiting. A new one is charged with the
room that it is going to need, so that new conversations spread over the caches' capacity. A prefix from which many
conversations start (a system prompt, a set of tools) is worth holding everywhere: once it has been met more often than
there are workers, only a share of its prefill is charged to those that do not hold it yet.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from math import inf
from typing import Annotated, Any, ClassVar, Final, NamedTuple

import msgspec
import numpy as np

from policies.base import (
    COLUMNS,
    Breakdown,
    Decision,
    FleetView,
    Floats,
    Residency,
    RoutingRequest,
    Tier,
    register,
)
from policies.cost import prefill_seconds, reload_seconds
from policies.ring import ring_of
from policies.traffic import Traffic

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]

# Up to here the formula is evaluated on floats, worker by worker, beyond on arrays: one numpy call costs as much as
# the arithmetic of several workers.
SMALL_FLEET: Final = 24

RUNNING: Final = COLUMNS.index("running")
CAPACITY: Final = COLUMNS.index("kv_capacity_tokens")
A, B, C = (COLUMNS.index(f"prefill_{letter}_s") for letter in "abc")

# state, hit, tokens by tier, turnover → the terms of `_Terms`
_Formula = Callable[[Any, Any, Any, Any], tuple[Any, ...]]


class ExpectedCostParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of ``expected-cost``.

    Attributes:
        price: charge for the delay of other requests (the term pi).
        reuse: probability that a displaced token would have been used again, per cache turnover within ``memory_s``;
            0 switches displacement off.
        growth: charge a new conversation with the tokens that conversations go on to add.
        replicate: spread prefixes from which many conversations start.
        bounded: skip workers above ``load_factor`` times the mean load plus one request.
        load_factor: see ``bounded``; also the bound of the ring.
        decode_weight: load of a context token being decoded, relative to a token waiting for prefill.
        fresh_share: a hit below this share of the prompt does not make a request the continuation of another.
        ring_slack: costs that differ by less than this share of the request's work are equal for a new conversation.
        rate_window_s: over which arrival rate and utilisation are averaged.
        memory_s: over which cache turnover and prefixes are remembered.
    """

    price: bool = True
    reuse: Share = 0.8
    growth: bool = True
    replicate: bool = True
    bounded: bool = True
    load_factor: Annotated[float, msgspec.Meta(ge=1)] = 1.25
    decode_weight: Share = 0.1
    fresh_share: Share = 0.1
    ring_slack: Share = 0.1
    rate_window_s: Seconds = 60.0
    memory_s: Seconds = 600.0


class _Start(NamedTuple):
    """How a prompt relates to what is cached."""

    fresh: bool  # a new conversation, not the continuation of one that some worker holds
    met: float  # how many conversations before started from its known part
    key: bytes  # the first chunk that nobody holds, for the ring


class _Terms(NamedTuple):
    """The score of every candidate, each ``[n]``; ``excess`` is load beyond one request, in seconds of prefill."""

    cost: Sequence[float]
    excess: Sequence[float]
    work: Sequence[float]
    wait: Sequence[float] | Floats
    pi: Sequence[float] | Floats
    displacement: Sequence[float] | Floats


@register
class ExpectedCost:
    """Least expected cost; see the module's docstring for the terms. What it learns, it learns per model."""

    name: ClassVar[str] = "expected-cost"
    Params: ClassVar[type[msgspec.Struct]] = ExpectedCostParams

    def __init__(self, params: ExpectedCostParams, /) -> None:
        self._params = params
        self._traffic: dict[str, Traffic] = {}

    def decide(self, request: RoutingRequest, fleet: FleetView, residency: Residency, now: float) -> Decision:
        """Return the worker of least expected cost, and learn from having sent the request there."""
        prompt = max(1, request.prompt_tokens)
        traffic = self._traffic_of(request.model, now)
        traffic.advance(fleet, now)

        hits = residency.hits()
        longest = max(hits)
        start = self._start(request, prompt, longest, traffic, now)
        if longest >= prompt:
            hits = [min(hit, prompt - 1) for hit in hits]  # an engine always computes the last token
        charged: Sequence[float] = hits
        if self._params.replicate and start.met > len(fleet):
            # n prefills, one per worker, are shared by all the conversations that will start from this prefix
            spared = 1.0 - len(fleet) / start.met
            charged = [hit + spared * (longest - hit) for hit in hits]

        weigh = self._formula(prompt, now, start.fresh, traffic)
        terms = _evaluate(weigh, fleet, charged, residency, traffic)
        over = self._over(terms, prompt, fleet)
        row, reason = self._choose(terms, over, start, fleet)

        hit = hits[row]
        work_s = terms.work[row]
        if charged is not hits:
            a, b, c = fleet.state[A : C + 1, row].tolist()
            granted = charged[row]
            work_s += prefill_seconds(prompt - hit, hit, a, b, c) - prefill_seconds(prompt - granted, granted, a, b, c)
        traffic.decided(row, start.fresh, prompt - hit, work_s, fleet.state.item(CAPACITY, row))
        return Decision(
            row,
            hit,
            float(terms.wait[row] + work_s),
            reason or ("hit" if hit else "load"),
            terms.cost,
            partial(_explain, terms, over, prompt, hits, residency, fleet.names, start.key),
        )

    def _traffic_of(self, model: str, now: float) -> Traffic:
        traffic = self._traffic.get(model)
        if traffic is None:
            traffic = self._traffic[model] = Traffic(self._params.rate_window_s, self._params.memory_s, now)
        return traffic

    def _start(self, request: RoutingRequest, prompt: int, longest: int, traffic: Traffic, now: float) -> _Start:
        """Find out whether the request goes on with a conversation that is cached, or starts a new one."""
        chunks = request.chunks
        known = min(longest // request.chunk_tokens, len(chunks))
        if known == 0:
            return _Start(True, 0.0, request.key())
        met = traffic.met(chunks[known - 1], prompt, known < len(chunks), now)
        fresh = met >= 0.5 or longest < self._params.fresh_share * prompt
        return _Start(fresh, met, request.ring_key or chunks[min(known, len(chunks) - 1)])

    def _formula(self, prompt: int, now: float, fresh: bool, traffic: Traffic) -> _Formula:
        """Return the score as a function of a candidate's figures: floats of one, or arrays of all (no branches)."""
        params = self._params
        crowding = traffic.crowding() if params.price else 0.0
        growth = traffic.growth_tokens() if params.growth and fresh else 0.0
        reuse, decode_weight = params.reuse, params.decode_weight

        def weigh(state: Any, hit: Any, tiers: Any, turnover: Any) -> tuple[Any, ...]:
            # in the order of policies.base.COLUMNS
            pending_tokens, pending_s, since, _, decode_tokens, _, _, _, _, a, b, c, host_s, disk_s, remote_s = state
            _, host, disk, remote = tiers
            new = prompt - hit
            queued = pending_s + since - now
            wait = (queued + abs(queued)) * 0.5  # never below 0
            work = prefill_seconds(new, hit, a, b, c) + reload_seconds(host, disk, remote, host_s, disk_s, remote_s)
            pi = (wait + work * 0.5) * crowding
            displacement = (new + growth) * b * turnover * reuse
            excess = (pending_tokens + decode_tokens * decode_weight - prompt) * b
            return wait + (pi + 1.0) * (work + displacement), excess, work, wait, pi, displacement

        return weigh

    def _over(self, terms: _Terms, prompt: int, fleet: FleetView) -> Collection[int]:
        """Return the rows whose load is above ``load_factor`` times the mean plus one request."""
        if not self._params.bounded or max(terms.excess) <= 0:
            return ()
        total_s = sum(terms.excess) + prompt * sum(fleet.state[B].tolist())
        limit_s = self._params.load_factor * total_s / len(fleet)
        return {row for row, excess in enumerate(terms.excess) if excess > limit_s}

    def _choose(self, terms: _Terms, over: Collection[int], start: _Start, fleet: FleetView) -> tuple[int, str]:
        """Return the row and, where it was not the cost alone that decided, the reason."""
        costs = terms.cost
        if over:
            costs = [inf if row in over else cost for row, cost in enumerate(costs)]
        limit = min(costs)
        if start.fresh:
            limit += self._params.ring_slack * min(terms.work)
        near = [row for row, cost in enumerate(costs) if cost <= limit]
        if len(near) == 1:
            return near[0], ""
        running = fleet.state[RUNNING].tolist()
        if start.fresh:
            return ring_of(tuple(fleet.names)).bounded(start.key, running, self._params.load_factor, near), "ring"
        least = min([(terms.wait[row], running[row]) for row in near])
        near = [row for row in near if (terms.wait[row], running[row]) == least]
        return near[0] if len(near) == 1 else ring_of(tuple(fleet.names)).first(start.key, near), ""


def _evaluate(
    weigh: _Formula, fleet: FleetView, hits: Sequence[float], residency: Residency, traffic: Traffic
) -> _Terms:
    if len(fleet) > SMALL_FLEET:
        granted = np.fromiter(hits, float, len(hits))
        cost, excess, work, *rest = weigh(fleet.state, granted, residency.by_tier.T, traffic.turnover)
        return _Terms(cost.tolist(), excess.tolist(), work.tolist(), *rest)  # the rest is only looked up
    scores = map(weigh, fleet.state.T.tolist(), hits, residency.tiers(), traffic.turnovers())
    return _Terms(*zip(*scores, strict=True))


def _explain(
    terms: _Terms,
    over: Collection[int],
    prompt: int,
    hits: Sequence[int],
    residency: Residency,
    names: Sequence[str],
    key: bytes,
) -> Breakdown:
    """Return the terms of every candidate; ``ring`` is its position on the way of the request's key, from 0."""
    tiers = residency.tiers()
    ring = {row: position for position, row in enumerate(ring_of(tuple(names)).walk(key))}
    return [
        {
            "hit_tokens": hits[row],
            **{f"{tier.name.lower()}_tokens": tiers[row][tier] for tier in Tier},
            "uncached_tokens": prompt - hits[row],
            "wait_s": float(terms.wait[row]),
            "work_s": float(terms.work[row]),
            "pi": float(terms.pi[row]),
            "displacement_s": float(terms.displacement[row]),
            "bounded": row in over,
            "ring": ring[row],
        }
        for row in range(len(names))
    ]
