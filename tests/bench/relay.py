"""The relay side by side with the routers it replaces: ``python -m tests.bench.relay [--json] [--quick]``.

A router has one core, load generator and upstream share the other. All routers are up and are measured in turn, round
after round, because the speed of a machine drifts: medians of the rounds are printed, and ratios are taken within a
round. Peers come from PyPI, into ``.venv-bench``.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import msgspec
from rich.console import Console

from tests.bench import memory, report
from tests.bench.client import WrongAnswer
from tests.bench.measure import WORKLOADS, Figures, Workload, run
from tests.bench.results import Results
from tests.bench.rig import StartFailed, become_load, choose_cores
from tests.bench.routers import ROUTERS, Peer, install, version
from tests.bench.testbed import Target, Testbed

MEMORY = "memory"


class Bench:
    """One run of the benchmark."""

    def __init__(self, options: argparse.Namespace, bed: Testbed, console: Console) -> None:
        self.quick: bool = options.quick
        self.rounds: int = options.rounds or (2 if options.quick else 5)
        self.wanted: list[str] = options.only
        self.bed = bed
        self.console = console
        self.results = Results()

    def run(self) -> Results:
        routers = [router for router in ROUTERS if self._is_installed(router)]
        targets = [self.bed.direct(), *filter(None, map(self._start, routers))]
        workloads = [workload for workload in WORKLOADS if workload.name in self.wanted]
        for number in range(self.rounds):
            for workload in workloads:
                self.console.print(f"round {number + 1} of {self.rounds}: {workload.title}")
                self.results.rounds[workload.name].append(self._round(workload, targets, number))
        if MEMORY in self.wanted:
            self.bed.stop_routers()
            for router in routers:
                self._measure_memory(router)
        return self.results

    def _is_installed(self, router: Peer) -> bool:
        why_not = install(router)
        if why_not:
            self.results.absent[router.name] = why_not
        else:
            self.results.versions[router.name] = version(router)
        return not why_not

    def _start(self, router: Peer, environ: dict[str, str] | None = None) -> Target | None:
        try:
            return self.bed.start(router, environ)
        except StartFailed as error:
            self.results.absent[router.name] = f"did not start: {error}"
            return None

    def _round(self, workload: Workload, targets: list[Target], number: int) -> dict[str, Figures]:
        figures = {}
        for target in targets:
            try:
                figures[target.name] = run(workload, target, number, pace=0.5 if self.quick else 1.0)
            except (WrongAnswer, OSError) as error:
                self.results.failures.append(f"{target.name}, {workload.title}: {error}")
        return figures

    def _measure_memory(self, router: Peer) -> None:
        self.console.print(f"memory of {router.name}")
        target = self._start(router, memory.SMALL_CACHES)
        if target is None:
            return
        requests, streams = (20_000, 500) if self.quick else (100_000, 2_000)
        try:
            self.results.memory[router.name] = {
                "requests": memory.over_requests(target, requests),
                "streams": memory.over_streams(target, streams),
            }
        except (WrongAnswer, OSError) as error:
            self.results.failures.append(f"{router.name}, memory: {error}")
        self.bed.stop_routers()


def parse_options() -> argparse.Namespace:
    parts = [*(workload.name for workload in WORKLOADS), MEMORY]
    parser = argparse.ArgumentParser(prog="python -m tests.bench.relay", description="kvway beside the Rust routers")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="two rounds of half the length, a fifth of the memory run")
    parser.add_argument("--rounds", type=int, help="default 5, quick 2")
    parser.add_argument(
        "--only", nargs="+", choices=parts, default=parts, help="leave out the rest; its targets are false"
    )
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    console = Console(stderr=options.json)
    cores = choose_cores(most=1)
    become_load(cores.load)
    with tempfile.TemporaryDirectory(prefix="kvway-bench-") as directory, Testbed(cores, Path(directory)) as bed:
        bench = Bench(options, bed, console)
        results = bench.run()
    report.print_tables(results, console)
    if options.json:
        print(msgspec.json.encode(report.as_json(results, quick=options.quick)).decode())


if __name__ == "__main__":
    main()
