"""Tables for people, one object for programs."""

from __future__ import annotations

import os
import platform
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.bench.measure import WORKLOADS, Figures, Workload
from tests.bench.results import DIRECT, Results
from tests.bench.targets import targets

QUIET_SHARE = 0.03


def print_tables(results: Results, console: Console) -> None:
    for workload in WORKLOADS:
        if results.rounds[workload.name]:
            console.print(
                _speed_table(results, workload) if workload.loop == "closed" else _delay_table(results, workload)
            )
    for kind in ("requests", "streams"):
        if results.memory:
            console.print(_memory_table(results, kind))
    for router, why_not in results.absent.items():
        console.print(f"[bold]{router} is absent:[/bold] {why_not}", highlight=False)
    for failure in results.failures:
        console.print(f"[bold]failed:[/bold] {failure}", highlight=False)
    others = results.others_share()
    if others > QUIET_SHARE:
        console.print(f"[bold]not a quiet machine:[/bold] other programs took {others:.0%} of the router's core")
    for target, met in targets(results).items():
        console.print(f"{'yes' if met else 'no ':<4}{target}", highlight=False)


def as_json(results: Results, quick: bool) -> dict[str, Any]:
    return {
        "quick": quick,
        "machine": {"python": platform.python_version(), "kernel": platform.release(), "cores": os.cpu_count()},
        "versions": results.versions,
        "absent": results.absent,
        "failures": results.failures,
        "others_share_of_router_core": results.others_share(),
        "workloads": {
            workload.name: {
                "title": workload.title,
                "medians": results.medians(workload.name),
                "rounds": results.rounds[workload.name],
                **({"speed_ratio": results.speed_ratio(workload.name)} if workload.loop == "closed" else {}),
                **({"added": results.added(workload.name)} if workload.loop == "open" else {}),
            }
            for workload in WORKLOADS
            if results.rounds[workload.name]
        },
        "memory": results.memory,
        "targets": targets(results),
    }


def _speed_table(results: Results, workload: Workload) -> Table:
    unit = "chunk" if workload.streams else "request"
    table = _table(workload.title, f"{unit}s/s", f"CPU µs/{unit}", "share of router core", "share of load core")
    for target, figures in results.medians(workload.name).items():
        table.add_row(target, f"{figures['rate']:,.0f}", *_cpu(target, figures))
    ratio = results.speed_ratio(workload.name)
    table.caption = "kvway / faster Rust router: " + (f"{ratio:.2f}" if ratio else "not measured")
    return table


def _delay_table(results: Results, workload: Workload) -> Table:
    what = "chunk delay" if workload.streams else "latency"
    unit = "chunk" if workload.streams else "request"
    columns = (f"{what} p50 ms", "p99 ms", "added p50 ms", "added p99 ms", f"CPU µs/{unit}")
    table = _table(workload.title, *columns, "share of router core", "share of load core")
    added = results.added(workload.name)
    for target, figures in results.medians(workload.name).items():
        times = [figures["p50_ms"], figures["p99_ms"]]
        if target in added:
            times += added[target].values()
        cells = [f"{value:.3f}" for value in times]
        table.add_row(target, *cells, *[""] * (4 - len(cells)), *_cpu(target, figures))
    return table


def _cpu(target: str, figures: Figures) -> list[str]:
    load = f"{figures['load_share']:.0%}"
    return ["", "", load] if target == DIRECT else [f"{figures['cpu_us']:.1f}", f"{figures['router_share']:.0%}", load]


def _memory_table(results: Results, kind: str) -> Table:
    columns = list(next(iter(results.memory.values()))[kind])
    table = _table(f"memory over {kind}", *(column.replace("_", " ") for column in columns))
    for router, figures in results.memory.items():
        table.add_row(router, *(f"{figures[kind][column]:,.1f}" for column in columns))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table("", title=title, title_justify="left", caption_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    return table
