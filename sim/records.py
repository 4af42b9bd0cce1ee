"""What happens to each request, noted as it happens."""

from __future__ import annotations

from typing import Any

import numpy as np

from policies.base import N_TIERS
from sim.requests import Trace
from sim.results import SimResult


class Records:
    """The columns of a ``SimResult`` that have one row per request.

    Args:
        trace: the requests.

    Attributes:
        arrival_s: when each reached the gateway; nan before.
        done: requests that are over, answered or lost.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._n = n = len(trace.requests)
        self.done = 0
        self.arrival_s = np.full(n, np.nan)
        self._ttft_s = np.full(n, np.nan)
        self._itl_s = np.full(n, np.nan)
        self._wait_s = np.full(n, np.nan)
        self._finish_s = np.full(n, np.nan)
        self._hit_tokens = np.zeros((n, N_TIERS), np.int64)
        self._expected = np.zeros(n, np.int64)
        self._worker = np.full(n, -1)

    @property
    def complete(self) -> bool:
        """Whether every request is over."""
        return self.done == self._n

    def decided(self, number: int, expected_hit_tokens: int) -> None:
        """A policy has chosen a worker."""
        self._expected[number] = expected_hit_tokens

    def admitted(self, number: int, at: float, hit_tokens: list[int]) -> None:
        """The prompt was begun at ``at``, so much of it cached."""
        self._wait_s[number] = at - self.arrival_s[number]
        self._hit_tokens[number] = hit_tokens

    def answered(self, number: int, now: float) -> None:
        """The first token has come."""
        self._ttft_s[number] = now - self.arrival_s[number]

    def finished(self, number: int, worker: int, now: float) -> None:
        """The last token has come."""
        self._finish_s[number] = now
        self._worker[number] = worker
        tokens = self._trace.requests[number].output_tokens
        if tokens > 1:
            first_at = self.arrival_s[number] + self._ttft_s[number]
            self._itl_s[number] = (now - first_at) / (tokens - 1)
        self.done += 1

    def lost(self, number: int) -> None:
        """The request is over without its last token."""
        self._ttft_s[number] = self._wait_s[number] = np.nan
        self.done += 1

    def result(self, policy: str, samples: dict[str, Any], counters: dict[str, float]) -> SimResult:
        """Return everything noted."""
        requests = self._trace.requests
        finished = self._finish_s[np.isfinite(self._finish_s)]
        return SimResult(
            policy=policy,
            trace=self._trace.name,
            arrival_s=self.arrival_s,
            ttft_s=self._ttft_s,
            itl_s=self._itl_s,
            wait_s=self._wait_s,
            finish_s=self._finish_s,
            prompt_tokens=np.array([request.prompt_tokens for request in requests], np.int64),
            output_tokens=np.array([request.output_tokens for request in requests], np.int64),
            hit_tokens=self._hit_tokens,
            expected_hit_tokens=self._expected,
            worker=self._worker,
            **samples,
            counters=counters,
            duration_s=float(finished.max() - np.nanmin(self.arrival_s)) if len(finished) else 0.0,
        )
