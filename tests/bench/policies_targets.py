"""What the default policy is held to, cell by cell, against the best of what others have published there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Final

from tests.bench.measure import Figures
from tests.bench.policies_cells import Cell

OURS: Final = "expected-cost"
LIMIT: Final = "nothing evicted"
"""Ours with an unbounded HBM: a reference, no baseline."""

Entrants = Mapping[str, Sequence[Figures]]
"""Entrant → figures, one per seed."""

Results = dict[str, dict[str, list[Figures]]]
"""Cell → the same."""


@dataclass(frozen=True)
class Wanted:
    """What a cell is held to, relative to the best baseline: changes of mean TTFT, requests per second and p99."""

    ttft: float
    requests: float | None = None
    p99: float | None = None


NO_LOSS: Final = Wanted(0.02)


def wanted(cell: Cell) -> Wanted:
    """Return a cell's targets; where there is none of its own it must not lose."""
    if cell.host_counts:
        return Wanted(-0.1 if cell.amount <= 1 else -0.3)
    if cell.traffic == "claude-code" and cell.tiers == "hbm":
        return {
            0.6: Wanted(-0.05),
            0.9: Wanted(-0.15),
            1.2: Wanted(-0.25, 0.08, -0.5),
            1.6: Wanted(-0.4, 0.35),
            2.2: Wanted(-0.35, 0.4),
        }[cell.amount]
    if cell.traffic == "mooncake" and cell.amount >= 0.8:
        small_cache = cell.tiers == "hbm"
        if not small_cache:
            return Wanted(-0.05)
        return Wanted(-0.15) if cell.amount >= 0.9 else NO_LOSS
    return NO_LOSS


@dataclass(frozen=True)
class Gain:
    """A relative change against the best baseline: the mean over paired seeds, and its standard error."""

    mean: float
    error: float

    def __str__(self) -> str:
        return f"{self.mean:+.1%}" + ("" if math.isnan(self.error) else f" ± {self.error:.1%}")


def best_baseline(entrants: Entrants) -> str:
    """Return the baseline with the least mean TTFT."""
    return min(
        (label for label in entrants if label not in (OURS, LIMIT)),
        key=lambda label: mean_of(entrants[label], "ttft_mean_s"),
    )


def gain(ours: Sequence[Figures], theirs: Sequence[Figures], key: str) -> Gain:
    """Return how much more of something we have, seed by seed."""
    changes = [our[key] / their[key] - 1 for our, their in zip(ours, theirs, strict=True)]
    return Gain(fmean(changes), stdev(changes) / math.sqrt(len(changes)) if len(changes) > 1 else math.nan)


def targets(results: Results, cells: Iterable[Cell]) -> dict[str, bool]:
    """Return for each target whether it was met; what was not measured was not met."""
    met: dict[str, bool] = {}
    for cell in cells:
        want, entrants = wanted(cell), results.get(cell.name)
        limits = {
            "ttft": ("ttft_mean_s", want.ttft),
            "throughput": ("requests_per_s", want.requests),
            "ttft_p99": ("ttft_p99_s", want.p99),
        }
        for figure, (key, limit) in limits.items():
            if limit is None:
                continue
            name = f"{cell.name}_{figure}_{limit:+.0%}"
            if entrants is None:
                met[name] = False
                continue
            change = gain(entrants[OURS], entrants[best_baseline(entrants)], key).mean
            met[name] = change >= limit if key == "requests_per_s" else change <= limit
        met[f"{cell.name}_no_collapse"] = entrants is not None and not any(
            figures["collapsed"] for figures in entrants[OURS]
        )
    return met


def mean_of(seeds: Sequence[Figures], key: str) -> float:
    return fmean(figures[key] for figures in seeds)
