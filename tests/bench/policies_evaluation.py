"""Every policy in every cell (``tests.bench.policies_cells``), and whether the default beats what others published.

``expected-cost`` runs as a gateway runs it, with requests held and released least work first; the others send requests
on at once, to engines that take them first come, first served. In every cell the best of them, by mean TTFT over the
seeds, is the one to beat. Gains are paired: the mean over the seeds of the relative change, with its standard error.

``--limit`` adds what no policy can gain more than: ``expected-cost`` where HBM never evicts. It beats nobody, and shows
how much of a cell's time is recomputing what was evicted. ``--oracle`` lets ``expected-cost`` run with parts of the
future known instead of other policies (``tests.bench.policies_oracle``): gains are against itself then.

Agents are measured from a warm-up to the moment when the first user has had all of its turns, open loops without their
first tenth.
"""

from __future__ import annotations

import json
import math
import os
import platform
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from policies.base import known_policies
from sim.engine import simulate
from sim.fleet import GatewaySettings
from sim.results import SimResult
from sim.users import steady
from tests.bench.measure import Figures
from tests.bench.policies_cells import CELLS, CLAUDE_CODE, DECISIVE, MOONCAKE, Cell, Setting, fleet_of, trace_of
from tests.bench.policies_oracle import Known, simulate_knowing
from tests.bench.policies_targets import LIMIT, OURS, Entrants, Results, best_baseline, gain, mean_of, targets
from tests.processes import ROOT

TRACES: Final = ROOT.parent / "shared" / "traces"
QUICK_TURNS: Final = 40
QUICK_REQUESTS: Final = 2500
_WARM_UP_SHARE: Final = 0.1  # of an open loop's time
_UNBOUNDED: Final = 20  # times HBM: more than all prompts of a cell together
_COLLAPSED: Final = 0.5  # a hit rate, or requests answered, below this share of what they were


@dataclass(frozen=True)
class Entrant:
    """A policy with its parameters, how requests are held and released, a factor for the size of HBM, what is known."""

    label: str
    policy: str
    params: Mapping[str, Any] = field(default_factory=dict)
    order: str = "none"
    hbm: int = 1
    piece_tokens: int = 8192
    make_room: bool = True
    known: Known | None = None


DEFAULT: Final = Entrant(OURS, OURS, order="least-work")
NEVER_EVICTS: Final = replace(DEFAULT, label=LIMIT, hbm=_UNBOUNDED)
_ALL_TAKE_PART: Final = replace(DEFAULT, make_room=False)  # else an oracle would change who may, too
ORACLE: Final = (
    _ALL_TAKE_PART,
    *(replace(_ALL_TAKE_PART, label=f"{known} known best", known=known) for known in get_args(Known)),
    NEVER_EVICTS,
)
BASELINES: Final = (
    *(Entrant(name, name) for name in sorted(known_policies()) if name != OURS),
    Entrant("lmetric, own tokens", "lmetric", {"queued": False}),
    Entrant("sticky, 14 s", "sticky", {"max_gap_s": 14}),
)
# Each is the best of all in one of the decisive cells; `weighted` is what llm-d runs.
STRONGEST: Final = ("weighted", "sticky", "predicted-latency", "dualmap", "lmetric, own tokens")
ABLATION: Final = (
    DEFAULT,
    *(
        Entrant(f"without {term}", OURS, {term: off}, "least-work")
        for term, off in (("price", False), ("reuse", 0), ("growth", False), ("replicate", False), ("bounded", False))
    ),
    Entrant("released fifo", OURS, order="fifo"),
    Entrant("nothing held", OURS),
    Entrant("long prompts whole", OURS, order="least-work", piece_tokens=0),
    Entrant("no room made", OURS, order="least-work", make_room=False),
)


@dataclass(frozen=True)
class Job:
    """One simulation."""

    cell: Cell
    setting: Setting
    seed: int
    entrant: Entrant


def run(job: Job) -> Figures:
    """Simulate, and return the figures of the part that counts."""
    trace = trace_of(job.cell, job.setting, job.seed)
    fleet = fleet_of(job.cell, job.setting)
    fleet = replace(
        fleet,
        capacity_tokens=job.entrant.hbm * fleet.capacity_tokens,
        gateway=GatewaySettings(
            order=job.entrant.order, piece_tokens=job.entrant.piece_tokens, make_room=job.entrant.make_room
        ),
    )
    if job.entrant.known is None:
        result = simulate(trace, fleet, job.entrant.policy, job.entrant.params, job.seed)
    else:
        result = simulate_knowing(job.entrant.known, trace, fleet, job.seed)
    if trace.closed_loop:
        return figures(steady(trace, result), fleet.workers)
    end_s = trace.requests[-1].arrival_s
    return figures(result.during(_WARM_UP_SHARE * end_s, end_s), fleet.workers)


def figures(result: SimResult, workers: int) -> Figures:
    """Return what is compared: the summary, and what it does not say.

    Returns:
        Besides the summary ``imbalance``, tokens prefilled by the busiest worker over the mean; ``longest_wait_s``,
        from arrival to the first step that computed something, of whoever waited longest; ``kv_in_use``, the mean share
        of HBM that running requests use, and that nothing idle can be kept in; ``collapsed``, 1 where the last third
        hit, or was answered, less than half as much as the first.
    """
    summary = {name: float(value) for name, value in result.summary().items() if not isinstance(value, str)}
    answered = result.answered
    uncached = (result.prompt_tokens - result.hit_tokens.sum(1))[answered]
    prefilled = np.bincount(result.worker[answered], uncached, workers)
    first, last = (_hits_and_answers(result, third) for third in (0, 2))
    waits = result.wait_s[np.isfinite(result.wait_s)]
    return summary | {
        "imbalance": float(prefilled.max() / max(prefilled.mean(), 1.0)),
        "longest_wait_s": float(waits.max(initial=0.0)),
        "kv_in_use": float(result.kv_usage.mean()) if result.kv_usage.size else 0.0,
        "collapsed": float(any(after < _COLLAPSED * before for before, after in zip(first, last, strict=True))),
    }


def _hits_and_answers(result: SimResult, third: int) -> tuple[float, float]:
    """Return the hit rate of a third of the time, and the requests answered in it."""
    begin_s = float(result.arrival_s.min(initial=math.inf))
    length_s = result.duration_s / 3
    part = result.during(begin_s + third * length_s, begin_s + (third + 1) * length_s)
    ends = (result.finish_s - begin_s) / length_s
    return part.hit_rate(), float(((ends >= third) & (ends < third + 1)).sum())


def simulate_all(
    jobs: Sequence[Job], processes: int, console: Console, on_cell: Callable[[str, Entrants], None]
) -> Results:
    """Run the jobs, showing how far they are and how long it will take; ``on_cell`` is told of every whole cell."""
    results: Results = {}
    left = Counter(job.cell.name for job in jobs)
    together = sum((job.cell, job.seed) == (jobs[0].cell, jobs[0].seed) for job in jobs)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("simulating", total=len(jobs))
        for job, found in zip(jobs, _outcomes(jobs, processes, together), strict=True):
            name = job.cell.name
            results.setdefault(name, {}).setdefault(job.entrant.label, []).append(found)
            left[name] -= 1
            if not left[name]:
                on_cell(name, results[name])
            bar.update(task, description=name, advance=1)
    return results


def _outcomes(jobs: Sequence[Job], processes: int, together: int) -> Iterator[Figures]:
    if processes == 1:
        yield from map(run, jobs)
        return
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        yield from pool.map(run, jobs, chunksize=together)  # a cell and seed as a whole: its traffic is read once


def table(cell: str, entrants: Entrants, beaten: str) -> Table:
    """Return a cell's figures, means over the seeds; gains are against ``beaten``."""
    columns = {
        "req/s": ("requests_per_s", 1, "{:.2f}"),
        "TTFT": ("ttft_mean_s", 1, "{:.2f}"),
        "p50": ("ttft_p50_s", 1, "{:.2f}"),
        "p90": ("ttft_p90_s", 1, "{:.2f}"),
        "p99": ("ttft_p99_s", 1, "{:.1f}"),
        "ITL": ("itl_mean_s", 1e3, "{:.1f}"),
        "HBM": ("hit_rate_hbm", 100, "{:.1f}"),
        "host": ("hit_rate_host", 100, "{:.1f}"),
        "pool": ("hit_rate_remote", 100, "{:.1f}"),
        "in use": ("kv_in_use", 100, "{:.0f}"),
        "busiest": ("imbalance", 1, "{:.2f}"),
        "longest wait": ("longest_wait_s", 1, "{:.0f}"),
    }
    shown = Table("", *columns, f"TTFT against {beaten}", title=cell, title_justify="left", box=None)
    for label, seeds in sorted(entrants.items(), key=lambda pair: mean_of(pair[1], "ttft_mean_s")):
        cells = [form.format(mean_of(seeds, key) * factor) for key, factor, form in columns.values()]
        collapsed = " collapsed" * any(figures["collapsed"] for figures in seeds)
        shown.add_row(label + collapsed, *cells, str(gain(seeds, entrants[beaten], "ttft_mean_s")))
    return shown


def summarise(entrants: Entrants, beaten: str) -> dict[str, Any]:
    """Return a cell for programs: means, every seed, and the gains against ``beaten`` with standard errors."""
    return {
        label: {
            "mean": {key: mean_of(seeds, key) for key in seeds[0]},
            "seeds": seeds,
            "gains": {
                key: {
                    "against": beaten,
                    "mean": change.mean,
                    "error": None if math.isnan(change.error) else change.error,
                }
                for key in ("ttft_mean_s", "ttft_p99_s", "requests_per_s")
                for change in [gain(seeds, entrants[beaten], key)]
            },
        }
        for label, seeds in entrants.items()
    }


def add_options(parser: ArgumentParser) -> None:
    """Add the options of the evaluation."""
    names = [cell.name for cell in CELLS]
    parser.add_argument(
        "--quick", action="store_true", help="the decisive cells, the strongest baselines, four workers"
    )
    parser.add_argument("--ablation", action="store_true", help="expected-cost without each of its terms instead")
    parser.add_argument("--oracle", action="store_true", help="expected-cost with parts of the future known instead")
    parser.add_argument("--limit", action="store_true", help="with what a fleet that never evicts would reach")
    parser.add_argument("--cells", nargs="+", choices=names, metavar="CELL", help=f"of {', '.join(names)}")
    parser.add_argument("--policies", nargs="+", metavar="POLICY", help="baselines, by name; default: all")
    parser.add_argument("--seeds", type=int, help="runs of each; default 3, with --quick 2")
    parser.add_argument("--workers", type=int, help="of the fleet; default 8, with --quick 4")
    parser.add_argument("--part", choices=("report", "tune"), default="report", help="of the traces")
    parser.add_argument("--traces", type=Path, default=TRACES, help=f"folder with {CLAUDE_CODE} and {MOONCAKE}")
    parser.add_argument("--processes", type=int, default=1, help="simulations at the same time")


def main(options: Namespace) -> None:
    """Evaluate, print tables, and with ``--json`` one object as the last line."""
    console = Console(stderr=options.json, width=150)
    quick = options.quick
    among_itself = options.ablation or options.oracle
    few = quick or among_itself
    chosen = [cell for cell in CELLS if cell.name in options.cells] if options.cells else DECISIVE if few else CELLS
    setting = Setting(
        options.traces,
        options.part,
        options.workers or (4 if quick else 8),
        *((QUICK_TURNS, QUICK_REQUESTS) if quick else ()),
    )
    present = [cell for cell in chosen if cell.source is None or (options.traces / cell.source).exists()]
    for cell in chosen:
        if cell not in present:
            console.print(f"[bold]{cell.name} is absent:[/bold] {options.traces / str(cell.source)} is not there")
    jobs = [
        Job(cell, setting, seed, entrant)
        for cell in present
        for seed in range(options.seeds or (2 if quick else 3))
        for entrant in _entrants(options)
    ]
    console.print(f"{len(jobs)} simulations, {setting}", style="dim", highlight=False)

    def beaten(entrants: Entrants) -> str:
        return OURS if among_itself else best_baseline(entrants)

    def show(name: str, entrants: Entrants) -> None:
        console.print(table(name, entrants, beaten(entrants)))

    results = simulate_all(jobs, options.processes, console, show)
    met = {} if among_itself else targets(results, chosen)
    for target, yes in met.items():
        console.print(f"{'yes' if yes else 'no ':<4}{target}", highlight=False)
    if options.json:
        machine = {"python": platform.python_version(), "cores": os.cpu_count()}
        cells = {name: summarise(entrants, beaten(entrants)) for name, entrants in results.items()}
        print(json.dumps({"machine": machine, "part": options.part, "cells": cells, "targets": met}))


def _entrants(options: Namespace) -> Sequence[Entrant]:
    if options.ablation:
        return ABLATION
    if options.oracle:
        return ORACLE
    wanted = options.policies or (STRONGEST if options.quick else None)
    limit = [NEVER_EVICTS] if options.limit else []
    return [DEFAULT, *limit, *(entrant for entrant in BASELINES if wanted is None or entrant.label in wanted)]
