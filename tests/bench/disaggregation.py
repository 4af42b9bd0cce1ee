"""What moving KV between workers gains, in the simulator: hand-overs from prefill to decode, and fetched prefixes.

``python -m tests.bench.disaggregation [apart] [--json]``: six workers of which two or three prefill, under the policies
``always``, ``never`` and ``break-even``.

``python -m tests.bench.disaggregation [turns] [--json]``: the same six workers before agents, where prefill workers
pull the turn before from the worker that decoded it, and where they do not.

``python -m tests.bench.disaggregation [pull] [--json]``: four workers that do both, and fetch prefixes from one another
over links of several speeds, or do not; for agents whose contexts are long, and for bursts of one cold prompt.

Llama 70B on four H100 per worker, ``expected-cost``, requests released least work first, means over the seeds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from statistics import fmean
from typing import Any, Final, Literal

import numpy as np
from rich.console import Console
from rich.table import Table

from sim.engine import simulate
from sim.fleet import DisaggregationSettings, FleetSettings, PullSettings
from sim.generators import generator
from sim.scaling import working_set_tokens

Kind = Literal["apart", "turns", "pull"]
Figures = dict[str, float]
Line = tuple[str, str | float]
"""Traffic, and the policy, with or without pulled turns, or the link's GB/s."""
Lines = dict[Line, Figures]
Gains = dict[Line, list[float]]

APART: Final = {
    # long tasks, of which everything but a step is cached from the second turn on
    "agents": ("agents:sessions=96,turns=8,task_tokens=12000,spread_s=40", 2),
    "agents, 3 prefill": ("agents:sessions=96,turns=8,task_tokens=12000,spread_s=40", 3),
    # a third of them: nobody waits
    "few agents": ("agents:sessions=32,turns=8,task_tokens=12000,spread_s=40", 2),
    # nothing but new documents
    "documents": ("rag:requests=600,rate=6,documents=600,zipf=0,document_tokens=8000", 3),
}
APART_GB_S: Final = 40.0
POLICIES: Final = ("always", "never", "break-even")
TURNS: Final = ("agents", "agents, 3 prefill")
PULLED: Final = ", pulled"
PULLING: Final = ("always", f"always{PULLED}", "break-even", f"break-even{PULLED}")
KEPT_S: Final = 400.0

LONG_AGENTS: Final = (
    "agents:sessions=32,turns=15,system_tokens=2000,task_tokens=30000,observation_tokens=3000,think_s=2"
)
PULL: Final = {  # traffic, and its working set over the HBM of all workers; 0: as much HBM as there is
    "agents, ws/cap 0.5": (LONG_AGENTS, 0.5),
    "agents, ws/cap 0.7": (LONG_AGENTS, 0.7),
    "bursts": ("bursts:bursts=40", 0.0),
}
PULL_GB_S: Final = (0.0, 10.0, 20.0, 40.0, 80.0)
SEEDS: Final = {"apart": 2, "turns": 2, "pull": 3}


@dataclass(frozen=True)
class Job:
    """One simulation: a line of the table, and a seed."""

    kind: Kind
    cell: str
    choice: str | float
    seed: int


def jobs_of(kind: Kind) -> Iterator[Job]:
    cells: Iterable[str] = {"apart": APART, "turns": TURNS, "pull": PULL}[kind]
    choices: Sequence[str | float] = {"apart": POLICIES, "turns": PULLING, "pull": PULL_GB_S}[kind]
    for cell, choice, seed in product(cells, choices, range(SEEDS[kind])):
        yield Job(kind, cell, choice, seed)


def run(job: Job) -> Figures:
    """Simulate one job."""
    source, amount = (PULL if job.kind == "pull" else APART)[job.cell]
    trace = generator(source).trace(job.seed)
    if isinstance(job.choice, str):
        policy: Any = job.choice.removesuffix(PULLED)
        kept_s = KEPT_S if policy != job.choice else 0.0
        apart = DisaggregationSettings(
            prefill_workers=int(amount), bytes_per_s=APART_GB_S * 1e9, policy=policy, pull_back_s=kept_s
        )
        fleet = FleetSettings(workers=6, disaggregation=apart)
    else:
        pull = PullSettings(bytes_per_s=job.choice * 1e9) if job.choice else None
        fleet = FleetSettings(workers=4, pull=pull)
        if amount:
            capacity = round(working_set_tokens(trace) / amount / fleet.workers)
            fleet = replace(fleet, capacity_tokens=capacity)
    result = simulate(trace, fleet, "expected-cost", seed=job.seed)
    summary = result.summary()
    counter = {"apart": "transfers", "turns": "turns_pulled", "pull": "pulls"}[job.kind]
    moved = result.counters.get(counter, 0.0)
    return {
        "ttft_mean_s": float(summary["ttft_mean_s"]),
        "ttft_p99_s": float(summary["ttft_p99_s"]),
        "itl_mean_s": float(summary["itl_mean_s"]),
        "answer_mean_s": float(np.nanmean(result.finish_s - result.arrival_s)),
        "requests_per_s": float(summary["requests_per_s"]),
        "hit_rate": float(summary["hit_rate"]),
        "moved_share": float(moved) / len(trace.requests),
    }


def mean_of(found: Sequence[Figures]) -> Figures:
    return {name: fmean(figures[name] for figures in found) for name in found[0]}


def measured(kind: Kind) -> tuple[Lines, Gains]:
    """Simulate everything, two at a time.

    Returns:
        By cell and choice the means over the seeds; and by how much, seed by seed, the mean TTFT is longer than with
        the first choice of the cell, as a share.
    """
    jobs = list(jobs_of(kind))
    runs: dict[Line, list[Figures]] = {}
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        for job, figures in zip(jobs, pool.map(run, jobs), strict=True):
            runs.setdefault((job.cell, job.choice), []).append(figures)
    gains: Gains = {}
    for (cell, choice), found in runs.items():
        first = next(each for (other, _), each in runs.items() if other == cell)
        pairs = zip(found, first, strict=True)
        gains[cell, choice] = [one["ttft_mean_s"] / other["ttft_mean_s"] - 1 for one, other in pairs]
    return {line: mean_of(found) for line, found in runs.items()}, gains


def table(kind: Kind, found: Lines, gains: Gains) -> Table:
    shown = Table(title=f"{kind}, means of {SEEDS[kind]} seeds", title_justify="left")
    shown.add_column("traffic")
    shown.add_column("link" if kind == "pull" else "policy")
    for title in ("TTFT s", "p99 s", "ITL ms", "answer s", "requests/s", "hits", "moved"):
        shown.add_column(title, justify="right")
    if kind != "apart":
        shown.add_column("TTFT by seed", justify="right")
    for (cell, choice), figures in found.items():
        shown.add_row(
            cell,
            choice if isinstance(choice, str) else (f"{choice:g} GB/s" if choice else "none"),
            f"{figures['ttft_mean_s']:.3f}",
            f"{figures['ttft_p99_s']:.2f}",
            f"{figures['itl_mean_s'] * 1e3:.1f}",
            f"{figures['answer_mean_s']:.2f}",
            f"{figures['requests_per_s']:.2f}",
            f"{figures['hit_rate']:.1%}",
            f"{figures['moved_share']:.0%}",
            *([" ".join(f"{gain:+.0%}" for gain in gains[cell, choice])] if kind != "apart" else []),
        )
    return shown


def wins(found: Lines, figure: str) -> list[str]:
    """Return the cells in which a figure is less with ``break-even`` than with ``always`` and with ``never``."""
    cells = dict.fromkeys(cell for cell, _ in found)
    values = {cell: [found[cell, policy][figure] for policy in POLICIES] for cell in cells}
    return [cell for cell, (always, never, break_even) in values.items() if break_even < min(always, never)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.disaggregation", description=__doc__.splitlines()[0])
    parser.add_argument("kind", nargs="?", choices=("apart", "turns", "pull"), help="one of them; default: all")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    console = Console(stderr=options.json, width=120)
    kinds: tuple[Kind, ...] = (options.kind,) if options.kind else ("apart", "turns", "pull")
    report: dict[str, Any] = {}
    for kind in kinds:
        found, gains = measured(kind)
        console.print(table(kind, found, gains))
        report[kind] = [
            {"traffic": cell, "choice": choice, **figures, "ttft_by_seed": gains[cell, choice]}
            for (cell, choice), figures in found.items()
        ]
        if kind == "apart":
            report["wins"] = {figure: wins(found, figure) for figure in ("ttft_mean_s", "answer_mean_s")}
            for figure, cells in report["wins"].items():
                console.print(f"{figure}: break-even beats both with {'; '.join(cells) or 'none'}")
    if options.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
