"""What a simulation found: one row per request, samples of every worker, totals."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from policies.base import N_TIERS, Floats, Ints, Tier

_PER_REQUEST: Final = (
    *("arrival_s", "ttft_s", "itl_s", "wait_s", "finish_s", "prompt_tokens", "output_tokens"),
    *("hit_tokens", "expected_hit_tokens", "worker"),
)
_PER_SAMPLE: Final = ("sample_s", "running", "waiting", "pending_tokens", "kv_usage")


@dataclass(slots=True)
class SimResult:
    """Requests in the order of the trace, ``n`` of them; ``w`` workers; ``s`` samples. Times in simulated seconds.

    Attributes:
        policy: name of the policy.
        trace: name of the trace.
        arrival_s: ``[n]``, when the request reached the gateway.
        ttft_s: ``[n]``, from arrival to the first token; nan for a request that was never answered.
        itl_s: ``[n]``, mean time between tokens; nan where there is only one.
        wait_s: ``[n]``, from arrival to the first step that computed something of it.
        finish_s: ``[n]``, when its last token came.
        prompt_tokens: int64 ``[n]``.
        output_tokens: int64 ``[n]``.
        hit_tokens: int64 ``[n, 4]``, prompt tokens found in a cache, by ``policies.base.Tier``.
        expected_hit_tokens: int64 ``[n]``, what the policy expected.
        worker: int64 ``[n]``, who answered, or -1.
        sample_s: ``[s]``, times of the samples.
        running: int64 ``[s, w]``, requests in the batch.
        waiting: int64 ``[s, w]``, requests queued at the engine.
        pending_tokens: ``[s, w]``, uncached prompt tokens dispatched and not yet answered.
        kv_usage: ``[s, w]``, share of HBM in use by requests, 0 to 1.
        counters: totals: preemptions, evictions, retries, bytes by link, …
        duration_s: simulated time from the first arrival to the last token.
    """

    policy: str
    trace: str
    arrival_s: Floats
    ttft_s: Floats
    itl_s: Floats
    wait_s: Floats
    finish_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    hit_tokens: Ints
    expected_hit_tokens: Ints
    worker: Ints
    sample_s: Floats
    running: Ints
    waiting: Ints
    pending_tokens: Floats
    kv_usage: Floats
    counters: dict[str, float] = field(default_factory=dict)
    duration_s: float = 0.0

    @property
    def answered(self) -> NDArray[np.bool_]:
        """Which requests were answered, ``[n]``."""
        return np.isfinite(self.finish_s)

    def hit_rate(self) -> float:
        """Return the share of all prompt tokens that came from a cache, whatever the tier."""
        answered = self.answered
        return float(self.hit_tokens[answered].sum() / max(1, self.prompt_tokens[answered].sum()))

    def hit_rates_over_time(self, bins: int = 60) -> tuple[Floats, Floats]:
        """Return the hit rate by tier as it developed.

        Returns:
            Times (the middle of each bin), ``[bins]``, and the share of the prompt tokens that arrived in it and came
            from each tier, ``[bins, 4]``; nan in bins where nothing arrived.
        """
        answered = self.answered
        arrival = self.arrival_s[answered]
        edges = np.linspace(arrival.min(initial=0.0), arrival.max(initial=0.0) + 1e-9, bins + 1)
        prompts, _ = np.histogram(arrival, edges, weights=self.prompt_tokens[answered].astype(float))
        prompts[prompts == 0] = np.nan
        rates = np.empty((bins, N_TIERS))
        for tier in Tier:
            rates[:, tier] = np.histogram(arrival, edges, weights=self.hit_tokens[answered, tier])[0] / prompts
        return (edges[:-1] + edges[1:]) / 2, rates

    def during(self, begin_s: float, end_s: float) -> SimResult:
        """Return what arrived, and was sampled, in an interval; ``counters`` stay those of the whole run."""
        arrived = (self.arrival_s >= begin_s) & (self.arrival_s < end_s)
        sampled = (self.sample_s >= begin_s) & (self.sample_s < end_s)
        return replace(
            self,
            **{name: getattr(self, name)[arrived] for name in _PER_REQUEST},
            **{name: getattr(self, name)[sampled] for name in _PER_SAMPLE},
            duration_s=end_s - begin_s,
        )

    def summary(self) -> dict[str, float | int | str]:
        """Return the figures by which runs are compared; seconds, shares, and per second."""
        answered = self.answered
        prompts = max(1, int(self.prompt_tokens[answered].sum()))
        summary: dict[str, float | int | str] = {
            "policy": self.policy,
            "trace": self.trace,
            "requests": len(answered),
            "answered": int(answered.sum()),
            "duration_s": self.duration_s,
            "requests_per_s": float(answered.sum() / max(self.duration_s, 1e-9)),
            "output_tokens_per_s": float(self.output_tokens[answered].sum() / max(self.duration_s, 1e-9)),
            "hit_rate": self.hit_rate(),
        }
        for tier in Tier:
            summary[f"hit_rate_{tier.name.lower()}"] = float(self.hit_tokens[answered, tier].sum() / prompts)
        for name, values in (("ttft", self.ttft_s), ("itl", self.itl_s), ("wait", self.wait_s)):
            known = values[np.isfinite(values)]
            summary[f"{name}_mean_s"] = float(known.mean()) if len(known) else 0.0
            for percent in (50, 90, 99):
                summary[f"{name}_p{percent}_s"] = float(np.percentile(known, percent)) if len(known) else 0.0
        return summary | self.counters
