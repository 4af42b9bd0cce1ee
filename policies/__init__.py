"""Routing policies and the mathematics under them: pure functions, no I/O, no clock, no await.

The gateway and the simulator call the same objects through the same ``FleetView``. Importing any module of the package
registers every policy.
"""

from policies import (
    burst_colocation,
    cache_threshold,
    conductor,
    dualmap,
    expected_cost,
    lbgr,
    least_requests,
    least_tokens,
    least_work,
    lmetric,
    overlap_cost,
    power_of_two,
    predicted_latency,
    prefix_hash,
    random_choice,
    round_robin,
    session,
    sticky,
    weighted,
)

__all__ = [
    "burst_colocation",
    "cache_threshold",
    "conductor",
    "dualmap",
    "expected_cost",
    "lbgr",
    "least_requests",
    "least_tokens",
    "least_work",
    "lmetric",
    "overlap_cost",
    "power_of_two",
    "predicted_latency",
    "prefix_hash",
    "random_choice",
    "round_robin",
    "session",
    "sticky",
    "weighted",
]
