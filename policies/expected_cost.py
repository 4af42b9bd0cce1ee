"""The default policy: the worker where a request costs the least, to itself and to everybody else.

For every candidate, in seconds::

    wait          what is queued there, less the time that its running prefill has already taken
    work          prefill of the uncached tokens, and reload of the tokens that lie below HBM; where workers can fetch
                  KV from one another (``policies.pull``) and it is quicker, that instead of prefill
    pi            how much longer others wait for each second of its work: those that come while it is done, for half of
                  it on average. Those that wait already do not count, as first come, first served they would: they are
                  released least work first, and go before it, or have more to do and hardly notice
    displacement  recomputing what this request pushes out of the cache, and what its conversation will

    cost = wait + (1 + pi)·(work + displacement)

A conversation stays where its cache is as long as moving would cost more than waiting. A new one is charged with the
room that it is going to need, so that new conversations spread over the caches' capacity. A prefix from which many
conversations start (a system prompt, a set of tools) is worth holding everywhere: once it has been met more often than
there are workers, only a share of its prefill is charged to those that do not hold it yet. The room that it takes there
is charged whole: a copy that pushes others out is paid for by all who miss them, however often it is used itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Annotated, Any, ClassVar, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

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
from policies.pull import Pull, PullLinks
from policies.ring import ring_for, ring_of
from policies.traffic import Traffic

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]

# Up to here the formula is evaluated on floats, worker by worker, beyond on arrays: one numpy call costs as much as
# the arithmetic of several workers.
SMALL_FLEET: Final = 24

RUNNING: Final = COLUMNS.index("running")
CAPACITY: Final = COLUMNS.index("kv_capacity_tokens")
A, B, C = (COLUMNS.index(f"prefill_{letter}_s") for letter in "abc")

# One value per candidate: a list or tuple of a small fleet, an array of a large one.
Values = list[Any] | tuple[Any, ...] | NDArray[Any]

# state, hit that is charged for, hit that is there, tokens by tier or None where all of them are in HBM, turnover, and
# what fetching saves where workers can → the terms of `_Terms`
_Formula = Callable[..., tuple[Any, ...]]


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
    reuse: Share = 0.75
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

    cost: Values
    excess: Values
    work: Values
    wait: Values
    pi: Values
    displacement: Values


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

        hits, longest = _hits(residency, len(fleet), prompt)
        start = self._start(request, prompt, longest, fleet, traffic, now)
        charged: Values = hits
        if self._params.replicate and start.met > len(fleet):
            # n prefills, one per worker, are shared by all the conversations that will start from this prefix
            charged = _raised(hits, longest, 1.0 - len(fleet) / start.met)

        weigh = self._formula(prompt, now, start.fresh, traffic)
        saved = None if fleet.pulls is None else _saved(fleet.pulls, fleet, charged, residency)
        terms = _evaluate(weigh, fleet, charged, hits, residency, traffic, saved)
        over = self._over(terms, prompt, fleet)
        row, reason = self._choose(terms, over, start, fleet)

        hit, work_s = int(hits[row]), float(terms.work[row])
        pull: Pull | None = None
        if fleet.pulls is not None and saved is not None and (saved[row] or charged is not hits):
            pull = fleet.pulls.best(fleet, row, hit, residency)
        if charged is not hits:
            a, b, c = fleet.state[A : C + 1, row].tolist()
            granted = float(charged[row])
            work_s += prefill_seconds(prompt - hit, hit, a, b, c) - prefill_seconds(prompt - granted, granted, a, b, c)
            if saved is not None:
                work_s += float(saved[row]) - (pull.saved_s if pull is not None else 0.0)
        traffic.decided(row, start.fresh, prompt - hit, work_s, fleet.state.item(CAPACITY, row))
        explain = partial(_explain, terms, over, prompt, hits, residency, fleet.names, start.key, saved)
        ttft_s = float(terms.wait[row]) + work_s
        if pull is not None:
            expected = min(hit + pull.tokens, prompt - 1)
            return Decision(row, expected, ttft_s, "pull", terms.cost, explain, pull)
        return Decision(row, hit, ttft_s, reason or ("hit" if hit else "load"), terms.cost, explain)

    def _traffic_of(self, model: str, now: float) -> Traffic:
        traffic = self._traffic.get(model)
        if traffic is None:
            traffic = self._traffic[model] = Traffic(self._params.rate_window_s, self._params.memory_s, now)
        return traffic

    def _start(
        self, request: RoutingRequest, prompt: int, longest: int, fleet: FleetView, traffic: Traffic, now: float
    ) -> _Start:
        """Find out whether the request goes on with a conversation that is cached, or starts a new one."""
        chunks = request.chunks
        known = min(longest // request.chunk_tokens, len(chunks))
        if known == 0:
            return _Start(True, 0.0, request.key())
        prefill_s = longest * fleet.state.item(B, 0)
        met = traffic.met(chunks[known - 1], prompt, known < len(chunks), prefill_s, now)
        fresh = met >= 0.5 or longest < self._params.fresh_share * prompt
        return _Start(fresh, met, request.ring_key or chunks[min(known, len(chunks) - 1)])

    def _formula(self, prompt: int, now: float, fresh: bool, traffic: Traffic) -> _Formula:
        """Return the score as a function of a candidate's figures: floats of one, or arrays of all."""
        params = self._params
        crowding = traffic.crowding() if params.price else 0.0
        growth = traffic.growth_tokens() if params.growth and fresh else 0.0
        reuse, decode_weight = params.reuse, params.decode_weight
        middle = prompt * 0.5  # where in a context as long as this one a displaced token is computed again, on average

        def weigh(state: Any, hit: Any, there: Any, tiers: Any, turnover: Any, saved: Any = None) -> tuple[Any, ...]:
            # in the order of policies.base.COLUMNS
            pending_tokens, pending_s, since, _, decode_tokens, _, _, _, _, a, b, c, host_s, disk_s, remote_s = state
            new = prompt - hit
            queued = pending_s + since - now
            wait = (queued + abs(queued)) * 0.5  # never below 0
            work = a + new * (b + c * (hit + new * 0.5))  # `cost.prefill_seconds`, without the call
            if tiers is not None:
                _, host, disk, remote = tiers
                work = work + reload_seconds(host, disk, remote, host_s, disk_s, remote_s)
            if saved is not None:
                work = work - saved
            pi = work * 0.5 * crowding
            displacement = (prompt - there + growth) * (b + c * middle) * turnover * reuse
            excess = (pending_tokens + decode_tokens * decode_weight - prompt) * b
            return wait + (pi + 1.0) * (work + displacement), excess, work, wait, pi, displacement

        return weigh

    def _over(self, terms: _Terms, prompt: int, fleet: FleetView) -> list[int]:
        """Return the rows whose load is above ``load_factor`` times the mean plus one request."""
        excess = terms.excess
        factor, n = self._params.load_factor, len(fleet)
        total_s = _total(excess)
        if not self._params.bounded or _most(excess) <= max(0.0, factor * total_s / n):
            return []
        total_s += prompt * float(np.add.reduce(fleet.state[B]))
        return _rows_above(excess, factor * total_s / n)

    def _choose(self, terms: _Terms, over: list[int], start: _Start, fleet: FleetView) -> tuple[int, str]:
        """Return the row and, where it was not the cost alone that decided, the reason."""
        costs = terms.cost
        if over:
            costs = list(costs) if isinstance(costs, tuple) else costs.copy()
            for row in over:
                costs[row] = inf
        limit = _least(costs)
        if start.fresh:
            limit += self._params.ring_slack * _least(terms.work)
        near = _rows_up_to(costs, limit)
        if len(near) == 1:
            return near[0], ""
        column: Floats = fleet.state[RUNNING]
        running = column.tolist() if len(fleet) <= SMALL_FLEET else column
        if start.fresh:
            return ring_for(fleet).bounded(start.key, running, self._params.load_factor, near), "ring"
        least = min([(terms.wait[row], running[row]) for row in near])
        near = [row for row in near if (terms.wait[row], running[row]) == least]
        return near[0] if len(near) == 1 else ring_for(fleet).first(start.key, near), ""


def _saved(pulls: PullLinks, fleet: FleetView, hits: Values, residency: Residency) -> Values:
    """Return the seconds that each worker would save by fetching, in the form of the hits."""
    saved = pulls.savings(fleet, np.asarray(hits), residency)
    return saved if isinstance(hits, np.ndarray) else saved.tolist()


def _evaluate(
    weigh: _Formula,
    fleet: FleetView,
    charged: Values,
    hits: Values,
    residency: Residency,
    traffic: Traffic,
    saved: Values | None,
) -> _Terms:
    if not isinstance(hits, np.ndarray):
        tiers_of = [tiers if tiers[1] or tiers[2] or tiers[3] else None for tiers in residency.tiers()]
        figures = [fleet.state.T.tolist(), charged, hits, tiers_of, traffic.turnover.tolist()]
        scores = map(weigh, *figures, *(() if saved is None else (saved,)))
        return _Terms(*zip(*scores, strict=True))
    # as floats, side by side: a cast in every operation would cost as much as the operation
    below = np.count_nonzero(residency.by_tier[:, Tier.HOST :])
    tiers = residency.by_tier.T.astype(np.float64, order="C") if below else None
    there = hits.astype(np.float64)
    return _Terms(*weigh(fleet.state, there if charged is hits else charged, there, tiers, traffic.turnover, saved))


def _explain(
    terms: _Terms,
    over: list[int],
    prompt: int,
    hits: Values,
    residency: Residency,
    names: Sequence[str],
    key: bytes,
    saved: Values | None,
) -> Breakdown:
    """Return the terms of every candidate; ``ring`` is its position on the way of the request's key, from 0.

    Where workers can fetch, ``fetch_saves_s`` is what ``work_s`` is less by it.
    """
    tiers = residency.tiers()
    ring = {row: position for position, row in enumerate(ring_of(tuple(names)).walk(key))}
    return [
        {
            "hit_tokens": int(hits[row]),
            **{f"{tier.name.lower()}_tokens": tiers[row][tier] for tier in Tier},
            "uncached_tokens": prompt - int(hits[row]),
            "wait_s": float(terms.wait[row]),
            "work_s": float(terms.work[row]),
            "pi": float(terms.pi[row]),
            "displacement_s": float(terms.displacement[row]),
            "bounded": row in over,
            "ring": ring[row],
            **({} if saved is None else {"fetch_saves_s": float(saved[row])}),
        }
        for row in range(len(names))
    ]


# The same on lists and tuples of small fleets and on arrays.


def _hits(residency: Residency, n: int, prompt: int) -> tuple[Values, int]:
    """Return the hits that engines grant, and the longest hit; an engine always computes the last token."""
    hits: Values = residency.hits() if n <= SMALL_FLEET else residency.hit_tokens
    longest = int(_most(hits))
    if longest >= prompt:
        if isinstance(hits, np.ndarray):
            return np.minimum(hits, prompt - 1), longest
        return [min(hit, prompt - 1) for hit in hits], longest
    return hits, longest


def _raised(hits: Values, longest: int, share: float) -> Values:
    """Return the hits, each raised by a share of what it is short of the longest one."""
    if isinstance(hits, np.ndarray):
        return hits + share * (longest - hits)
    return [hit + share * (longest - hit) for hit in hits]


def _least(values: Values) -> float:
    return float(np.minimum.reduce(values)) if isinstance(values, np.ndarray) else min(values)


def _most(values: Values) -> float:
    return float(np.maximum.reduce(values)) if isinstance(values, np.ndarray) else max(values)


def _total(values: Values) -> float:
    return float(np.add.reduce(values)) if isinstance(values, np.ndarray) else sum(values)


def _rows_above(values: Values, limit: float) -> list[int]:
    if isinstance(values, np.ndarray):
        return (values > limit).nonzero()[0].tolist()
    return [row for row, value in enumerate(values) if value > limit]


def _rows_up_to(values: Values, limit: float) -> list[int]:
    if isinstance(values, np.ndarray):
        return (values <= limit).nonzero()[0].tolist()
    return [row for row, value in enumerate(values) if value <= limit]
