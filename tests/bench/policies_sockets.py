"""The decisive cells of the evaluation once more, with processes: agents, the real gateway, ``kvway worker``s.

Every user is a client that waits for its answers. Clocks run ``--speed`` times as fast as a GPU's. The simulator's
figures for the same requests stand beside those of the processes; both are of the answers between a warm-up and the
moment when the first user has had all of its turns. Workers make up their answers, so that no prompt finds the answer
before it cached; in both. ``late`` is the share of the time by which the workers fell behind their own clock.
"""

from __future__ import annotations

import asyncio
import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np
from rich.console import Console
from rich.table import Table

from policies.base import Floats, Ints
from sim.engine import simulate
from sim.fleet import GatewaySettings
from sim.requests import Trace
from sim.users import WARM_UP_SHARE
from tests.bench.fidelity import with_answers_of_workers
from tests.bench.fidelity_fleet import play
from tests.bench.measure import Figures
from tests.bench.policies_cells import Cell, Setting, fleet_of, trace_of
from tests.bench.policies_targets import OURS

RATIOS: Final = (0.9, 1.2, 1.6)
BASELINES: Final = ("weighted", "sticky")
_WORKERS: Final = 2
_TURNS: Final = 16


def add_options(parser: ArgumentParser) -> None:
    """Add the options of these runs."""
    parser.add_argument("--sockets", action="store_true", help="the decisive cells of agents, with processes")
    parser.add_argument("--speed", type=float, default=16.0, help="--sockets: of all clocks; slower for a slow machine")


def main(options: Namespace) -> None:
    """Run, print a table per cell, and with ``--json`` one object as the last line."""
    console = Console(stderr=options.json, width=120)
    found: dict[str, dict[str, dict[str, Figures]]] = {}
    for ratio in RATIOS:
        cell = Cell("claude-code", ratio)
        setting = Setting(options.traces, options.part, _WORKERS, _TURNS)
        if not (options.traces / str(cell.source)).exists():
            console.print(f"[bold]{cell.name} is absent:[/bold] {options.traces / str(cell.source)} is not there")
            continue
        found[cell.name] = dict(_measured(cell, setting, options.speed))
        console.print(_table(cell.name, found[cell.name]))
    met = {
        f"{name}_default_has_the_least_mean_ttft": all(
            by_policy[OURS]["served"]["ttft_mean_s"] <= both["served"]["ttft_mean_s"] for both in by_policy.values()
        )
        for name, by_policy in found.items()
    }
    for target, yes in met.items():
        console.print(f"{'yes' if yes else 'no ':<4}{target}", highlight=False)
    if options.json:
        print(json.dumps({"speed": options.speed, "cells": found, "targets": met}))


def _measured(cell: Cell, setting: Setting, speed: float) -> Iterator[tuple[str, dict[str, Figures]]]:
    """Yield for each policy the figures of the processes and of the simulator."""
    trace = with_answers_of_workers(trace_of(cell, setting, 0))
    for policy in (OURS, *BASELINES):
        order = "least-work" if policy == OURS else "none"
        fleet = replace(fleet_of(cell, setting), gateway=GatewaySettings(order=order))
        simulated = simulate(trace, fleet, policy)
        served, behind_s = asyncio.run(play(trace, fleet, policy, speed))
        cached = np.array([each.cached_tokens for each in served])
        ttft_s, ended_s = (np.array([getattr(each, name) for each in served]) for name in ("ttft_s", "ended_s"))
        yield (
            policy,
            {
                "served": _figures(trace, ttft_s, ended_s, cached)
                | {"behind": behind_s / fleet.workers / ended_s.max()},
                "simulated": _figures(trace, simulated.ttft_s, simulated.finish_s, simulated.hit_tokens.sum(1)),
            },
        )


def _figures(trace: Trace, ttft_s: Floats, ended_s: Floats, cached_tokens: Ints) -> Figures:
    """Return what is compared, of the answers that ended while all users played; arrays have a row per request."""
    last_s: dict[str | None, float] = {}
    for request, end_s in zip(trace.requests, ended_s.tolist(), strict=True):
        last_s[request.session] = max(last_s.get(request.session, 0.0), end_s)
    end_s = min(last_s.values())
    counted = (ended_s > WARM_UP_SHARE * end_s) & (ended_s <= end_s)
    prompts = np.array([request.prompt_tokens for request in trace.requests])
    return {
        "requests_per_s": float(counted.sum() / ((1 - WARM_UP_SHARE) * end_s)),
        "ttft_mean_s": float(ttft_s[counted].mean()),
        "ttft_p50_s": float(np.percentile(ttft_s[counted], 50)),
        "ttft_p90_s": float(np.percentile(ttft_s[counted], 90)),
        "ttft_p99_s": float(np.percentile(ttft_s[counted], 99)),
        "hit_rate": float(cached_tokens[counted].sum() / prompts[counted].sum()),
    }


def _table(title: str, by_policy: dict[str, dict[str, Figures]]) -> Table:
    columns = {
        "req/s": ("requests_per_s", 1),
        "TTFT": ("ttft_mean_s", 1),
        "p50": ("ttft_p50_s", 1),
        "p90": ("ttft_p90_s", 1),
        "p99": ("ttft_p99_s", 1),
        "hit %": ("hit_rate", 100),
        "late %": ("behind", 100),
    }
    shown = Table("", "", *columns, title=title, title_justify="left", box=None)
    for policy, both in by_policy.items():
        for where, figures in both.items():
            shown.add_row(policy, where, *(f"{figures.get(key, 0) * factor:.2f}" for key, factor in columns.values()))
    return shown
