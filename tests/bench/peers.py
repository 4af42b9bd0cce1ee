"""kvway beside the routers it replaces, before one fleet: ``python -m tests.bench.peers [--quick] [--seeds N]``.

Every cell is a new fleet of four ``kvway worker``s with KV events, one router, and ``kvway load`` with a seeded
workload at a share of the fleet's capacity (``tests.bench.peers_fleet.Workload``). kvway routes by events
(``expected-cost``), the Rust routers by what they sent (``cache_aware``); round robin is kvway without looking. Peers
come from PyPI, into ``.venv-bench``. ``limit`` is how far any router could come (``Workload.limit``).

One run of a hundred requests says little of a percentile: with ``--seeds``, every cell is run with so many workloads of
its kind, by all routers in turn, and its figures are means over them.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.bench.peers_fleet import Workload, kvway_router, play, read_workload
from tests.bench.routers import ROUTERS, Peer, install, version

KVWAY = "kvway"
ROUND_ROBIN = "round robin"
SHARES = (0.6, 0.9, 1.1)
TARGET_SHARE = 0.9
LEAST_GAIN = 0.2
EQUAL = 0.99  # throughputs and hit rates that differ by less are equal

# Nominal rates are near the capacity, so that pauses are scaled little.
SOURCES = {
    "multi-turn": "chat:sessions=240,rate=9,turns=3,system_tokens=1024,message_tokens=600,output_tokens=80,think_s=2",
    "shared-prefix": "tenants:requests=600,rate=24,tenants=40,system_tokens=4000,question_tokens=400,output_tokens=80",
    "agent-text": "code:sessions=56,turns=10,think_s=1.5,output_tokens=60,lines=60",
}
QUICK_SOURCES = {
    "multi-turn": "chat:sessions=120,rate=12,turns=3,system_tokens=1024,message_tokens=600,output_tokens=80,think_s=2",
    "shared-prefix": "tenants:requests=200,rate=24,tenants=15,system_tokens=4000,question_tokens=400,output_tokens=80",
    "agent-text": "code:sessions=48,turns=4,think_s=1.5,output_tokens=60,lines=60",
}
TIMES = ("ttft_p50_s", "ttft_p90_s", "ttft_p99_s")
RATES = ("requests_per_s", "hit_rate")

Row = dict[str, Any]


def routers() -> tuple[list[Peer], dict[str, str]]:
    """Return the routers that are installed, and why the others are not."""
    peers = [router for router in ROUTERS if router.package in ("sglang-router", "vllm-router")]
    absent = {peer.name: why for peer in peers if (why := install(peer))}
    present = [peer for peer in peers if peer.name not in absent]
    return [kvway_router("expected-cost", KVWAY), *present, kvway_router("round-robin", ROUND_ROBIN)], absent


def measure(router: Peer, workload: Workload, share: float) -> Row:
    """Return one row; a cell that could not be run says why."""
    row: Row = {"workload": workload.name, "share": share, "router": router.name}
    try:
        found = play(router, workload, share)
    except (RuntimeError, AssertionError) as error:
        return {**row, "problem": str(error)}
    if not found["answered"]:
        return {**row, "problem": f"no request was answered: {found['errors']}"}
    kept = {key: found[key] for key in (*TIMES, *RATES, "answered", "failed", "errors", "client")}
    return {**row, **kept, "problem": ""}


def mean(rows: Sequence[Row]) -> Row:
    """Return the row of a router's runs of one cell; if one of them could not be run, it says why."""
    first = rows[0]
    if problem := next((row["problem"] for row in rows if row["problem"]), ""):
        return {**{key: first[key] for key in ("workload", "share", "router")}, "problem": problem}
    means = {key: fmean(row[key] for row in rows) for key in (*TIMES, *RATES)}
    sums = {key: sum(row[key] for row in rows) for key in ("answered", "failed")}
    errors = dict(sum((Counter(row["errors"]) for row in rows), Counter()))
    client = {key: sum(row["client"][key] for row in rows) for key in ("seconds", "saturated_s")}
    return {**first, **means, **sums, "errors": errors, "client": client}


def is_best(own: Row, others: list[Row]) -> bool:
    """Whether a row is the best of its cell in every column; a row with failed requests is not."""
    if own["problem"] or own["failed"]:
        return False
    rivals = [row for row in others if not row["problem"]]
    return all(own[key] <= row[key] for row in rivals for key in TIMES) and all(
        own[key] >= EQUAL * row[key] for row in rivals for key in RATES
    )


def targets(rows: list[Row], absent: dict[str, str]) -> dict[str, bool]:
    """Return for each target whether it was met; with a peer that is absent, none is."""
    met = {}
    for workload, share in dict.fromkeys((row["workload"], row["share"]) for row in rows):
        cell = [row for row in rows if (row["workload"], row["share"]) == (workload, share)]
        [own] = [row for row in cell if row["router"] == KVWAY]
        others = [row for row in cell if row["router"] != KVWAY]
        complete = not absent and not any(row["problem"] for row in cell)
        met[f"{workload}_{share:.0%}_best"] = complete and is_best(own, others)
        if share == TARGET_SHARE:
            limit = (1 - LEAST_GAIN) * min((row["ttft_p90_s"] for row in others if not row["problem"]), default=0.0)
            met[f"{workload}_{share:.0%}_ttft_p90_20%_below"] = complete and own["ttft_p90_s"] <= limit
    return met


def limit(workloads: Sequence[Workload]) -> dict[str, float]:
    """Return ``Workload.limit`` as a mean over the seeds."""
    return {key: fmean(workload.limit[key] for workload in workloads) for key in workloads[0].limit}


def print_cell(workloads: Sequence[Workload], share: float, rows: list[Row], console: Console) -> None:
    capacity_per_s = fmean(workload.capacity_per_s for workload in workloads)
    title = f"{workloads[0].name}, {share:.0%} of {capacity_per_s:.1f} requests/s"
    table = Table("", title=title, title_justify="left")
    for name in ("TTFT p50 ms", "p90 ms", "p99 ms", "requests/s", "hit rate", "failed"):
        table.add_column(name, justify="right")
    for row in rows:
        if row["problem"]:
            console.print(f"[bold]{row['router']} was not measured:[/bold] {row['problem']}", highlight=False)
            continue
        cells = [*(f"{row[key] * 1e3:,.0f}" for key in TIMES), f"{row['requests_per_s']:.2f}", f"{row['hit_rate']:.1%}"]
        table.add_row(row["router"], *cells, str(row["failed"]))
        if row["client"]["saturated_s"]:
            late = f"{row['client']['saturated_s']} of {row['client']['seconds']} s"
            console.print(f"[bold]not a quiet machine:[/bold] {row['router']}: load generator delayed in {late}")
    bound = limit(workloads)
    table.add_row("limit", *(f"{bound[key] * 1e3:,.0f}" for key in TIMES), "", f"{bound['hit_rate']:.1%}", "")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.peers", description="kvway beside other routers")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="a third of the requests, at 90 %% of the capacity only")
    parser.add_argument("--seeds", type=int, default=1, help="workloads of each kind whose figures are averaged")
    parser.add_argument("--only", nargs="+", choices=list(SOURCES), default=list(SOURCES), help="leave out the rest")
    options = parser.parse_args()
    console = Console(stderr=options.json)
    peers, absent = routers()
    for name, why in absent.items():
        console.print(f"[bold]{name} is absent:[/bold] {why}", highlight=False)
    sources = QUICK_SOURCES if options.quick else SOURCES
    rows: list[Row] = []
    limits = {}
    for name in options.only:
        workloads = [read_workload(name, sources[name], seed) for seed in range(options.seeds)]
        limits[name] = limit(workloads)
        for share in (TARGET_SHARE,) if options.quick else SHARES:
            runs = [[measure(router, workload, share) for router in peers] for workload in workloads]
            cell = [mean(of_router) for of_router in zip(*runs, strict=True)]
            print_cell(workloads, share, cell, console)
            rows += cell
    met = targets(rows, absent)
    for target, yes in met.items():
        console.print(f"{'yes' if yes else 'no ':<4}{target}", highlight=False)
    if options.json:
        versions = {peer.name: version(peer) for peer in peers}
        run = {"quick": options.quick, "seeds": options.seeds, "versions": versions}
        print(json.dumps({**run, "rows": rows, "limits": limits, "targets": met}))


if __name__ == "__main__":
    main()
