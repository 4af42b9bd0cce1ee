"""What several policies share: hits as the engine will grant them, and the least of several columns."""

from __future__ import annotations

import numpy as np

from policies.base import Costs, Decision, FleetView, Floats, Ints, Residency, RoutingRequest
from policies.ring import ring_of


def expected_hit(request: RoutingRequest, residency: Residency, row: int) -> int:
    """Return the prompt tokens that ``row`` will not compute. An engine always computes at least the last one."""
    return max(0, min(int(residency.hit_tokens[row]), request.prompt_tokens - 1))


def uncached_tokens(request: RoutingRequest, residency: Residency) -> Ints:
    """Return the prompt tokens that each candidate would have to prefill, int64 ``[n]``, at least 1."""
    return np.maximum(request.prompt_tokens - residency.hit_tokens, 1)


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
    return ring_of(tuple(fleet.names)).first(key, set(rows.tolist()))


def decided(
    request: RoutingRequest, residency: Residency, row: int, reason: str, costs: Costs | None = None
) -> Decision:
    """Return the decision for ``row``; ``costs`` order the fallbacks."""
    return Decision(row, expected_hit(request, residency, row), reason=reason, costs=costs)
