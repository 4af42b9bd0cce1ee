"""What expected-cost learns about the traffic of one model from its own decisions.

Every quantity is an exponentially decaying sum: recent decisions count more, and nothing is kept per decision. Rates
decay over ``rate_window_s``, what concerns caches over ``memory_s``, about the time a conversation stays in a cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from math import exp
from typing import Final

import numpy as np

from policies.base import FleetView, Floats

MAX_UTILISATION: Final = 0.95
MAX_ENDS: Final = 8192
RESOLUTION_S: Final = 0.05


class Traffic:
    """Arrivals, cache turnover and branching prefixes of one model.

    Attributes:
        turnover: float64 ``[n]``, how many times over each worker's HBM cache was filled anew of late. The higher,
            the younger are the tokens it evicts, and the likelier they would have been used again.
    """

    __slots__ = (
        "_advanced_at",
        "_arrivals",
        "_busy_s",
        "_continued_tokens",
        "_conversations",
        "_ends",
        "_memory_s",
        "_names",
        "_rate_window_s",
        "_version",
        "turnover",
    )

    def __init__(self, rate_window_s: float, memory_s: float, now: float) -> None:
        self._rate_window_s = rate_window_s
        self._memory_s = memory_s
        self._advanced_at = now
        self._arrivals = 0.0
        self._busy_s = 0.0
        self._continued_tokens = 0.0
        self._conversations = 0.0
        self._ends: OrderedDict[bytes, tuple[float, float, int, bool]] = OrderedDict()
        self._names: Sequence[str] = ()
        self._version = -1
        self.turnover: Floats = np.zeros(0)

    def advance(self, fleet: FleetView, now: float) -> None:
        """Let time pass, and follow the set of candidates. Call it first, once per decision."""
        if fleet.names is not self._names or fleet.version != self._version:
            self._align(fleet)
        elapsed = now - self._advanced_at
        if elapsed > RESOLUTION_S:
            self._advanced_at = now
            rate_decay = exp(-elapsed / self._rate_window_s)
            self._arrivals *= rate_decay
            self._busy_s *= rate_decay
            memory_decay = exp(-elapsed / self._memory_s)
            self._continued_tokens *= memory_decay
            self._conversations *= memory_decay
            self.turnover *= memory_decay

    def crowding(self) -> float:
        """Return ``(λ/n)/(1 − ρ)``: how many requests per second of queue a worker makes wait (M/G/1)."""
        n = len(self._names)
        utilisation = min(self._busy_s / self._rate_window_s / n, MAX_UTILISATION)
        return self._arrivals / self._rate_window_s / n / (1.0 - utilisation)

    def growth_tokens(self) -> float:
        """Return how many tokens a new conversation has gone on to add to its worker's cache, on average."""
        return self._continued_tokens / (self._conversations + 1.0)

    def met(self, chunk: bytes, prompt_tokens: int, more: bool, now: float) -> float:
        """Return how many conversations started from the prefix that ends with ``chunk``, and count this one.

        The known part of a prompt ends there. A conversation moves on: it comes back to such an end only with a longer
        prompt, and only until the next chunk is whole. Whoever else comes there has started from the same prefix.

        Args:
            chunk: the last known chunk of the prompt.
            prompt_tokens: length of the prompt.
            more: whether the prompt has whole chunks after it.
            now: monotonic seconds.
        """
        count, at, last_tokens, last_more = self._ends.pop(chunk, (0.0, now, prompt_tokens, True))
        count *= exp((at - now) / self._memory_s)
        same = prompt_tokens > last_tokens and not (more and last_more)
        self._ends[chunk] = (count + (not same), now, prompt_tokens, more)
        if len(self._ends) > MAX_ENDS:
            self._ends.popitem(last=False)
        return 0.0 if same else count

    def decided(self, row: int, fresh: bool, new_tokens: float, work_s: float, capacity_tokens: float) -> None:
        """Account for a decision.

        Args:
            row: the worker.
            fresh: whether a new conversation begins there.
            new_tokens: tokens that its HBM takes in.
            work_s: seconds of its prefill.
            capacity_tokens: size of its HBM cache, 0 if unknown.
        """
        self._arrivals += 1.0
        self._busy_s += work_s
        if fresh:
            self._conversations += 1.0
        else:
            self._continued_tokens += new_tokens
        if capacity_tokens > 0:
            self.turnover[row] += new_tokens / capacity_tokens

    def _align(self, fleet: FleetView) -> None:
        known = dict(zip(self._names, self.turnover.tolist(), strict=True))
        # a newcomer at zero would attract every new conversation; at the mean it gets its share
        mean = sum(known.values()) / len(known) if known else 0.0
        self.turnover = np.array([known.get(name, mean) for name in fleet.names])
        self._names, self._version = fleet.names, fleet.version
