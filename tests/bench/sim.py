"""How fast the simulator is, and how much memory it takes: seconds of one core per trace.

The Mooncake conversation trace is measured where it lies (``--traces``); 100,000 generated requests always.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter, process_time

from rich.console import Console
from rich.table import Table

from sim.engine import simulate
from sim.fleet import FleetSettings
from sim.scenario import Traffic
from tests.processes import ROOT

Figures = dict[str, float]

TRACES = ROOT.parent / "shared" / "traces"
MOONCAKE = "mooncake_conversation.jsonl.gz"
# About 80 % of what 64 workers can bear.
MANY = "chat:sessions=18000,rate=16,turns=6,system_tokens=1024,message_tokens=600"


@dataclass(frozen=True)
class Case:
    """What is simulated, and how many seconds and MiB it may take."""

    name: str
    traffic: Traffic
    workers: int
    seconds: float
    mib: float = 2048


def cases(traces: Path) -> list[Case]:
    return [
        Case("mooncake_8_workers", Traffic(str(traces / MOONCAKE)), 8, 10),
        Case("100k_requests_64_workers", Traffic(MANY, first=100_000), 64, 180),
    ]


def measure(case: Case) -> Figures:
    """Read and simulate; CPU seconds, so that other programs on the machine do not count."""
    began, read_s = perf_counter(), process_time()
    trace = case.traffic.trace(0)
    read_s = process_time() - read_s
    simulate_s = process_time()
    result = simulate(trace, FleetSettings(workers=case.workers))
    simulate_s = process_time() - simulate_s
    return {
        "requests": len(trace.requests),
        "answered": int(result.answered.sum()),
        "read_s": read_s,
        "simulate_s": simulate_s,
        "wall_s": perf_counter() - began,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "hit_rate": result.hit_rate(),
    }


def targets(results: dict[str, Figures], wanted: list[Case]) -> dict[str, bool]:
    """Return for each target whether it was met; what was not measured was not met."""
    met = {}
    for case in wanted:
        figures = results.get(case.name)
        met[f"{case.name}_{case.seconds:g}s"] = figures is not None and figures["simulate_s"] <= case.seconds
        met[f"{case.name}_{case.mib:g}mib"] = figures is not None and figures["peak_mib"] <= case.mib
    return met


def table(results: dict[str, Figures]) -> Table:
    shown = Table("", title="one core, expected-cost", title_justify="left")
    for column in ("requests", "read s", "simulate s", "requests/s", "peak MiB", "hit rate"):
        shown.add_column(column, justify="right")
    for name, figures in results.items():
        speed = figures["requests"] / figures["simulate_s"]
        cells = (f"{figures['read_s']:.1f}", f"{figures['simulate_s']:.1f}", f"{speed:,.0f}")
        shown.add_row(
            name, f"{figures['requests']:,.0f}", *cells, f"{figures['peak_mib']:,.0f}", f"{figures['hit_rate']:.1%}"
        )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.sim", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--traces", type=Path, default=TRACES, help=f"folder with {MOONCAKE}")
    options = parser.parse_args()
    console = Console(stderr=options.json, width=100)
    load = os.getloadavg()[0]
    wanted, results = cases(options.traces), {}
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
        for case in wanted:
            source = Path(case.traffic.source)
            if source.suffix and not source.exists():
                console.print(f"[bold]{case.name} is absent:[/bold] {source} is not there", highlight=False)
                continue
            console.print(case.name, style="dim", highlight=False)
            results[case.name] = processes.submit(measure, case).result()
    console.print(table(results))
    met = targets(results, wanted)
    for target, yes in met.items():
        console.print(f"{'yes' if yes else 'no ':<4}{target}", highlight=False)
    if options.json:
        machine = {"python": platform.python_version(), "cores": os.cpu_count(), "load_at_start": load}
        print(json.dumps({"machine": machine, "results": results, "targets": met}))


if __name__ == "__main__":
    main()
