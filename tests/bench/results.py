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
        return _medians(self._rounds_that_count(workload))

    def added(self, workload: str) -> dict[str, Figures]:
        """Return for each router the latency above that of the upstream asked directly: medians of the rounds."""
        return _medians(
            [
                {
                    target: {key: figures[key] - one_round[DIRECT][key] for key in ("p50_ms", "p99_ms")}
                    for target, figures in one_round.items()
                    if target != DIRECT
                }
                for one_round in self._rounds_that_count(workload)
                if DIRECT in one_round
            ]
        )

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
            for one_round in self._rounds_that_count(workload)
            if {KVWAY, *RUST} <= one_round.keys()
        ]
        return median(ratios) if ratios else None

    def _rounds_that_count(self, workload: str) -> list[dict[str, Figures]]:
        """Return the rounds; kvway is left out of all when it failed in one: it must not win by its better rounds."""
        rounds = self.rounds[workload]
        if all(KVWAY in one_round for one_round in rounds):
            return rounds
        return [{target: one_round[target] for target in one_round if target != KVWAY} for one_round in rounds]


def _medians(rounds: list[dict[str, Figures]]) -> dict[str, Figures]:
    by_target = defaultdict(list)
    for one_round in rounds:
        for target, figures in one_round.items():
            by_target[target].append(figures)
    return {
        target: {key: median(figures[key] for figures in measured) for key in measured[0]}
        for target, measured in by_target.items()
    }


def _speed_ratio(ours: Figures, theirs: Figures) -> float:
    if min(ours["router_share"], theirs["router_share"]) < SATURATED_SHARE:
        return theirs["cpu_us"] / ours["cpu_us"]
    return ours["rate"] / theirs["rate"]
