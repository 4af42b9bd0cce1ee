"""Routing policies and the mathematics under them: pure functions, no I/O, no clock, no await.

The gateway and the simulator call the same objects through the same ``FleetView``. Importing any module of the package
registers every policy.
"""

from policies import (
    expected_cost,
    least_requests,
    least_tokens,
    least_work,
    power_of_two,
    prefix_hash,
    random_choice,
    round_robin,
    session,
)

__all__ = [
    "expected_cost",
    "least_requests",
    "least_tokens",
    "least_work",
    "power_of_two",
    "prefix_hash",
    "random_choice",
    "round_robin",
    "session",
]
