"""How true the simulator is: against kernel tables, cache bounds, published orderings, and a fleet that serves."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count, islice
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from sim.engine import simulate
from sim.fleet import FleetSettings, GatewaySettings
from sim.requests import SimRequest, Trace
from sim.reuse import lru_hit_rates
from sim.scaling import working_set_tokens
from sim.scenario import Traffic
from tests.bench.fidelity_fleet import play
from tests.bench.sim import MOONCAKE, TRACES

Row = dict[str, Any]

K = 1024
# Kernel tables (AIConfigurator 0.12.0, vLLM 0.24.0, bf16): TTFT ms by prompt, ITL ms by batch and context.
TTFT_MS = {
    "llama-3.1-70b/h100/4": {1 * K: 67.4, 4 * K: 264, 8 * K: 577, 32 * K: 2531, 128 * K: 16697},
    "llama-3.1-70b/h200/4": {1 * K: 65.7, 4 * K: 267, 8 * K: 543, 32 * K: 2625, 128 * K: 17044},
    "qwen3-32b/h200/2": {1 * K: 53.7, 4 * K: 222, 8 * K: 474, 32 * K: 2525, 128 * K: 20744},
}
ITL_MS = {
    "llama-3.1-70b/h100/4": {(1, K): 14.9, (32, 4 * K): 20.2, (64, 4 * K): 24.1, (128, 4 * K): 32.9, (256, K): 30.5},
    "llama-3.1-70b/h200/4": {(1, K): 12.3, (32, 4 * K): 15.7, (64, 4 * K): 18.8, (128, 4 * K): 25.3, (256, K): 26.5},
    "qwen3-32b/h200/2": {(1, K): 10.7, (32, 4 * K): 15.4, (64, 4 * K): 19.8, (128, 4 * K): 28.5, (256, K): 25.3},
}
LIVE = "agents:sessions={},turns=4,spread_s=50,think_s=8,system_tokens=4096,task_tokens=4000,output_tokens=60"
# With several workers and a policy that looks at load, one request that comes a millisecond later sends all that
# follow elsewhere; by turns it does not.
LIVE_SESSIONS = 16  # of every worker
LIVE_FLEETS = ((1, "expected-cost"), (2, "round-robin"))
LIVE_LOAD_OF_CACHE = 0.9
# On its way to a first token a request waits some five times for a process to get its turn. Where the client's own
# turns come this late, nine times of ten, in shares of the TTFT, that alone may be all that the aim leaves.
MOST_LATE = 0.03
# Of a worker's time, that it lost to the machine: where it is busy, every request queued there comes so much later.
MOST_BEHIND = 0.01
ORDERED = "agents:sessions=64,turns=10,spread_s=120"
ORDERED_SEEDS = 6


def constants() -> list[Row]:
    """One prompt alone, and batches that decode, against the tables."""
    rows = []
    for profile, table in TTFT_MS.items():
        fleet = FleetSettings(workers=1, profile=profile, capacity_tokens=2**21)
        for tokens, expected in table.items():
            result = simulate(Trace([SimRequest(0, (), tokens, 1)], 512), fleet, "round-robin")
            rows.append(_row(f"TTFT ms, {profile}, {tokens // K}k", expected, float(result.ttft_s[0]) * 1e3))
        for (batch, context), expected in ITL_MS[profile].items():
            # The prompt is cached by a first request, so that all of the batch begins to decode in one step.
            chunks = range(context // 512)
            warm = SimRequest(0, chunks, context, 1)
            together = [SimRequest(1000, chunks, context, 17) for _ in range(batch)]
            result = simulate(Trace([warm, *together], 512), fleet, "round-robin")
            rows.append(_row(f"ITL ms, {profile}, {batch} x {context // K}k", expected, result.itl_s[-1] * 1e3))
    return rows


def bounds(requests: int = 4_000) -> list[Row]:
    """Hit rates of one worker whose requests never overlap, against an LRU cache of the same size."""
    if not (TRACES / MOONCAKE).exists():
        return []
    trace = Traffic(str(TRACES / MOONCAKE), load=0.01, first=requests).trace(0)
    rows = []
    for tokens in (2**20, 2**22, 2**30):
        fleet = FleetSettings(workers=1, capacity_tokens=tokens, sample_s=1e6, gateway=GatewaySettings(metrics_s=1e6))
        [expected] = lru_hit_rates(trace, [tokens])
        rows.append(_row(f"hit rate, {tokens:,} tokens", expected, simulate(trace, fleet, "round-robin").hit_rate()))
    return rows


def orderings() -> list[Row]:
    """Precise, approximate, load-only and random routing of agents; mean TTFT in seconds over the seeds.

    Two gateways hear of each other's requests a little later. One alone would know from what it has sent as well what
    is cached as from events.
    """
    precise, approximate = (GatewaySettings(replicas=2, sync_lag_s=0.05, approximate=each) for each in (False, True))
    ways = {
        "precise (expected-cost)": ("expected-cost", precise),
        "approximate (expected-cost)": ("expected-cost", approximate),
        "load only (least-tokens)": ("least-tokens", precise),
        "random": ("random", precise),
    }
    rows = []
    for name, (policy, gateway) in ways.items():
        results = []
        for seed in range(ORDERED_SEEDS):
            trace = Traffic(ORDERED).trace(seed)
            capacity = round(working_set_tokens(trace) / 0.8 / 4)
            fleet = FleetSettings(workers=4, capacity_tokens=capacity, gateway=gateway)
            results.append(simulate(trace, fleet, policy, seed=seed))
        ttft = sum(float(result.ttft_s.mean()) for result in results) / ORDERED_SEEDS
        hits = sum(result.hit_rate() for result in results) / ORDERED_SEEDS
        rows.append({"what": name, "ttft_mean_s": ttft, "hit_rate": hits})
    return rows


class TooLate(Exception):
    """The machine was too busy for what it served to say anything about the simulator."""


def live(speed: float) -> list[Row]:
    """A trace through the gateway to simulated workers over HTTP, and through the simulator.

    Raises:
        TooLate: client or workers could not keep their times.
    """
    rows = []
    for workers, policy in LIVE_FLEETS:
        trace = replace(
            with_answers_of_workers(Traffic(LIVE.format(LIVE_SESSIONS * workers)).trace(0)), closed_loop=False
        )
        blocks = round(working_set_tokens(trace) / LIVE_LOAD_OF_CACHE / workers / trace.block_tokens)
        fleet = FleetSettings(workers=workers, capacity_tokens=blocks * trace.block_tokens)
        simulated = simulate(trace, fleet, policy)
        served, behind_s = asyncio.run(play(trace, fleet, policy, speed))
        late_s = float(np.percentile([each.late_s for each in served], 90))
        check_times(late_s / float(np.median(simulated.ttft_s)), behind_s / workers / simulated.duration_s, speed)
        hits = sum(each.cached_tokens for each in served) / int(simulated.prompt_tokens.sum())
        name = f"{workers} x {policy}"
        rows.append(_row(f"hit rate, {name}", hits, simulated.hit_rate()))
        for percent in (50, 90):
            seen = float(np.percentile([each.ttft_s for each in served], percent))
            rows.append(_row(f"TTFT p{percent} s, {name}", seen, float(np.percentile(simulated.ttft_s, percent))))
    return rows


def with_answers_of_workers(made: Trace) -> Trace:
    """Return a trace in which no prompt goes on with an answer: workers make up their own, and cache them."""
    fresh, size, requests = count(1 + max(max(each.chunks, default=0) for each in made.requests)), made.block_tokens, []
    for each in made.requests:
        prompt = each.chunks[: each.prompt_tokens // size]
        answer = islice(fresh, (each.prompt_tokens + each.output_tokens) // size - len(prompt))
        requests.append(replace(each, chunks=(*prompt, *answer)))
    return replace(made, requests=requests)


def check_times(late: float, behind: float, speed: float) -> None:
    if late > MOST_LATE or behind > MOST_BEHIND:
        slower = speed / 2 / max(1.0, late / MOST_LATE, behind / MOST_BEHIND)
        raise TooLate(
            f"the machine is too busy: a tenth of the requests were sent {late:.0%} of the TTFT late or more, and "
            f"workers stood still for {behind:.1%} of the time; try --speed {slower:.1g}, or a quieter hour"
        )


def _row(what: str, expected: float, simulated: float) -> Row:
    return {"what": what, "expected": expected, "simulated": simulated, "off": simulated / expected - 1}


SECTIONS = ("constants", "bounds", "orderings", "live")


def targets(found: dict[str, list[Row]]) -> dict[str, bool]:
    """Return for each target whether it was met; what was not measured was not met."""
    met = {}
    if rows := found.get("constants"):
        met["constants_within_10_percent"] = all(abs(row["off"]) <= 0.1 for row in rows)
    if rows := found.get("bounds"):
        met["hit_rates_within_0.1_points"] = all(abs(row["simulated"] - row["expected"]) <= 1e-3 for row in rows)
    if rows := found.get("orderings"):
        times = [row["ttft_mean_s"] for row in rows]
        met["precise_approximate_load_random"] = times == sorted(times)
    if rows := found.get("live"):
        hits, ttfts = ([row for row in rows if row["what"].startswith(what)] for what in ("hit rate", "TTFT"))
        met["live_hit_rate_within_1_point"] = all(abs(row["simulated"] - row["expected"]) <= 0.01 for row in hits)
        met["live_ttft_p50_p90_within_15_percent"] = all(abs(row["off"]) <= 0.15 for row in ttfts)
    return met


def table(title: str, rows: list[Row]) -> Table:
    shown = Table(title=title, title_justify="left")
    for key in rows[0]:
        shown.add_column(key.replace("_", " "), justify="left" if key == "what" else "right")
    for row in rows:
        cells = [f"{value:+.1%}" if key == "off" else f"{value:.4g}" for key, value in row.items() if key != "what"]
        shown.add_row(row["what"], *cells)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.fidelity", description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], help="which; all without")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--speed", type=float, default=1.0, help="live: of all clocks; slower for a slow machine")
    options = parser.parse_args()
    console = Console(stderr=options.json, width=100)
    sections: dict[str, Callable[[], list[Row]]] = {
        "constants": constants, "bounds": bounds, "orderings": orderings, "live": partial(live, options.speed),
    }  # fmt: skip
    found, void = {}, {}
    for name in options.sections or SECTIONS:
        try:
            found[name] = sections[name]()
        except TooLate as error:
            void[name] = str(error)
            console.print(f"[bold]{name} is void:[/bold] {error}", highlight=False)
            continue
        if found[name]:
            console.print(table(name, found[name]))
        else:
            console.print(f"[bold]{name} is absent:[/bold] {TRACES / MOONCAKE} is not there", highlight=False)
    met = targets(found)
    for target, yes in met.items():
        console.print(f"{'yes' if yes else 'no ':<4}{target}", highlight=False)
    if options.json:
        print(json.dumps({"results": found, "void": void, "targets": met}))


if __name__ == "__main__":
    main()
