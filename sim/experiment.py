"""Runs policies over traffic, seeds and sweeps, in as many processes as there are cores."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice, product
from multiprocessing import get_context
from typing import Any, Final

from sim.engine import Progress, simulate
from sim.fleet import FleetSettings
from sim.requests import Trace
from sim.results import SimResult
from sim.scaling import working_set_tokens
from sim.scenario import PolicyChoice, Traffic
from sim.users import steady

SWEEPS: Final = ("load", "ws_cap", "workers")

Cell = Mapping[str, float]
"""One point of a sweep: the values of the keys that are swept."""

Summary = dict[str, float | int | str]


@dataclass(frozen=True, slots=True)
class Case:
    """One simulation.

    Attributes:
        policy: under which it runs.
        traffic: what comes in.
        fleet: what serves it.
        cell: of the sweep.
        seed: of traffic and policy.
        gpu_hour: price of a GPU hour, for ``cost_per_1k_requests``.
    """

    policy: PolicyChoice
    traffic: Traffic
    fleet: FleetSettings
    cell: Cell
    seed: int
    gpu_hour: float


@dataclass(slots=True)
class Outcome:
    """What a case gave: its summary with the cost, and all of the result where it was asked for."""

    case: Case
    summary: Summary
    result: SimResult | None


def parse_sweep(words: str) -> tuple[str, list[float]]:
    """Return key and values of ``key=value,value``.

    Raises:
        ValueError: the key cannot be swept, or a value is no positive number.
    """
    key, _, values = words.partition("=")
    if key not in SWEEPS:
        raise ValueError(f"--sweep {words!r}: can sweep {', '.join(SWEEPS)}; write for instance --sweep load=0.5,1,2")
    try:
        numbers = [float(value) for value in values.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < math.inf for number in numbers):
        raise ValueError(f"--sweep {words!r}: the values must be numbers above 0, separated by commas")
    if key == "workers" and not all(number.is_integer() for number in numbers):
        raise ValueError(f"--sweep {words!r}: workers come in whole numbers")
    return key, numbers


def cells(sweeps: Sequence[tuple[str, list[float]]]) -> list[Cell]:
    """Return every combination of the swept values; one empty cell without sweeps.

    Raises:
        ValueError: a key is swept twice.
    """
    keys = [key for key, _ in sweeps]
    if len(set(keys)) < len(keys):
        raise ValueError(f"--sweep: {', '.join(keys)}: sweep each key once, with all its values")
    return [dict(zip(keys, values, strict=True)) for values in product(*(values for _, values in sweeps))]


def run_case(case: Case, keep: bool = True, on_progress: Progress | None = None) -> Outcome:
    """Simulate one case.

    Raises:
        ValueError: traffic or fleet cannot be simulated; the message says why.
    """
    trace = _trace(replace(case.traffic, load=case.traffic.load * case.cell.get("load", 1.0)), case.seed)
    fleet = _fleet(case, trace)
    try:
        result = simulate(trace, fleet, case.policy.name, case.policy.params, case.seed, on_progress)
    except ValueError as error:
        where = ", ".join(f"{key} {value:g}" for key, value in case.cell.items())
        raise ValueError(f"at {where}: {error}" if where else str(error)) from None
    result.policy = case.policy.label
    if case.traffic.users:
        result = steady(trace, result)
    gpu_hours = fleet.workers * fleet.speed.gpus * result.duration_s / 3600
    summary: Summary = {"policy": case.policy.label, "seed": case.seed, **case.cell, **result.summary()}
    summary["workers"] = fleet.workers
    summary["capacity_tokens"] = fleet.capacity_tokens
    summary["cost_per_1k_requests"] = gpu_hours * case.gpu_hour / max(1, int(summary["answered"])) * 1000
    return Outcome(case, summary, result if keep else None)


@lru_cache(maxsize=1)
def _trace(traffic: Traffic, seed: int) -> Trace:
    return traffic.trace(seed)


def _fleet(case: Case, trace: Trace) -> FleetSettings:
    """Return the fleet of the case's cell; ``ws_cap`` is the working set over the HBM of all workers together."""
    fleet = replace(case.fleet, workers=int(case.cell.get("workers", case.fleet.workers)))
    if "ws_cap" in case.cell:
        tokens = working_set_tokens(trace) / case.cell["ws_cap"] / fleet.workers
        fleet = replace(fleet, capacity_tokens=max(1, round(tokens)))
    return fleet


def run_cases(cases: Sequence[Case], on_done: Callable[[Outcome], None], processes: int = 0) -> list[Outcome]:
    """Simulate cases side by side and return their outcomes in the same order; results are kept of the first seed.

    Args:
        cases: those of one seed and one load together, so that a process reads its traffic once.
        on_done: called with each as it ends.
        processes: at most so many; 0: as many as there are cores.

    Raises:
        ValueError: a case cannot be simulated; the others are given up.
    """
    first_seed = min(case.seed for case in cases)
    count = min(processes or os.cpu_count() or 1, len(cases))
    outcomes: dict[int, Outcome] = {}

    def ended(number: int, outcome: Outcome) -> None:
        outcomes[number] = outcome
        on_done(outcome)

    if count == 1:
        for number, case in enumerate(cases):
            ended(number, run_case(case, case.seed == first_seed))
    else:
        _side_by_side(cases, count, first_seed, ended)
    return [outcomes[number] for number in range(len(cases))]


def _side_by_side(cases: Sequence[Case], count: int, first_seed: int, ended: Callable[[int, Outcome], None]) -> None:
    left = iter(enumerate(cases))
    running: dict[Future[Outcome], int] = {}
    with ProcessPoolExecutor(count, get_context("spawn")) as pool:
        while True:
            # No more than run at once: what waits in the pool would be run even after an interruption.
            for number, case in islice(left, count - len(running)):
                running[pool.submit(run_case, case, case.seed == first_seed)] = number
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                try:
                    ended(running.pop(future), future.result())
                except BrokenProcessPool:
                    raise ValueError(
                        "a simulating process was killed, perhaps for want of memory; try --processes 1, or a part "
                        "of the traffic (--share, --first)"
                    ) from None


def compare(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return one row per cell and policy: the mean of every figure over the seeds, and its standard error.

    Returns:
        Rows with ``policy``, the cell's keys, ``seeds``, and each figure; ``errors`` holds the standard errors.
    """
    grouped: dict[tuple[Any, ...], list[Outcome]] = {}
    for outcome in outcomes:
        key = (outcome.case.policy.label, *outcome.case.cell.items())
        grouped.setdefault(key, []).append(outcome)
    rows = []
    for group in grouped.values():
        first = group[0].summary
        row: dict[str, Any] = {"policy": first["policy"], **group[0].case.cell, "seeds": len(group)}
        errors = {}
        for name, value in first.items():
            if isinstance(value, str) or name in row or name == "seed":
                continue
            values = [float(each.summary[name]) for each in group]
            mean = math.fsum(values) / len(values)
            row[name] = mean
            if len(values) > 1:
                spread = math.fsum((each - mean) ** 2 for each in values) / (len(values) - 1)
                errors[name] = math.sqrt(spread / len(values))
        rows.append(row | {"errors": errors})
    return rows
