"""Fetching a prefix from another worker instead of computing it again: who can, what it takes, and when it pays.

Of a prompt of which a worker holds ``p`` tokens and another one of its group ``q``, it can fetch the difference. That
takes ``latency + (q - p)·s`` seconds, with ``s`` the KV bytes of a token over the bandwidth of the link. Computing it
takes ``(q - p)·(b + c·(p + q)/2)``. The tokens cost the lesser of the two, so what fetching saves is::

    max(0, (q - p)·(b + c·(p + q)/2 - s) - latency)

What lies in a remote pool is no worker's to give: all that share the pool read it themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple, cast

import numpy as np

from policies.base import COLUMNS, FleetView, Floats, Ints, Residency, Tier

NO_GROUP: Final = -1

_RUNNING: Final = COLUMNS.index("running")
_B, _C = (COLUMNS.index(f"prefill_{letter}_s") for letter in "bc")


class Pull(NamedTuple):
    """A prefix that the chosen worker is to fetch.

    Attributes:
        source: row of the worker to fetch it from.
        tokens: how many, beyond those it holds itself.
        saved_s: seconds that it takes less than to compute them.
        seconds: that it takes.
    """

    source: int
    tokens: int
    saved_s: float
    seconds: float = 0.0


@dataclass(slots=True, frozen=True)
class PullLinks:
    """Who can fetch from whom, one entry per candidate.

    Attributes:
        group: int64 ``[n]``, workers of one group fetch from one another, numbered from 0; ``NO_GROUP`` from nobody.
        s_per_token: float64 ``[n]``, seconds per token towards each worker.
        latency_s: float64 ``[n]``, seconds before the first.
    """

    group: Ints
    s_per_token: Floats
    latency_s: Floats
    _one_group: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_one_group", bool((self.group == 0).all()))

    def take(self, rows: Ints) -> PullLinks:
        """Return the links restricted to ``rows``."""
        return PullLinks(self.group[rows], self.s_per_token[rows], self.latency_s[rows])

    def savings(self, fleet: FleetView, held: Ints | Floats, residency: Residency) -> Floats:
        """Return the seconds that each worker saves by fetching, ``[n]``, 0 where it does not pay.

        Args:
            fleet: the candidates.
            held: tokens that each is taken to hold, ``[n]``.
            residency: what they have to give.
        """
        reach = self._reach(_given(residency))
        b, c = fleet.state[_B], fleet.state[_C]
        tokens = np.maximum(reach - held, 0)
        saved = tokens * (b + (reach + held) * (0.5 * c) - self.s_per_token) - self.latency_s
        return cast("Floats", np.maximum(saved, 0.0))

    def best(self, fleet: FleetView, row: int, held: int, residency: Residency) -> Pull | None:
        """Return what one worker is to fetch, None where that does not pay.

        Of several that hold as much, the least busy one gives.

        Args:
            fleet: the candidates.
            row: the worker.
            held: tokens that it holds.
            residency: what they have to give.
        """
        given = _given(residency)
        if not self._one_group:
            if self.group[row] == NO_GROUP:
                return None
            given = np.where(self.group == self.group[row], given, 0)
        reach = int(given.max())
        b, c = fleet.state[_B : _C + 1, row].tolist()
        tokens = reach - held
        seconds = tokens * float(self.s_per_token[row]) + float(self.latency_s[row])
        saved_s = tokens * (b + c * 0.5 * (reach + held)) - seconds
        if tokens <= 0 or saved_s <= 0:
            return None
        holders = (given == reach).nonzero()[0]
        return Pull(int(holders[fleet.state[_RUNNING, holders].argmin()]), tokens, saved_s, seconds)

    def _reach(self, given: Ints) -> Ints:
        """Return the longest prefix that each worker could hold after fetching, ``[n]``, or one number for all."""
        if self._one_group:
            return cast("Ints", given.max())
        longest = np.zeros(len(self.group) + 1, np.int64)  # the last one is that of NO_GROUP
        np.maximum.at(longest, self.group, given)
        longest[NO_GROUP] = 0
        return longest[self.group]


def _given(residency: Residency) -> Ints:
    """Return the tokens that each worker has for others, ``[n]``."""
    return residency.hit_tokens - residency.by_tier[:, Tier.REMOTE]
