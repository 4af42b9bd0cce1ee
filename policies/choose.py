"""What several policies share: hits as the engine will grant them, times to come, and the least of several columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from policies.base import Breakdown, Costs, Decision, FleetView, Floats, Ints, Residency, RoutingRequest, Tier
from policies.cost import prefill_seconds, reload_seconds
from policies.ring import ring_for

Terms = Mapping[str, NDArray[Any]]
"""The terms of a policy's score by name, each ``[n]``."""

LOWER_TIERS: Final = ("host", "disk", "remote")


def expected_hit(request: RoutingRequest, residency: Residency, row: int) -> int:
    """Return the prompt tokens that ``row`` will not compute. An engine always computes at least the last one."""
    return max(0, min(int(residency.hit_tokens[row]), request.prompt_tokens - 1))


def uncached_tokens(request: RoutingRequest, residency: Residency) -> Ints:
    """Return the prompt tokens that each candidate would have to prefill, int64 ``[n]``, at least 1."""
    return np.maximum(request.prompt_tokens - residency.hit_tokens, 1)


def hit_share(request: RoutingRequest, residency: Residency) -> Floats:
    """Return the cached share of the prompt, float64 ``[n]``, 0 to 1."""
    return cast("Floats", np.minimum(residency.hit_tokens / max(1, request.prompt_tokens), 1.0))


def queue_seconds(fleet: FleetView, now: float) -> Floats:
    """Return the prefill queued at each candidate, less the time that its running one has already taken, ``[n]``."""
    queued = fleet.column("pending_prefill_s") + fleet.column("prefilling_since") - now
    return cast("Floats", np.maximum(queued, 0.0))


def prefill_of(fleet: FleetView, new: Ints, cached: Ints) -> Floats:
    """Return the prefill time of ``new`` tokens behind ``cached`` ones at each candidate's rates, seconds ``[n]``."""
    rates: Iterator[Floats] = (fleet.column(f"prefill_{term}_s") for term in "abc")
    return prefill_seconds(new.astype(np.float64), cached.astype(np.float64), *rates)


def lower_tier_seconds(fleet: FleetView, residency: Residency) -> Floats:
    """Return the time to bring back into HBM what each candidate holds of the prompt below it, seconds ``[n]``."""
    rates = (fleet.column(f"reload_{tier}_s") for tier in LOWER_TIERS)
    return cast("Floats", reload_seconds(*residency.by_tier[:, Tier.HOST :].T, *rates))


def first_token_seconds(request: RoutingRequest, fleet: FleetView, residency: Residency, now: float) -> Floats:
    """Return the predicted time to the first token: queue, prefill, and reload from lower tiers; seconds ``[n]``."""
    prefill = prefill_of(fleet, uncached_tokens(request, residency), residency.hit_tokens)
    return queue_seconds(fleet, now) + prefill + lower_tier_seconds(fleet, residency)


def lowest(fleet: FleetView, key: bytes, *columns: Floats | Ints) -> int:
    """Return the row where the first column is least; ties go to the next column, in the end to the ring.

    Args:
        fleet: the candidates.
        key: where on the ring a tie is broken, so that no worker is favoured for standing first in a list.
        columns: what to compare, most important first, each ``[n]``.
    """
    rows = np.arange(len(fleet))
    for column in columns:
        values = column[rows]
        rows = rows[values == values.min()]
        if len(rows) == 1:
            return int(rows[0])
    return ring_for(fleet).first(key, set(rows.tolist()))


def decided(
    request: RoutingRequest,
    residency: Residency,
    row: int,
    reason: str | None = None,
    costs: Costs | None = None,
    terms: Terms | None = None,
    predicted_ttft: float = 0.0,
) -> Decision:
    """Return the decision for ``row``.

    Args:
        request: what was decided about.
        residency: of its prompt.
        row: the chosen candidate.
        reason: see ``Decision``; by default ``hit`` if the worker holds any of the prompt, else ``load``.
        costs: order the fallbacks; no live view of the fleet.
        terms: explain the costs; no live views either.
        predicted_ttft: see ``Decision``.
    """
    hit = expected_hit(request, residency, row)
    explain = partial(_rows, terms) if terms else None
    return Decision(row, hit, predicted_ttft, reason or ("hit" if hit else "load"), costs, explain)


def _rows(terms: Terms) -> Breakdown:
    columns = [column.tolist() for column in terms.values()]
    return [dict(zip(terms, values, strict=True)) for values in zip(*columns, strict=True)]
