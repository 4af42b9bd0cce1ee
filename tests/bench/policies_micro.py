"""What one decision of the default policy costs, and one release of a held request.

The prompt has 512 chunks (128k tokens at 256 a chunk), and what every worker holds of it is given: all hold its first
16, the system prompt. A *continued* conversation is held almost whole by one worker and half by another, a *new* one
by nobody; *fetched* is a continued one where all workers can fetch from one another. Workers are loaded unevenly, and
change a little from one decision to the next, as a ledger changes them.

Everything runs in this process, pinned to one core. The best of the rounds is what counts: whatever else runs on the
machine can only add to it. The median of all rounds stands beside it.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import random
from statistics import fmean, median
from time import perf_counter
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.table import Table

from policies.base import N_TIERS, FleetView, Residency, RoutingRequest, create_policy
from policies.order import Held, Turnstile, create_order
from policies.pull import PullLinks

Case = Literal["continued", "fetched", "new"]

CHUNKS = 512
CHUNK_TOKENS = 256
SYSTEM_CHUNKS = 16
FLEETS = (8, 64, 1000)
LISTS_UP_TO = 24
"""The index gives what small fleets hold as lists, what large ones hold as arrays."""
SITUATIONS = 16
ROUNDS = 400  # virtual machines are slower for seconds at a time
HELD = 1000
RELEASES = 200
RELEASE_ROUNDS = 20
PREFILL_S = (0.011, 58e-6, 1.05e-9)
PULL_S = (8e-6, 0.026)
CASES: tuple[Case, ...] = ("continued", "fetched", "new")
DECISION_TARGETS_US = {64: 100.0, 1000: 400.0}
RELEASE_TARGET_US = 20.0

Figures = dict[str, float]


def main(as_json: bool) -> None:
    """Measure, and print a table or, as the last line, one JSON object."""
    console = Console(stderr=as_json, width=100)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    load = os.getloadavg()[0]
    decisions = {(n, case): time_decisions(n, case) for n in FLEETS for case in CASES}
    release = time_releases()
    console.print(table(decisions, release))
    met = targets(decisions, release)
    for target, is_met in met.items():
        console.print(f"{'yes' if is_met else 'no ':<4}{target}", highlight=False)
    if as_json:
        lines = [{"workers": n, "conversation": case, **figures} for (n, case), figures in decisions.items()]
        machine = {"python": platform.python_version(), "cores": os.cpu_count(), "load_at_start": load}
        print(json.dumps({"machine": machine, "decision": lines, "release": release, "targets": met}))


def time_decisions(n_workers: int, case: Case) -> Figures:
    """Return the cost of a decision of ``expected-cost`` in µs: the best per situation, on average, and the median."""
    rng = np.random.default_rng(0)
    fleet = loaded_fleet(n_workers, rng)
    if case == "fetched":
        s_per_token, latency_s = PULL_S
        every = np.ones(n_workers)
        fleet.pulls = PullLinks(np.zeros(n_workers, np.int64), every * s_per_token, every * latency_s)
    policy = create_policy("expected-cost")
    situations = [(chunks_of(number), tiers_of(n_workers, case != "new", rng)) for number in range(SITUATIONS)]
    times: list[list[float]] = [[] for _ in situations]
    now = 1000.0
    for _ in range(ROUNDS):
        for number, (chunks, tiers) in enumerate(situations):
            request = RoutingRequest("model", CHUNKS * CHUNK_TOKENS + 100, chunks, CHUNK_TOKENS)
            residency = given(tiers)
            started = perf_counter()
            decision = policy.decide(request, fleet, residency, now)
            times[number].append(perf_counter() - started)
            now += 0.01
            shift_load(fleet, decision.worker, int(rng.integers(n_workers)), now)
    return figures_of(times)


def time_releases() -> Figures:
    """Return the cost in µs of one prefill that ends and lets the next request through, with 1,000 held."""
    numbers = random.Random(0)
    times: list[list[float]] = [[] for _ in range(RELEASES)]
    for _ in range(RELEASE_ROUNDS):
        gate = Turnstile(create_order("least-work"), budget_tokens=1)
        now = 0.0
        gone = Held(1.0, 1000, now)
        gate.enter(gone)
        for number in range(-HELD, RELEASES):
            now += 0.01
            gate.enter(Held(numbers.expovariate(1.0), 1000, now))
            if number >= 0:
                started = perf_counter()
                gate.leave(gone)
                following = gate.release()
                gate.release()
                times[number].append(perf_counter() - started)
                assert following is not None
                gone = following
    return figures_of(times)


def figures_of(times: list[list[float]]) -> Figures:
    """Return best and median, in µs, of what was done so often alike."""
    gc.collect()
    best = fmean(min(each) for each in times)
    return {"best_us": best * 1e6, "median_us": median(time for each in times for time in each) * 1e6}


def loaded_fleet(n_workers: int, rng: np.random.Generator) -> FleetView:
    fleet = FleetView([f"worker-{number}" for number in range(n_workers)], version=1)
    fleet.prefill_a_s[:], fleet.prefill_b_s[:], fleet.prefill_c_s[:] = PREFILL_S
    fleet.kv_capacity_tokens[:] = 1_000_000
    fleet.reload_host_s[:] = 7e-6
    fleet.running[:] = rng.integers(1, 20, n_workers)
    fleet.decode_tokens[:] = fleet.running * 20_000
    fleet.pending_prefill_tokens[:] = rng.integers(0, 100_000, n_workers)
    fleet.pending_prefill_s[:] = fleet.pending_prefill_tokens * 8e-5
    fleet.prefilling_since[:] = 999.5
    return fleet


def shift_load(fleet: FleetView, chosen: int, ended: int, now: float) -> None:
    """The chosen worker has one more request, another worker one less."""
    fleet.running[chosen] += 1
    fleet.pending_prefill_tokens[chosen] += 5000
    fleet.pending_prefill_s[chosen] += 0.4
    fleet.running[ended] = max(fleet.running[ended] - 1, 0)
    fleet.pending_prefill_tokens[ended] = fleet.pending_prefill_s[ended] = 0
    fleet.prefilling_since[:] = now - 0.5


def chunks_of(conversation: int) -> list[bytes]:
    system = [number.to_bytes(16, "little") for number in range(SYSTEM_CHUNKS)]
    return system + [(conversation << 64 | number).to_bytes(16, "little") for number in range(SYSTEM_CHUNKS, CHUNKS)]


def tiers_of(n_workers: int, continued: bool, rng: np.random.Generator) -> np.ndarray[Any, np.dtype[np.int64]]:
    tiers = np.zeros((n_workers, N_TIERS), np.int64)
    tiers[:, 0] = SYSTEM_CHUNKS * CHUNK_TOKENS
    if continued:
        whole, half = rng.choice(n_workers, 2, replace=False)
        tiers[whole, 0], tiers[half, 1] = (CHUNKS - 4) * CHUNK_TOKENS, CHUNKS // 2 * CHUNK_TOKENS
    return tiers


def given(tiers: np.ndarray[Any, np.dtype[np.int64]]) -> Residency:
    if len(tiers) <= LISTS_UP_TO:
        return Residency.of_lists(tiers.tolist())
    return Residency(tiers.sum(1), tiers)


def targets(decisions: dict[tuple[int, str], Figures], release: Figures) -> dict[str, bool]:
    """Return for each target whether it was met, by the dearest kind of conversation."""
    dearest = {n: max(figures["best_us"] for (size, _), figures in decisions.items() if size == n) for n in FLEETS}
    met = {f"decision_{limit:.0f}us_{n}_workers": dearest[n] <= limit for n, limit in DECISION_TARGETS_US.items()}
    return met | {f"release_{RELEASE_TARGET_US:.0f}us_{HELD}_held": release["best_us"] <= RELEASE_TARGET_US}


def table(decisions: dict[tuple[int, str], Figures], release: Figures) -> Table:
    shown = Table(title=f"a prompt of {CHUNKS} chunks, under expected-cost", title_justify="left")
    for column in ("", "best µs", "median µs"):
        shown.add_column(column, justify="right" if column else "left")
    rows = {f"decision, {n:,} workers, {case} conversation": figures for (n, case), figures in decisions.items()}
    for name, figures in (rows | {f"release, {HELD:,} held": release}).items():
        shown.add_row(name, f"{figures['best_us']:.1f}", f"{figures['median_us']:.1f}")
    return shown
