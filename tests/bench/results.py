"""What a run of the benchmark found, and what follows from it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from statistics import mean, median

from tests.bench.measure import Figures

KVWAY = "kvway"
DIRECT = "direct"
RUST = ("sglang-router", "vllm-router")
# A router that had less of its core than this was not the limit: load generator, upstream or other programs were.
SATURATED_SHARE = 0.95


@dataclass
class Results:
    """Figures per workload, round and target (a target that failed is missing), and the remarks that belong to them."""

    rounds: dict[str, list[dict[str, Figures]]] = field(default_factory=lambda: defaultdict(list))
    memory: dict[str, dict[str, Figures]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def medians(self, workload: str) -> dict[str, Figures]:
        """Return for each target the median over the rounds of every figure."""
        by_target = defaultdict(list)
        for one_round in self.rounds[workload]:
            for target, figures in one_round.items():
                by_target[target].append(figures)
        return {
            target: {key: median(figures[key] for figures in rounds) for key in rounds[0]}
            for target, rounds in by_target.items()
        }

    def added(self, workload: str) -> dict[str, Figures]:
        """Return for each router the latency above that of the upstream asked directly: medians of the rounds."""
        by_target = defaultdict(list)
        for one_round in self.rounds[workload]:
            direct = one_round.get(DIRECT)
            for target, figures in one_round.items():
                if direct and target != DIRECT:
                    by_target[target].append({key: figures[key] - direct[key] for key in ("p50_ms", "p99_ms")})
        return {
            target: {key: median(figures[key] for figures in rounds) for key in rounds[0]}
            for target, rounds in by_target.items()
        }

    def others_share(self) -> float:
        """Return how much of the router's core other programs took: the mean over everything measured."""
        shares = [
            figures["others_share"]
            for rounds in self.rounds.values()
            for one_round in rounds
            for target, figures in one_round.items()
            if target != DIRECT
        ]
        return mean(shares) if shares else 0.0

    def speed_ratio(self, workload: str) -> float | None:
        """Return kvway's speed over the faster Rust router's, or None unless all three were measured in a round.

        Where one of the two was not saturated, their CPU per unit is compared instead of units per second.
        """
        ratios = [
            min(_speed_ratio(one_round[KVWAY], one_round[rival]) for rival in RUST)
            for one_round in self.rounds[workload]
            if {KVWAY, *RUST} <= one_round.keys()
        ]
        return median(ratios) if ratios else None


def _speed_ratio(ours: Figures, theirs: Figures) -> float:
    if min(ours["router_share"], theirs["router_share"]) < SATURATED_SHARE:
        return theirs["cpu_us"] / ours["cpu_us"]
    return ours["rate"] / theirs["rate"]
