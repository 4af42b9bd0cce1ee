"""Requests per second of ``kvway serve --processes N``: ``python -m tests.bench.scaling [--json]``.

Load generator and upstream have the last core, the gateway all others. Where there are fewer of these than processes,
requests/s say little; the CPU per request still does: with a core each, N processes serve N times as many requests as
one, divided by what a request costs more with N.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.bench.measure import WORKLOADS, run
from tests.bench.results import Results
from tests.bench.rig import Cores, become_load, choose_cores
from tests.bench.routers import kvway_processes
from tests.bench.testbed import Target, Testbed

ROUNDS = 3
READY_CHECKS = 16
MEASURED = [workload for workload in WORKLOADS if workload.name in ("short_json", "long_json")]


def measure(bed: Testbed, counts: list[int], console: Console) -> Results:
    results = Results()
    targets = [start(bed, count) for count in counts]
    for number in range(ROUNDS):
        console.print(f"round {number + 1} of {ROUNDS}", highlight=False)
        for workload in MEASURED:
            figures = {target.name: run(workload, target, number, pace=1.0) for target in targets}
            results.rounds[workload.name].append(figures)
    return results


def start(bed: Testbed, count: int) -> Target:
    target = bed.start(kvway_processes(count))
    for _ in range(READY_CHECKS):  # each on a new connection, so that no process is missed
        target.process.wait_ready("http://{}:{}/ready".format(*target.address))
    return target


def summary(results: Results, counts: list[int]) -> dict[str, dict[int, dict[str, float]]]:
    """Return medians of the rounds per workload and number of processes."""
    return {
        workload.name: {
            count: {
                "rate": figures["rate"],
                "times_one": figures["rate"] / one["rate"],
                "cpu_us": figures["cpu_us"],
                "times_one_by_cpu": count * one["cpu_us"] / figures["cpu_us"],
                "load_share": figures["load_share"],
            }
            for count in counts
            for one, figures in [(medians[kvway_processes(1).name], medians[kvway_processes(count).name])]
        }
        for workload in MEASURED
        for medians in [results.medians(workload.name)]
    }


def print_table(by_workload: dict[str, dict[int, dict[str, float]]], cores: Cores, console: Console) -> None:
    columns = ("processes", "requests/s", "times one", "CPU µs/request", "times one by CPU", "share of load core")
    table = Table("", *columns, title=f"the gateway on {len(cores.router)} core(s)", title_justify="left")
    for workload in MEASURED:
        for count, figures in by_workload[workload.name].items():
            table.add_row(
                *(workload.title, str(count), f"{figures['rate']:,.0f}", f"{figures['times_one']:.2f}"),
                *(f"{figures['cpu_us']:.1f}", f"{figures['times_one_by_cpu']:.2f}", f"{figures['load_share']:.0%}"),
            )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.scaling", description="kvway serve --processes N")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    console = Console(stderr=options.json)
    cores = choose_cores(most=os.cpu_count() or 1)
    become_load(cores.load)
    counts = [1, 2, *range(4, len(cores.router) + 1, 2)]
    with tempfile.TemporaryDirectory(prefix="kvway-scaling-") as directory, Testbed(cores, Path(directory)) as bed:
        by_workload = summary(measure(bed, counts, console), counts)
    print_table(by_workload, cores, console)
    if options.json:
        print(json.dumps({"gateway_cores": len(cores.router), "workloads": by_workload}))


if __name__ == "__main__":
    main()
