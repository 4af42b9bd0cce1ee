"""A worker dies with the prefixes of its tenants, which others compute anew all at once: with and without copies.

``python -m tests.bench.avalanche [--json]``. Twice: in the simulator, a fleet of eight; and through the real gateway,
four ``kvway worker``s of which one is killed (SIGKILL). Both route by ``expected-cost``. The figures are those of the
requests of the seconds after the death, ``before`` those of the seconds before it: what replication costs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from sim.engine import simulate
from sim.fleet import Failure, FleetSettings, GatewaySettings, ReplicationSettings
from sim.generators import Tenants
from sim.requests import Trace
from tests.bench.avalanche_fleet import Answer, run_fleet

SIM_WORKERS = 8
SIM_DEATH_S = 120.0
SIM_BEFORE_S = 60.0
SIM_AFTER_S = 5.0
SIM_TENANTS = Tenants(
    requests=2300, rate=18.0, tenants=48, zipf=0.0, system_tokens=10_000, question_tokens=200, output_tokens=40
)
SIM_SEEDS = range(2)
# Copies come as slowly as warm-ups that take a tenth of what the fleet can prefill.
SIM_SHARE = 0.1
LARGEST_P90 = 0.5  # with copies, of what it is without
LATE_S = 0.1
LARGEST_COST = 1.25  # TTFT p50 before the death, of what it is without

Row = dict[str, Any]


def row_of(ttft_s: Sequence[float], hit_rate: float) -> Row:
    p50, p90, p99 = (float(value) for value in np.quantile(ttft_s, (0.5, 0.9, 0.99)))
    return {"requests": len(ttft_s), "p50_ms": 1e3 * p50, "p90_ms": 1e3 * p90, "p99_ms": 1e3 * p99, "hits": hit_rate}


def simulated(traces: Sequence[Trace], replicated: bool) -> dict[str, Row]:
    """Let one worker die in a simulated fleet, with every trace."""
    fleet = FleetSettings(workers=SIM_WORKERS)
    copied_tokens_per_s = SIM_SHARE * SIM_WORKERS / fleet.speed.prefill_b_s
    copies = ReplicationSettings(
        uses=4, interval_s=20.0, bytes_per_s=copied_tokens_per_s * fleet.speed.kv_bytes_per_token
    )
    parts: dict[str, list[Any]] = {"before": [], "after": []}
    for trace in traces:
        settings = FleetSettings(
            workers=SIM_WORKERS,
            gateway=GatewaySettings(order="least-work"),
            failures=(Failure(at_s=SIM_DEATH_S, worker=0),),
            replication=copies if replicated else None,
        )
        run = simulate(trace, settings)
        for name, begin_s, end_s in (("before", -SIM_BEFORE_S, 0.0), ("after", 0.0, SIM_AFTER_S)):
            since_s = run.arrival_s - SIM_DEATH_S
            taken = run.answered & (since_s >= begin_s) & (since_s < end_s)
            parts[name].append((run.ttft_s[taken], run.hit_tokens[taken].sum(), run.prompt_tokens[taken].sum()))
    rows = {}
    for name, found in parts.items():
        ttft_s, hits, tokens = zip(*found, strict=True)
        rows[name] = row_of(np.concatenate(ttft_s), float(sum(hits) / sum(tokens)))
    return rows


def measured(answers: Sequence[Answer]) -> Row:
    shares = [answer.cached_share for answer in answers]
    return row_of([answer.ttft_s for answer in answers], float(np.mean(shares)))


def targets(rows: dict[str, dict[str, Row]], failed: int) -> dict[str, bool]:
    """Return for each target whether it was met.

    Args:
        rows: by where and how (``simulator_with`` …), and then by when.
        failed: requests through the real gateway, both runs together, that got no answer.
    """
    met = {}
    for where in ("simulator", "gateway"):
        alone, copied = rows[f"{where}_without"], rows[f"{where}_with"]
        met[f"{where}_p90_after_half"] = copied["after"]["p90_ms"] <= LARGEST_P90 * alone["after"]["p90_ms"]
        met[f"{where}_hits_after_higher"] = copied["after"]["hits"] > alone["after"]["hits"]
        met[f"{where}_costs_little_before"] = copied["before"]["p50_ms"] <= LARGEST_COST * alone["before"]["p50_ms"]
    return met | {"no_request_failed": not failed}


def print_rows(rows: dict[str, dict[str, Row]], console: Console) -> None:
    table = Table("", "copies", "", "requests", "TTFT p50 ms", "p90 ms", "p99 ms", "hit rate")
    for key, by_time in rows.items():
        where, _, copies = key.partition("_")
        for when, row in by_time.items():
            times = (f"{row[name]:,.0f}" for name in ("p50_ms", "p90_ms", "p99_ms"))
            table.add_row(where, copies, when, str(row["requests"]), *times, f"{row['hits']:.1%}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.avalanche", description="a death with and without copies"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    console = Console(stderr=options.json, highlight=False)
    rows: dict[str, dict[str, Row]] = {}
    failed: dict[str, dict[str, int]] = {}
    late_s: dict[str, float] = {}
    warm_ups = 0
    traces = [SIM_TENANTS.trace(seed) for seed in SIM_SEEDS]
    for name, replicated in (("without", False), ("with", True)):
        rows[f"simulator_{name}"] = simulated(traces, replicated)
    for name, replicated in (("without", False), ("with", True)):
        found = asyncio.run(run_fleet(replicated))
        rows[f"gateway_{name}"] = {when: measured(found[when]) for when in ("before", "after")}
        failed[name], late_s[name] = found["failed"], found["late_s"]
        warm_ups += found["warm_ups"]
    print_rows(rows, console)
    console.print(f"warm-ups: {warm_ups}, requests that failed: {failed}")
    for name, seconds in late_s.items():
        if seconds > LATE_S:
            console.print(f"[bold]not a quiet machine:[/bold] {name} copies, clients were up to {seconds:.2f} s late")
    met = targets(rows, sum(sum(kinds.values()) for kinds in failed.values()))
    for target, yes in met.items():
        console.print(f"{'yes' if yes else 'no ':<4}{target}")
    if options.json:
        print(json.dumps({"rows": rows, "warm_ups": warm_ups, "failed": failed, "late_s": late_s, "targets": met}))


if __name__ == "__main__":
    main()
