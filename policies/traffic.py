"""What expected-cost learns about the traffic of one model from its own decisions.

Every quantity is an exponentially decaying sum: recent decisions count more, and nothing is kept per decision. Rates
decay over ``rate_window_s``, what concerns caches over ``memory_s``, about the time a conversation stays in a cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from math import exp, inf
from statistics import fmean
from typing import Final

import numpy as np

from policies.base import FleetView, Floats

MAX_UTILISATION: Final = 0.95
MAX_ENDS: Final = 8192  # prefixes remembered
MAX_WORKERS: Final = 16_384  # beyond, what is known of workers that are gone is forgotten
PRIOR_GROWTH_TOKENS: Final = 2048.0  # what a conversation is taken to add before any has been seen to
PRIOR_CONVERSATIONS: Final = 16.0  # how many conversations that opinion is worth
RESOLUTION_S: Final = 0.05  # sums are brought up to date no more often: decay over less than this is nothing


class Traffic:
    """Arrivals, cache turnover and branching prefixes of one model.

    A worker's turnover is how many times over its cache was filled anew of late: the higher it is, the younger are the
    tokens that it evicts, and the likelier they would have been used again. What a lower tier gives back to HBM is not
    new: what makes room for it has a copy there too.
    """

    __slots__ = (
        "_advanced_at",
        "_arrivals",
        "_busy_s",
        "_continued_tokens",
        "_conversations",
        "_ends",
        "_everyone",
        "_known",
        "_memory_s",
        "_names",
        "_rate_window_s",
        "_reserved",
        "_rows",
        "_turnover",
        "_version",
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
        self._known: dict[str, int] = {}  # worker → its row in _turnover
        self._turnover = np.zeros(0)
        self._reserved = np.zeros(0)  # tokens counted in _turnover that conversations are still to add
        self._names: Sequence[str] = ()  # the candidates of the last decision …
        self._version = -1
        self._rows = np.zeros(0, np.int64)  # … their rows …
        self._everyone = False  # … and whether these are all, in order

    def advance(self, fleet: FleetView, now: float) -> None:
        """Let time pass, and follow the set of candidates. Call it first, once per decision."""
        if fleet.names is not self._names or fleet.version != self._version:
            self._follow(fleet)
        elapsed = now - self._advanced_at
        if elapsed > RESOLUTION_S:
            self._advanced_at = now
            rate_decay = exp(-elapsed / self._rate_window_s)
            self._arrivals *= rate_decay
            self._busy_s *= rate_decay
            memory_decay = exp(-elapsed / self._memory_s)
            self._continued_tokens *= memory_decay
            self._conversations *= memory_decay
            self._turnover *= memory_decay
            self._reserved *= memory_decay

    def crowding(self) -> float:
        """Return ``(λ/n)/(1 − ρ)``: how many requests have to wait for each second that a worker is busy (M/G/1)."""
        n = len(self._rows)
        utilisation = min(self._busy_s / self._rate_window_s / n, MAX_UTILISATION)
        return self._arrivals / self._rate_window_s / n / (1.0 - utilisation)

    @property
    def turnover(self) -> Floats:
        """Turnover of the candidates, float64 ``[n]``, not to be changed."""
        return self._turnover if self._everyone else self._turnover[self._rows]

    def growth_tokens(self) -> float:
        """Return how many tokens a new conversation goes on to add to its worker's cache, on average."""
        prior_tokens = PRIOR_GROWTH_TOKENS * PRIOR_CONVERSATIONS
        return (self._continued_tokens + prior_tokens) / (self._conversations + PRIOR_CONVERSATIONS)

    def met(self, chunk: bytes, prompt_tokens: int, more: bool, prefill_s: float, now: float) -> float:
        """Return how many conversations started from the prefix that ends with ``chunk``, and count this one.

        The known part of a prompt ends there. A conversation moves on: it comes back to such an end only with a longer
        prompt, and only until the next chunk is whole. Whoever else comes there has started from the same prefix.
        Starts that are closer together than its prefill count as a part of one: a burst waits for a single prefill, and
        says nothing of how often the prefix will be wanted.

        Args:
            chunk: the last known chunk of the prompt.
            prompt_tokens: length of the prompt.
            more: whether the prompt has whole chunks after it.
            prefill_s: seconds that computing the prefix takes.
            now: monotonic seconds.
        """
        count, at, last_tokens, last_more = self._ends.pop(chunk, (0.0, -inf, prompt_tokens, True))
        count *= exp(min(at - now, 0.0) / self._memory_s)
        same = prompt_tokens > last_tokens and not (more and last_more)
        since = max(now - at, 0.0)
        start = 0.0 if same else since / prefill_s if since < prefill_s else 1.0
        self._ends[chunk] = (count + start, now, prompt_tokens, more)
        if len(self._ends) > MAX_ENDS:
            self._ends.popitem(last=False)
        return 0.0 if same else count

    def decided(self, row: int, fresh: bool, new_tokens: float, work_s: float, capacity_tokens: float) -> None:
        """Account for a decision.

        Args:
            row: the worker.
            fresh: whether a new conversation begins there.
            new_tokens: tokens that its cache takes in.
            work_s: seconds of its prefill.
            capacity_tokens: size of its cache, 0 if unknown.
        """
        self._arrivals += 1.0
        self._busy_s += work_s
        known = self._rows.item(row)
        if fresh:
            # Room that it is going to need is taken at once: conversations that begin together spread.
            taken = new_tokens + self.growth_tokens()
            self._reserved[known] += taken - new_tokens
            self._conversations += 1.0
        else:
            taken = new_tokens - min(new_tokens, self._reserved.item(known))
            self._reserved[known] -= new_tokens - taken
            self._continued_tokens += new_tokens
        if capacity_tokens > 0:
            self._turnover[known] += taken / capacity_tokens

    def _follow(self, fleet: FleetView) -> None:
        """Find the candidates' rows; sets of candidates differ by adapter, by retry, and as workers come and go."""
        if len(self._known) > MAX_WORKERS:
            self._known = {}
            self._turnover = np.zeros(0)
            self._reserved = np.zeros(0)
        strangers = [name for name in fleet.names if name not in self._known]
        if strangers:
            # a newcomer at zero would attract every new conversation; at the mean it gets its share
            mean = fmean(self._turnover) if self._known else 0.0
            self._turnover = np.append(self._turnover, [mean] * len(strangers))
            self._reserved = np.append(self._reserved, [0.0] * len(strangers))
            self._known |= {name: row for row, name in enumerate(strangers, start=len(self._known))}
        rows = [self._known[name] for name in fleet.names]
        self._rows = np.array(rows, np.int64)
        self._everyone = rows == list(range(len(self._known)))
        self._names, self._version = fleet.names, fleet.version
